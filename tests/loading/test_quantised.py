"""Quantised checkpoints of the hub: weights are the numbers that the tensors stand for, packed where they can be."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_text_parts import WHOLE

import saltus
from architectures import chain, text, tiny
from quantised_models import CASES, FP8, GPTQ, INT4, floats4, floats8, gptq, packed_integers, write_quantised
from saltus.engine.target_network import make_network
from saltus.kernels import native
from saltus.kernels.model_weights import describe_weights
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading import quantised_weights
from saltus.loading.load_model import load_model
from saltus.loading.quantised import find_method
from tiny_models import byte_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
kernels = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of a case, and one of the model that it means."""

    def written(case: str, name: str = "Llama", **changes) -> tuple[Path, Path]:
        settings, writer, _ = CASES[case]
        folder, reference = tmp_path / "quantised", tmp_path / "meant"
        tiny(name, **SIZES | changes).bfloat16().save_pretrained(folder)
        write_quantised(folder, settings, writer, reference)
        return folder, reference

    return written


@pytest.mark.parametrize("method", ["another", None])
def test_scales_that_nothing_reads_are_refused_in_a_line(tiny_folder, tmp_path, method):
    folder = shutil.copytree(tiny_folder(), tmp_path / "fp8")
    weights = load_file(folder / "model.safetensors")
    scaled = next(name for name in weights if name.endswith("up_proj.weight"))
    weights[scaled] = weights[scaled].to(torch.float8_e4m3fn)
    save_file(weights | {f"{scaled}_scale": torch.tensor(0.5)}, folder / "model.safetensors", {"format": "pt"})
    if method:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match=r"weights quantised by .*do not load here") as error:
        saltus.load(str(folder), "plain")
    assert "\n" not in str(error.value)


def test_integers_that_nothing_reads_are_refused_in_a_line(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder(), tmp_path / "int8")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("up_proj.weight"))
    weights[name] = weights[name].to(torch.int8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused(folder, f"holds weights quantised by another program, which do not load here; take the original model, or a"
            f" GGUF file of it (there is {name})")  # fmt: skip


def test_what_older_exports_of_modelopt_say_in_a_file_of_their_own_is_read(checkpoint):
    folder, reference = checkpoint("modelopt fp8")
    said = json.loads((folder / "config.json").read_text()).pop("quantization_config")
    change_config(folder, quantization_config=None)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": said["quant_algo"]}}))
    require_equal_weights(load_model("tiny", folder), load_model("meant", reference))
    tensors = load_file(folder / "model.safetensors")
    change = {"model.layers.1.mlp.up_proj.svdquant_lora_a": torch.ones(64, 4)}
    save_file(tensors | change, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "quantised by modelopt, and model.layers.1.mlp.up_proj.weight has a svdquant_lora_a, which is not")


def test_a_name_goes_before_a_pattern_and_a_pattern_before_a_class():
    eight = {"format": "int-quantized", "weights": {"type": "int", "num_bits": 8}}
    four = {"format": "pack-quantized", "weights": {"type": "int", "num_bits": 4}}
    settings = {"config_groups": {"0": {**eight, "targets": ["Linear"]}, "1": {**eight, "targets": ["re:.*proj"]},
                                  "2": {**four, "targets": ["layers.1.up_proj"]}}}  # fmt: skip
    method = find_method("compressed-tensors")
    assert method is not None
    for layer, needs in (("layers.1.up_proj", "weight_packed"), ("layers.0.up_proj", "weight"), ("fc", "weight")):
        with pytest.raises(ValueError, match=f"^lacks its {needs}$"):
            method.read(settings, f"{layer}.weight", {})


def require_equal_weights(model, meant) -> None:
    ours, theirs = dict(model.named_parameters()), dict(meant.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight.dequantize() if isinstance(weight, PackedWeight) else weight, theirs[name]), name


def formats(model) -> set[str]:
    """Of the matrices of its layers."""
    return {
        weight.format.name if isinstance(weight, PackedWeight) else str(weight.dtype).removeprefix("torch.")
        for name, weight in model.named_parameters()
        if "proj" in name and "bias" not in name
    }


def packed_as(format: str) -> set[str]:
    return {format if native.load_kernels() is not None else "bfloat16"}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_numbers_that_the_tensors_stand_for(case, checkpoint):
    folder, reference = checkpoint(case)
    meant, model = load_model("meant", reference), load_model("tiny", folder, arithmetic="bf16")
    assert formats(model) == packed_as(CASES[case][2])
    require_equal_weights(model, meant)
    tokens = text(20)
    assert torch.equal(chain(make_network(model, "tiny"), tokens), chain(make_network(meant, "meant"), tokens))


@kernels
@pytest.mark.parametrize(("case", "name"), [("nvfp4", "Llama"), ("modelopt nvfp4", "Llama"), ("nvfp4", "Qwen3Moe")])
def test_nvfp4_stays_packed_where_rows_are_whole_blocks(case, name, checkpoint):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
    folder, reference = checkpoint(case, name, **sizes)
    meant = load_model("meant", reference)
    logits = chain(make_network(meant, "meant"), text(20)).float()
    for arithmetic, bound in (("bf16", 0), ("int8", 0.2)):
        model = load_model("tiny", folder, arithmetic=arithmetic)
        assert formats(model) == {"NVFP4"}
        require_equal_weights(model, meant)
        found = chain(make_network(model, "tiny"), text(20)).float()
        assert (found - logits).norm() <= bound * logits.norm()


@kernels
@pytest.mark.parametrize(
    ("case", "name"),
    [("fp8 of channels", "Llama"), ("fp8 of tensors", "Qwen3Moe"), ("modelopt fp8", "Qwen3Moe"), ("fp8", "Llama")],
)
def test_fp8_stays_packed_where_128_inputs_share_a_scale(case, name, checkpoint, monkeypatch):
    """Where memory has no room for them in bfloat16; they are multiplied as the numbers that they stand for."""
    blocks = floats8("weight_scale_inv", "blocks", block=(96, 128))
    monkeypatch.setattr(quantised_weights, "available_bytes", lambda: 1e5)
    monkeypatch.setitem(CASES, "fp8", (FP8 | {"weight_block_size": [96, 128]}, blocks, "FP8"))
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 64}
    folder, reference = checkpoint(case, name, **sizes)
    meant, model = load_model("meant", reference), load_model("tiny", folder)
    assert formats(model) == {"FP8"}
    assert formats(load_model("tiny", folder, weights="bf16")) == {"bfloat16"}
    assert formats(load_model("tiny", folder, weights="q4_0")) == {"Q4_0"}
    monkeypatch.setattr(quantised_weights, "available_bytes", lambda: 1e9)
    assert formats(load_model("tiny", folder)) == {"bfloat16"}
    assert describe_weights(model) == "FP8, bfloat16"
    require_equal_weights(model, meant)
    tokens = text(20)
    assert torch.equal(chain(make_network(model, "tiny"), tokens), chain(make_network(meant, "meant"), tokens))


@pytest.mark.parametrize("case", ["gptq", "int8 and int8 activations", "mxfp4", "fp8"])
def test_weights_are_expanded_where_that_is_asked_for(case, checkpoint):
    folder, reference = checkpoint(case)
    model = load_model("tiny", folder, weights="bf16")
    assert formats(model) == {"bfloat16"}
    require_equal_weights(model, load_model("meant", reference))
    assert load_model("tiny", folder, dtype=torch.float32).dtype == torch.float32
    assert formats(load_model("tiny", folder, weights="q4_0")) == packed_as("Q4_0")


@pytest.mark.parametrize(("case", "format"), [("gptq", "Q5_0"), ("int4", "Q4_0"), ("fp8", "bfloat16")])
def test_experts_are_stacked_as_they_are(case, format, checkpoint):
    folder, reference = checkpoint(case, "Qwen3Moe", moe_intermediate_size=64)
    meant, model = load_model("meant", reference), load_model("tiny", folder)
    assert formats(model) == packed_as(format)
    require_equal_weights(model, meant)
    tokens = text(20)
    logits = chain(make_network(meant, "meant"), tokens).float()
    assert (chain(make_network(model, "tiny"), tokens).float() - logits).norm() < 0.2 * logits.norm()


def test_the_experts_of_gpt_oss_stay_in_mxfp4(tmp_path):
    draws, (folder, reference) = np.random.default_rng(0), (tmp_path / "quantised", tmp_path / "meant")
    model = tiny("GptOss", **SIZES).bfloat16()
    for each in (folder, reference):
        model.save_pretrained(each)
    written, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        written[name] = meant[name] = tensor
        if tensor.ndim == 3:  # [experts, in, out]
            experts, ins, outs = tensor.shape
            pairs, numbers = floats4(draws, experts * outs, ins)
            exponents = draws.integers(120, 125, (experts, outs, ins // 32)).astype(np.uint8)
            scales = np.exp2(exponents.astype(np.float32) - 127)[:, :, np.arange(ins) // 32]
            meant[name] = torch.from_numpy(numbers.reshape(experts, outs, ins) * scales).bfloat16().mT.contiguous()
            written[f"{name}_blocks"] = torch.from_numpy(pairs).view(experts, outs, ins // 32, 16)
            written[f"{name}_scales"] = torch.from_numpy(exponents)
            del written[name]
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, reference / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model, expected = load_model("tiny", folder), load_model("meant", reference)
    require_equal_weights(model, expected)
    stacks = [weight for weight in model.parameters() if weight.ndim == 3]
    assert {type(weight) for weight in stacks} == {PackedWeight if native.load_kernels() else torch.nn.Parameter}
    network, tokens = make_network(model, "tiny"), text(20)
    assert network.compute_path == ("transformers" if native.load_kernels() is None else "native")
    logits = chain(make_network(expected, "meant"), tokens).float()
    assert (chain(network, tokens).float() - logits).norm() < 0.2 * logits.norm()


def change_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_text_part_of_a_quantised_model_loads_and_what_is_ignored_stays(tmp_path):
    _, settings, vision, more = WHOLE["Gemma3"]
    folder, reference = tmp_path / "quantised", tmp_path / "meant"
    config = transformers.Gemma3Config(text_config={**settings, **SIZES}, vision_config=vision, **more)
    transformers.set_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    ignored = {**INT4, "ignore": ["lm_head", "re:.*vision_tower.*", "re:.*layers\\.0\\..*"]}
    write_quantised(
        folder,
        ignored,
        packed_integers(),
        reference,
        lambda name: "layers.1" in name and "proj" in name and "vision" not in name,
    )
    model = load_model("tiny", folder)
    require_equal_weights(model, load_model("meant", reference))
    assert formats(model) == packed_as("Q4_0") | {"bfloat16"}
    change_config(folder, quantization_config={**ignored, "ignore": ["re:.*layers.*"]})
    refused(folder, "is quantised, but the configuration says that it is not")


def test_what_is_expanded_or_rounded_is_said(checkpoint, caplog):
    load_model("tiny", checkpoint("gptq act order")[0])
    said = [record.message for record in caplog.records]
    assert [
        line for line in said if "14 of 14 weights in gptq are expanded to bfloat16: scales in another" in line
    ] or native.load_kernels() is None


@kernels
def test_scales_that_float16_cannot_hold_are_rounded_or_the_weight_is_expanded(tmp_path, caplog):
    for factor, format in ((1.0, "Q4_0"), (1e-6, "bfloat16")):
        folder = tmp_path / f"{factor}"
        tiny("Llama", **SIZES).bfloat16().save_pretrained(folder)
        write_quantised(folder, INT4, packed_integers(), tmp_path / f"{factor} meant")
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("weight_scale"):
                tensors[name] = tensor.float() * factor * (1 + 2.0**-15)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        assert formats(load_model("tiny", folder)) == {format}
    said = [record.message.split(": ", 1)[1] for record in caplog.records]
    assert said == [
        "the scales of 14 of 14 weights in compressed-tensors are rounded to float16, by 1 part in 2048 at most",
        "14 of 14 weights in compressed-tensors are expanded to bfloat16: scales beyond float16",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gptq", "fp8"])
def test_texts_are_those_of_plain_decoding(case, checkpoint):
    folder, _ = checkpoint(case, vocab_size=300, eos_token_id=0, pad_token_id=1, bos_token_id=2)
    byte_tokenizer().save_pretrained(folder)
    engine = saltus.load(str(folder), "lookup", adaptive=False, device="cpu")
    for temperature in (0.0, 0.9):
        settings = {"temperature": temperature, "seed": 1, "raw": True, "max_new_tokens": 24}
        texts = [
            engine.generate("one two one two one", method=method, **settings).tokens for method in ("plain", "lookup")
        ]
        assert texts[0] == texts[1]


# What is damaged or of another kind


def refused(folder: Path, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        load_model("tiny", folder)
    assert "\n" not in str(caught.value)


def expanded(numbers) -> torch.Tensor:
    return numbers if isinstance(numbers, torch.Tensor) else numbers.expand()


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_weight_is_refused_and_nothing_else_happens(case):
    settings, writer, _ = CASES[case]
    parts, weight = writer(np.random.default_rng(0), 64, 96)
    parts.pop("input_scale", None)
    method = find_method(settings["quant_method"])
    assert method is not None

    def read(changed: dict[str, torch.Tensor]) -> None:
        """Errors: ValueError, also for a weight of other sizes, which who loads it would find."""
        if expanded(method.read(settings, "model.layers.0.mlp.up_proj.weight", changed)).shape != weight.shape:
            raise ValueError("has another size")

    read(parts)
    optional = {"g_idx", "weight_shape", "weight_g_idx", "pre_quant_scale"}
    for name, tensor in parts.items():
        others = {other: each for other, each in parts.items() if other != name}
        if name not in optional:
            with pytest.raises(ValueError, match=r"^(lacks its|has) "):
                read(others)
        for damaged in (tensor[:-1], tensor[..., :-1], tensor[None], tensor[:0], tensor.flatten()[0], tensor.double()):
            if damaged.shape != tensor.shape or damaged.dtype != tensor.dtype:
                with contextlib.suppress(ValueError):
                    read(others | {name: damaged})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "holds weights quantised by BITSANDBYTES, which do not",
        ),
        ({**GPTQ, "checkpoint_format": "marlin"}, "is in the form marlin"),
        ({**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:fake"}, "is in the form auto_round:fake"),
        ({**GPTQ, "quant_method": "awq", "version": "gemv"}, "is in the version gemv"),
        ({**INT4, "config_groups": {}}, "lacks"),
        ({**GPTQ, "quant_method": "../gptq"}, "do not load here"),
        ({**GPTQ, "quant_method": 7}, "do not load here"),
    ],
)
def test_other_forms_are_named_and_refused_in_a_line(settings, said, tmp_path):
    tiny("Llama", **SIZES).bfloat16().save_pretrained(tmp_path / "quantised")
    write_quantised(tmp_path / "quantised", settings, gptq(), tmp_path / "meant")
    refused(tmp_path / "quantised", said)


def test_a_checkpoint_that_lacks_a_weight_or_has_it_in_another_size_is_refused(checkpoint):
    folder, _ = checkpoint("awq")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "lacks 1 of its weights or has them in other shapes, such as model.layers.1.mlp.up_proj.weight")
    scales = {"model.layers.0.mlp.act.scales": torch.ones(96)}  # AutoAWQ's of some activations
    save_file(tensors | scales, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "quantised by awq, and model.layers.0.mlp.act.scales belongs to no weight")
    tensors["model.layers.1.mlp.up_proj.qweight"] = tensors["model.layers.1.mlp.up_proj.qweight"][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "quantised by awq, and model.layers.1.mlp.up_proj.weight has qweight")


def test_floats_of_experts_in_stacks_have_scales_by_block():
    parts, weight = floats8("down_proj_scale_inv", "blocks")(np.random.default_rng(0), 48, 96)
    stack = {"down_proj": parts["weight"][None], "down_proj_scale_inv": parts["down_proj_scale_inv"][None]}
    fp8 = find_method("fp8")
    assert fp8 is not None
    numbers = fp8.read({"weight_block_size": [32, 48]}, "model.layers.0.mlp.experts.down_proj", stack)
    assert torch.equal(expanded(numbers)[0], torch.from_numpy(weight))
    halves = {"gate_up_proj": parts["weight"][None], "gate_up_proj_scale_inv": torch.tensor([[[0.5], [2.0]]])}
    numbers = expanded(fp8.read({}, "model.layers.0.mlp.experts.gate_up_proj", halves))
    assert torch.equal(numbers[0, :24], 0.5 * parts["weight"][:24].float())
    assert torch.equal(numbers[0, 24:], 2 * parts["weight"][24:].float())
