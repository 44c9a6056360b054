"""Teacher texts of a server: its texts become tokens of the model that learns, whatever fails in between."""

import gzip
import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
from test_cli import complaint, lines, saltus_
from test_token_texts import llama_2_tokenizer
from tokenizers.processors import TemplateProcessing

from saltus.engine.encoding import PromptSettings, encode_prompt
from saltus.engine.engine import Engine
from saltus.evaluation.benchmarks.baselines import OpenAIServerBaseline
from saltus.evaluation.benchmarks.systems_under_test import BenchmarkRequest
from saltus.training.data import endpoint_texts
from saltus.training.data.given_texts import tokenize_row
from saltus.training.data.teacher_texts import METADATA_FILE, read_teacher_texts, text_seed
from saltus.training.run import check_teacher_model
from tiny_models import END, byte_tokenizer, space_tokenizer
from tiny_server import engine, server  # noqa: F401 (fixtures)

PROMPTS = ["the cat sat on the mat", "the dog", "a log and a mat", "sat", "the mat and the log", "on"]


class Written(BaseHTTPRequestHandler):
    """A server that writes the same text to all, or an error for each entry of `statuses`."""

    asked: list[dict] = []  # noqa: RUF012
    keys: list[str] = []  # noqa: RUF012
    statuses: list[int] = []  # noqa: RUF012
    text, reason = " sat on the log", "stop"
    seconds, now, most = 0.0, 0, 0
    lock = threading.Lock()

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, {"data": [{"id": "served/model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls = type(self)
        with self.lock:
            cls.now += 1
            cls.most = max(cls.most, cls.now)
            self.asked.append(body)
            self.keys.append(self.headers.get("Authorization", ""))
            status = self.statuses.pop(0) if self.statuses else 200
        time.sleep(self.seconds)
        with self.lock:
            cls.now -= 1
        self._send(status, {"choices": [{"text": self.text, "finish_reason": self.reason}]})

    def _send(self, status, body):
        self.send_response(status)
        data = json.dumps(body).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def written(monkeypatch):
    monkeypatch.setattr(endpoint_texts, "LONGEST_PAUSE", 0.01)
    for name, value in {"asked": [], "keys": [], "statuses": [], "most": 0}.items():
        monkeypatch.setattr(Written, name, value)
    made = ThreadingHTTPServer(("127.0.0.1", 0), Written)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


@pytest.fixture
def prompts_file(tmp_path) -> Path:
    return lines(tmp_path / "prompts.jsonl", *({"prompt": prompt} for prompt in PROMPTS))


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    """A folder without weights."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def command(written, prompts_file, tokenizer_folder, tmp_path) -> list[object]:
    given = ["-f", prompts_file, "--endpoint", written, "-m", tokenizer_folder, "--out", tmp_path / "teacher"]
    return ["collect", "text", *given, "-n", 12, "--texts-per-file", 4]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for file in sorted(folder.glob("*.gz")) for line in gzip.open(file)]


def test_texts_are_those_that_our_own_server_writes(server, engine, tiny_folder, prompts_file, tmp_path):  # noqa: F811
    out = tmp_path / "teacher"
    given = "-f", prompts_file, "-m", tiny_folder(), "-n", 12, "-t", 0, "-t", 0.9, "--top-k", 20, "--limit", 3
    said = saltus_("collect", "text", *given, "--endpoint", server[1], "--out", out, "--batch-size", 3).stderr
    assert "6 texts in" in said
    found = rows(out)
    for number, row in enumerate(found):
        seed = text_seed(0, number // 2) % endpoint_texts.SEEDS
        settings = {"max_new_tokens": 12, "temperature": row["temperature"], "top_k": 20, "seed": seed}
        assert row["prompt"] == engine.encode(PROMPTS[number // 2])
        text = engine.generate(PROMPTS[number // 2], method="plain", **settings).text
        # a halved character, as this random model writes them, becomes three tokens, so that 12 may end before the text
        found_text = engine.tokenizer.decode(row["completion"], skip_special_tokens=True).rstrip("\ufffd")
        assert text.startswith(found_text)
        assert len(found_text) > 3
        assert len(row["completion"]) <= 12
    assert [row["temperature"] for row in found] == [0.0, 0.9] * 3
    metadata = json.loads((out / METADATA_FILE).read_text())
    assert (metadata["served"], metadata["model"], metadata["top_k"]) == ("tiny", str(tiny_folder()), 20)


def test_benchmarks_measure_our_own_server_as_a_baseline(server, engine):  # noqa: F811
    baseline = OpenAIServerBaseline(server[1], engine)
    request = BenchmarkRequest("the cat", tuple(engine.encode("the cat")), max_new_tokens=12)
    answer = baseline.to_answer(request, baseline.generate(request))
    expected = engine.generate("the cat", method="plain", max_new_tokens=12)
    assert ("".join(answer.pieces), answer.new_tokens, answer.problems) == (expected.text, len(expected.tokens), [])


def test_a_text_becomes_tokens_of_the_model_and_ends_where_the_server_ended_it(command, written, tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    saltus_(*command, "-t", 0.5, "--top-p", 0.9, "--api-key", "secret", "--seed", 3)
    body = tokenizer(" sat on the log", add_special_tokens=False).input_ids
    found = rows(tmp_path / "teacher")
    assert [row["completion"] for row in found] == [[*body, tokenizer.convert_tokens_to_ids(END)]] * len(PROMPTS)
    assert [row["prompt"] for row in found] == [
        tokenizer.apply_chat_template([{"role": "user", "content": one}], add_generation_prompt=True)["input_ids"]
        for one in PROMPTS
    ]
    asked = sorted(Written.asked, key=lambda one: [row["seed"] for row in Written.asked].index(one["seed"]))
    assert {one["prompt"] for one in asked} == {tokenizer.decode(row["prompt"]) for row in found}
    assert {(one["temperature"], one["top_p"], one["max_tokens"], one["model"]) for one in asked} == {
        (0.5, 0.9, 12, "served/model")
    }
    assert {one["seed"] for one in asked} == {text_seed(3, number) % 2**31 for number in range(len(PROMPTS))}
    assert set(Written.keys) == {"Bearer secret"}
    monkeypatch.setattr(Written, "reason", "length")
    saltus_(*command, "-t", 0, "--out", tmp_path / "cut", "--served-model", "mine")
    assert [row["completion"] for row in rows(tmp_path / "cut")] == [body] * len(PROMPTS)
    assert Written.asked[-1]["model"] == "mine"


def test_a_text_after_a_prompt_has_no_space_that_only_a_text_s_beginning_has(
    written, prompts_file, tmp_path, monkeypatch
):
    """Tokenizers of Llama 2's kind put a space before a text."""
    tokenizer = space_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "spaces")
    monkeypatch.setattr(Written, "text", "the")
    saltus_("collect", "text", "-f", prompts_file, "--endpoint", written, "-m", tmp_path / "spaces", "-t", 0,
            "--limit", 1, "--out", tmp_path / "out")  # fmt: skip
    (row,) = rows(tmp_path / "out")
    assert tokenizer.decode(row["prompt"] + row["completion"], skip_special_tokens=True).endswith(" matthe")


@pytest.mark.parametrize(("make_tokenizer", "begin"), [(space_tokenizer, ""), (llama_2_tokenizer, "<s>")])
def test_a_completion_of_a_data_set_has_none_either(make_tokenizer, begin):
    """Also where the prompt read again is another: Llama 2's own tokenizer puts a space behind a begin token, too."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = begin + "{{ messages[0]['content'] }}"
    given = Mock(spec=Engine, tokenizer=tokenizer, target=Mock(end_tokens=frozenset([2])))
    given.encode = lambda prompt: encode_prompt(tokenizer, prompt, PromptSettings(), "spaces")
    prompt, completion = tokenize_row(given, {"prompt": "the mat", "completion": "the cat"})
    assert tokenizer.decode(prompt + completion) == begin + " " * bool(begin) + "the matthe cat</s>"


def test_fields_that_a_server_does_not_know_are_left_out(command, written, tmp_path, monkeypatch):
    send = Written._send

    def strict(self, status, body):
        known = "add_special_tokens" not in (self.asked or [{}])[-1]
        send(self, *((status, body) if known else (400, {"error": "unknown field add_special_tokens"})))

    monkeypatch.setattr(Written, "_send", strict)
    tokenizer = space_tokenizer()  # which puts <s> before a text, as servers then do
    tokenizer.chat_template = "<s>{{ messages[0]['content'] }}"
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(tmp_path / "begins")
    saltus_(*command, "-t", 0, "--limit", 1, "-m", tmp_path / "begins")
    assert [one["prompt"].startswith("<s>") for one in Written.asked] == [True, False]
    assert rows(tmp_path / "teacher")[0]["prompt"].count(1) == 1


def test_what_passes_is_tried_again_and_what_does_not_is_one_line(command, written, tmp_path, monkeypatch):
    monkeypatch.setattr(Written, "statuses", [503, 429, 500])
    saltus_(*command, "-t", 0)
    assert len(Written.asked) == len(PROMPTS) + 3
    assert len(rows(tmp_path / "teacher")) == len(PROMPTS)
    monkeypatch.setattr(Written, "statuses", [400])
    assert "/v1/completions refuses (400)" in complaint(*command, "-t", 0, "--out", tmp_path / "other")
    monkeypatch.setattr(endpoint_texts, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(Written, "statuses", [503] * 100)
    said = complaint(*command, "-t", 0, "--out", tmp_path / "third")
    assert "refuses (503)" in said
    assert said.endswith("3 attempts failed, the same command writes the missing files")


def test_requests_at_a_time_are_as_many_as_asked_for(command, written, monkeypatch):
    monkeypatch.setattr(Written, "seconds", 0.05)
    saltus_(*command, "-t", 0, "--batch-size", 3, "--texts-per-file", 6)
    assert Written.most == 3


def test_files_that_are_written_stay_and_the_same_command_writes_the_others(command, written, tmp_path, monkeypatch):
    monkeypatch.setattr(Written, "statuses", [200] * 4 + [400])
    complaint(*command, "-t", 0, "--batch-size", 1)
    assert [file.name for file in (tmp_path / "teacher").glob("*.gz")] == ["00000.jsonl.gz"]
    Written.asked.clear()
    assert "6 texts in" in saltus_(*command, "-t", 0).stderr
    assert len(Written.asked) == 2
    assert len(read_teacher_texts(tmp_path / "teacher")) == len(PROMPTS)
    assert "all there before" in saltus_(*command, "-t", 0).stderr
    assert "was begun with served served/model, not mine" in complaint(*command, "-t", 0, "--served-model", "mine")
    assert "was begun with temperatures" in complaint(*command, "-t", 1)


def test_texts_are_for_models_with_the_same_tokens(command, written, tmp_path):
    saltus_(*command, "-t", 0)
    check_teacher_model(tmp_path / "teacher", None, byte_tokenizer(), "any")
    with pytest.raises(ValueError, match="whose tokens are others than those of other; give --model other"):
        check_teacher_model(tmp_path / "teacher", None, byte_tokenizer("a tiger"), "other")


def test_wrong_input_is_one_line(command, tokenizer_folder, tmp_path):
    assert "--processes is for a model that is loaded here" in complaint(*command, "--processes", 2)
    assert "leave --coupling out" in complaint(
        *command, "--endpoint", "http://127.0.0.1:9", "--coupling", "token-order"
    )
    assert "give an address such as" in complaint(*command, "--endpoint", "localhost:8000")
    assert "does not answer" in complaint(*command, "--endpoint", "http://127.0.0.1:9")
    shutil.rmtree(tokenizer_folder)
    assert "there is no folder" in complaint(*command)
