"""The header of a GGUF file is read as gguf reads it, and one that announces more than it has is refused at once."""

import json
import math
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFReader
from test_gguf import MIXED, folder_with_its_file, own_cache, tiny, write  # noqa: F401 (a fixture)

from saltus.loading.fetching import SourceError
from saltus.loading.gguf_header import UnknownFormatError, read_gguf_header
from saltus.loading.gguf_tokenizers import MAX_TOKEN_LENGTH, make_tokenizer
from saltus.loading.gguf_weights import load_gguf_model
from saltus.loading.sources import resolve

ARRAY, UINT8, UINT32, FLOAT32, STRING = 9, 0, 4, 6, 8  # types of GGUF


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def header(*metadata: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(metadata) if count is None else count) + b"".join(metadata)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text("a") + struct.pack("<IIQ", ARRAY, kind, count) + content


def refused(content: bytes, tmp_path: Path) -> str:
    file = tmp_path / "strange.gguf"
    file.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        resolve(str(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_format_that_nothing_reads_is_named_and_not_called_damage(tmp_path):
    file = tmp_path / "old.gguf"
    out = gguf.GGUFWriter(file, "llama")
    out.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    content = bytearray(file.read_bytes())
    place = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert content[place : place + 4] == bytes(4)  # F32
    content[place] = 31  # Q4_0_4_4
    file.write_bytes(content)
    with pytest.raises(UnknownFormatError, match=r"token_embd\.weight in format 31 of GGML, which is not supported"):
        read_gguf_header(file)


def test_a_header_is_what_the_library_gguf_reads(tmp_path):
    file = tmp_path / "tiny.gguf"
    write(tiny("llama"), file, MIXED)
    expected, found = GGUFReader(file), read_gguf_header(file)
    fields = {key: field.contents() for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert found.metadata == fields
    assert [(one.name, one.format, one.shape[::-1], one.offset, one.size) for one in found.tensors] == [
        (one.name, one.tensor_type, tuple(one.shape.tolist()), one.data_offset, one.n_bytes) for one in expected.tensors
    ]


@pytest.mark.parametrize(
    "content",
    [
        header(array(UINT8, 1 << 60)), header(array(UINT32, 1 << 60, bytes(64))), header(array(STRING, 1 << 60)),
        header(array(ARRAY, 1 << 60)), header(count=1 << 60), header(tensors=1 << 60), header(text("a"), count=1),
        header(struct.pack("<Q", 1 << 60)), b"GGUF", b"",
    ],
)  # fmt: skip
def test_counts_are_compared_with_the_bytes_that_are_left(content, tmp_path):
    assert "is not a whole GGUF file" in refused(content, tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGML" + header()[4:], "does not begin with GGUF"), (header()[:4] + b"\0\0\0\3" + header()[8:], "big-endian"),
        (header(text("a") + struct.pack("<IB", UINT8, 1), text("a") + struct.pack("<IB", UINT8, 1)), "twice"),
        (header(array(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 9)), "arrays in arrays"),
        (header(text("a") + struct.pack("<I", 99)), "not a valid GGUFValueType"),
        (header(text("general.alignment") + struct.pack("<II", UINT32, 3)), "no power of two"),
        (header(text("x.scale") + struct.pack("<If", FLOAT32, math.nan)), "its x.scale is no finite number"),
        (header(array(FLOAT32, 2, struct.pack("<2f", 1.0, math.inf))), "its a is no finite number"),
        (header(array(ARRAY, 1, struct.pack("<IQf", FLOAT32, 1, -math.inf))), "its a is no finite number"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_is_refused(content, said, tmp_path):
    assert said in refused(content, tmp_path)


def test_more_layers_than_the_file_has_are_not_made(tmp_path, monkeypatch):
    real = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", lambda self, _: real(self, 1 << 23))
    write(tiny("llama"), tmp_path / "tiny.gguf", [Q.Q8_0])
    with pytest.raises(SourceError, match="a model of 8,388,608 layers has 21 tensors"):
        load_gguf_model(resolve(str(tmp_path / "tiny.gguf")), own_classes=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 1 << 23}, "has 21 tensors"), ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None"),
        ({"rope_parameters": {}}, "rope_type is None"), ({"tie_word_embeddings": "no"}, "must be of type bool"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"eos_token_id": [1, 999]}, "eos_token_id is 999, but its vocabulary has 300"),
    ],
)  # fmt: skip
def test_a_published_folder_whose_configuration_cannot_be_is_refused(changes, said, tmp_path):
    folder = folder_with_its_file(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SourceError, match=re.escape(said)):
        load_gguf_model(folder, own_classes=True)


SENTENCEPIECE = {"model": "llama", "tokens": ["<unk>", "a", "b", "ab"], "scores": [0.0, -1.0, -2.0, -3.0]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": ["a" * 3_000_000], "scores": [0.0]}, f"tokens have at most {MAX_TOKEN_LENGTH}"),
        ({"tokens": 7}, "tokens are missing or of another type"), ({"tokens": [7] * 4}, "tokens are missing or of"),
        ({"scores": None}, "scores are missing"), ({"scores": [0.0]}, "has 4 tokens and 1 scores"),
        ({"token_type": [1]}, "has 4 tokens and 1 token_type"),
        *(({f"{name}_token_id": number}, f"its {name} token is number {number!r} of 4 tokens")
          for name, number in (("bos", 4), ("eos", -1), ("eot", 1 << 31), ("unknown", [0]), ("padding", "x"))),
        ({"model": "gpt2", "merges": ["a x"]}, "a tokenizer that does not load"),
        ({"model": "gpt2", "merges": ["a"]}, "a tokenizer that does not load"),
    ],
)  # fmt: skip
def test_a_tokenizer_whose_parts_do_not_fit_is_refused(changes, said):
    metadata = {f"tokenizer.ggml.{name}": value for name, value in (SENTENCEPIECE | changes).items()}
    with pytest.raises(SourceError, match=re.escape(said)):
        make_tokenizer(metadata, "x.gguf")


def test_many_special_tokens_are_added_at_once():
    tokens = [f"<|{number}|>" for number in range(20_000)]
    types = [3 + number % 2 for number in range(20_000)]
    data = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    made = make_tokenizer(data, "x.gguf")  # one by one it took minutes
    assert made.encode("<|7|><|19999|>").ids == [7, 19_999]
    assert made.decode([6, 7]) == "<|7|>", "the even ones are control tokens"
