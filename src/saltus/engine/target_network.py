"""Make the network of a model, and check that Saltus's attention gives the same logits as the model's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.out_of_memory import is_out_of_memory
from saltus.kernels import native
from saltus.kernels.model_weights import uses_integers
from saltus.loading.fetching import first_line
from saltus.loading.load_model import silence_transformers
from saltus.methods.assd.network import ANY_SUBSET, AnySubsetNetwork
from saltus.methods.assd.xlnet import XlnetNetwork
from saltus.models.architectures import describe_decoder, ignored_setting, why_not_described
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.native_decoder import supports_native_decoder
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings
from saltus.models.cuda.gpu_decoder_support import description_on_gpu
from saltus.models.cuda.kernel_support import KernelsFail, give_up, has_kernels
from saltus.models.evabyte import EvaByteNetwork
from saltus.models.evabyte_decoder import EvaByteDecoder
from saltus.models.packed_decoder import PackedDecoder
from saltus.models.protocols import TargetNetwork
from saltus.models.recurrent_layers import other_key_types, recurrent_layer_types

OTHER_MODEL = "take a model of an architecture that docs/models.md lists, such as Llama, Qwen3 or Gemma 3"
MAX_OTHER_TEXTS = 3  # on which a model in 16 bits is checked where the first one differs
TESTED_TRANSFORMERS = 5, 24  # the release that the tests run with; the layers of some models are wrong in older ones
ROUNDINGS = 3  # logits may differ by as many times what another rounding of the embeddings makes of them


def make_network(model: Any, name: str, exact: bool = True, max_draft_tokens: int = 16) -> TargetNetwork:
    """The network of a model. A causal one is checked on a small tree: both attentions must give the same logits.

    A sibling node between text and branch exposes attention that ignores the tree mask. Errors: ValueError.
    """
    if isinstance(model, EvaByteDecoder):
        return EvaByteNetwork(model, exact)
    if getattr(model.config, ANY_SUBSET, None):
        return AnySubsetNetwork(model, exact)
    is_on_gpu = model.device.type == "cuda"
    on_gpu = torch.cuda.device(model.device) if is_on_gpu else nullcontext()  # Triton launches on the thread's own GPU
    if isinstance(model, PackedDecoder):
        network = CausalNetwork(model, exact, FixedShapeSettings.for_max_draft_tokens(max_draft_tokens))
        if is_on_gpu:  # a kernel that Triton or the GPU refuses is an error now, not in the first text
            with torch.inference_mode(), on_gpu:
                _logits_in_a_tree(network, 0, network.new_kv_cache())
        return network
    if model.config.model_type == "xlnet":
        return XlnetNetwork(model, exact)
    why, cure = _why_no_layers(model) or ("", OTHER_MODEL)
    if not why:
        with torch.inference_mode(), silence_transformers(), on_gpu:
            made = _checked_network(model, name, exact, max_draft_tokens)
        if not isinstance(made, str):
            return made
        why, cure = made, _newer_transformers() + OTHER_MODEL
    raise ValueError(f"{name} ({type(model).__name__}) cannot be served: {why}; {cure}")


def _newer_transformers() -> str:
    """The cure of an older release than the tested one, as the first of two."""
    major, minor, *_ = transformers.__version__.split(".")
    if (int(major), int(minor)) >= TESTED_TRANSFORMERS:
        return ""
    tested = ".".join(map(str, TESTED_TRANSFORMERS))
    return f"install Transformers {tested} or later (this is {transformers.__version__}), or "


def _checked_network(model: Any, name: str, exact: bool, max_draft_tokens: int) -> CausalNetwork | str:
    """The network of a model of Transformers, or why its logits would not be the model's own."""
    try:
        expected = _logits_of_a_branch(model, 0)
        network = CausalNetwork(model, exact, FixedShapeSettings.for_max_draft_tokens(max_draft_tokens))
        kv_cache = network.new_kv_cache()
        differs = _differ_everywhere(network, expected, _logits_in_a_tree(network, 0, kv_cache))
    except KernelsFail as failure:
        if not has_kernels(model.device):  # packed weights need them
            raise
        give_up(failure)
        return _checked_network(model, name, exact, max_draft_tokens)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return first_line(error)
    if not expected.isfinite().all():
        _require_finite_weights(model, name)
    if kv_cache.keys is None and network.state_sizes is None:
        return "its attention does not go through Transformers' AttentionInterface"
    if differs:
        return "a tree of tokens gets other logits than its branches get alone"
    network.kv_bytes_per_token = kv_cache.bytes_per_token
    return network


def _differ_everywhere(network: CausalNetwork, expected: Tensor, computed: Tensor) -> bool:
    """True if the logits of the first text differ, and in 16 bits those of some others, too.

    What is wrong differs in every text. What rounding does depends on the text: another expert is taken at a near-tie,
    or a small difference grows from layer to layer (in Gemma 3 270M until it is a third of the logits). So where logits
    differ by more than rounding mostly does, the model's own are computed once more from embeddings that are rounded
    otherwise, and the network's without the sibling, which must be those in the tree.
    """
    model = network.model
    # bounds of rounding alone, in float32, in bfloat16, by activations in 8 bits; what a sibling does is about 1
    if model.dtype == torch.float32:
        return _differ(expected, computed, 0.01)
    others = (
        (_logits_of_a_branch(model, text), _logits_in_a_tree(network, text, network.new_kv_cache()))
        for text in range(1, 1 + MAX_OTHER_TEXTS)
    )
    bound = 0.6 if uses_integers(model) else 0.2
    return all(
        _differ_on(network, text, *logits, bound) for text, logits in enumerate(chain([(expected, computed)], others))
    )


def _differ_on(network: CausalNetwork, number: int, expected: Tensor, computed: Tensor, bound: float) -> bool:
    """True if the logits of a text differ by more than the bound, and than the model's own rounding explains."""
    if not _differ(expected, computed, bound):
        return False
    with _embeddings_rounded_otherwise(network.model):
        error = ROUNDINGS * _difference(expected, _logits_of_a_branch(network.model, number))
    without_sibling = _logits_in_a_tree(network, number, network.new_kv_cache(), sibling=False)
    return not math.isfinite(error) or _differ(expected, computed, error) or _differ(without_sibling, computed, bound)


def _require_finite_weights(model: Any, name: str) -> None:
    """Raise ValueError for weights that are not numbers, which no other type would mend."""
    for key, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(f"{name} has weights that are NaN or infinite, such as {key}; fetch or train it again")


def _tree_tokens(vocab: int, number: int) -> tuple[list[int], list[int]]:
    """A text, and a tree after it: a sibling, then a branch of two tokens. There is one for each number."""
    return [(7 * i + 3 + 29 * number) % vocab for i in range(6)], [(11 * i + 5 + 29 * number) % vocab for i in range(3)]


def _logits_of_a_branch(model: Any, number: int) -> Tensor:
    """The logits after a text and each token of the branch, by the model's own forward."""
    text, (_, *branch) = _tree_tokens(model.get_output_embeddings().weight.shape[0], number)
    whole = torch.tensor([text + branch], device=model.device)
    with _chunks_of(model, whole.shape[1]):
        return model(whole, use_cache=False).logits[0, len(text) - 1 :]


@contextmanager
def _chunks_of(model: Any, tokens: int) -> Iterator[None]:
    """Let Transformers' Mamba-2 layers read a text in chunks of this many tokens.

    They pad it to whole chunks, and for one of 256 tokens a layer of a model of 9 B parameters takes 4 GB.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, "chunk_size", None), int)]
    before = [layer.chunk_size for layer in layers]
    try:
        for layer in layers:
            layer.chunk_size = tokens
        yield
    finally:
        for layer, size in zip(layers, before, strict=True):
            layer.chunk_size = size


@contextmanager
def _embeddings_rounded_otherwise(model: Any) -> Iterator[None]:
    """Multiply the numbers of embeddings by 1 ± 2⁻⁸, about what rounding to bfloat16 does, while open."""

    def scale(_module: Any, _inputs: Any, embeddings: Tensor) -> Tensor:
        signs = torch.arange(embeddings.numel(), device=embeddings.device).view(embeddings.shape) * 7 % 11 % 2 * 2 - 1
        return (embeddings * (1 + signs * 2.0**-8)).to(embeddings.dtype)

    hook = model.get_input_embeddings().register_forward_hook(scale)
    try:
        yield
    finally:
        hook.remove()


def _logits_in_a_tree(network: CausalNetwork, number: int, kv_cache: Any, sibling: bool = True) -> Tensor:
    """The same by the network, in a tree with a sibling, or with the branch alone."""
    text, nodes = _tree_tokens(network.model.get_output_embeddings().weight.shape[0], number)
    first, parents = (0, (-1, -1, 1)) if sibling else (1, (-1, 0))
    inputs = ForwardInputs(continuation(text, len(parents)), tuple(nodes[first:]), parents)
    rows = [0, len(parents) - 1, len(parents)]
    return network.forward([inputs], [kv_cache])[0].logits[rows]


def _differ(expected: Tensor, computed: Tensor, bound: float) -> bool:
    """True for finite logits whose difference is more than this part of their spread."""
    return bool(expected.isfinite().all()) and not _difference(expected, computed) <= bound


def _difference(expected: Tensor, computed: Tensor) -> float:
    """The difference of logits as a part of their spread, NaN where they are."""
    expected, computed = expected.float(), computed.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return ((computed - expected).norm() / spread.clamp(min=torch.finfo(spread.dtype).tiny)).item()


def _why_no_layers(model: Any) -> tuple[str, str] | None:
    """Why layers cannot be had, such as Transformers' own that keep a state and read no tree, and the cure.

    None: they can.
    """
    if setting := ignored_setting(model):
        why = f"this version of Transformers ignores its {setting}, and texts would be wrong"
        return why, f"install a version that reads it, or {OTHER_MODEL}"
    description = describe_decoder(model)
    others, kinds = other_key_types(model), recurrent_layer_types(model)
    if description is None and others:
        return f"its {others[0]} layers attend to other keys than those of the text", OTHER_MODEL
    if not (kinds or others) or supports_native_decoder(model) or description_on_gpu(model) is not None:
        return None
    state = f"it keeps a state in {kinds[0]} layers" if kinds else f"its {others[0]} layers choose keys"
    if (what := why_not_described(model)) is not None:
        return f"{state}, and our kernels do not compute {what}", OTHER_MODEL
    if description is None:
        return f"{state}, and Transformers' layers cannot discard a rejected draft from it", OTHER_MODEL
    cure = "install a C compiler, such as gcc, or the package ziglang"
    if model.device.type != "cpu":
        on_gpu = "" if others else "in bfloat16, which our kernels for GPUs read, or "
        cure = f"load it {on_gpu}on the CPU (--device cpu, device='cpu')"
    elif native.kernel("linear", model.dtype, model.device) is not None:
        cure = "load it without hooks or changed layers, all weights in one type"
    return f"{state}, which only our own kernels can {'read' if kinds else 'do'}", cure
