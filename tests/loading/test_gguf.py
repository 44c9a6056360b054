"""GGUF files as models: every architecture and format gives the logits of Transformers on the dequantised weights."""

import json
import re
import shutil
import struct
import subprocess
import unicodedata
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaTokenizer

import saltus
from forked_python import forked_python
from gguf_blocks import PLACES, put_scales
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine import calibration
from saltus.engine.checkpoints import load_checkpoint
from saltus.engine.target_network import make_network
from saltus.kernels.packed_blocks import PACKED_FORMATS
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading import gguf_index, gguf_parts, sources
from saltus.loading.fetching import SourceError
from saltus.loading.gguf_header import read_gguf_header
from saltus.loading.gguf_storage import remove_gguf
from saltus.loading.gguf_tokenizers import make_tokenizer
from saltus.loading.load_model import load_model
from saltus.loading.model_identity import embedding_signs, model_fingerprint
from saltus.loading.sources import resolve
from saltus.methods.ptp.network import DrafterShape
from saltus.methods.published.dflash_model import DFlashShape
from saltus.methods.published.eagle_model import EagleShape
from saltus.models.gguf_architecture import LLAMA_TENSORS
from saltus.models.packed_decoder import PackedDecoder

# What gguf reads and does not write: how large usual scales and minimums are.
OTHERS = {
    Q.Q2_K: 2e-3, Q.Q3_K: 4e-4, Q.Q4_K: 2e-4, Q.Q5_K: 2e-4, Q.Q6_K: 2e-4, Q.IQ4_NL: 1e-3, Q.IQ4_XS: 5e-5,
    Q.IQ1_S: 5e-3, Q.IQ1_M: 5e-3, Q.IQ2_XXS: 5e-4, Q.IQ2_XS: 5e-4, Q.IQ2_S: 5e-4, Q.IQ3_XXS: 2e-4, Q.IQ3_S: 3e-4,
    Q.NVFP4: 1.0,
}  # fmt: skip
SIZES = {
    "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ARCHITECTURES = {
    "llama": {}, "llama, tied": {"tie_word_embeddings": True}, "mistral": {"sliding_window": 8}, "qwen2": {},
    "qwen3": {}, "qwen3, biases": {"attention_bias": True}, "llama, biases": {"attention_bias": True, "mlp_bias": True},
}  # fmt: skip


def tiny(architecture: str):
    torch.manual_seed(0)
    kind = architecture.partition(",")[0]
    settings = {"tie_word_embeddings": False, "initializer_range": 0.1, **SIZES, **ARCHITECTURES[architecture]}
    config = AutoConfig.for_model(kind, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.data = torch.rand_like(weight) + (0.5 if name.endswith("weight") else -0.5)
    return model


def as_blocks(values: np.ndarray, format: Q) -> np.ndarray:
    """Quantised, or for the formats that gguf does not write: any blocks of such a shape, with fitting scales."""
    if format not in OTHERS:
        return quantize(values, format)
    weights, size = GGML_QUANT_SIZES[format]
    random = np.random.default_rng(int(format))
    blocks = random.integers(0, 256, (values.size // weights, size), dtype=np.uint8)
    for at in PLACES[format]:
        put_scales(blocks, format, at, random.uniform(OTHERS[format] / 2, OTHERS[format], len(blocks)))
    if format is Q.NVFP4:
        blocks[:, :4] &= 0x3F  # 8-bit floats below 2
    return blocks.reshape(*values.shape[:-1], -1)


def write(model, file: Path, formats: list[Q], scale: float = 1.0, **more) -> None:
    """Write the model as llama.cpp's converter does, matrices in these formats by turns; it gets what was written.

    A scale other than 1 is written for each matrix, with one of its inputs, which is not needed.
    """
    config = model.config
    kind = "llama" if config.model_type == "mistral" else config.model_type
    out = gguf.GGUFWriter(file, kind)
    out.add_context_length(128)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim if hasattr(config, "head_dim") else 64)
    out.add_rope_freq_base(5000.0)
    out.add_layer_norm_rms_eps(1e-6)
    if config.model_type == "mistral":
        out.add_sliding_window(config.sliding_window)
    add_vocabulary(out, **more)
    names = {ours: name for name, ours in LLAMA_TENSORS.items()}
    at = 0
    for name, weight in model.named_parameters():
        block, key, part = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(weight|bias)", name).groups()
        target = (f"blk.{block}." if block else "") + f"{names[key]}.{part}"
        values = weight.detach().float().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(names[key])
        turned = kind == "llama" and heads
        if turned:
            values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if weight.ndim == 1:
            out.add_tensor(target, np.ascontiguousarray(values))
            continue
        format, at = formats[at % len(formats)], at + 1
        blocks = as_blocks(np.ascontiguousarray(values), format)
        out.add_tensor(target, blocks, raw_dtype=None if format in (Q.F32, Q.F16) else format)
        made = dequantize(blocks, format) * np.float32(scale)
        if scale != 1:
            out.add_tensor(target.replace("weight", "scale"), np.array([scale], np.float32))
            out.add_tensor(target.replace("weight", "input_scale"), np.array([0.1], np.float32))
        if turned:
            made = made.reshape(heads, len(made) // heads // 2, 2, -1).swapaxes(1, 2).reshape(made.shape)
        weight.data = torch.from_numpy(np.array(made)).bfloat16()
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def add_vocabulary(out, pre: str = "smollm", kind: str = "gpt2", template: str = "") -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "Ġt", *(f"<unused{i}>" for i in range(297 - len(alphabet)))]
    out.add_tokenizer_model(kind)
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([3, 3] + [1] * 298)
    out.add_token_merges(["Ġ t"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    if template:
        out.add_chat_template(template)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The kernels stay where they are."""
    for module in (sources, gguf_index):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")


MIXED = [Q.Q4_0, Q.Q8_0, Q.Q6_K, Q.Q4_1, Q.Q5_K, Q.F16, Q.Q4_K, Q.BF16, Q.Q5_1, Q.Q5_0, Q.F32, Q.MXFP4, Q.IQ4_NL,
         Q.IQ4_XS, Q.Q2_K, Q.Q3_K]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_the_logits_of_transformers(architecture, tmp_path):
    model, file = tiny(architecture), tmp_path / "tiny.gguf"
    write(model, file, MIXED)
    folder = resolve(str(file))
    theirs, ours, expanded = model, load_model("tiny", folder), load_model("tiny", folder, weights="bf16")
    assert type(ours) is type(theirs)
    assert any(isinstance(weight, PackedWeight) for weight in ours.parameters())
    assert not any(isinstance(weight, PackedWeight) for weight in expanded.parameters())
    text = torch.randint(2, 300, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(theirs(text).logits, expanded(text).logits), "the same weights and settings"
        wide = load_model("tiny", folder, torch.float32)
        assert (wide(text).logits - theirs.float()(text).logits).abs().max() < 1e-4


@pytest.mark.parametrize("format", [*PACKED_FORMATS, Q.NVFP4, Q.BF16, Q.F32], ids=lambda format: format.name)
def test_every_format_gives_the_logits_of_the_expanded_weights(format, tmp_path):
    file, model = tmp_path / "tiny.gguf", tiny("llama")
    write(model, file, [format], scale=0.02 if format is Q.NVFP4 else 1)
    networks = [
        load_checkpoint(str(file), "cpu", weights=weights, arithmetic="bf16").network for weights in ("file", "bf16")
    ]
    path = "model.layers.1.self_attn.q_proj"
    assert torch.equal(networks[1].model.get_submodule(path).weight, model.get_submodule(path).weight)
    assert isinstance(networks[0].model.get_submodule(path).weight, PackedWeight) == (format not in (Q.BF16, Q.F32))
    assert all(network.native_decoder is not None for network in networks)
    text = [int(token) for token in np.random.default_rng(0).integers(2, 300, 40)]
    inputs = ForwardInputs(continuation(text, 8), (5, 6, 7), (-1, 0, -1))
    logits = [network.forward([inputs], [network.new_kv_cache()])[0].logits for network in networks]
    assert torch.equal(*logits)


@pytest.mark.parametrize("arithmetic", ["bf16", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_plain_decoding_with_every_method(temperature, arithmetic, tmp_path):
    """In bfloat16 those of the expanded weights, too."""
    file = tmp_path / "tiny.gguf"
    write(tiny("llama, tied"), file, MIXED)
    texts = set()
    for weights in ("file", "bf16") if arithmetic == "bf16" else ("file",):
        engine = saltus.load(str(file), "jacobi+lookup", device="cpu", weights=weights, arithmetic=arithmetic)
        for method in ("plain", "lookup", "jacobi+lookup"):
            settings = {"raw": True, "temperature": temperature, "max_new_tokens": 24, "method": method}
            texts.add(tuple(engine.generate("one two one two", **settings).tokens))
    assert len(texts) == 1


def test_a_model_with_rope_factors_divides_its_frequencies(tmp_path):
    model, file = tiny("llama"), tmp_path / "tiny.gguf"
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    real = gguf.GGUFWriter.write_header_to_file

    def with_factors(self, *arguments):
        self.add_tensor("rope_freqs.weight", factors)
        real(self, *arguments)

    gguf.GGUFWriter.write_header_to_file = with_factors
    try:
        write(model, file, [Q.Q8_0])
    finally:
        gguf.GGUFWriter.write_header_to_file = real
    ours = load_model("tiny", resolve(str(file)))
    assert torch.allclose(ours.model.rotary_emb.inv_freq * torch.from_numpy(factors), model.model.rotary_emb.inv_freq)


def test_a_file_that_is_split_is_whole_by_any_of_its_parts(tmp_path, monkeypatch):
    model, real = tiny("llama"), gguf.GGUFWriter
    monkeypatch.setattr(gguf, "GGUFWriter", lambda *arguments: real(*arguments, split_max_tensors=6))
    write(model, tmp_path / "tiny.gguf", MIXED)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) > 2
    text = torch.arange(2, 30)[None]
    expected = model(text).logits
    for part in parts:
        assert torch.equal(load_model("tiny", resolve(str(part)), weights="bf16")(text).logits, expected)
    folder = resolve(str(parts[0]))
    assert gguf_index.read_gguf_index(folder).files == parts
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    assert f"renamed.gguf is a part of {len(parts)}, but is not called so" in complaint(renamed)
    parts[1].unlink()
    assert f"is one of {len(parts)} parts, and {parts[1].name} is not beside it" in complaint(parts[0])


@pytest.mark.parametrize("name", ["sha256-0123456789", "TINY.GGUF", "tiny.bin"])
def test_the_first_bytes_make_a_gguf_file_whatever_its_name(tmp_path, name):
    write(tiny("llama"), tmp_path / name, [Q.Q8_0])
    assert load_checkpoint(str(tmp_path / name), "cpu").context_length == 128


ROPE_METADATA = {
    "linear without a factor": ({"type": "linear"}, "default", 128),
    "linear": ({"type": "linear", "factor": 4.0}, "linear", 512),
    "linear without a type": ({"factor": 4.0}, "linear", 512),
    "the old name of the factor": ({"scale_linear": 2.0}, "linear", 256),
    "yarn without a factor": ({"type": "yarn"}, "default", 128),
    "yarn without a length": ({"type": "yarn", "factor": 4.0}, "yarn", 512),
    "yarn": ({"type": "yarn", "factor": 4.0, "original_context_length": 32}, "yarn", 128),
}


@pytest.mark.parametrize("case", ROPE_METADATA)
def test_what_a_file_leaves_out_of_its_scaling_has_llama_cpps_defaults(tmp_path, monkeypatch, case):
    metadata, kind, length = ROPE_METADATA[case]
    real = gguf.GGUFWriter.write_header_to_file

    def with_scaling(self, *arguments):
        for name, value in metadata.items():
            key = f"llama.rope.{name}" if name == "scale_linear" else f"llama.rope.scaling.{name}"
            add = {str: self.add_string, float: self.add_float32, int: self.add_uint32}[type(value)]
            add(key, value)
        real(self, *arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_scaling)
    write(tiny("llama"), tmp_path / "tiny.gguf", [Q.Q8_0])
    loaded = load_checkpoint(str(tmp_path / "tiny.gguf"), "cpu")
    assert loaded.network.model.config.rope_parameters["rope_type"] == kind
    assert loaded.context_length == length


def test_the_token_that_ends_a_turn_ends_a_text_too(tmp_path, monkeypatch):
    real = gguf.GGUFWriter.write_header_to_file

    def with_end_of_turn(self, *arguments):
        self.add_eot_token_id(7)
        real(self, *arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_end_of_turn)
    write(tiny("llama"), tmp_path / "tiny.gguf", [Q.Q8_0])
    assert load_checkpoint(str(tmp_path / "tiny.gguf"), "cpu").end_tokens == {1, 7}
    assert load_checkpoint(str(tmp_path / "tiny.gguf"), "cpu", weights="bf16").end_tokens == {1, 7}


@pytest.mark.parametrize("arithmetic", ["bf16", "int8"])
def test_experts_are_a_stack_of_matrices(arithmetic, tmp_path):
    file, out = tmp_path / "experts.gguf", gguf.GGUFWriter(tmp_path / "experts.gguf", "llama")
    values = np.random.default_rng(0).normal(size=(4, 32, 256)).astype(np.float32)
    formats = {"ffn_up_exps": Q.MXFP4, "ffn_down_exps": Q.Q8_0, "ffn_gate_exps": Q.NVFP4, "more": Q.F32}
    blocks = {name: as_blocks(values, format) for name, format in formats.items()}
    for name, format in formats.items():
        out.add_tensor(name, blocks[name], raw_dtype=None if format is Q.F32 else format)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    content = np.memmap(file, mode="c")
    for tensor in read_gguf_header(file).tensors:
        scales = (0.5, 0.1, 1.0, -3.0) if tensor.format is Q.NVFP4 else ()
        numbers = dequantize(blocks[tensor.name], tensor.format)
        expected = torch.from_numpy(numbers * np.reshape(scales or [1], (-1, 1, 1)).astype(np.float32)).bfloat16()
        place = gguf_index.GgufTensor(int(tensor.format), tensor.shape, tensor.offset, tensor.size, scales=scales)
        for packed in (True, False):
            weight = gguf_parts.read_weight(tensor.name, [place], [content], (4, 32, 256), False, packed, arithmetic)
            assert isinstance(weight, PackedWeight) == (packed and tensor.format is not Q.F32)
            assert weight.shape == (4, 32, 256)
            assert torch.equal(weight.bfloat16().float(), expected.float())
            assert torch.equal(weight[2].bfloat16(), expected[2])
        if tensor.format is Q.NVFP4:  # each of two parts has its own scales
            parts = [replace(place, alternating=True), replace(place, alternating=True, scales=())]
            weight = gguf_parts.read_weight(tensor.name, parts, [content], (4, 64, 256), False, True, arithmetic)
            assert torch.equal(weight.bfloat16()[:, ::2], expected)
            assert torch.equal(weight.bfloat16()[:, 1::2], torch.from_numpy(numbers).bfloat16())


# Files that cannot be served


def complaint(file: Path) -> str:
    with pytest.raises(SourceError) as caught:
        load_model("tiny", resolve(str(file)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_not_supported_is_one_line_that_names_it_and_what_is(tmp_path):
    file = tmp_path / "other.gguf"
    out = gguf.GGUFWriter(file, "rwkv7")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    named = "architecture rwkv7; supported are afmoe, apertus, arcee, baichuan, bailingmoe2, bailingmoe3, chatglm"
    assert named in complaint(file)
    file = tmp_path / "matrix.gguf"
    out = gguf.GGUFWriter(file, "")
    out.kv_data[0].clear()
    out.add_string("general.type", "imatrix")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    named = "matrix.gguf is no model, since it names no architecture ('imatrix' is its type); take the file of a model"
    assert complaint(file) == named
    file = tmp_path / "version.gguf"
    file.write_bytes(b"GGUF" + (4).to_bytes(4, "little") + bytes(100))
    assert "version.gguf has version 4 of GGUF, but versions 2 and 3 are read here; take" in complaint(file)
    file = tmp_path / "big.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    assert "big.gguf is a big-endian GGUF file; take a little-endian one" in complaint(file)
    file = tmp_path / "pointer.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n")
    assert "pointer.gguf is a pointer of git-lfs, not the file itself; run git lfs pull" in complaint(file)
    file = tmp_path / "split.gguf"
    write(tiny("llama"), file, [Q.Q8_0], pre="poro-chat")
    assert "splits texts as 'poro-chat' does; supported are" in complaint(file)
    file = tmp_path / "kind.gguf"
    write(tiny("llama"), file, [Q.Q8_0], kind="rwkv")
    assert "a tokenizer of the kind rwkv; supported are gpt2, llama, gemma4" in complaint(file)
    file = tmp_path / "format.gguf"
    write(tiny("llama"), file, [Q.F32])
    before, name, after = file.read_bytes().partition(b"blk.0.attn_k.weight")
    file.write_bytes(before + name + after[:20] + struct.pack("<I", Q.I32) + after[24:])  # 2 dimensions, 2 sizes
    assert "stores blk.0.attn_k.weight as I32; supported are F16, Q4_0" in complaint(file)
    assert "IQ3_XXS, IQ3_S, NVFP4, F32" in complaint(file)


def test_a_damaged_file_is_one_line(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little"))
    assert "is not a whole GGUF file" in complaint(file)
    write(tiny("llama"), file, [Q.Q8_0])
    folder = resolve(str(file))
    whole = file.stat()
    with file.open("r+b") as content:
        content.truncate(whole.st_size // 2)
    with pytest.raises(SourceError, match="cut short"):
        load_model("tiny", folder)
    file.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        load_model("tiny", folder)


def folder_with_its_file(tmp_path: Path) -> Path:
    """As a model is published: configuration, index and weights in one folder."""
    file, folder = tmp_path / "tiny.gguf", tmp_path / "published"
    write(tiny("llama"), file, [Q.Q8_0])
    shutil.copytree(resolve(str(file)), folder)
    shutil.copy(file, folder / "model.gguf")
    change_index(folder, lambda index: index.update(file="model.gguf"))
    return folder


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / "gguf.json").read_text())
    change(index)
    (folder / "gguf.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 34), ("size", -1), ("offset", -64), ("format", 999), ("interleaved_heads", 3), ("scales", [0.5, 0.5]),
        ("scales", ["0.5"])
    ],
)  # fmt: skip
def test_an_index_whose_numbers_do_not_fit_is_refused(field, value, tmp_path):
    folder = folder_with_its_file(tmp_path)
    load_model("tiny", folder, own_classes=True)
    query = "model.layers.0.self_attn.q_proj.weight"
    change_index(folder, lambda index: index["tensors"][query].update({field: value}))
    with pytest.raises(SourceError, match=r"fetch (it|the model) again"):
        load_model("tiny", folder, own_classes=True)


@pytest.mark.parametrize("name", ["../tiny.gguf", "..", "absolute"])
def test_an_index_names_a_file_of_its_own_folder_only(name, tmp_path):
    folder, other = folder_with_its_file(tmp_path), tmp_path / "tiny.gguf"
    change_index(folder, lambda index: index.update(file=str(other) if name == "absolute" else name))
    for use in (lambda: load_model("tiny", folder), lambda: remove_gguf(folder)):
        with pytest.raises(SourceError, match="not a file of its folder"):
            use()
    assert other.is_file()


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 8}, {"num_attention_heads": 0}, {"head_dim": 63}])
def test_heads_that_kernels_cannot_divide_are_refused(changes, tmp_path):
    folder = folder_with_its_file(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a decoder"):
        load_model("tiny", folder, own_classes=True)


def test_a_gguf_file_whose_heads_cannot_share_keys_is_refused(tmp_path):
    model, file = tiny("qwen2"), tmp_path / "heads.gguf"
    model.config.num_key_value_heads = 8
    write(model, file, [Q.Q8_0])
    assert "8 heads of keys and values cannot share evenly" in complaint(file)


@pytest.mark.parametrize(
    "shape", [DrafterShape(64, 64), DFlashShape(64, 64, (1,), 0), EagleShape(64, 64, (1,), 4, 2, 16)]
)
def test_drafters_whose_heads_cannot_share_keys_are_refused(shape):
    for changes in ({"heads": 4, "kv_heads": 8}, {"kv_heads": 0}, {"heads": -9}, {"hidden": 1 << 40}):
        with pytest.raises(ValueError, match="a decoder"):
            replace(shape, **changes)


def test_weights_that_cannot_be_had_are_one_line(tmp_path):
    file = tmp_path / "tiny.gguf"
    write(tiny("llama"), file, [Q.Q8_0])
    with pytest.raises(ValueError, match="are packed in a GGUF file; weights can be file or bf16"):
        saltus.load(str(file), weights="q4_1")
    with pytest.raises(ValueError, match="weights is 'q3', but must be one of file, bf16, q8_0"):
        saltus.load(str(file), weights="q3")


# Tokenizers


def metadata_of(tokenizer: Tokenizer, **more) -> dict:
    """What a GGUF file says of a trained byte-pair tokenizer."""
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    merges = [" ".join(merge) for merge in content["merges"]]
    return {f"tokenizer.ggml.{key}": value for key, value in {"tokens": tokens, "merges": merges, **more}.items()}


TEXTS = [
    "It's 1234 apples, isn't it?  No: 12,345!\n\n\nNext   line\t\ttabs",
    "naïve café — 漢字とかな 😀 ‘quoted’", "x=1;y_2 += 'Z'\r\n",
    " leading", "trailing ", "I'LL we've THEY'RE", "a\u0301 combining", "",
]  # fmt: skip


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_byte_level_tokenizer_gives_every_text_back_and_splits_as_its_kind_does(pre):
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    made = make_tokenizer(metadata_of(trained, model="gpt2", pre=pre), "x.gguf")
    for text in TEXTS:
        kept = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == kept
    words = [text for text, _ in made.pre_tokenizer.pre_tokenize_str("in 12345 ways")]
    numbers = {"default": ["Ġ12345"], "gpt-2": ["Ġ12345"], "smollm": ["Ġ", "1", "2", "3", "4", "5"],
               "llama-bpe": ["Ġ", "123", "45"], "qwen2": ["Ġ", "1", "2", "3", "4", "5"]}  # fmt: skip
    assert words == ["in", *numbers[pre], "Ġways"]


def test_a_sentencepiece_tokenizer_is_the_one_that_transformers_makes(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * len(tokens)
    for rank, word in enumerate(["▁t", "he", "▁the", "▁c", "at", "▁cat", "▁", "t", "h", "e", "c", "a", "s", "▁s"]):
        tokens.append(word)
        scores.append(-float(rank))
    data = {"model": "llama", "tokens": tokens, "scores": scores, "bos_token_id": 1, "unknown_token_id": 0,
            "token_type": [2, 3, 3] + [6] * 256 + [1] * 14}  # fmt: skip
    ours = make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in data.items()}, "x.gguf")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "s")]
    theirs = LlamaTokenizer(vocab=vocabulary, merges=merges)
    for text in ("the cat sat", "  the  cat", "cat é 漢", "thecats", ""):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.encode("the").ids[0] == 1, "a text begins with the bos token"


# Without Transformers' model classes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_decoder_computes_what_the_model_of_transformers_does(architecture, tmp_path):
    file = tmp_path / "tiny.gguf"
    write(tiny(architecture), file, MIXED)
    own = load_checkpoint(str(file), "cpu").network
    theirs = make_network(load_model("tiny", resolve(str(file))), "tiny")
    assert isinstance(own.model, PackedDecoder)
    assert type(theirs.model).__module__.startswith("transformers.")
    assert own.native_decoder is not None
    assert theirs.native_decoder is not None
    assert model_fingerprint(own.model) == model_fingerprint(theirs.model)
    text = [int(token) for token in np.random.default_rng(0).integers(2, 300, 40)]
    inputs = ForwardInputs(continuation(text, 8), (5, 6, 7), (-1, 0, -1))
    logits = [network.forward([inputs], [network.new_kv_cache()])[0].logits for network in (own, theirs)]
    assert torch.equal(*logits)


def test_the_model_of_transformers_can_be_had_and_shares_the_weights(tmp_path):
    file = tmp_path / "tiny.gguf"
    write(tiny("llama, tied"), file, [Q.Q8_0])
    engine = saltus.load(str(file), "plain", arithmetic="bf16")
    model = engine.model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert engine.model is model
    assert model.lm_head.weight is engine.network.model.lm_head.weight
    prompt = torch.tensor([engine.encode("one two", raw=True)])
    theirs = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    ours = list(engine.generate("one two", raw=True, max_new_tokens=12).tokens)
    assert theirs[:3] == ours[:3], "later ones by the processor: torch rounds bfloat16 in ways of its own"


def test_a_packed_model_is_recognised_by_few_rows_of_its_embeddings(tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write(tiny("llama"), file, [Q.Q8_0])
    packed, expanded = (
        load_checkpoint(str(file), "cpu", weights=weights).network.model for weights in ("file", "bf16")
    )
    assert isinstance(packed.get_input_embeddings().weight, PackedWeight)
    expected = model_fingerprint(expanded), embedding_signs(expanded)
    dequantize, expanded_rows = PackedWeight.dequantize, []

    def counted(self, rows=None):
        expanded_rows.append(len(self) if rows is None else len(rows))
        return dequantize(self, rows)

    monkeypatch.setattr(PackedWeight, "dequantize", counted)
    assert (model_fingerprint(packed), embedding_signs(packed)) == expected
    assert max(expanded_rows) < len(packed.get_input_embeddings().weight) / 2


def test_decoding_a_gguf_file_imports_no_model_class_of_transformers(tmp_path):
    file = tmp_path / "tiny.gguf"
    write(tiny("llama, tied"), file, [Q.Q8_0])
    program = f"""
import sys, saltus
saltus.load({str(file)!r}, "lookup").generate("one two one", raw=True, max_new_tokens=4)
slow = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy")
print([name for name in slow if name in sys.modules])
"""
    done = subprocess.run([*forked_python("torch"), "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_call_costs_are_kept_for_large_models_of_the_same_shapes_and_only_fall(tmp_path, monkeypatch):
    file, timed, found = tmp_path / "tiny.gguf", [], {}
    write(tiny("llama"), file, [Q.Q8_0])
    network = load_checkpoint(str(file), "cpu").network
    whole = {1: 0.5, 2: 0.75, 4: 1.0, 8: 2.0, 16: 3.0, 32: 4.0}

    def measured(network, row_counts=calibration.CALIBRATION_ROWS, turns=3, min_seconds=0.0):
        timed.append(len(row_counts))
        return {rows: (whole | found)[rows] for rows in row_counts}

    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(calibration, "measure_call_seconds", measured)
    for _ in range(2):
        assert calibration.call_seconds(network) == whole
    assert timed == [6, 6], "a small model is measured each time"
    monkeypatch.setattr(calibration, "MIN_CACHED_BYTES", 1)
    for _ in range(3):
        assert calibration.call_seconds(network) == whole
    assert timed == [6, 6, 6, 4, 4]
    found |= {1: 0.25, 2: 9.0}  # other work on the machine has ended, and disturbs again
    assert calibration.call_seconds(network) == whole | {1: 0.25, 2: calibration.MAX_RISE * whole[2]}
    found.clear()
    risen = whole | {1: calibration.MAX_RISE * 0.25}
    assert calibration.call_seconds(network) == risen, "times fall at once, and rise slowly"
    monkeypatch.setattr(calibration, "QUICK_SECONDS", 8.0)
    found |= {16: 2.5}
    assert calibration.call_seconds(network)[16] == 2.5, "large calls, too, where they take no time"
    found.clear()
    [kept] = (tmp_path / "cache" / "call_costs").iterdir()
    kept.write_text("damaged")
    assert calibration.call_seconds(network) == whole
