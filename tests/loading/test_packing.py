"""`--weights q8_0` packs the matrices of a Hugging Face model, experts too, one by one, and keeps the blocks."""

import json
import os

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from test_gguf import tiny as tiny_llama

from architectures import GEMMA4_EXPERTS, MIXTURES, OF_WHOLE_BLOCKS, chain, read, text, tiny
from saltus.kernels import native
from saltus.kernels.packed_blocks import rearrange_blocks
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading import packing
from saltus.loading.load_model import load_model
from saltus.models.architectures import describe_decoder
from saltus.models.causal import CausalNetwork
from saltus.models.decoder_description import experts_of
from saltus.models.decoder_of import decoder_of

pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
TRANSPOSED = {"GptOss", "Llama4"}  # whose experts' matrices are [in, out]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "cache_folder", lambda: tmp_path / "cache")


def mixture(name: str):
    """A tiny model with experts whose matrices can be packed, in bfloat16."""
    changes = {"GraniteMoeHybrid": {"mamba_n_heads": 8}, "Gemma4": {**GEMMA4_EXPERTS, "moe_intermediate_size": 32}}
    return tiny(name, **OF_WHOLE_BLOCKS | changes.get(name, {})).bfloat16()


def test_a_hugging_face_model_is_packed_once_and_is_another_model(tmp_path):
    model, folder = tiny_llama("llama, tied"), tmp_path / "model"
    model.save_pretrained(folder)
    blocks = quantize(model.model.embed_tokens.weight.detach().float().numpy(), Q.Q4_1)
    packed = load_model("tiny", folder, weights="q4_1", arithmetic="bf16")
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    assert torch.equal(packed.lm_head.weight.rows, rearrange_blocks(torch.from_numpy(blocks), Q.Q4_1))
    assert {type(weight) for weight in packed.parameters() if weight.ndim == 2} == {PackedWeight}
    [kept] = (tmp_path / "cache" / "packed").glob("*.safetensors")
    written = kept.stat().st_mtime_ns
    again = load_model("tiny", folder, weights="q4_1", arithmetic="bf16")
    assert kept.stat().st_mtime_ns == written
    tokens = torch.arange(2, 20)[None]
    assert torch.equal(packed(tokens).logits, again(tokens).logits)
    assert not torch.equal(packed(tokens).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="are for bfloat16"):
        load_model("tiny", folder, torch.float32, weights="q8_0")


def test_an_output_layer_of_its_own_stays_so_whatever_the_configuration_says(tmp_path):
    model, folder = tiny_llama("llama"), tmp_path / "model"
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    packed = load_model("tiny", folder, weights="q8_0", arithmetic="bf16")
    assert packed.lm_head.weight is not packed.model.embed_tokens.weight
    tokens = torch.arange(2, 20)[None]
    assert (packed(tokens).logits - model(tokens).logits).norm() < 0.1 * model(tokens).logits.norm()


@pytest.mark.parametrize(
    ("name", "arithmetic"), [*((name, "int8") for name in MIXTURES), ("Mixtral", "bf16"), ("GptOss", "bf16")]
)
def test_experts_are_packed_with_the_other_matrices_and_routers_are_not(tmp_path, name, arithmetic):
    model = mixture(name)
    model.save_pretrained(tmp_path / "model")
    packed = load_model("tiny", tmp_path / "model", weights="q8_0", arithmetic=arithmetic)
    for path, weight in packed.named_parameters():
        given = model.get_parameter(path)
        assert weight.shape == given.shape
        if weight.ndim == 3 and "conv" not in path:
            assert isinstance(weight, PackedWeight), path
            matrices = given.mT if name in TRANSPOSED else given
            numbers = dequantize(quantize(matrices.detach().float().numpy(), Q.Q8_0), Q.Q8_0)
            expected = torch.from_numpy(numbers).bfloat16()
            assert torch.equal(weight.dequantize(), expected.mT if name in TRANSPOSED else expected), path
    description = describe_decoder(packed)
    assert description is not None
    mixtures = [experts for layer in description.layers if (experts := experts_of(layer))]
    assert mixtures
    for experts in mixtures:
        assert not isinstance(decoder_of(packed).get_submodule(experts.router).weight, PackedWeight)
    network = CausalNetwork(packed)
    assert network.compute_path == "native"
    tokens = text(30)
    found = chain(network, tokens)
    kv_cache = network.new_kv_cache()
    for length in range(1, 30):
        assert torch.equal(read(network, tokens[:length], kv_cache=kv_cache)[0], found[length - 1])
    if not network.state_sizes:  # Transformers' layers on the same weights
        own = packed(torch.tensor(tokens[None]), use_cache=False).logits[0].float()
        errors = (found.float() - own).norm(dim=-1) / own.norm(dim=-1)
        assert errors.sort().values[:20].max() < 0.08  # rounding sends some rows to other experts


def test_matrices_are_packed_one_after_the_other_and_come_from_the_cache_unchanged(tmp_path, monkeypatch):
    mixture("GptOss").save_pretrained(tmp_path / "model")
    quantized_blocks, packed_before = packing.quantized_blocks, []
    model = load_model("tiny", tmp_path / "model")

    def counted(weight, format):
        packed_before.append(sum(isinstance(each, PackedWeight) for each in model.parameters()))
        return quantized_blocks(weight, format)

    monkeypatch.setattr(packing, "quantized_blocks", counted)
    packing.pack_model(model, "q4_1", tmp_path / "model", "int8")
    assert packed_before == list(range(len(packed_before)))
    again = load_model("tiny", tmp_path / "model", weights="q4_1")
    assert len(packed_before) == 14, "nothing is quantised again"
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        if isinstance(one, PackedWeight):
            assert torch.equal(one.rows, other.rows)
    file = tmp_path / "model" / "model.safetensors"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    load_model("tiny", tmp_path / "model", weights="q4_1")
    assert len(packed_before) == 28, "a changed file is packed anew"


def test_experts_that_no_block_divides_stay_as_they_are_and_a_line_says_so(tmp_path, caplog):
    tiny("Qwen3Moe", **OF_WHOLE_BLOCKS | {"moe_intermediate_size": 40}).save_pretrained(tmp_path / "model")
    model = load_model("tiny", tmp_path / "model", weights="q8_0")
    assert {type(weight) for weight in model.parameters() if weight.ndim == 3} == {torch.nn.Parameter}
    [line] = [record.getMessage() for record in caplog.records]
    assert "2 matrices of experts stay as they are" in line
    assert chain(CausalNetwork(model), text(8)).isfinite().all()
