"""Any-subset models as an objective of recipes: a model that fills holes, and the pairwise correction of its drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, XLNetConfig, XLNetLMHeadModel

from saltus.core.value_types import require_at_least
from saltus.engine.checkpoints import fills_holes
from saltus.loading.gguf_storage import require_packable
from saltus.loading.load_model import load_model, load_tokenizer
from saltus.loading.packing import PACKINGS
from saltus.loading.sources import resolve
from saltus.methods.assd.network import ANY_SUBSET
from saltus.methods.assd.training import infill_texts
from saltus.methods.assd.training.any_subset import AnySubsetTrainingTask, LeftToRightTrainingTask, XlnetTrainingTask
from saltus.methods.assd.training.holes import HoleOrder, HoleSettings, MaskRatio
from saltus.methods.assd.training.pairwise_correction import PairwiseCorrectionTrainingTask
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.loop.training_loop import Schedule
from saltus.training.objective import TARGET_KEYS, Objective, TrainingInputs
from saltus.training.settings import Recipe
from saltus.training.training_task import TrainingTask

MIN_TEXTS = 200
CORRECTION_LEARNING_RATE = 1e-2
TASKS = {"any-subset": AnySubsetTrainingTask, "xlnet": XlnetTrainingTask, "left-to-right": LeftToRightTrainingTask}


@dataclass(frozen=True)
class AnySubsetSettings:
    """A small model that fills holes anywhere, and the holes of its training texts.

    `hidden`, `layers` and `vocabulary` are those of a new model; with --from they are the folder's.
    """

    # any-subset: a Llama; xlnet: the paper's, for holes of given lengths; left-to-right: causal, to compare with
    architecture: Literal["any-subset", "xlnet", "left-to-right"] = "any-subset"
    hidden: int = 256  # attention heads have 64
    layers: int = 6
    vocabulary: int = 4096  # of a tokenizer that is made of the texts
    # fraction of a text that is holes: few, narrow, wide; paper, paper-wide, paper-code, paper-single-line
    mask_ratio: MaskRatio = "wide"
    span_probability: float = 0.5  # of a text whose holes are a few spans; else they are scattered
    order: HoleOrder = "lattice"  # in which holes are decided: lattice (left to right), any
    correction_steps: int = 800  # for the pairwise correction of drafts, after the model; 0: none
    weights: str = "bf16"  # as they are stored: bf16, or packed by GGUF: q8_0, q5_1, q5_0, q4_1, q4_0
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        require_at_least(self, hidden=1, layers=1, vocabulary=1)
        if self.hidden % (2 * self.heads) or self.hidden < 12:
            raise ValueError(f"hidden is {self.hidden}, but attention heads have 64; take a multiple of that")
        if not 0 <= self.span_probability <= 1:
            raise ValueError(f"span_probability is {self.span_probability}, but is a probability, in [0, 1]")
        require_at_least(self, correction_steps=0)
        if self.weights not in ("bf16", *PACKINGS):
            raise ValueError(f"weights is {self.weights!r}, but must be one of bf16, {', '.join(PACKINGS)}")

    @property
    def heads(self) -> int:
        return max(self.hidden // 64, 1)

    @property
    def identity(self) -> Mapping[str, Any]:
        """The settings that can change what is trained; a trained model can be stored once more in another way."""
        return {name: value for name, value in asdict(self).items() if name != "weights"}


class AnySubsetObjective(Objective):
    """A model of its own, trained from scratch or further, on stories or on programs; nothing is cached."""

    method, settings_type = "assd", AnySubsetSettings
    needs_target, has_matrices = False, True
    unused_keys = TARGET_KEYS | {
        "windows_per_text", "discount", "uniform_beta", "distillation_weight", "greedy_fraction"
    }  # fmt: skip
    unused_keys_hint = "training of an any-subset model has no {}; leave it out"

    def validate(self, recipe: Recipe, keys: Collection[str]) -> None:
        super().validate(recipe, keys)
        if recipe.settings.architecture == "xlnet" and recipe.schedule.optimizer == "muon":
            raise ValueError("an XLNet is trained by adamw alone; set optimizer=adamw")

    def without_effect(self, recipe: Recipe) -> Mapping[str, str]:
        found: dict[str, str] = {}
        if recipe.settings.architecture != "any-subset":
            found["correction_steps"] = "only an any-subset model has a pairwise correction"
        if recipe.settings.architecture == "left-to-right":
            found |= dict.fromkeys(("span_probability", "order", "mask_ratio"), "a causal model fills no holes")
        return found

    def resolve_initial(self, folder: Path) -> Path:
        """The folder of a model, which may be one of a hub."""
        return folder if folder.exists() else resolve(str(folder))

    def select_texts(self, recipe: Recipe, paths: Sequence[Path]) -> Sequence[str]:
        """All different stories and programs, in random order."""
        if missing := [path for path in paths if not path.exists()]:
            raise ValueError(
                f"there is no text {missing[0]}; give --text a file of stories, or --code a folder of programs"
            )
        programs = [path for path in paths if infill_texts.holds_programs(path)]
        found = [story for path in paths if path not in programs for story in infill_texts.read_stories(path)]
        found += [one for path in programs for one in infill_texts.read_programs(path)]
        texts = list(dict.fromkeys(found))
        if len(texts) < MIN_TEXTS:
            named = f" in {' and '.join(map(str, paths))}" if paths else ""
            raise ValueError(
                f"only {len(texts)} stories or functions{named}; give {MIN_TEXTS} or more: --text FILE, whose stories"
                " stand between empty lines, or --code FOLDER of Python programs"
            )
        return [texts[index] for index in seeded_generator(recipe.data.seed, "texts").permutation(len(texts))]

    def describe_texts(self, recipe: Recipe, samples: Sequence[str]) -> dict[str, Any]:
        return {"texts": len(samples), "characters": sum(map(len, samples))}

    def decoding_commands(self, recipe: Recipe, folder: str) -> list[str]:
        if recipe.settings.architecture == "left-to-right":
            return [f'saltus generate --model {folder} --raw "Once upon a time"']
        return [f'saltus infill --model {folder} "Once upon a time there was a [[3]]."']

    def make_task(self, inputs: TrainingInputs) -> AnySubsetTrainingTask:
        recipe, settings, folder = inputs.recipe, inputs.recipe.settings, inputs.initial_folder
        model, tokenizer = _new_model(recipe, inputs.samples) if folder is None else _load_model(folder, settings)
        if settings.weights != "bf16":
            require_packable(model.config.to_dict())
        num_held_out = max(int(len(inputs.samples) * recipe.data.validation_fraction), 1)
        held_out, training = (
            _tokenize(texts, tokenizer, recipe.data.max_length)
            for texts in (inputs.samples[:num_held_out], inputs.samples[num_held_out:])
        )
        if not (training and held_out):
            raise ValueError(f"no text that is held out has {infill_texts.MIN_TOKENS} tokens; give longer texts")
        newline = tokenizer.get_vocab().get(infill_texts.NEWLINE_PIECE)
        blank = (getattr(model.config, ANY_SUBSET, None) or {}).get("blank")
        holes = HoleSettings(
            settings.mask_ratio, span_probability=settings.span_probability, order=settings.order, blank_token=blank,
            newline_token=newline,
        )  # fmt: skip
        return TASKS[settings.architecture](
            model.to(inputs.device), training, held_out, recipe.schedule.steps, recipe.data.batch_size, holes,
            settings.autocast, recipe.data.seed, tokenizer, settings.weights, str(folder or ""),
        )  # fmt: skip

    def next_task(self, inputs: TrainingInputs, task: TrainingTask) -> TrainingTask | None:
        """The pairwise correction of an any-subset model."""
        steps, every = inputs.recipe.settings.correction_steps, inputs.recipe.schedule.checkpoint_steps
        if type(task) is not AnySubsetTrainingTask or not steps:
            return None
        schedule = Schedule(steps, CORRECTION_LEARNING_RATE, checkpoint_steps=every)
        return PairwiseCorrectionTrainingTask(task, schedule=schedule)


def _tokenize(texts: Sequence[str], tokenizer: Any, max_length: int) -> list[np.ndarray]:
    """The tokens of texts, in parts of at most `max_length`."""
    start, end = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    return [part for one in ids for part in infill_texts.split_tokens([*start, *one, *end], max_length)]


def _new_model(recipe: Recipe, texts: Sequence[str]) -> tuple[Any, Any]:
    """An untrained model, and a tokenizer made of the texts."""
    settings = recipe.settings
    tokenizer = infill_texts.train_tokenizer(texts, settings.vocabulary)
    if settings.architecture == "xlnet":
        model: Any = XLNetLMHeadModel(
            XLNetConfig(
                vocab_size=len(tokenizer), d_model=settings.hidden, d_inner=4 * settings.hidden,
                n_layer=settings.layers, n_head=settings.heads, dropout=0.0, bos_token_id=infill_texts.BOS,
                eos_token_id=infill_texts.EOS, pad_token_id=infill_texts.PAD,
            )
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=settings.hidden,
            intermediate_size=int(settings.hidden * 8 / 3) // 32 * 32, num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads, max_position_embeddings=4 * recipe.data.max_length,
            bos_token_id=infill_texts.BOS, eos_token_id=infill_texts.EOS, pad_token_id=infill_texts.PAD,
            tie_word_embeddings=True,
        )  # fmt: skip
        if settings.architecture == "any-subset":
            setattr(config, ANY_SUBSET, {"mask": infill_texts.MASK, "blank": infill_texts.BLANK})
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                generator = seeded_generator(recipe.data.seed, name)
                weight.copy_(torch.from_numpy(generator.normal(0, 0.02, tuple(weight.shape))))
    return model, tokenizer


def _load_model(folder: Path, settings: AnySubsetSettings) -> tuple[Any, Any]:
    """A trained model, in float32, and its tokenizer. Errors: ValueError for one of another architecture."""
    model = load_model(str(folder), folder, torch.float32, weights="bf16")
    if not fills_holes(model):
        raise ValueError(f"{folder} holds a causal model; start with an XLNet or an any-subset model")
    found = "xlnet" if model.config.model_type == "xlnet" else "any-subset"
    if found != settings.architecture:
        raise ValueError(f"{folder} holds a model of the architecture {found}; set architecture={found}")
    return model, load_tokenizer(folder)


OBJECTIVES = {"any-subset": AnySubsetObjective()}
