"""Draft a block of dependent tokens in one cheap pass: a few layers that read the target's features and the uniforms.

The target does the understanding: a slot of the text holds its last hidden state before a token, fused with the
embedding of that token. Behind the slots stand queries, one for each position to draft, which know nothing but the
uniforms that will pick the tokens up to theirs (PTP, Eq. 5). The target's own unembedding, cut to common tokens, reads
the answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from saltus.core.forward import Forward, Reply
from saltus.networks import attention, native
from saltus.networks.attention import Call, Part
from saltus.networks.auxiliary import Auxiliary
from saltus.networks.lean import Lean, supports
from saltus.networks.linear import Exact
from saltus.networks.memory import Memory

ROWS = 256  # of one pass
HIDDEN_MASK = -30000.0


@dataclass(frozen=True)
class Shape:
    """What a drafter is made of; the hidden size is the target's."""

    hidden: int
    intermediate: int
    layers: int = 2
    heads: int = 9
    kv_heads: int = 3
    window: int = 8  # queries that it was trained with
    embedding: str = "bits"  # of uniforms, see Auxiliary
    told: bool = True  # the temperature
    informed: bool = True  # False: a constant in place of every uniform, which is independent prediction
    rope_theta: float = 10000.0


class DraftModel(nn.Module):
    """The layers and embeddings of a drafter. The target's embeddings come from outside and are not trained."""

    tokens: Tensor  # [draft] ids of the target's vocabulary that are drafted

    def __init__(self, shape: Shape, tokens: Int[Tensor, "draft"], embeddings: Tensor, unembedding: Tensor) -> None:
        super().__init__()
        self.shape = shape
        config = LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=1, rms_norm_eps=1e-5,
            max_position_embeddings=1 << 20, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)
        self.llama.lm_head = nn.Linear(shape.hidden, len(tokens), bias=False)
        self.llama.lm_head.weight = nn.Parameter(unembedding[tokens].clone(), requires_grad=False)
        self.fuse = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.auxiliary = Auxiliary(shape.hidden, shape.embedding, shape.told)
        self.query = nn.Parameter(torch.randn(shape.hidden) * 0.02)
        self.register_buffer("tokens", tokens, persistent=False)
        self.embeddings = [embeddings]  # in a list: neither a parameter nor a buffer of ours

    def slots(self, features: Float[Tensor, "*slots hidden"], tokens: Int[Tensor, "*slots"]) -> Tensor:
        """The inputs of slots: the feature before each token, and the token."""
        dtype = self.fuse.weight.dtype
        embedded = nn.functional.embedding(tokens, self.embeddings[0]).to(dtype)
        scale = embedded.shape[-1] ** 0.5 / embedded.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        return self.fuse(torch.cat([_normed(features.to(dtype)), embedded * scale], -1))

    def queries(self, u: Float[Tensor, "*queries"], temperature: Float[Tensor, "*queries"]) -> Tensor:
        """The inputs of queries."""
        if not self.shape.informed:
            u = torch.zeros_like(u)
        return self.query + self.auxiliary(u, temperature)

    def forward(self, inputs: Float[Tensor, "batch rows hidden"], positions: Int[Tensor, "batch rows"],
                visible: Bool[Tensor, "batch rows rows"]) -> Float[Tensor, "batch rows hidden"]:  # fmt: skip
        """Last hidden states, for training; `lm_head` reads them."""
        mask = torch.zeros_like(visible, dtype=inputs.dtype).masked_fill(~visible, HIDDEN_MASK)[:, None]
        return self.llama.model(inputs_embeds=inputs, position_ids=positions, attention_mask=mask).last_hidden_state


def _normed(x: Tensor) -> Tensor:
    return x * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)


def fingerprint(model: Any) -> str:
    """What tells a target from others: its shapes and a sample of its embeddings."""
    weight = model.get_input_embeddings().weight
    sample = weight[:: max(len(weight) // 64, 1)].detach().float().cpu().numpy()
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return blake2b(sample.astype("<f4").tobytes() + repr(shapes).encode(), digest_size=16).hexdigest()


def save_drafter(
    model: DraftModel, folder: Path, target: str, target_fingerprint: str, card: Mapping[str, Any]
) -> None:
    """Weights as bfloat16, and what they are for. The target's own embeddings are not saved."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in ("llama.lm_head.weight", "llama.model.embed_tokens.weight")
    }
    save_file(kept | {"tokens": model.tokens.to(torch.int32)}, folder / "drafter.safetensors")
    told = {"kind": "drafter", "target": target, "fingerprint": target_fingerprint, "shape": asdict(model.shape)}
    (folder / "saltus.json").write_text(json.dumps(told | {"card": dict(card)}, indent=1) + "\n", encoding="utf-8")


def load_drafter(folder: Path, target: Any, name: str) -> DraftModel:
    """A drafter for this target (a Hugging Face model called `name`), in its dtype. Errors: ValueError of one line."""
    try:
        told = json.loads((folder / "saltus.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "drafter.safetensors")
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no drafter ({Path(error.filename).name} is missing); train one") from None
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"the drafter in {folder} is damaged ({error}); fetch or train it again") from None
    if told["fingerprint"] != fingerprint(target):
        raise ValueError(f"the drafter in {folder} was trained for {told['target']}, not {name}; train one for {name}")
    unembedding = target.get_output_embeddings().weight.detach()
    embeddings = target.get_input_embeddings().weight.detach()
    tokens = weights.pop("tokens").long()
    model = DraftModel(Shape(**told["shape"]), tokens, embeddings, unembedding)
    missing = set(model.state_dict()) - set(weights) - {"llama.lm_head.weight", "llama.model.embed_tokens.weight"}
    if missing:
        raise ValueError(f"the drafter in {folder} lacks {min(missing)}; fetch or train it again")
    model.load_state_dict(weights, strict=False)
    return model.to(target.dtype).eval()


@dataclass
class DraftMemory:
    """What a drafter has read of one text: slots for the decided tokens from `start` on."""

    start: int = 0
    read: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    inner: Memory = field(default_factory=Memory)

    @property
    def keys(self) -> Tensor | None:
        return self.inner.keys

    @property
    def values(self) -> Tensor | None:
        return self.inner.values


@dataclass
class DraftNetwork:
    """A drafter behind Forward and Reply: a Forward brings the target's features of the tokens decided since."""

    model: DraftModel
    lean: Lean | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.model.llama.set_attn_implementation(attention.NAME)
        if supports(self.model.llama):
            self.lean = Lean(self.model.llama, ROWS)

    def memory(self) -> DraftMemory:
        return DraftMemory()

    @torch.inference_mode()
    def forward(self, asks: Sequence[Forward], memories: Sequence[DraftMemory]) -> list[Reply]:
        """Logits over the target's vocabulary (−inf for tokens that it does not draft), of each query."""
        with native.in_charge():
            return [self._answer(ask, memory) for ask, memory in zip(asks, memories, strict=True)]

    def _answer(self, ask: Forward, memory: DraftMemory) -> Reply:
        started = time.perf_counter()
        assert ask.hidden is not None and ask.uniforms is not None
        decided = ask.canvas.decided
        end = len(decided)
        begin = end - len(ask.hidden)  # slots that it brings
        past = memory.start + len(memory.read)
        if past != begin or not np.array_equal(memory.read, decided[memory.start : past]):
            memory.start, memory.inner, past = begin, Memory(), begin
        tokens = torch.from_numpy(decided[past:end].copy())
        slots = self.model.slots(ask.hidden[past - begin :], tokens)
        u = torch.tensor([x or 0.0 for x in ask.uniforms], dtype=torch.float64)
        queries = self.model.queries(u, torch.full_like(u, ask.temperature))
        rows = torch.cat([slots, queries.to(slots.dtype)])
        filled = past - memory.start
        answers = None
        for at in range(0, len(rows), ROWS - len(u)):
            last = at + ROWS - len(u) >= len(slots)
            piece = rows[at:] if last else rows[at : at + ROWS - len(u)]
            positions = np.arange(filled + at, filled + at + len(piece))
            part = Part(memory.inner, filled + at, positions, np.tri(len(piece), dtype=np.uint8))
            answers = self._pass(piece, positions, part, len(u) + 1 if last else 1)
            if last:
                break
        memory.read = decided[memory.start : end].copy()
        assert answers is not None
        logits = answers.new_full((len(answers), len(self.model.embeddings[0])), -torch.inf)
        logits[:, self.model.tokens] = answers
        return Reply(logits, None, time.perf_counter() - started, end - past, len(rows))

    def _pass(self, inputs: Tensor, positions: np.ndarray, part: Part, wanted: int) -> Tensor:
        call = Call([part], self.model.shape.layers)
        keep = torch.arange(len(inputs) - wanted, len(inputs))
        if self.lean is not None:
            return self.lean(inputs, torch.from_numpy(positions), call, keep)[0]
        with attention.during(call), Exact():
            places = torch.from_numpy(positions[None])
            return self.model.llama(
                inputs_embeds=inputs[None], position_ids=places, logits_to_keep=keep, use_cache=False
            ).logits[0]
