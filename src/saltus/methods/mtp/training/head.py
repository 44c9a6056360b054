"""Training of a head that reads its own outputs: one pass over the contexts, then one for each further draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.core.picking import Coupling
from saltus.kernels.packed_weight import select_rows
from saltus.loading.metadata import Kind
from saltus.methods.mtp.files import read_trained_head
from saltus.methods.mtp.module import MtpModule, linear_of
from saltus.methods.mtp.trained_head import KIND, save_head
from saltus.models.cpu import attention
from saltus.models.decoder_of import decoder_of
from saltus.models.output_layer import norm_offset
from saltus.training.data.packed_forward import PackedMemory, packed_states
from saltus.training.data.window_dataset import Batch
from saltus.training.data.window_packing import pack_windows, slice_rows
from saltus.training.query_drafter_task import QueryDrafterTask, set_initial_values


@dataclass(frozen=True)
class MtpShape:
    """The sizes of a head: those of its target, and how many drafts it is trained for."""

    hidden: int
    window: int  # drafts, each read with the outputs of the one before
    hidden_state_layers: tuple[int, ...] = ()  # it reads the target's last states only
    reads_uniforms: bool = False  # it learns distributions


class TrainableHead(nn.Module):
    """The module of a head with weights to train, in float32. Embeddings and output layer are the target's.

    GPT-2's initial values, from the seed alone; the last norm is the target's. Errors: ValueError for a target whose
    layers have experts, or numbers that are not trained.
    """

    tokens: Tensor  # [draft] ids of the target's vocabulary that are drafted
    unembedding: Tensor  # [draft, hidden]
    correction: None = None

    def __init__(self, target: Any, shape: MtpShape, tokens: Int[Tensor, "draft"], seed: int = 0) -> None:
        super().__init__()
        self.shape, self.head = shape, [head := MtpModule(target, False, False, True)]  # in a list: no submodule
        layer = head.parts["layer"]
        odd = [name for name, weight in layer.named_parameters() if weight.ndim > 2]
        if odd := [*odd, *(name for name, _ in layer.named_buffers())]:
            raise ValueError(
                f"layers of {target.config.model_type} have {odd[0]}, which no head learns here; train a drafter with"
                " saltus train ptp"
            )
        self.parts = nn.ModuleDict(head.parts)
        self.parts.to_empty(device="cpu").float().requires_grad_(True)
        self._initialize(seed, target)
        self.register_buffer("tokens", tokens, persistent=False)
        unembedding = select_rows(target.get_output_embeddings().weight, tokens.to(target.device))
        self.register_buffer("unembedding", unembedding, persistent=False)
        attention.install_attention(head.model)

    @torch.no_grad()
    def _initialize(self, seed: int, target: Any) -> None:
        set_initial_values(self.parts, 1, seed)
        for name, weight in self.parts.named_parameters():
            if weight.ndim != 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0 - norm_offset(target))
        self.parts["norm"].load_state_dict(decoder_of(target).norm.state_dict())

    @property
    def lm_head(self) -> nn.Linear:
        """The target's output layer, restricted to the drafted tokens."""
        return linear_of(self.unembedding)

    @property
    def matrices(self) -> list[Tensor]:
        """What the optimizer muon trains."""
        return [weight for weight in self.parts.parameters() if weight.ndim == 2]

    def inputs(
        self, tokens: Int[Tensor, "*rows"], states: Float[Tensor, "*rows hidden"]
    ) -> Float[Tensor, "*rows hidden"]:
        """`MtpModule.inputs` with gradients."""
        embeddings = self.head[0].target[0].get_input_embeddings().weight
        embedded = select_rows(embeddings, tokens.to(embeddings.device)).float()
        parts = [self.parts["embedding_norm"](embedded), self.parts["state_norm"](states.float())]
        return self.parts["projection"](torch.cat(parts, -1))

    def forward(
        self, states: Float[Tensor, "batch slots hidden"], batch: Batch, length: int
    ) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
        """Outputs at the context slots, and of the drafts of each window, given its true tokens (DeepSeek-AI 2024).

        A slot holds a token and the target's state before it. The first draft of a window comes from the slot before
        it; each further one from the token before it and the output there, after the window's context.
        """
        starts, windows = batch.window_starts, batch.window_starts.shape[1]
        none = torch.full((*starts.shape, self.shape.window - 1), torch.nan, device=starts.device)
        packed = pack_windows(batch.tokens[:, :length], starts, none, length)
        model, memory = self.head[0].model, PackedMemory(packed.positions)
        context = packed_states(
            model, self.inputs(packed.tokens[:, :length], states), slice_rows(packed, 0, length), memory
        )
        places = (starts - 1)[..., None].expand(-1, -1, context.shape[-1])
        outputs = [context.gather(1, places)]
        for draft in range(self.shape.window - 1):
            begin, read = length + draft * windows, self.inputs(batch.targets[..., draft], outputs[-1])
            outputs.append(packed_states(model, read, slice_rows(packed, begin, begin + windows), memory))
        return context, torch.stack(outputs, 2)


@dataclass(eq=False)
class MtpTrainingTask(QueryDrafterTask):
    """A head, whose drafts of a window are made one after the other from the true tokens and its own outputs."""

    kind: ClassVar[Kind] = KIND
    module: TrainableHead = field(init=False)

    @classmethod
    def learns_distributions(cls, coupling: Coupling) -> bool:
        return True

    def _new_module(self, draft_tokens: Int[Tensor, "draft"]) -> TrainableHead:
        self.target.requires_grad_(False)
        return TrainableHead(self.target, self.shape, draft_tokens, self.window_settings.seed)

    def _forward(
        self, batch: Batch, context_length: int | None = None
    ) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
        length = context_length or int(batch.window_starts.max())
        states = self.corpus.hidden_states[batch.corpus_rows[:, :length] - 1]
        return self.module(states.to(self._device), batch.to(self._device), length)

    def _logits(self, hidden_states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        """Those of the target's class, as in decoding."""
        return self.scale_logits(super()._logits(hidden_states))

    @classmethod
    def load_initial(cls, folder: Path, target: Any, target_name: str, shape: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The weights of a saved head, by the names of `TrainableHead.parts`, and its tokens. Errors: ValueError."""
        return read_trained_head(folder, target, target_name)

    def initialize_from(self, folder: Path) -> None:
        """Start with a saved head and its vocabulary."""
        weights, tokens = self.load_initial(folder, self.target, self.target_name, self.shape)
        self._set_module(self._new_module(tokens))
        self.module.parts.load_state_dict(weights)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `--option mtp.model=FOLDER`."""
        module = self.module
        save_head(module.parts.state_dict(), module.tokens, folder, self.target, self.target_name, card)
