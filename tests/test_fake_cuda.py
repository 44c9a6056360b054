"""Decoding on a CUDA device that does not exist: every tensor is where it has to be, and texts are those of plain."""

import contextlib
import importlib.util
import queue
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import saltus
from fake_cuda import fake_cuda
from loading.test_gguf import tiny as tiny_llama
from loading.test_gguf import write
from methods.published import reference_dflash, reference_eagle
from methods.published.reference_dflash import block_drafter
from methods.published.reference_eagle import published_head
from methods.published.reference_gemma4_assistant import published_assistant
from models.test_fixed_queries import adapter_folder
from mtp_checkpoints import write_checkpoint
from quantised_models import CASES, write_quantised
from saltus.core import distributions
from saltus.core.control.controller import Controller
from saltus.engine import target_network
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.scheduled_request import ScheduledRequest
from saltus.engine.scheduler import Scheduler
from saltus.loading.load_model import load_model
from saltus.methods.ptp.gpu_draft_pass import GPUDraftPass
from saltus.methods.shared import autoregressive, query_predictions
from saltus.models.cuda import (
    device_candidates,
    expert_kernels,
    gpu_decoder_support,
    kernel_support,
    launching,
    packed_weight,
    pick_kernels,
    row_kernels,
)
from saltus.models.cuda.cuda_graphs import GraphCapture
from saltus.models.cuda.device_candidates import FoundCandidates
from saltus.models.cuda.packed_weight import GPUPackedWeight
from saltus.models.gated_lora import new_adapter
from saltus.models.packed_decoder import transformers_model
from saltus.server.engine_thread import EngineThread
from saltus.server.served_request import Limits, serve_text
from tiny_models import byte_tokenizer

OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources
pytestmark = [
    pytest.mark.slow,
    pytest.mark.unchecked,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device"),
]
PROMPTS = ["the cat sat on the mat and the cat sat on", "one two one two"]
OWN_KERNELS = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
               "head_dim": 32}  # fmt: skip
OWN_GEMMA4 = {
    **OWN_KERNELS, "hidden_size_per_layer_input": 64, "global_head_dim": 64, "vocab_size_per_layer_input": 300,
}  # fmt: skip
OWN_STATES = {  # sizes of layers with a state
    "Qwen3_5": {"linear_value_head_dim": 16}, "Lfm2": {}, "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
}  # fmt: skip
OWN_LATENT = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "head_dim": 16,
}  # fmt: skip
OWN_ASSISTANT = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}

FIRST_LAYERS = {  # what drafters read of models with fewer layers, and how many these have
    "eagle": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, 4), "block": ({"target_layer_ids": [0, 1]}, 3),
}  # fmt: skip
OWN_DRAFTER = {"hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 1, "reads_uniforms": False}


@pytest.fixture
def device(monkeypatch):
    with fake_cuda(monkeypatch) as state:
        yield state


def load(folder, options=None, device="cuda", **settings) -> saltus.Engine:
    engine = saltus.load(
        str(folder), "plain", device=device, dtype="float32", options=options, adaptive=False, **settings
    )
    assert engine.network.device.type == device
    return engine


def check_texts(engine: saltus.Engine, methods, temperature=0.8, tokens=6, prompts=PROMPTS, twin=None) -> None:
    """Texts of two prompts at once, by each method, against plain's; with a twin on the CPU also the drafts."""
    settings = {"raw": True, "max_new_tokens": tokens, "seed": 3, "temperature": temperature, "ignore_eos": True}
    plain = [each.tokens for each in engine.generate(prompts, method="plain", **settings)]
    for method in methods:
        with drafts_of_calls() as found:
            made = engine.generate(prompts, method=method, **settings)
        assert [each.tokens for each in made] == plain, method
        if twin is not None:
            with drafts_of_calls() as expected:
                twin.generate(prompts, method=method, **settings)
            assert sum(map(len, expected)), method
            assert len(found) == len(expected), method
            for tokens_there, tokens_here in zip(found, expected, strict=True):  # rounding may change their order
                assert sorted(tokens_there) == sorted(tokens_here), method


@contextlib.contextmanager
def drafts_of_calls() -> Iterator[list[tuple[int, ...]]]:
    """The draft tokens that are offered for each call meanwhile."""
    drafts: list[tuple[int, ...]] = []
    offered_tree = Controller.offered_tree

    def noted(*given):
        tree = offered_tree(*given)
        drafts.append(tuple(tree.tokens))
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "offered_tree", noted)
        yield drafts


@pytest.mark.parametrize(
    ("method", "temperature"),
    [
        ("lookup", 0.8),
        ("token_recycling", 0),
        ("jacobi", 0.8),
        ("small_model", 0.8),
        ("ptp", 0.8),
        ("ptp+lookup", 0),
        ("mtpc", 0.8),
        ("auto", 0),
    ],
)
def test_every_method_writes_the_text_of_plain_decoding(
    device, tiny_folder, partners, monkeypatch, method, temperature
):
    monkeypatch.setattr(device_candidates, "NUM_CANDIDATES", 512)  # of 280: the twin weighs all of them
    twin = load(tiny_folder(), partners, device="cpu")
    tokens = 10 if method == "token_recycling" else 7  # it drafts what calls have seen
    check_texts(load(tiny_folder(), partners), [method], temperature, tokens, twin=twin)
    assert device.graphs


def test_our_kernels_for_gpus_write_the_texts_of_plain_decoding(device, monkeypatch, tiny_folder, tiny_drafter):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})  # of the tiny models
    folder = tiny_folder(**OWN_KERNELS)
    options = {"ptp": {"model": str(tiny_drafter(LlamaForCausalLM.from_pretrained(folder), **OWN_DRAFTER))}}
    engine = load(folder, options)
    assert engine.network.compute_path == "native"
    check_texts(engine, ["ptp+lookup"], tokens=4, twin=load(folder, options, device="cpu"))
    assert isinstance(engine.decoder.setup("ptp+lookup").networks["ptp"].whole_pass, GPUDraftPass)


@pytest.mark.parametrize(
    ("method", "settings", "most", "waits"),
    [
        ("plain", {}, 5, 1),
        ("plain", {"temperature": 0.8}, 5, 1),
        ("plain", {"temperature": 0.8, "top_p": 0.9}, 17, 1),
        ("plain", {"temperature": 0.8, "repetition_penalty": 1.2}, 7, 1),
        ("plain", {"logprobs": True}, 7, 1),
        ("plain", {"grammar": saltus.Grammar.regex("[a-e ]{40}"), "ignore_eos": False}, 7, 1),
        ("lookup", {"temperature": 0.8}, 9, 1),
        ("token_recycling", {}, 20, 1),
        ("small_model", {}, 23, 4),
        ("mtpc", {}, 18, 2),
        ("ptp", {}, 18, 2),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else None,
)
def test_a_step_of_many_texts_starts_no_more_operations_than_one_of_a_text(
    device, monkeypatch, tiny_folder, tiny_drafter, partners, method, settings, most, waits
):
    """Each takes the host some microseconds, for which all texts wait; and as much as a call takes to wait for one."""
    folder, options = tiny_folder(), partners
    if method == "ptp":
        monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
        folder = tiny_folder(**OWN_KERNELS)
        options = {"ptp": {"model": str(tiny_drafter(LlamaForCausalLM.from_pretrained(folder), **OWN_DRAFTER))}}
    engine, steps, call = load(folder, options, batch_size=8), [], Scheduler._call

    def counted(scheduler, scheduled):
        before = device.operations, device.waits
        call(scheduler, scheduled)
        steps.append((device.operations - before[0], device.waits - before[1]))

    monkeypatch.setattr(Scheduler, "_call", counted)
    texts = 3 if method in ("plain", "ptp") else 8  # the interpreter is slow
    prompts = [f"one {number} one" for number in range(texts)]
    for _ in range(2):  # the second time graphs are there
        steps.clear()
        engine.generate(
            prompts, method=method, raw=True, max_new_tokens=5, **{"temperature": 0, "ignore_eos": True} | settings
        )
    operations, waited = zip(*steps[2:], strict=True)  # the first ones read prompts
    assert 0 < max(operations) <= most
    assert 0 < max(waited) <= waits


def test_heads_and_their_adapted_layers_draft_in_graphs(device, monkeypatch, tiny_folder, tiny_heads):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder = tiny_folder(**OWN_KERNELS)
    adapted = {"hidden": 64, "layers": 1, "lora_rank": 2, "hidden_state_layers": (1,)}
    heads = tiny_heads(LlamaForCausalLM.from_pretrained(folder), **adapted)
    options = {"mtpc": {"model": str(heads), "min_probability": 0.0, "draw": "window"}}
    engine, twin = (load(folder, options, each, rule="reject") for each in ("cuda", "cpu"))
    check_texts(engine, ["mtpc"], temperature=0, tokens=3, prompts=PROMPTS[1:], twin=twin)
    sampled = engine.generate(PROMPTS, method="mtpc", raw=True, max_new_tokens=3, temperature=1.0, ignore_eos=True)
    assert all(len(each.tokens) == 3 for each in sampled)
    network = engine.decoder.setup("mtpc").networks["mtpc"]
    assert set(network.run_heads.graphs) == {1, 2}
    assert network.context_layers.on_gpu.passes.pool.graphs


@pytest.mark.parametrize("method", ["plain", "lookup"])
def test_sampled_tokens_are_picked_on_the_device_and_are_those_of_the_host(device, tiny_folder, monkeypatch, method):
    engine = load(tiny_folder())
    settings = {"raw": True, "max_new_tokens": 6, "temperature": 0.8, "ignore_eos": True, "method": method}
    with monkeypatch.context() as patch:
        patch.setattr(distributions, "pick_token", None)  # no row of logits is copied to the host
        picked = [each.tokens for each in engine.generate(PROMPTS, **settings)]
    find_tokens = pick_kernels.find_tokens

    def undecided(*given):
        found = find_tokens(*given)
        found[2] = -1
        return found

    monkeypatch.setattr(pick_kernels, "find_tokens", undecided)
    engine = load(tiny_folder())
    assert [each.tokens for each in engine.generate(PROMPTS, **settings)] == picked


@pytest.mark.parametrize("method", ["plain", "lookup"])
def test_truncated_sampling_needs_the_likeliest_tokens_alone_and_writes_the_same_texts(
    device, tiny_folder, monkeypatch, method
):
    settings = {"raw": True, "max_new_tokens": 6, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "ignore_eos": True}
    with monkeypatch.context() as patch:
        patch.setattr(distributions, "token_distribution", None)  # no row of logits is copied to the host
        found = [each.tokens for each in load(tiny_folder()).generate(PROMPTS, method=method, **settings)]
    monkeypatch.setattr(FoundCandidates, "of", lambda *_: None)
    assert [each.tokens for each in load(tiny_folder()).generate(PROMPTS, method=method, **settings)] == found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20}], ids=str)
def test_no_row_of_a_draft_model_on_the_device_is_read_by_the_host(
    device, tiny_folder, partners, monkeypatch, sampling
):
    monkeypatch.setattr(device_candidates, "NUM_CANDIDATES", 512)  # of 280: the tiny model finds all tokens likely
    for module, name in ((autoregressive, "most_likely"), (autoregressive, "float_row"),
                         (distributions, "token_distribution"), (distributions, "greedy_tokens")):  # fmt: skip
        monkeypatch.setattr(module, name, None)
    made = load(tiny_folder(), partners).generate(
        PROMPTS, method="small_model", raw=True, max_new_tokens=6, ignore_eos=True, **{"temperature": 0} | sampling
    )
    assert all(each.statistics.nodes_per_call > 0 for each in made)


@pytest.mark.parametrize("two_calls", [False, True])
def test_an_adapter_drafts_beside_our_kernels_and_changes_no_text(
    device, monkeypatch, tiny_folder, tmp_path, two_calls
):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder = tiny_folder(**OWN_KERNELS)
    training = {"form": "one-hot", "window": 8, "coupling": "probability"}
    options = {"ptp": {"model": str(adapter_folder(folder, tmp_path, **training)), "two_calls": two_calls}}
    settings = {"raw": True, "max_new_tokens": 5, "temperature": 0.8, "coupling": "probability", "ignore_eos": True}
    without = [each.tokens for each in load(folder).generate(PROMPTS, method="plain", **settings)]
    engine = load(folder, options)
    drafted = engine.generate(PROMPTS, method="ptp", **settings)
    assert [each.tokens for each in drafted] == without
    assert all(each.statistics.nodes_per_call > 0 for each in drafted)
    assert engine.network.adapter is not None
    assert engine.network.compute_path == "native"
    assert {has_queries for _, has_queries in engine.network.fixed_shape_runner.pool.graphs} == {True, False}


def test_a_conversation_is_read_from_where_it_is_known(device, monkeypatch, tiny_folder):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder = tiny_folder(**OWN_KERNELS)
    settings = {"raw": True, "max_new_tokens": 4, "temperature": 0, "ignore_eos": True, "method": "lookup"}
    first, second = "the cat sat on the mat", "the cat sat on a dog"
    texts = [load(folder).generate(prompt, **settings).tokens for prompt in (first, second)]
    engine, read = load(folder), []
    forward = engine.network.forward

    def counted(batch, kv_caches):
        outputs = forward(batch, kv_caches)
        read.extend(each.context_tokens_read for each in outputs)
        return outputs

    monkeypatch.setattr(engine.network, "forward", counted)
    assert [engine.generate(prompt, **settings).tokens for prompt in (first, second)] == texts
    prompts = [tokens for tokens in read if tokens > 1]
    assert len(prompts) == 2
    assert prompts[1] < prompts[0] == len(engine.tokenizer(first).input_ids)


def kinds_of_weights(model) -> dict[str, set[type]]:
    """By the last part of their modules' names; all are on the device."""
    found: dict[str, set[type]] = {}
    for name, weight in model.named_parameters():
        assert weight.device.type == "cuda", name
        found.setdefault(name.split(".")[-2], set()).add(type(weight))
    return found


def expanding(x, weight, bias=None):
    """A product as by the kernels, which in bfloat16 have assembly, that the interpreter lacks."""
    return torch.nn.functional.linear(x, weight.dequantize(), bias)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_packed_weights_stay_packed_on_the_device(device, tiny_folder, architecture_folder, monkeypatch, name):
    monkeypatch.setattr(packed_weight, "_linear", expanding)
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", set())
    folder = tiny_folder(**OWN_KERNELS) if name == "Llama" else architecture_folder(name, **OWN_KERNELS)
    engine = saltus.load(str(folder), "plain", device="cuda", weights="q8_0", adaptive=False)
    kinds = kinds_of_weights(engine.network.model)
    packed = {name for name, types in kinds.items() if GPUPackedWeight in types}
    assert {"q_proj", "down_proj", "lm_head"} <= packed
    assert "embed_tokens" not in packed
    check_texts(engine, ["lookup"], temperature=0.0)


def test_a_gguf_file_is_packed_and_decoded_by_our_kernels_on_the_device(device, tmp_path, monkeypatch):
    monkeypatch.setattr(target_network, "_logits_in_a_tree", lambda *_: None)  # in bfloat16; see `expanding`
    write(tiny_llama("llama"), tmp_path / "tiny.gguf", [GGMLQuantizationType.Q8_0])
    engine = saltus.load(str(tmp_path / "tiny.gguf"), "plain", device="cuda")
    assert engine.network.compute_path == "native"
    kinds = kinds_of_weights(engine.network.model)
    assert kinds["gate_proj"] == kinds["v_proj"] == {GPUPackedWeight}
    assert GPUPackedWeight not in kinds["embed_tokens"]
    (joined,) = engine.network.fixed_shape_runner.decoder.layers[0].attention.qkv
    attention = engine.network.model.model.layers[0].self_attn
    assert torch.equal(joined.dequantize()[-128:], attention.v_proj.weight.dequantize())
    engine.network.attach_adapter(new_adapter(engine.network.model))
    layers = transformers_model(engine.network.model).model
    assert layers.layers[0].self_attn.v_proj.weight is attention.v_proj.weight
    assert layers.rotary_emb.inv_freq.device.type == "cuda"


@pytest.mark.parametrize("name", ["Gemma3", "Gemma3n", "Llama4"])  # whose experts get a `forward` of ours before
def test_described_layers_decode_by_our_kernels(device, monkeypatch, architecture_folder, name):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    sizes = {"intermediate_size_mlp": 64} if name == "Llama4" else {}
    if name == "Gemma3n":
        sizes = {"laurel_rank": 64, "hidden_size_per_layer_input": 64}
    engine = load(architecture_folder(name, **OWN_KERNELS, **sizes))
    assert engine.network.compute_path == "native"
    check_texts(engine, ["lookup"], temperature=0.8, tokens=5)


def test_texts_of_unlike_lengths_have_their_own_angles_in_the_same_graphs(device, monkeypatch, architecture_folder):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    border = max(len(byte_tokenizer().encode(prompt)) for prompt in PROMPTS)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
            "factor": 8.0, "original_max_position_embeddings": border}  # fmt: skip
    sizes = {"rope_parameters": rope, "num_hidden_layers": 1, "max_position_embeddings": 8 * border}
    engine = load(architecture_folder("Llama", **OWN_KERNELS, **sizes))
    assert engine.network.compute_path == "native"
    check_texts(engine, ["lookup"], temperature=0.8, tokens=5)
    decoder = engine.network.fixed_shape_runner.decoder
    assert set(decoder.angles_of_texts) == {False, True}


@pytest.mark.parametrize("name", ["Gemma3", "Llama4"])
def test_other_architectures_decode_in_fixed_shapes(device, architecture_folder, name):
    engine = load(architecture_folder(name))
    assert engine.network.compute_path == "fixed shapes"
    check_texts(engine, ["lookup"], temperature=0.0, tokens=6)


@pytest.mark.parametrize(("name", "path"), [("Qwen3Moe", "native"), ("GptOss", "fixed shapes")])
def test_experts_on_a_gpu_do_not_depend_on_the_other_rows_of_a_call(
    device, architecture_folder, monkeypatch, caplog, name, path
):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32} if path == "native" else set())
    engine = load(architecture_folder(name, **OWN_KERNELS if path == "native" else {}))
    assert engine.network.compute_path == path
    assert not any("rounding depends" in each for each in caplog.messages)
    check_texts(engine, ["lookup"], temperature=0.0, tokens=3)
    assert device.graphs


def expanding_product(x, stack, pairs, is_transposed=False, biases=None):
    """As `expanding`, of experts without biases."""
    assert biases is None
    starts, found = pairs.starts.tolist(), x.new_empty(len(pairs.order), stack.shape[1])
    for expert, matrix in enumerate(stack.dequantize()):
        own = pairs.order[starts[expert] : starts[expert + 1]].long()
        found[own] = x[own if len(x) == len(found) else own // pairs.chosen] @ matrix.T
    return found


@pytest.fixture
def expanding_products(monkeypatch):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", set())
    monkeypatch.setattr(packed_weight, "_linear", expanding)
    monkeypatch.setattr(expert_kernels, "expert_product", expanding_product)


@pytest.mark.usefixtures("expanding_products")
@pytest.mark.parametrize("name", ["Qwen3Moe", "Llama4"])
def test_packed_experts_stay_packed_on_the_device(device, architecture_folder, name):
    sizes = OWN_KERNELS | ({"moe_intermediate_size": 64} if name == "Qwen3Moe" else {})
    engine = saltus.load(
        str(architecture_folder(name, **sizes)), "plain", device="cuda", weights="q8_0", adaptive=False
    )
    assert kinds_of_weights(engine.network.model)["experts"] == {GPUPackedWeight}
    network = engine.network
    network.fixed_shape_runner.use_cuda_graphs = False  # this product waits for the device
    check_texts(engine, ["lookup"], temperature=0.0, tokens=4)


@pytest.mark.usefixtures("expanding_products")
@pytest.mark.parametrize(("name", "case"), [("Llama", "fp8 of channels"), ("Qwen3Moe", "fp8 of tensors")])
def test_8_bit_floats_stay_such_on_the_device_and_are_the_numbers_of_the_cpu(
    device, architecture_folder, tmp_path, name, case
):
    settings, writer, _ = CASES[case]
    sizes = OWN_KERNELS | ({"moe_intermediate_size": 64} if name == "Qwen3Moe" else {})
    folder = shutil.copytree(architecture_folder(name, **sizes), tmp_path / "fp8")
    write_quantised(folder, settings, writer, tmp_path / "meant")
    engine = saltus.load(str(folder), "plain", device="cuda", adaptive=False)
    kinds = kinds_of_weights(engine.network.model)
    assert kinds["q_proj"] == kinds["experts" if name == "Qwen3Moe" else "down_proj"] == {GPUPackedWeight}
    meant = load_model("meant", tmp_path / "meant", torch.bfloat16)
    weights = dict(engine.network.model.named_parameters())
    for own, weight in meant.named_parameters():
        if isinstance(found := weights[own], GPUPackedWeight):
            assert torch.equal(found.dequantize().cpu(), weight), own
            assert found.nbytes < 0.6 * weight.nbytes or weight.shape[-2] % 64
    if name == "Llama":  # texts of experts are tested above
        check_texts(engine, ["lookup"], temperature=0.0, tokens=4)
        unpacked = saltus.load(str(folder), "plain", device="cuda", weights="bf16", adaptive=False)
        assert GPUPackedWeight not in set().union(*kinds_of_weights(unpacked.network.model).values())


def test_without_our_kernels_a_warning_says_what_does_not_hold_of_experts(
    device, architecture_folder, monkeypatch, caplog
):
    monkeypatch.setenv("SALTUS_KERNELS", "off")
    engine = load(architecture_folder("Qwen3Moe"))
    assert any("rounding depends on the shapes of calls" in each for each in caplog.messages)
    for method in ("plain", "lookup", "jacobi"):
        made = engine.generate(PROMPTS, method=method, raw=True, max_new_tokens=6, ignore_eos=True)
        assert all(len(one.tokens) == 6 for one in made)


@pytest.mark.parametrize("name", ["Qwen3_5", "Lfm2", "FalconH1", "NemotronH", "Mamba2"])
def test_layers_with_states_that_our_kernels_do_not_know_are_refused_in_a_line(device, architecture_folder, name):
    with pytest.raises(ValueError, match="cannot be served") as error:
        load(architecture_folder(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "method"), [("Qwen3_5", "small_model"), ("Lfm2", "lookup"), ("Bamba", "lookup")])
def test_layers_with_states_decode_by_our_kernels(device, monkeypatch, architecture_folder, name, method):
    """The text of a draft model goes back with each draft."""
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder = architecture_folder(name, **OWN_KERNELS, **OWN_STATES[name])
    given = folder, {"small_model": {"model": str(folder)}}
    engine = load(*given, exact=name != "Lfm2")
    assert engine.network.compute_path == "native"
    check_texts(engine, [method], tokens=6, twin=load(*given, device="cpu"))
    with pytest.raises(ValueError, match="does not draft for a model that keeps a state"):
        engine.network.attach_adapter(new_adapter(engine.network.model))


def test_latent_attention_decodes_by_our_kernels(device, monkeypatch, architecture_folder):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder = architecture_folder("DeepseekV3", **OWN_LATENT)
    engine = load(folder)
    assert engine.network.compute_path == "native"
    check_texts(engine, ["lookup"], tokens=6, twin=load(folder, device="cpu"))
    with pytest.raises(ValueError, match="does not draft for a model that keeps latent vectors"):
        engine.network.attach_adapter(new_adapter(engine.network.model))


def test_heads_of_a_checkpoint_draft(device, tmp_path):
    folder = write_checkpoint(tmp_path, "MiMo")
    check_texts(load(folder), ["mtp"], twin=load(folder, device="cpu"))


@pytest.mark.parametrize(
    ("form", "modules", "sizes"),
    [
        ("MiMo", 2, OWN_KERNELS),
        ("DeepSeek V3", 1, OWN_LATENT),
        ("Qwen3.5", 1, {**OWN_KERNELS, **OWN_STATES["Qwen3_5"]}),
    ],
)
def test_heads_of_a_checkpoint_draft_by_our_kernels(device, monkeypatch, tmp_path, form, modules, sizes):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder = write_checkpoint(tmp_path, form, modules=modules, **sizes)
    engine = load(folder)
    check_texts(engine, ["mtp"], temperature=0, tokens=4, twin=load(folder, device="cpu"))
    for module in engine.decoder.setup("mtp").networks["mtp"].modules:
        assert module.layers.on_gpu.passes.pool.graphs


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "eagle3", "peagle"])
def test_published_drafters_draft(device, tiny_folder, tmp_path, kind):
    read, layers = FIRST_LAYERS["eagle" if "eagle" in kind else "block"]
    if "eagle" in kind:
        published_head(tmp_path, {"eagle3": "speculators"}.get(kind, kind), **read)
    else:
        block_drafter(tmp_path, kind, **read)
    given = tiny_folder(num_hidden_layers=layers), {"ptp": {"model": str(tmp_path)}}
    check_texts(load(*given), ["ptp"], tokens=4, twin=load(*given, device="cpu"))


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_published_heads_find_the_likely_tokens_of_all_texts_at_once(device, monkeypatch, tiny_folder, tmp_path, kind):
    published_head(tmp_path, {"eagle3": "speculators"}.get(kind, kind), **FIRST_LAYERS["eagle"][0])
    engine, rows = load(tiny_folder(num_hidden_layers=4), {"ptp": {"model": str(tmp_path)}}), []
    likely = query_predictions.rows_likely_tokens

    def noted(logits):
        rows.append(len(logits))
        return likely(logits)

    monkeypatch.setattr(query_predictions, "rows_likely_tokens", noted)
    engine.generate(["one", "two", "cat"], method="ptp", raw=True, max_new_tokens=3, temperature=0, ignore_eos=True)
    assert {count % 3 for count in rows} == {0}  # of three texts


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        ("dflash", {"context", "rows"}),
        ("dspark", {"context", "rows"}),
        ("eagle3", {"read", "draft"}),
        ("peagle", {"read"}),
    ],
)
def test_published_drafters_of_known_sizes_draft_by_our_kernels(
    device, monkeypatch, tiny_folder, tmp_path, kind, passes
):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    sizes = {"HIDDEN": 64, "WIDE": 64, "DIM": 32, "HEADS": 2, "KV_HEADS": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(reference_eagle, name, size)
        monkeypatch.setattr(reference_dflash, name, size)
    read, num_layers = FIRST_LAYERS["eagle" if "eagle" in kind else "block"]
    if "eagle" in kind:
        reference_eagle.published_head(tmp_path, {"eagle3": "speculators"}.get(kind, kind), **read)
    else:
        layers = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2}
        reference_dflash.block_drafter(tmp_path, kind, {**layers, "num_key_value_heads": 1}, **read)
    given = tiny_folder(num_hidden_layers=num_layers, **OWN_KERNELS), {"ptp": {"model": str(tmp_path)}}
    engine = load(*given)
    check_texts(engine, ["ptp"], temperature=0, tokens=3, twin=load(*given, device="cpu"))
    network = engine.decoder.setup("ptp").networks["ptp"]
    layers = network.layers if "eagle" in kind else network.context_layers
    assert {name for _, (name, *_) in layers.passes.pool.graphs} == passes


@pytest.mark.parametrize("exact", [True, False])
def test_assistants_draft_by_our_kernels_over_the_targets_pages_or_in_torch(
    device, monkeypatch, architecture_folder, tmp_path, exact
):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder = architecture_folder("Gemma4 of shared keys", **OWN_GEMMA4)
    published_assistant(tmp_path, AutoModelForCausalLM.from_pretrained(folder), **OWN_ASSISTANT)
    given = folder, {"ptp": {"model": str(tmp_path)}}
    engine = load(*given, exact=exact)
    check_texts(engine, ["ptp", "ptp+lookup"], temperature=0, tokens=5, twin=load(*given, device="cpu"))
    assert engine.network.compute_path == ("native" if exact else "transformers")
    assert bool(engine.decoder.setup("ptp").networks["ptp"].on_gpu) == bool(device.graphs) == exact


def test_each_of_two_assistants_of_a_model_has_its_own_graphs(device, monkeypatch, architecture_folder, tmp_path):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    folder, engine = architecture_folder("Gemma4 of shared keys", **OWN_GEMMA4), None
    for size in (64, 128):
        sizes, path = {**OWN_ASSISTANT, "intermediate_size": size}, tmp_path / str(size)
        published_assistant(path, AutoModelForCausalLM.from_pretrained(folder), **sizes)
        options = {"ptp": {"model": str(path)}}
        engine = load(folder, options) if engine is None else engine.copy_with(options=options)
        check_texts(engine, ["ptp"], temperature=0, tokens=4, twin=load(folder, options, device="cpu"))


def test_a_graph_reads_the_memory_of_its_capture_until_that_is_free(device):
    read = [torch.ones(3, device="cuda")]
    graph, out = GraphCapture(read[0].device).capture(lambda: read[0] + 1)
    read[0].fill_(4)
    graph.replay()
    assert out.tolist() == [5, 5, 5]
    read[0] = torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cpu", [1, 2, 3, 4, 5, 6]), ("cuda", [3, 4, 5, 6])],  # 12 + 10 + 10; 5, since 5 + 30 are more; 30; 3
)
def test_texts_join_one_by_one_on_a_cpu_and_by_chunks_on_a_gpu(device, tiny_folder, name, expected):
    engine = load(tiny_folder(), device=name)
    scheduler = Scheduler(engine.decoder, prefix_tree=PrefixTree(), prefill_chunk_tokens=32)
    for length in (12, 10, 10, 5, 30, 3):
        request = engine.text_request([50 + length] * length, max_new_tokens=9, ignore_eos=True).request
        scheduler.add(ScheduledRequest(request, "plain"))
    assert [len(scheduler.step()) for _ in expected] == expected


def test_the_scheduler_of_the_server_gives_each_request_its_own_text(device, tiny_folder, partners):
    engine = load(tiny_folder(), partners)
    settings = {"raw": True, "max_new_tokens": 6, "seed": 1, "temperature": 0.8, "ignore_eos": True}
    parts: queue.Queue = queue.Queue()
    jobs = [
        serve_text(
            engine.text_request(PROMPTS[number % 2], **settings), method,
            lambda part, number=number: parts.put((number, part)),
        )
        for number, method in enumerate(["plain", "lookup", "ptp", "mtpc"])
    ]  # fmt: skip
    thread, ended = EngineThread(engine, Limits(max_batch=3)), set()
    thread.submit(*jobs)
    thread.start()
    try:
        while len(ended) < len(jobs):
            number, part = parts.get(timeout=60)
            ended |= {number} if part.finish_reason is not None else set()
    finally:
        thread.close()
    alone = [engine.generate(prompt, method="plain", **settings).tokens for prompt in PROMPTS]
    assert [job.request.tokens for job in jobs] == [*alone, *alone]


def test_a_tensor_on_the_wrong_device_is_found(device, monkeypatch, tiny_folder):
    engine = load(tiny_folder())
    embed = engine.model.get_input_embeddings()
    monkeypatch.setattr(embed, "forward", lambda tokens: embed.weight.cpu()[tokens.cpu()])
    engine.network.fixed_shape_runner.pool.graphs.clear()  # of calls before
    with pytest.raises(RuntimeError, match="same device"):
        check_texts(engine, [])


def test_without_a_compiler_for_our_kernels_a_warning_says_so_and_texts_are_written(
    device, tiny_folder, monkeypatch, caplog
):
    def fails(_: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(launching, "check_launch", fails)
    kernel_support._kernels_run.cache_clear()
    try:
        engine = load(tiny_folder())
        check_texts(engine, ["lookup"])
        (told,) = [each for each in caplog.messages if "kernels for GPUs are off" in each]
        assert told.endswith("Triton finds no C compiler; install gcc or clang")
    finally:
        kernel_support._kernels_run.cache_clear()
    failed = subprocess.CalledProcessError(1, ["gcc", "/tmp/main.c"])
    assert kernel_support.KernelsFail("check", failed).reason.endswith("install python3-dev (python3-devel)")


@dataclass(frozen=True)
class RefusedKernel:
    """In place of a kernel of Triton that needs too much."""

    __name__ = "_add_and_norm"

    def __getitem__(self, grid):
        raise OutOfResources(200_000, 101_376, "shared memory")


def test_without_a_kernel_that_the_gpu_refuses_texts_are_those_of_fixed_shapes_or_an_error_says_so(
    device, tiny_folder, monkeypatch, caplog
):
    monkeypatch.setattr(gpu_decoder_support, "KERNEL_DTYPES", {torch.float32})
    monkeypatch.setattr(kernel_support, "_given_up", [])
    running = load(tiny_folder(**OWN_KERNELS))
    monkeypatch.setattr(row_kernels, "_add_and_norm", launching.Kernel(RefusedKernel()))
    running.network.fixed_shape_runner.pool.graphs.clear()
    with pytest.raises(ValueError, match=r"shared memory.*set SALTUS_KERNELS=off") as error:
        check_texts(running, [])
    assert "\n" not in str(error.value)
    engine = load(tiny_folder(**OWN_KERNELS))
    assert engine.network.compute_path == "fixed shapes"
    (told,) = [each for each in caplog.messages if "kernels for GPUs are off" in each]
    assert "_add_and_norm: out of resource: shared memory" in told
    check_texts(engine, ["lookup"], temperature=0)


def test_a_kernel_that_the_gpu_refuses_ends_the_loading_of_packed_weights(device, tmp_path, monkeypatch):
    write(tiny_llama("llama"), tmp_path / "tiny.gguf", [GGMLQuantizationType.Q8_0])
    monkeypatch.setattr(row_kernels, "_add_and_norm", launching.Kernel(RefusedKernel()))
    with pytest.raises(ValueError, match=r"shared memory.*set SALTUS_KERNELS=off"):
        saltus.load(str(tmp_path / "tiny.gguf"), "plain", device="cuda")


@pytest.mark.parametrize("name", ["Qwen3Moe", "Llama4"])
def test_transformers_generate_launches_experts_on_the_models_device(device, architecture_folder, name):
    model = load(architecture_folder(name)).model
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7]], device="cuda"), use_cache=False).logits
    assert logits.shape == (1, 3, 300)


def test_transformers_generate_launches_packed_products_on_the_models_device(device, monkeypatch):
    from fake_cuda import CHOSEN
    from saltus.models.cuda import linear_kernels

    packed = GPUPackedWeight.from_floats(
        torch.ones(64, 64).to(torch.float8_e4m3fn).cuda(), torch.ones(64, 1).cuda(), 64
    )
    chosen = []

    def product(x, weight, rows):
        chosen.append(CHOSEN.device)
        return x[:, :64]

    monkeypatch.setattr(linear_kernels, "product", product)
    with torch.inference_mode():
        torch.nn.functional.linear(torch.zeros(2, 64, dtype=torch.bfloat16, device="cuda"), packed)
    assert chosen == [True]


def test_without_triton_a_warning_says_how_to_have_our_kernels(device, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kernel_support._kernels_run.cache_clear()
    try:
        assert not kernel_support.has_kernels("cuda")
        assert not kernel_support.has_kernels("cpu")
        assert [each.endswith("pip install triton") for each in caplog.messages] == [True]
    finally:
        kernel_support._kernels_run.cache_clear()


def test_our_kernels_are_off_on_gpus_that_do_not_multiply_bfloat16(device, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda each: (9 if each.index == 0 else 7, 5))
    kernel_support._kernels_run.cache_clear()
    try:
        assert kernel_support.has_kernels("cuda:0")
        assert not kernel_support.has_kernels("cuda:1")
        assert caplog.messages[-1].endswith("need a GPU of compute capability 8.0 or more, and this one has 7.5")
    finally:
        kernel_support._kernels_run.cache_clear()
