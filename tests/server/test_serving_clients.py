"""Programs that others wrote, against the server: litellm, llm, and schemathesis, which invents requests."""

# ruff: noqa: F811  fixtures

import json
import os
import subprocess
import sys

import pytest

from tiny_server import MESSAGES, alone, engine, serving  # noqa: F401

pytestmark = [pytest.mark.external, pytest.mark.slow]

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network when it is imported


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as (_, address):
        yield address


def test_litellm(engine, url):
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "any", "seed": 3, "max_tokens": 24}
    expected = alone(engine, seed=3)
    answer = litellm.completion(messages=MESSAGES, **asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens == 24
    chunks = litellm.completion(messages=MESSAGES, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    text = litellm.text_completion(prompt="the cat", **{**asked, "model": "text-completion-openai/tiny"})
    assert text.choices[0].text == alone(engine, "the cat", raw=True, seed=3).text
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, temperature=-1, **asked)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "dog " * 2000}], **asked)


def test_litellm_by_anthropics_protocol(engine, url):
    litellm = pytest.importorskip("litellm")
    asked = {"model": "anthropic/tiny", "api_base": url, "api_key": "any", "max_tokens": 24, "seed": 3}
    asked["allowed_openai_params"] = ["seed"]
    expected = alone(engine, seed=3)
    answer = litellm.completion(messages=MESSAGES, **asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens == 24
    chunks = litellm.completion(messages=MESSAGES, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**asked, "model": "anthropic/claude"})


def test_llm(engine, url, tmp_path):
    pytest.importorskip("llm")
    model = f"- model_id: tiny\n  model_name: tiny\n  api_base: {url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "any"}
    command = [sys.executable, "-m", "llm", "-m", "tiny", MESSAGES[0]["content"]]
    asked = [*command, "-o", "seed", "3", "-o", "max_tokens", "24"]
    found = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=100)
    assert found.stdout.strip() == alone(engine, seed=3).text.strip(), found.stderr


def test_lm_evaluation_harness_scores_texts_over_http(engine, url, tiny_folder):
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from saltus.evaluation.benchmarks.lm_eval_model import model_class

    pairs = [("the cat sat", " on the mat"), ("a dog", " sat on the log and the cat"), ("the", " the the")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    expected = model_class()(engine).loglikelihood(asked)
    for tokenized in (True, False):
        client = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions", model="tiny", tokenizer=str(tiny_folder()),
            tokenizer_backend="huggingface", tokenized_requests=tokenized, batch_size=2,
        )  # fmt: skip
        for (value, greedy), (exact, exactly) in zip(client.loglikelihood(asked), expected, strict=True):
            assert value == pytest.approx(exact, abs=1e-4)
            assert greedy == exactly


def test_no_invented_request_is_a_fault_of_the_server(engine):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    engine.limit_context(256)  # so that answers without a limit are short
    with serving(engine) as (_, url):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        statuses = set()
        for found in schema.get_all_operations():
            operation = found.ok()

            @given(case=operation.as_strategy())
            @settings(
                max_examples=10, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def ask(case):
                answer = case.call(base_url=url, timeout=60)
                assert answer.status_code < 500, answer.text
                if answer.status_code >= 400 and answer.status_code != 405:
                    assert "message" in json.loads(answer.text)["error"]
                statuses.add(answer.status_code)

            ask()
        assert {200, 400} <= statuses
