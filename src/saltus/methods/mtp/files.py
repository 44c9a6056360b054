"""Find multi-token-prediction heads in a target's checkpoint, or in a folder of their own, and load them.

Weights are read only then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from saltus.kernels.model_weights import arithmetic_of
from saltus.loading.model_folders import INDEX_FILE
from saltus.loading.quantised_weights import find_quantised
from saltus.loading.stored_tensors import StoredTensor, stored_tensors
from saltus.methods.mtp.family import MtpFamily, families
from saltus.methods.mtp.module import MtpModule
from saltus.methods.mtp.trained_head import check_head, drafted_tokens
from saltus.methods.shared.published_files import read_config, warn_of_another_target
from saltus.models.protocols import DrafterHost, TargetNetwork

EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate|up|down)_proj\.weight")
TARGET_NAMES = {"embeddings.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
OPTIONAL = ("embeddings.weight", "head.weight")  # modules may have copies of the target's
COMPUTED = re.compile(r".*rotary_emb\.\w+")  # in some files, though it follows from the configuration


@dataclass(frozen=True)
class HeadTensors:
    """The heads of a checkpoint: for each module its tensors by part, and by the rest of their names."""

    family: MtpFamily
    modules: Sequence[Mapping[str, StoredTensor]]
    others: Mapping[str, StoredTensor]  # all tensors of the checkpoint, by name
    folder: Path
    num_layers: int  # of the target

    def published(self, name: str, module: int) -> str:
        """What the checkpoint calls a weight of a module."""
        return self.family.published(name, module, self.num_layers)


def find_heads(model: Any, folder: Path | None = None) -> HeadTensors | None:
    """The heads in a folder, or in the checkpoint of a model that `load_model` made; None if there are none."""
    folder = folder or getattr(model, "checkpoint_folder", None)
    if folder is None:
        return None
    tensors = stored_tensors(folder, arithmetic_of(model))
    layers = model.config.get_text_config().num_hidden_layers
    found = [(family, modules) for family in families() if (modules := family.modules(tensors, layers))]
    if not found:
        return None
    # layers of several families may be called alike
    family, modules = max(found, key=lambda each: len({name.partition(".")[0] for name in each[1][0]}))
    placed = [{part: tensors[name] for part, name in module.items()} for module in modules]
    return HeadTensors(family, placed, tensors, folder, layers)


def has_heads(model: Any) -> bool:
    """True if the checkpoint of a model has whole heads, of sizes that fit as far as they are listed.

    Nothing is read but names and sizes; those of quantised weights are known when they are read.
    """
    found = find_heads(model)
    if found is None:
        return False
    try:
        new_modules(found, model)
    except ValueError:
        return False
    return True


def load_heads(target: TargetNetwork, target_name: str, folder: Path | None = None) -> list[MtpModule]:
    """The modules of the heads in a folder, of `saltus train mtp` or speculators, or else in the target's checkpoint.

    They are in the target's dtype. Errors: ValueError of one line.
    """
    if not isinstance(target, DrafterHost):
        raise ValueError(f"{target_name} fills holes anywhere, but mtp drafts for causal models; take assd")
    found = _find_heads_for(target.model, target_name, folder)
    modules = new_modules(found, target.model)
    is_trained = folder is not None and not _is_of_speculators(folder)
    tokens = drafted_tokens(found.folder, found.others, target.model) if is_trained else None
    stays = (found.folder / INDEX_FILE).is_file() or find_quantised(found.folder) is not None  # as it is stored
    for number, (module, tensors) in enumerate(zip(modules, found.modules, strict=True)):
        weights = _weights(tensors, found.others)
        _check_shapes(module, {name: tuple(weight.shape) for name, weight in weights.items()}, found, number)
        module.load(weights, not stays, tokens)
    return modules


def read_trained_head(folder: Path, model: Any, model_name: str) -> tuple[dict[str, Tensor], Int[Tensor, "draft"]]:
    """Of a head of `saltus train mtp` the weights, by the names of `MtpModule.needed_weights`, and the drafted tokens.

    Errors: ValueError.
    """
    found = _find_heads_for(model, model_name, folder)
    new_modules(found, model)
    return _weights(found.modules[0], found.others), drafted_tokens(folder, found.others, model)


def _is_of_speculators(folder: Path) -> bool:
    """True for a folder of heads alone, all of whose tokens are drafted."""
    return read_config(folder).get("speculators_model_type") == "mtp"


def _find_heads_for(model: Any, model_name: str, folder: Path | None) -> HeadTensors:
    if folder is not None and _is_of_speculators(folder):
        warn_of_another_target(folder, model_name)
    elif folder is not None:
        check_head(folder, model, model_name)
    found = find_heads(model, folder)
    if found is None:
        raise ValueError(
            f"{folder or f'the checkpoint of {model_name}'} has no heads for multi-token prediction; take lookup, a"
            " checkpoint that has them, or a head of saltus train mtp (--option mtp.model=FOLDER)"
        )
    return found


def new_modules(found: HeadTensors, target: Any) -> list[MtpModule]:
    """The modules, without weights. Errors: ValueError for tensors that are missing, unknown or of other sizes."""
    modules = []
    for number, tensors in enumerate(found.modules):
        made = MtpModule(target, _has_experts(tensors), found.family.state_first, bool(found.family.norm))
        _check(made, tensors, found, number)
        modules.append(made)
    return modules


def _has_experts(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(".experts." in name for name in tensors)


def _check(module: MtpModule, tensors: Mapping[str, StoredTensor], found: HeadTensors, number: int) -> None:
    """Errors: ValueError for tensors that are missing or unknown, and for sizes that are listed and do not fit."""
    needed = module.needed_weights()
    given = {name: shape for name, shape in _shapes(tensors).items() if not COMPUTED.fullmatch(name)}
    for name in sorted({*needed, *given}):
        if name not in given:
            raise ValueError(f"the heads in {found.folder} lack {found.published(name, number)}; fetch the model again")
        if name not in needed and name not in OPTIONAL:
            raise ValueError(
                f"the heads in {found.folder} have {found.published(name, number)}, which Saltus does not know; take"
                " another method"
            )
    _check_shapes(module, {name: shape for name, shape in given.items() if shape is not None}, found, number)


def _check_shapes(module: MtpModule, shapes: Mapping[str, tuple[int, ...]], found: HeadTensors, number: int) -> None:
    """Errors: ValueError for one that is not that of the module."""
    expected = {name: tuple(weight.shape) for name, weight in module.needed_weights().items()}
    expected |= dict.fromkeys(OPTIONAL, module.embedding_shape)
    for name, shape in sorted(shapes.items()):
        stored = found.modules[number].get(name)
        is_reshaped = stored is not None and stored.is_reshaped and prod(shape) == prod(expected[name])
        if shape != expected[name] and not is_reshaped:
            raise ValueError(
                f"{found.folder}: {found.published(name, number)} is {shape}, but must be {expected[name]}; fetch the"
                " model again"
            )


def _stacks(names: Mapping[str, Any]) -> dict[str, dict[tuple[int, str], str]]:
    """Matrices of single experts, by the stack that Transformers has them in: by expert and kind."""
    stacks: dict[str, dict[tuple[int, str], str]] = {}
    for name in names:
        if match := EXPERT.fullmatch(name):
            has_gate = f"{match[1]}.{match[2]}.gate_proj.weight" in names
            stack = f"{match[1]}.{'gate_up' if has_gate and match[3] != 'down' else match[3]}_proj"
            stacks.setdefault(stack, {})[int(match[2]), match[3]] = name
    return stacks


def _shapes(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...] | None]:
    """The shapes of weights, as far as they are listed, by the names of a MtpModule: those of experts are stacked."""
    shapes = {name: tensor.shape for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    for stack, places in _stacks(tensors).items():
        kinds, parts = _kinds(stack), {tensors[name].shape for name in places.values()}
        shape, experts = next(iter(parts)), len(places) // len(kinds)
        if len(parts) > 1 or places.keys() != {(expert, kind) for expert in range(experts) for kind in kinds}:
            shapes[stack] = (len(places), *(shape or ()))
        else:
            shapes[stack] = None if shape is None else (experts, shape[0] * len(kinds), *shape[1:])
    return shapes


def _kinds(stack: str) -> tuple[str, ...]:
    """The matrices of an expert that stand in a stack, in this order."""
    return tuple(stack.rpartition(".")[2].removesuffix("_proj").split("_"))


def _weights(tensors: Mapping[str, StoredTensor], others: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The weights, read and stacked; copies of the target's own embeddings and output layer are left out.

    Errors: ValueError for experts of several sizes.
    """
    stacks, weights = _stacks(tensors), {}
    for name, tensor in tensors.items():
        copied = others.get(TARGET_NAMES.get(name, ""))
        is_copy = copied is not None and tensor.seems_equal(copied)
        if not EXPERT.fullmatch(name) and not COMPUTED.fullmatch(name) and not is_copy:
            weights[name] = tensor.read()
    for stack, places in stacks.items():
        kinds = _kinds(stack)
        experts = len(places) // len(kinds)
        parts = [tensors[places[expert, kind]].read() for expert in range(experts) for kind in kinds]
        if len({part.shape for part in parts}) > 1:
            raise ValueError(f"the heads have {stack.partition('.')[2]} of several sizes; fetch the model again")
        weights[stack] = torch.cat(parts).unflatten(0, (experts, -1))
    return weights
