"""Where models come from: short names, folders, and a hub that answers, refuses, breaks off or says nothing."""

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from forked_python import forked_python
from saltus.loading.model_folders import LFS_POINTER, check_folder, weight_files
from saltus.loading.progress import Stage, progress_bars
from saltus.loading.sources import SHORT_NAMES, SourceError, resolve
from saltus.loading.split_gguf import find_gguf
from saltus.storage.cache_folder import cache_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def complaint(name: str | Path, **options: bool) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        resolve(str(name), **options)
    assert isinstance(caught.value, SourceError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Names


def test_an_unknown_name_offers_the_nearest():
    said = complaint("smolm2-135")
    assert "did you mean smollm2-135m" in said
    assert "did you mean" not in complaint("zzzzzzzz")
    assert all(short in said for short in SHORT_NAMES)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        ("Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        ("K_M", None),
        ("4_K_M", None),
        ("BF16", None),
    ],
)
def test_a_gguf_file_is_found_by_its_kind(wanted, found):
    parts = [f"Q8_0/m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert find_gguf(["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf", *parts, "mmproj-BF16.gguf", "BF16"], wanted) == found


def test_a_name_of_ollama_or_llama_cpp_is_told_what_to_give_instead():
    assert "`ollama show llama3.2:1b --modelfile`" in complaint("llama3.2:1b")
    assert "there is no folder 'owner/name-GGUF:'" in complaint("owner/name-GGUF:")


@pytest.mark.parametrize("name", ["", " ", "./nowhere", "no/such/folder", "/", "a\\b", "x" * 5000])
def test_a_name_that_cannot_be_a_model_is_one_line(name):
    complaint(name)


def test_a_short_name_is_the_model_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-4b").mkdir()
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "Qwen/Qwen3-4B is not in the cache" in complaint("Qwen3-4B", offline=True)
    assert "config.json is missing" in complaint("./qwen3-4b", offline=True)


def test_the_environment_switches_the_network_off(tmp_path, monkeypatch):
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path))
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert "network is switched off" in complaint("nobody/nothing")


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.delenv("SALTUS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "saltus"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/saltus")
    monkeypatch.setenv("SALTUS_CACHE", "/y")
    assert cache_folder() == Path("/y")


# Folders


def test_a_folder_that_holds_a_model_is_taken_as_it_is(model, monkeypatch):
    assert resolve(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert resolve("model") == model


def test_a_folder_without_a_model_says_what_is_missing(model, tmp_path):
    assert "config.json is missing" in complaint(tmp_path)
    assert "is a file; give the folder" in complaint(model / "config.json")
    (model / "model.safetensors").rename(tmp_path / "aside")
    assert "no weights" in complaint(model)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "aside").rename(model / "model-00001-of-00002.safetensors")
    assert "lacks model-00002-of-00002.safetensors" in complaint(model)
    (tmp_path / "adapter_config.json").touch()
    assert "adapter_config.json is damaged" in complaint(tmp_path)


def test_the_files_that_transformers_prefers_are_the_weights(model):
    index = {"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (model / "flax_model.msgpack").write_bytes(LFS_POINTER)
    check_folder(model)
    assert weight_files(model) == [model / "model.safetensors"]
    (model / "tokenizer.json").write_bytes(LFS_POINTER)
    with pytest.raises(ValueError, match="git lfs pull"):
        check_folder(model)


@pytest.mark.parametrize("kept", [0, 5, 100, 10_000])
def test_weights_that_were_cut_short_are_told(model, kept):
    os.truncate(model / "model.safetensors", kept)
    said = complaint(model)
    assert "cut short" in said or "not a safetensors file" in said


# The hub


class Hub:
    """A hub on this machine with one model of three needed files; it can refuse, and break off."""

    def __init__(self, model: Path) -> None:
        self.files = {name: (model / name).read_bytes() for name in ("config.json", "model.safetensors")}
        self.files |= {"tokenizer.json": b"{}", "onnx/model.onnx": b"not needed", "README.md": b"not needed"}
        self.asked: list[str] = []
        self.refusal: tuple[int, str] | None = None
        self.broken = ""  # a file that cannot be had
        self.tired = False  # answers the first question alone
        self.gated = False  # lists its files, and gives none
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.asked.append(self.path)
                head = {"X-Repo-Commit": "a" * 40, "Content-Type": "application/json"}
                listed = [{"rfilename": name, "size": len(body)} for name, body in hub.files.items()]
                if hub.tired and "blobs" not in self.path:
                    self.reply(403, b"", {})
                elif hub.gated and "/resolve/" in self.path:
                    self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
                elif hub.refusal:
                    status, code = hub.refusal
                    self.reply(status, b"", {"X-Error-Code": code})
                elif "/resolve/" in self.path:
                    name = self.path.split("/resolve/")[1].partition("/")[2]
                    body = hub.files[name]
                    self.reply(
                        404 if name == hub.broken else 200, body, head | {"ETag": hashlib.sha1(body).hexdigest()}
                    )
                elif "/tree/" in self.path:
                    tree = [
                        {"type": "file", "path": each["rfilename"], "size": each["size"], "oid": "0" * 40}
                        for each in listed
                    ]
                    self.reply(200, json.dumps(tree).encode(), head)
                else:
                    self.reply(200, json.dumps({"id": "o/m", "sha": "a" * 40, "siblings": listed}).encode(), head)

            def reply(self, status: int, body: bytes, head: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**head, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


PROGRAM = """
import json, sys
from saltus.loading import hub
from saltus.loading.split_gguf import find_gguf
from saltus.loading.sources import resolve, resolve_tokenizer
hub.HUB_TIMEOUT = float(sys.argv[2])
stages = []
try:
    found = resolve(sys.argv[1], progress=stages.append) if sys.argv[3] == "model" else resolve_tokenizer(sys.argv[1])
    found = str(found)
except ValueError as error:
    found = f"ValueError: {error}"
print(json.dumps([found, [[stage.text, stage.done, stage.total] for stage in stages]]))
"""


@pytest.fixture
def ask(tmp_path):
    """Resolve a name in a process of its own, since the hub's client reads its endpoint when it is imported."""

    def ask(name: str, port: int, patience: float = 20.0, what: str = "model") -> tuple[str, list[list]]:
        places = {
            "SALTUS_CACHE": tmp_path / "cache",
            "HF_HOME": tmp_path / "hf",
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        }
        spared = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        ran = subprocess.run(
            [*forked_python("torch"), "-c", PROGRAM, name, str(patience), what],
            env=spared | {name: str(value) for name, value in places.items()},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not ran.returncode, ran.stderr
        found, stages = json.loads(ran.stdout)
        assert "\n" not in found
        return found, stages

    return ask


@pytest.fixture
def hub(model):
    hub = Hub(model)
    yield hub
    hub.server.shutdown()


@pytest.mark.slow
def test_a_hub_id_is_downloaded_once_with_what_is_needed_of_it(hub, ask):
    found, stages = ask("o/m", hub.server.server_port)
    assert sorted(file.name for file in Path(found).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    total = sum(len(hub.files[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert stages[-1] == ["downloading o/m", total, total]
    hub.asked.clear()
    assert ask("o/m", hub.server.server_port)[0] == found
    assert hub.asked == []
    (Path(found) / "tokenizer.json").unlink()
    assert ask("o/m", hub.server.server_port)[0] == found
    assert (Path(found) / "tokenizer.json").exists()


@pytest.mark.slow
def test_a_tokenizer_comes_without_weights_and_also_from_a_repository_that_has_none(hub, ask):
    found, _stages = ask("o/m", hub.server.server_port, what="tokenizer")
    assert sorted(file.name for file in Path(found).iterdir()) == ["config.json", "tokenizer.json"]
    assert not any("model.safetensors" in path for path in hub.asked)
    whole, _stages = ask("o/m", hub.server.server_port)
    assert (Path(whole) / "model.safetensors").exists()
    assert ask("o/m", hub.server.server_port, what="tokenizer")[0] == whole
    del hub.files["model.safetensors"]
    found, _stages = ask("o/tokens", hub.server.server_port, what="tokenizer")
    assert (Path(found) / "tokenizer.json").exists()


def test_a_pairwise_correction_comes_with_an_any_subset_model(hub, ask):
    hub.files["pairwise.safetensors"] = b"weights of pairs"
    found, _stages = ask("o/m", hub.server.server_port)
    assert (Path(found) / "pairwise.safetensors").read_bytes() == b"weights of pairs"


def test_a_model_whose_weights_are_packed_comes_with_them(hub, ask):
    weights = hub.files.pop("model.safetensors")
    hub.files |= {"pairwise.safetensors": b"weights of pairs", "gguf.json": b"{}", "model.gguf": weights}
    found, _stages = ask("o/m", hub.server.server_port)
    assert {"pairwise.safetensors", "gguf.json", "model.gguf"} <= {file.name for file in Path(found).iterdir()}


@pytest.mark.slow
def test_a_file_of_a_hub_that_was_cut_short_is_downloaded_again(hub, ask):
    found = Path(ask("o/m", hub.server.server_port)[0])
    (found / "tokenizer.json").write_bytes(b"{")
    hub.asked.clear()
    assert Path(ask("o/m", hub.server.server_port)[0]) == found
    assert (found / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]
    assert not any("model.safetensors" in path for path in hub.asked), "what is whole stays"


@pytest.mark.slow
def test_a_gguf_file_of_a_hub_that_was_cut_short_is_downloaded_again(hub, ask, gguf_file):
    hub.files[gguf_file.name] = gguf_file.read_bytes()
    folder = Path(ask(f"o/m:{gguf_file.name}", hub.server.server_port)[0])
    weights = Path(json.loads((folder / "gguf.json").read_text())["file"])
    weights.write_bytes(hub.files[gguf_file.name][:-100])
    folder = Path(ask(f"o/m:{gguf_file.name}", hub.server.server_port)[0])
    assert Path(json.loads((folder / "gguf.json").read_text())["file"]).read_bytes() == hub.files[gguf_file.name]


@pytest.mark.slow
def test_a_download_that_broke_off_is_not_taken_for_a_model(hub, ask, tmp_path):
    hub.broken = "tokenizer.json"
    assert "broke off" in ask("o/m", hub.server.server_port)[0]
    shutil.rmtree(next(tmp_path.rglob("trees")), ignore_errors=True)  # as an older client leaves it
    hub.tired = True  # the client then returns the part that it has
    assert "broke off before tokenizer.json" in ask("o/m", hub.server.server_port)[0]
    hub.broken, hub.tired = "", False
    found = ask("o/m", hub.server.server_port)[0]
    assert (Path(found) / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("status", "code", "cure"),
    [
        (404, "RepoNotFound", "check the spelling"),
        (404, "RevisionNotFound", "look up its branches"),
        (403, "GatedRepo", "accept its licence|those who accept"),
        (500, "", "check the network"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_cure(hub, ask, status, code, cure):
    hub.refusal = (status, code)
    said, _ = ask("o/m@v1", hub.server.server_port)
    assert said.startswith("ValueError: ")
    assert any(each in said for each in cure.split("|"))


def test_a_repository_that_lists_its_files_and_gives_none_asks_for_its_licence(hub, ask):
    hub.gated = True
    assert "accept its licence" in ask("o/m", hub.server.server_port)[0]


def test_all_files_of_an_index_come_and_other_templates(hub, ask):
    shard = hub.files.pop("model.safetensors")
    names = "model-00001-of-00001.safetensors", "model_extra_tensors.safetensors"
    hub.files |= dict.fromkeys((*names, "consolidated.safetensors", "additional_chat_templates/tool_use.jinja"), shard)
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    folder = Path(ask("o/m", hub.server.server_port)[0])
    assert {file.name for file in folder.glob("*.safetensors")} == set(names)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").exists()


def test_a_file_of_heads_beside_the_weights_comes_too(hub, ask):
    hub.files |= dict.fromkeys(("mtp.safetensors", "consolidated.safetensors"), hub.files["model.safetensors"])
    folder = Path(ask("o/m", hub.server.server_port)[0])
    assert {file.name for file in folder.glob("*.safetensors")} == {"model.safetensors", "mtp.safetensors"}


def test_a_repository_without_weights_is_told(hub, ask):
    del hub.files["model.safetensors"]
    assert "holds no weights" in ask("o/m", hub.server.server_port)[0]


@pytest.mark.slow
def test_a_hub_that_takes_the_call_and_says_nothing_is_given_up_soon(ask):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        said, _ = ask("o/m", mute.getsockname()[1], 0.5)
    assert "does not answer" in said
    assert "0.5 seconds" in said


@pytest.mark.slow
def test_what_another_tool_downloaded_serves_where_the_hub_is_silent(hub, ask, tmp_path):
    found, _ = ask("o/m", hub.server.server_port)
    shutil.rmtree(next(tmp_path.rglob("trees")))  # the list of files, which another tool does not leave
    assert ask("o/m", 1)[0] == found
    (Path(found) / "model.safetensors").unlink()
    assert "does not answer" in ask("o/m", 1)[0]


# GGUF files


@pytest.fixture
def gguf_file(tmp_path) -> Path:
    """The smallest that there is: a tokenizer of three tokens, one matrix."""
    file = tmp_path / "tiny-Q8_0.gguf"
    out = gguf.GGUFWriter(file, "llama")
    for name, value in {"context_length": 8, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
                        "head_count": 1, "layer_norm_rms_eps": 1e-6}.items():  # fmt: skip
        getattr(out, f"add_{name}")(value)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list(["a", "b", "ab"])
    out.add_token_merges(["a b"])
    out.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def test_a_gguf_file_of_a_hub_is_downloaded_once_and_indexed(hub, ask, gguf_file):
    hub.files[gguf_file.name] = gguf_file.read_bytes()
    found, stages = ask(f"o/m:{gguf_file.name}", hub.server.server_port)
    assert {file.name for file in Path(found).iterdir()} >= {"config.json", "tokenizer.json", "gguf.json"}
    weights = Path(json.loads((Path(found) / "gguf.json").read_text())["file"])
    assert weights.read_bytes() == hub.files[gguf_file.name]
    assert ["downloading o/m", len(hub.files[gguf_file.name]), len(hub.files[gguf_file.name])] in stages
    hub.asked.clear()
    assert ask(f"o/m:{gguf_file.name}", hub.server.server_port)[0] == found
    for name in (gguf_file.name, "q8_0"):
        assert ask(f"o/m:{name}", 1)[0] == found, "where the hub is silent"
    assert hub.asked == []


def test_a_gguf_file_that_a_hub_lacks_is_one_line_with_those_it_has(hub, ask, gguf_file):
    hub.files |= {"b.gguf": b"", "a.gguf": b""}
    said, _ = ask("o/m:c.gguf", hub.server.server_port)
    assert said == "ValueError: o/m has no file c.gguf; its GGUF files are a.gguf, b.gguf"
    assert "does not answer" in ask("o/m:c.gguf", 1)[0]
    hub.files |= {"a-Q4_0-00001-of-00002.gguf": b""}
    assert "o/m lacks a-Q4_0-00002-of-00002.gguf, one of 2 parts" in ask("o/m:Q4_0", hub.server.server_port)[0]


def test_a_gguf_file_that_changed_is_indexed_anew(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path / "cache"))
    first = resolve(str(gguf_file))
    assert resolve(str(gguf_file)) == first
    os.utime(gguf_file, (0, 0))
    second = resolve(str(gguf_file))
    assert second != first
    monkeypatch.setattr("saltus.loading.sources.GGUF_FOLDER_FORMAT", 99)
    assert resolve(str(gguf_file)) not in (first, second), "a version that writes other folders makes its own"


# Progress


def test_a_log_sees_a_line_a_stage_and_a_terminal_sees_bytes():
    log = io.StringIO()
    with progress_bars(Console(file=log)) as show:
        for done in (0, 500, 1000):
            show(Stage("downloading", done, 1000))
        show(Stage("converting"))
    assert log.getvalue() == "downloading\nconverting\n"
    screen = io.StringIO()
    with progress_bars(Console(file=screen, force_terminal=True, width=100)) as show:
        show(Stage("downloading", 500_000, 1_000_000))
    assert "0.5/1.0 MB" in screen.getvalue()


def test_a_cache_that_cannot_be_made_is_named(monkeypatch):
    if not Path("/proc/self").exists():
        pytest.skip("no /proc")
    monkeypatch.setenv("SALTUS_CACHE", "/proc/none")
    assert "name another with SALTUS_CACHE" in complaint("smollm2-135m")
