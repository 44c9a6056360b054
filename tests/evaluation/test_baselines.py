"""Baselines write the same prompts with the same lengths, and their calls are counted where they can be."""

import json
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

import saltus
from saltus.core.sampling import Sampling
from saltus.engine.prompts import Prompt
from saltus.evaluation.benchmarks import llama_cpp_baseline
from saltus.evaluation.benchmarks.baselines import (
    OpenAIServerBaseline,
    baselines_under_test,
    servers_under_test,
    transformers_baselines,
)
from saltus.evaluation.benchmarks.benchmark_run import Benchmark
from saltus.evaluation.benchmarks.suites import Task
from saltus.evaluation.benchmarks.systems_under_test import BenchmarkRequest, methods_under_test
from saltus.integrations.openai_endpoint import NEUTRAL, connect_endpoint

TEXT = "the cat sat on the mat and the cat sat on the mat and the cat"


@pytest.fixture(scope="module")
def engine(tiny_folder) -> saltus.Engine:
    return saltus.load(str(tiny_folder()), "plain")


def question(engine, **changes) -> BenchmarkRequest:
    return BenchmarkRequest(TEXT, **{"prompt_tokens": tuple(engine.encode(TEXT)), "max_new_tokens": 24, **changes})


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_baselines_of_transformers_write_plain_s_text_and_tell_their_calls(engine, tiny_folder, ignore_eos):
    names = ["transformers", "transformers-lookup", "transformers-assistant"]
    inputs = question(engine, ignore_eos=ignore_eos)
    plain = engine.generate(TEXT, max_new_tokens=24, ignore_eos=ignore_eos)
    for baseline in transformers_baselines(names, engine, str(tiny_folder())):
        written = baseline.to_answer(inputs, baseline.generate(inputs))
        assert baseline.kind == "baseline"
        assert written.tokens == plain.tokens
        assert "".join(written.pieces) == plain.text
        assert written.finish_reason == plain.finish_reason
        assert written.calls is not None
        assert sum(call.decided for call in written.calls) == len(written.tokens)
        assert written.calls[0].read == len(inputs.prompt_tokens)
        assert written.problems == []
        if baseline.name == "transformers":
            assert [(call.decided, call.nodes) for call in written.calls] == [(1, 0)] * len(written.tokens)
        if baseline.name == "transformers-assistant":  # which is the model itself
            assert len(written.calls) < len(written.tokens)


@pytest.mark.parametrize("name", ["transformers", "transformers-lookup", "transformers-assistant"])
def test_a_stop_string_ends_a_text_of_transformers(engine, tiny_folder, name):
    whole = engine.generate(TEXT, max_new_tokens=24)
    stop = next(word for word in ("dog", "log", "cat", "mat", "the") if word in whole.text)
    plain = engine.generate(TEXT, max_new_tokens=24, stop=stop)
    (baseline,) = transformers_baselines([name], engine, str(tiny_folder()))
    inputs = question(engine, stop=(stop,))
    written = baseline.to_answer(inputs, baseline.generate(inputs))
    assert written.tokens[: len(plain.tokens)] == plain.tokens
    if name != "transformers-assistant":  # which looks for stop strings at the end of each step only
        assert len(written.tokens) == len(plain.tokens) < len(whole.tokens)
        assert written.finish_reason == "stop"


def test_a_baseline_that_gives_out_more_than_its_calls_checked_is_told_on(engine):
    (baseline,) = transformers_baselines(["transformers"], engine, None)
    tokens, given, clock, widths = baseline.generate(question(engine))
    given = [given[0] + given[1], *given[2:]]
    told = baseline.to_answer(question(engine), (tokens, given, clock[:-1], widths[:-1]))
    assert told.problems == ["more tokens than checked"]


def test_a_sampling_baseline_is_told_temperature_and_seed(engine):
    (baseline,) = transformers_baselines(["transformers"], engine, None)
    distribution = Sampling(temperature=1.5)
    first, again, other = (
        baseline.generate(question(engine, sampling=distribution, seed=seed))[0] for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


class FakeLlama:
    """The part of llama_cpp.Llama that the baseline uses; it gives out tokens of its own."""

    tokens: list[int] = []  # noqa: RUF012
    told: list = []  # noqa: RUF012

    def __init__(self, path: str, **settings):
        self.told.append((path, settings))

    def reset(self):
        self.told.append("reset")

    def set_seed(self, seed: int):
        self.told.append(seed)

    def generate(self, tokens, **sampling):
        self.told.append((tokens, sampling))
        yield from self.tokens


WEIGHT = {"format": 0, "shape": [1], "offset": 0, "size": 4}


def test_llama_cpp_decodes_the_same_file_and_its_calls_are_single_tokens(engine, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"pip install \"\.\[llama-cpp\]\"|is none; name one"):
        baselines_under_test(["llama-cpp"], engine, None)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama, __spec__=object()))
    with pytest.raises(ValueError, match="decodes GGUF files"):
        baselines_under_test(["llama-cpp"], engine, None)
    (tmp_path / "gguf.json").write_text(json.dumps({"file": "model.gguf", "tensors": {"weight": WEIGHT}}))
    monkeypatch.setattr(llama_cpp_baseline, "resolve", lambda name: tmp_path)
    first, baseline = baselines_under_test(["transformers", "llama-cpp"], engine, None)
    assert (first.name, baseline.name, baseline.kind) == ("transformers", "llama-cpp", "baseline")
    plain = engine.generate(TEXT, max_new_tokens=24)
    FakeLlama.tokens = [*plain.tokens, 7, 7, 7]
    inputs = question(engine, seed=5, sampling=Sampling(temperature=0.5, top_k=3))
    written = baseline.to_answer(inputs, baseline.generate(inputs))
    assert (written.tokens, "".join(written.pieces)) == (plain.tokens, plain.text)
    assert written.finish_reason == plain.finish_reason
    assert [(call.decided, call.nodes) for call in written.calls] == [(1, 0)] * len(plain.tokens)
    assert written.calls[0].read == len(inputs.prompt_tokens)
    (path, settings), (warm_up, _), reset, seed, (tokens, sampling) = FakeLlama.told
    assert warm_up == tokens[:8]
    assert (path, settings["n_threads"], reset, seed) == (
        str(tmp_path / "model.gguf"),
        torch.get_num_threads(),
        "reset",
        5,
    )
    assert tokens == list(inputs.prompt_tokens)
    assert (sampling["temp"], sampling["top_k"], sampling["repeat_penalty"]) == (0.5, 3, 1.0)


def test_llama_cpp_s_stop_strings_are_looked_for_in_the_last_tokens_alone(engine, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama, __spec__=object()))
    (tmp_path / "gguf.json").write_text(json.dumps({"file": "model.gguf", "tensors": {"weight": WEIGHT}}))
    monkeypatch.setattr(llama_cpp_baseline, "resolve", lambda name: tmp_path)
    (baseline,) = baselines_under_test(["llama-cpp"], engine, None)
    FakeLlama.tokens = engine.encode("the cat sat on the log and the dog sat", raw=True)
    inputs = question(engine, stop=(" dog", " mat"))
    decode, decoded = engine.tokenizer.decode, []
    monkeypatch.setattr(engine.tokenizer, "decode", lambda tokens: decoded.append(len(tokens)) or decode(tokens))
    tokens, clock = baseline.generate(inputs)
    monkeypatch.undo()
    assert engine.tokenizer.decode(tokens) == "the cat sat on the log and the dog"
    assert len(clock) == len(tokens) + 1 == len(decoded) + 1
    assert max(decoded) < 6 < len(tokens)


def contexts(told) -> list[int]:
    return [one[1]["n_ctx"] for one in told if isinstance(one, tuple) and "n_ctx" in one[1]]


def test_llama_cpp_reserves_what_texts_need_before_they_are_timed(engine, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama, __spec__=object()))
    (tmp_path / "gguf.json").write_text(json.dumps({"file": "model.gguf", "tensors": {"weight": WEIGHT}}))
    monkeypatch.setattr(llama_cpp_baseline, "resolve", lambda name: tmp_path)
    monkeypatch.setattr(FakeLlama, "told", [])
    monkeypatch.setattr(FakeLlama, "tokens", [7] * 20_000)
    target = replace(engine.target, context_length=20_000)
    (baseline,) = baselines_under_test(["llama-cpp"], replace(engine, target=target), None)
    lengths = []
    for tokens, new in ((40, 24), (400, 24), (9_000, 24), (500, 24), (19_990, 24)):
        request = question(engine, prompt_tokens=(1,) * tokens, max_new_tokens=new, ignore_eos=True)
        baseline.prepare(request)
        begun = len(FakeLlama.told)
        written = baseline.to_answer(request, baseline.generate(request))
        assert written.finish_reason == "length"
        lengths.append(len(written.tokens))
        assert not contexts(FakeLlama.told[begun:])
    assert lengths == [24, 24, 24, 24, 10], "the last one ends at the model's context, as ours does"
    assert contexts(FakeLlama.told) == [512, 16_384, 20_000]


class Served(BaseHTTPRequestHandler):
    """A server of OpenAI's protocol that writes a fixed text."""

    asked: list[dict] = []  # noqa: RUF012
    usage = True
    cached = 0  # tokens of the prompt
    unknown: tuple[str, ...] = ()  # fields that it refuses
    too_long: tuple[int, str] | tuple[()] = ()  # how many characters it reads, and what it says of more
    reason = "stop"
    broken = ""  # what stands in the stream after the first piece, in place of the rest

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "models/served"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if refused := [name for name in self.unknown if name in body]:
            self.send_error(400, f"unrecognised argument {refused[0]}")
            return
        if body["max_tokens"] == 1:
            self.send_error(400, "too short")
            return
        if self.too_long and len(body["prompt"]) > self.too_long[0]:
            self.send_error(400, self.too_long[1])
            return
        if self.broken:
            self._send(f'data: {{"choices": [{{"text": "the"}}]}}\n\n{self.broken}')
            return
        events = [{"choices": [{"text": "the"}]}, {"choices": [{"text": " cat", "finish_reason": self.reason}]}]
        usage = {"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": self.cached}}
        events += [{"choices": [], "usage": usage}] if self.usage else []
        self._send("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data:[DONE]\n\n")

    def _send(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Served.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_servers_of_the_same_model_are_told_apart_by_their_addresses(engine, served):
    other = served.replace("127.0.0.1", "localhost")
    assert [server.name for server in servers_under_test([served], engine)] == ["endpoint:served"]
    pair = servers_under_test([served, other + "/"], engine)
    assert [server.name for server in pair] == [
        f"endpoint:served@{url.removeprefix('http://')}" for url in (served, other)
    ]
    with pytest.raises(ValueError, match="is given twice"):
        Benchmark(engine, servers_under_test([served, served], engine), [], {})


def test_a_server_writes_the_templated_prompt_with_our_settings(engine, served):
    baseline = OpenAIServerBaseline(served, engine)
    inputs = question(engine, seed=4, stop=("x",), ignore_eos=True, sampling=Sampling(temperature=0.5, top_k=7))
    written = baseline.to_answer(inputs, baseline.generate(inputs))
    assert baseline.name == "endpoint:served"
    assert "".join(written.pieces) == "the cat"
    assert (written.new_tokens, written.finish_reason, written.calls) == (5, "stop", None)
    (sent,) = Served.asked
    assert engine.tokenizer(sent["prompt"], add_special_tokens=False).input_ids == list(inputs.prompt_tokens)
    told = {name: sent[name] for name in ("model", "max_tokens", "temperature", "top_k", "seed", "stop", "ignore_eos")}
    assert told == {
        "model": "models/served", "max_tokens": 24, "temperature": 0.5, "top_k": 7, "seed": 4, "stop": ["x"],
        "ignore_eos": True,
    }  # fmt: skip


def test_a_server_is_asked_to_read_each_prompt_anew(engine, served, monkeypatch):
    baseline = OpenAIServerBaseline(served, engine)
    for _ in range(2):
        written = baseline.to_answer(question(engine), baseline.generate(question(engine)))
        assert written.problems == []
    assert [sent["cache_prompt"] for sent in Served.asked] == [False, False]
    assert len({sent["cache_salt"] for sent in Served.asked}) == 2
    monkeypatch.setattr(Served, "cached", 7)
    monkeypatch.setattr(Served, "unknown", ("cache_prompt", "cache_salt"))
    written = baseline.to_answer(question(engine), baseline.generate(question(engine)))
    assert not {"cache_prompt", "cache_salt"} & Served.asked[-1].keys()
    (problem,) = written.problems
    assert "7 tokens of the prompt in its prefix cache" in problem


def test_a_server_is_told_to_truncate_nothing_and_what_it_does_not_know_is_left_out(engine, served, monkeypatch):
    endpoint = connect_endpoint(served, engine.tokenizer)
    body = endpoint.completion_body("a", 8, Sampling(temperature=1.0), 0)
    endpoint.post_completion(body).close()
    assert {name: Served.asked[-1][name] for name in NEUTRAL} == NEUTRAL  # else servers take a model's own values
    monkeypatch.setattr(Served, "unknown", ("min_p", "repetition_penalty"))
    endpoint.post_completion(body).close()
    assert set(NEUTRAL) & set(Served.asked[-1]) == {"top_k"}
    with pytest.raises(ValueError, match="unrecognised argument min_p"):  # never left out silently
        endpoint.post_completion(endpoint.completion_body("a", 8, Sampling(temperature=1.0, min_p=0.1), 0))


def test_a_server_that_does_not_count_its_tokens_is_told_on(engine, served, monkeypatch):
    monkeypatch.setattr(Served, "usage", False)
    baseline = OpenAIServerBaseline(served + "/v1/", engine)
    written = baseline.to_answer(question(engine), baseline.generate(question(engine)))
    assert written.problems == ["the server does not tell how many tokens it wrote"]


def test_a_server_that_refuses_says_why(engine, served):
    baseline = OpenAIServerBaseline(served, engine)
    with pytest.raises(ValueError, match=r"/v1/completions refuses \(400\)"):
        baseline.generate(BenchmarkRequest(TEXT, (1, 2), max_new_tokens=1))


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 64 tokens. However, you requested 90 tokens",
        "the request exceeds the available context size. try increasing the context size",
        "Requested token count exceeds the model's maximum context length of 64 tokens.",
        "`inputs` tokens + `max_new_tokens` must be <= 64. Given: 60 `inputs` tokens and 24 `max_new_tokens`",
        "context_length_exceeded",
    ],
)
def test_a_prompt_that_a_server_s_context_does_not_hold_is_skipped_for_all_systems(engine, served, monkeypatch, said):
    monkeypatch.setattr(Served, "too_long", (60, said))
    tasks = [Task(name, "cats", Prompt((text,))) for name, text in (("long", "the cat " * 20), ("short", "the cat"))]
    systems = [*methods_under_test(engine, ["plain"]), *servers_under_test([served], engine)]
    run = Benchmark(engine, systems, tasks, {"max_new_tokens": 8, "seed": 0})
    (record,) = run.measure_task(0)
    assert (record["task"], record["turn"]) == ("long", 0)
    assert record["skipped"].startswith("endpoint:served: http://127.0.0.1")
    assert said[:40] in record["skipped"]
    assert [one["system"] for one in run.measure_task(1)] == ["plain", "endpoint:served"]
    monkeypatch.setattr(Served, "reason", "length")
    (record,) = run.measure_task(1)
    assert record["skipped"] == "endpoint:served ended after 5 of 8 tokens, by a limit of its own"


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ('data: {"error": {"message": "out of\\nmemory"}}\n\ndata: [DONE]\n\n', "out of memory"),
        ("data: Internal error\n\n", "Expecting value"),
        ("data: [DONE]\n\n", "without a finish_reason"),
        (" ", "without a finish_reason"),
    ],
)
def test_an_answer_that_breaks_off_is_no_fast_one(engine, served, monkeypatch, rest, said):
    monkeypatch.setattr(Served, "broken", rest)
    with pytest.raises(ValueError, match=f"broke off an answer .*{said}") as told:
        OpenAIServerBaseline(served, engine).generate(question(engine))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://127.0.0.1:9"])
def test_an_address_without_a_server_is_a_line(engine, url):
    with pytest.raises(ValueError, match=r"such as http://localhost:8000|does not answer") as told:
        OpenAIServerBaseline(url, engine)
    assert "\n" not in str(told.value)
