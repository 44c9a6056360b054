"""llama.cpp's own routes: the texts are those of the other routes, and clients find the fields that they read."""

# ruff: noqa: F811  fixtures

import json
import shutil

import httpx
import pytest
from transformers import AutoTokenizer

import saltus
from saltus.engine.detokenizer import Detokenizer, TextOutput
from saltus.engine.fim import fim_prompt
from saltus.engine.fim_formats import FORMATS
from saltus.engine.token_texts import token_name
from saltus.server.line_limits import LineLimits
from saltus.server.llama_request import InfillRequest, LlamaCompletionRequest
from tiny_server import MESSAGES, PROMPT, alone, engine, server, serving  # noqa: F401

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
BEFORE, AFTER = "the cat sat on the ", " and the cat sat on the log and the mat"


def post(server, route="/completion", **body):
    answer = httpx.post(server[1] + route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server, **body):
    lines = httpx.post(server[1] + "/completion", json={**body, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@pytest.fixture(scope="module")
def coder(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("coder") / "model"
    shutil.copytree(tiny_folder(vocab_size=320, max_position_embeddings=512), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    form = FORMATS[0]
    names = [form.before, form.after, form.middle, form.file, form.repository]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.save_pretrained(folder)
    with serving(saltus.load(str(folder), "lookup", adaptive=False)) as started:
        yield started


@pytest.mark.parametrize("speculative", [True, False])
def test_a_completion_is_that_of_the_engine_with_llamas_defaults(server, engine, speculative):
    asked = {"prompt": PROMPT, "n_predict": 24, "seed": 3, "speculative": speculative}
    expected = alone(engine, PROMPT, raw=True, seed=3, **DEFAULTS)
    found = post(server, **asked, return_tokens=True)
    assert (found["content"], found["tokens"]) == (expected.text, expected.tokens)
    assert (found["stop"], found["stop_type"]) == (True, "eos" if expected.finish_reason == "stop" else "limit")
    assert found["generation_settings"]["n_ctx"] == 512
    assert {name: found["generation_settings"][name] for name in DEFAULTS} == DEFAULTS
    timings = found["timings"]
    assert timings["predicted_n"] == len(expected.tokens)
    assert timings["cache_n"] + timings["prompt_n"] == found["tokens_evaluated"] == len(engine.encode(PROMPT, raw=True))
    assert speculative == (timings.get("draft_n", 0) > 0)
    assert timings.get("draft_n_accepted", 0) <= timings.get("draft_n", 0)
    chunks = events_of(server, **asked, timings_per_token=True)
    assert "".join(chunk["content"] for chunk in chunks) == expected.text
    assert [token for chunk in chunks for token in chunk["tokens"]] == expected.tokens
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["content"] == ""
    assert all("timings" in chunk for chunk in chunks)
    calls = [chunk["metrics"]["speculative_decoding"]["num_calls"]
             for chunk in events_of(server, **asked, include_metrics=True) if "metrics" in chunk]  # fmt: skip
    assert sum(calls) == post(server, **asked, include_metrics=True)["metrics"]["speculative_decoding"]["num_calls"]


def test_prompts_of_all_forms(server, engine):
    ids = engine.encode(PROMPT, raw=True)
    texts = [
        post(server, prompt=prompt, n_predict=8, seed=3)["content"]
        for prompt in (PROMPT, ids, {"prompt_string": PROMPT}, [*ids[:3], engine.tokenizer.decode(ids[3:])], [PROMPT])
    ]
    assert len(set(texts)) == 1
    several = post(server, prompt=[PROMPT, ids], n_predict=8, n_cmpl=2, seed=3)
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    assert [one["content"] for one in several] == [texts[0], several[1]["content"]] * 2
    assert several[1]["content"] == post(server, prompt=PROMPT, n_predict=8, seed=4)["content"]


def test_a_greedy_text_is_decoded_once_for_all_that_want_it(server):
    def count():
        page = server[0].metrics.page().decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:generation_tokens"))

    before = count()
    found = post(server, prompt=PROMPT, n_predict=4, n_cmpl=3, temperature=0)
    assert [one["index"] for one in found] == [0, 1, 2]
    assert len({one["content"] for one in found}) == 1
    assert count() - before == found[0]["tokens_predicted"]


@pytest.mark.parametrize(
    ("samplers", "settings"),
    [
        (["top_k", "top_p", "min_p", "temperature"], DEFAULTS),
        (["temperature"], {"temperature": 0.8}),
        ("kt", {"temperature": 0.8, "top_k": 40}),
        ([], {"temperature": 1.0}),
        (["top_k", "top_p", "infill"], {"temperature": 0.0}),
    ],
    ids=str,
)
def test_samplers_that_are_not_named_are_off(server, engine, samplers, settings):
    found = post(server, prompt=PROMPT, n_predict=24, seed=3, samplers=samplers, presence_penalty=2)
    assert found["content"] == alone(engine, PROMPT, raw=True, seed=3, **settings).text


def test_what_ended_a_text(server, engine):
    whole = alone(engine, PROMPT, raw=True, seed=3, **DEFAULTS).text
    word = whole[6:9]
    found = post(server, prompt=PROMPT, n_predict=24, seed=3, stop=[word])
    assert (found["content"], found["stop_type"], found["stopping_word"]) == (
        whole[: whole.index(word)], "word", word,
    )  # fmt: skip
    found = post(server, prompt=PROMPT, n_predict=24, seed=3, logit_bias=[[engine.tokenizer.eos_token_id, 100]])
    assert (found["content"], found["stop_type"]) == ("", "eos")
    found = post(server, prompt=PROMPT, n_predict=24, seed=3, response_fields=["stop_type", "timings/cache_n", "no"])
    assert found.keys() == {"stop_type", "timings/cache_n"}


def test_likely_tokens_have_their_ids(server, engine):
    found = post(server, prompt=PROMPT, n_predict=6, seed=3, n_probs=3, return_tokens=True)
    listed = found["completion_probabilities"]
    assert [one["id"] for one in listed] == found["tokens"]
    expected = alone(engine, PROMPT, raw=True, seed=3, max_new_tokens=6, logprobs=True, **DEFAULTS)
    assert [one["logprob"] for one in listed] == expected.logprobs
    for one in listed:
        top = one["top_logprobs"]
        assert [token_name(engine.tokenizer, each["id"])[0] for each in top] == [each["token"] for each in top]
        assert len(top) == 3
    streamed = [one for event in events_of(server, prompt=PROMPT, n_predict=6, seed=3, n_probs=3)
                for one in event["completion_probabilities"]]  # fmt: skip
    assert streamed == listed


def test_formats_of_a_text_in_llamas_fields(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    found = post(server, prompt=PROMPT, n_predict=64, json_schema=schema)["content"]
    assert json.loads(found).keys() == {"a"}
    for route, given in (("/completion", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = post(server, route, **given, grammar='root ::= ("cat" | "dog") "s"{2}', temperature=1)
        text = answer["content"] if "content" in answer else answer["choices"][0]["message"]["content"]
        assert text in ("catss", "dogss")
    wrong = httpx.post(server[1] + "/completion", json={"prompt": PROMPT, "grammar": "root ::= ("})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "grammar")


def test_requests_that_no_text_answers_are_refused(server):
    url = server[1]
    for given, param in (
        ({"prompt": []}, "prompt"),
        ({"prompt": [[], "a"]}, "prompt"),
        ({"prompt": [5, "\ud800"]}, "prompt"),
        ({"prompt": [5, "the " * 9000]}, "prompt"),
        ({"prompt": [5, *[""] * 5000]}, "prompt"),
        ({"t_max_predict_ms": float("inf")}, "t_max_predict_ms"),
        ({"prompt": [PROMPT] * 100, "n_cmpl": 128, "temperature": 0}, "n_cmpl"),
        ({"prompt": [PROMPT] * 1000}, "prompt"),
        ({"samplers": "k" * 10**4}, "samplers"),
        ({"samplers": ["k" * 10**4]}, "samplers"),
        ({"response_fields": ["a/" * 10**4]}, "response_fields"),
        ({"max_tokens": "many", "n_predict": None}, "n_predict"),
        ({"grammar": "root ::= other"}, "grammar"),
    ):
        body = json.dumps({"prompt": PROMPT, "n_predict": 2, **given})
        answer = httpx.post(url + "/completion", content=body, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"].split(".")[0]) == (400, param), error
        assert "a JSON object of content type" not in error["message"]
    wrong = httpx.get(url + "/slots?fail_on_no_slot=perhaps")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "fail_on_no_slot")


def test_a_text_that_the_context_ends_is_truncated(server):
    asked = {"prompt": [7 + place % 200 for place in range(500)], "ignore_eos": True}
    assert post(server, **asked)["truncated"]
    assert not post(server, **asked, n_predict=4)["truncated"]


def test_a_limit_of_no_tokens_reads_the_prompt_for_texts_to_come(server):
    prompt = [7 + place % 200 for place in range(400)]
    for route, given, limit in (
        ("/completion", {"prompt": prompt}, "n_predict"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the log " * 40}]}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the mat " * 40}]}, "n_predict"),
    ):
        post(server, route, **given, **{limit: 0})
        answer = post(server, route, **given, **{limit: 2})
        if route == "/completion":
            assert answer["timings"]["cache_n"] == len(prompt) - 1
        else:
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_text_of_a_conversation_continued_as_a_prompt_is_the_answer(server, engine):
    prompt = post(server, "/apply-template", messages=MESSAGES, tool_choice="auto", model="")["prompt"]
    assert engine.encode(prompt, raw=True) == engine.encode(MESSAGES)
    found = post(server, prompt=prompt, n_predict=24, seed=3, samplers=[])
    assert found["content"] == alone(engine, seed=3).text


def test_tokens_of_a_content_and_their_pieces(server, engine):
    tokens = engine.tokenizer(PROMPT + "é", add_special_tokens=False).input_ids
    assert post(server, "/tokenize", content=PROMPT + "é") == {"tokens": tokens}
    pieces = post(server, "/tokenize", content=PROMPT + "é", with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    written = [
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces
    ]
    assert b"".join(written).decode() == PROMPT + "é"
    assert post(server, "/tokenize", content="<|end|>")["tokens"] == engine.tokenizer("<|end|>").input_ids[-1:]
    assert len(post(server, "/tokenize", content="<|end|>", parse_special=False)["tokens"]) > 1
    text = post(server, "/detokenize", tokens=tokens)
    assert text["content"] == text["prompt"] == PROMPT + "é"


def test_what_clients_ask_of_the_server(server):
    url = server[1]
    assert httpx.get(url + "/health").json() == httpx.get(url + "/v1/health").json() == {"status": "ok"}
    props = httpx.get(url + "/props?model=tiny&autoload=false").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == 16
    slots = httpx.get(url + "/slots?fail_on_no_slot=1").json()
    assert [slot["is_processing"] for slot in slots] == [False] * 16
    assert httpx.get(url + "/v1/models").json()["data"][0]["meta"]["n_ctx"] == 512


def test_the_requests_of_editors(coder):
    """As llama.vim and llama.vscode send them: a model without a name, copies of a text, and a prompt to be read."""
    asked = {
        "id_slot": 0, "input_prefix": "the cat sat ", "prompt": "on the ", "input_suffix": AFTER, "n_predict": 12,
        "input_extra": [{"text": "the log", "time": [3, 4], "filename": "a.py"}], "stop": [], "n_indent": 0,
        "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 10**6, "model": "",
    }  # fmt: skip
    engine = coder[0].engine
    expected = engine.text_request(BEFORE, suffix=AFTER, files=[("a.py", "the log")], raw=True, max_new_tokens=12)
    plain = engine.generate(expected.request.prompt, raw=True, max_new_tokens=12, method="plain")
    warm = {**asked, "n_predict": 0, "samplers": [], "response_fields": [""], "t_max_predict_ms": 1}
    assert post(coder, "/infill", **warm) == {}
    found = post(coder, "/infill", **asked)
    assert found["content"] == plain.text
    assert found["timings"]["cache_n"] == len(expected.request.prompt) - 1
    assert found["generation_settings"]["n_ctx"] == 512
    copies = post(coder, "/infill", **asked, n_cmpl=3)
    assert [one["content"] for one in copies] == [found["content"]] * 3


def test_files_that_do_not_fit_are_left_out_the_first_ones_first(coder):
    engine = coder[0].engine
    files = [(f"{number}.py", "the cat sat " * 8) for number in range(40)]
    prompt = engine.text_request(BEFORE, suffix=AFTER, files=files, raw=True, max_new_tokens=2**20).request.prompt
    kept = [name for name, _ in files if f"<|file_sep|>{name}\n" in engine.tokenizer.decode(prompt)]
    assert 0 < len(kept) < 40
    assert kept == [name for name, _ in files[-len(kept) :]]
    assert len(prompt) <= 512 - 512 // 4
    more = fim_prompt(engine.tokenizer, "it", BEFORE, AFTER, files[-len(kept) - 1 :])
    assert len(more.tokens) > 512 - 512 // 4
    without = fim_prompt(engine.tokenizer, "it", BEFORE, AFTER)
    assert fim_prompt(engine.tokenizer, "it", BEFORE, AFTER, files, len(without.tokens) + 2).tokens == without.tokens
    extra = [{"filename": name, "text": text} for name, text in files]
    asked = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 2, "input_extra": extra}
    assert post(coder, "/infill", **asked)["tokens_evaluated"] <= 510


TEXT = "a = 1\n    b\n  \tc\n d\n    e"


@pytest.mark.parametrize(
    ("least", "expected"),
    [(0, TEXT), (1, TEXT), (2, "a = 1\n    b\n  \tc\n "), (4, "a = 1\n    b\n  \t"), (9, "a = 1\n    ")],
)
@pytest.mark.parametrize("text", [TEXT, "a = 1\n\n    b"], ids=["indented", "blank line"])
def test_a_text_ends_before_a_line_that_is_indented_too_little(engine, text, least, expected):
    if text != TEXT:
        expected = text if not least else "a = 1\n"
    output = TextOutput(Detokenizer(engine.tokenizer), frozenset())
    limits, released = LineLimits(output, least), ""
    for token in engine.tokenizer(text, add_special_tokens=False).input_ids:
        ends = limits.add(token)
        released += output.release(ends)
        if ends:
            break
    assert released == output.text == expected
    assert limits.ended == (expected != text)


def test_a_text_ends_at_a_line_break_when_its_time_is_over(engine):
    now = [0.0]
    output = TextOutput(Detokenizer(engine.tokenizer), frozenset())
    limits = LineLimits(output, seconds=2.5, clock=lambda: now[0])
    for token in engine.tokenizer("a\nb c\nd", add_special_tokens=False).input_ids:
        if limits.add(token):
            break
        now[0] += 1
    assert (output.text, limits.ended) == ("a\nb c\n", True)


@pytest.mark.parametrize("request_model", [LlamaCompletionRequest, InfillRequest])
def test_names_of_other_servers(request_model):
    prompt = {"prompt": PROMPT}
    for names in ({"max_tokens": 5, "n": 2}, {"max_completion_tokens": 5, "max_tokens": 9, "n_cmpl": 2, "n": 3}):
        made = request_model.model_validate({**prompt, **names})
        assert (made.n_predict, made.n_cmpl) == (5, 2)
    assert request_model.model_validate({**prompt, "n_predict": -1, "max_tokens": 5}).most_new_tokens is None
    assert request_model.model_validate({**prompt, "seed": 2**32 - 1}).seed == -1
