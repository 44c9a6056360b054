"""Decode many texts at once: batch their pending forward passes into one call for each network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from saltus.core.distributions import DecodeGenerator
from saltus.core.forward import TARGET, ForwardInputs, ForwardOutputs
from saltus.core.protocols import Network


@dataclass
class SequenceState:
    """One running text: its generator, the forward pass that it waits for, and its KV cache on each network."""

    generator: DecodeGenerator
    kv_caches: dict[str, Any] = field(default_factory=dict)
    pending: ForwardInputs | None = None

    def advance(self, outputs: ForwardOutputs | None) -> bool:
        """Send the outputs and take the next inputs; False when the text is finished."""
        try:
            self.pending = next(self.generator) if outputs is None else self.generator.send(outputs)
        except StopIteration:
            self.pending = None
        return self.pending is not None


def run_batch(sequences: list[SequenceState], networks: Mapping[str, Network]) -> Iterator[None]:
    """Run all sequences to their end, one batched call of the target a round; yields after each round.

    Sequences may be added to the list between rounds (continuous batching); finished ones are removed from it. Errors:
    ValueError if a sequence waits for a network that is not in `networks`; errors of a network pass through.
    """
    while True:
        sequences[:] = [one for one in sequences if one.pending is not None or one.advance(None)]
        if not sequences:
            return
        if unknown := {one.pending.network_name for one in sequences if one.pending is not None} - set(networks):
            raise ValueError(f"a drafter calls a network {unknown.pop()!r}, but there are {', '.join(networks)}")
        _run_round(sequences, networks)
        sequences[:] = [one for one in sequences if one.pending is not None]
        yield


def _run_round(sequences: list[SequenceState], networks: Mapping[str, Network]) -> None:
    """One batched call of the target, then calls of the draft networks until no sequence waits for one.

    So sequences whose drafts take different numbers of calls share the target's next call. A function of its own, so
    that between rounds nothing holds a sequence's memory.
    """
    _call(TARGET, sequences, networks)
    draft_networks = [name for name in networks if name != TARGET]
    while sum(_call(name, sequences, networks) for name in draft_networks):
        pass


def _call(name: str, sequences: list[SequenceState], networks: Mapping[str, Network]) -> bool:
    """One batched call for all sequences that wait for a network; False if none does."""
    waiting = [one for one in sequences if one.pending is not None and one.pending.network_name == name]
    if not waiting:
        return False
    network = networks[name]
    # a `ReadsTargetKVCache`; isinstance takes long in every round
    owner = TARGET if getattr(network, "reads_target_kv_cache", False) else name
    for one in waiting:
        if owner not in one.kv_caches:
            one.kv_caches[owner] = networks[owner].new_kv_cache()
    batch = [one.pending for one in waiting if one.pending is not None]
    batch_outputs = network.forward(batch, [one.kv_caches[owner] for one in waiting])
    if len(batch_outputs) != len(batch):
        raise ValueError(
            f"the network {name} returned {len(batch_outputs)} outputs for {len(batch)} texts; return one for each"
        )
    for one, outputs in zip(waiting, batch_outputs, strict=True):
        one.advance(outputs)
    return True


def run(generator: DecodeGenerator, networks: Mapping[str, Network]) -> None:
    """Decode one text to its end."""
    for _ in run_batch([SequenceState(generator)], networks):
        pass
