"""Trajectories of Jacobi decoding: texts with every iterate of every block (Jacobi Forcing, §2.1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from saltus.core.picking import Coupling
from saltus.training.data.hidden_states import Sample
from saltus.training.data.teacher_texts import read_metadata, read_rows, shard_paths
from saltus.training.data.uniform_intervals import Truncation


@dataclass(frozen=True)
class Trajectory(Sample):
    """A text, and for each call the number of tokens decided before it and its guesses for the next ones."""

    block_size: int
    seed: int  # of the random numbers that picked the text
    calls: Sequence[Sequence[int]]
    coupling: Coupling = "probability"
    truncation: Truncation | None = None  # of the distributions that it was picked from

    def iterates_by_block(self) -> list[list[list[int]]]:
        """The iterates of each block, in order; the last one is the text. They are truncated at the text's end."""
        text, blocks = list(self.completion), []
        for start in range(0, len(text), self.block_size):
            stop = min(start + self.block_size, len(text))
            iterates = []
            for done, *guesses in self.calls:
                if start <= done < stop:
                    iterate = text[start:done] + guesses[: stop - done]
                    iterates.append(iterate + text[start + len(iterate) : stop])  # a text's last hole is not guessed
            blocks.append([*iterates, text[start:stop]])
        return blocks


def read_trajectories(folder: Path) -> list[Trajectory]:
    """All texts of a folder of `saltus collect jacobi`.

    Errors: ValueError where it holds none, where files are missing or cut short, and where iterates contradict texts.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of trajectories; write one with saltus collect jacobi")
    metadata = read_metadata(folder)
    if not metadata.get("block_size"):
        raise ValueError(f"{folder} holds texts without iterates; write them with saltus collect jacobi")
    trajectories, coupling = [], metadata["coupling"]
    truncation = Truncation(metadata.get("top_k", 0), metadata.get("top_p", 1.0))
    for file in shard_paths(folder, metadata):
        for row in read_rows(file, ("prompt", "completion", "temperature", "seed", "iterates")):
            prompt, text, temperature = row["prompt"], row["completion"], float(row["temperature"])
            trajectory = Trajectory(
                prompt, text, temperature, metadata["block_size"], row["seed"], row["iterates"], coupling, truncation
            )
            if not _is_consistent(trajectory):
                raise ValueError(f"{file} is damaged (iterates do not fit their text); delete it and collect again")
            trajectories.append(trajectory)
    return trajectories


def _is_consistent(trajectory: Trajectory) -> bool:
    """True if every call decided one token or more, and guessed within its block."""
    if not all(trajectory.calls) or bool(trajectory.calls) != bool(trajectory.completion):
        return False
    if not trajectory.calls:
        return True
    decided = [call[0] for call in trajectory.calls]
    increasing = all(
        before < after for before, after in zip(decided, [*decided[1:], len(trajectory.completion)], strict=True)
    )
    within = all(len(call) - 1 <= trajectory.block_size - call[0] % trajectory.block_size for call in trajectory.calls)
    return increasing and within and decided[0] == 0


def texts_to_train_on(trajectories: Sequence[Trajectory], max_length: int, window: int) -> list[Trajectory]:
    """Those of more than a block, truncated to `max_length` tokens.

    Errors: ValueError for fewer than two, for texts of different kinds, and for a `window` of more blocks than a text.
    """
    texts = [short for trajectory in trajectories if (short := _truncate(trajectory, max_length)) is not None]
    if len(texts) < 2:
        raise ValueError(
            f"there are fewer than two texts of more than a block within {max_length} tokens to"
            " learn from and to hold out; collect more or longer ones, or raise data.max_length"
        )
    for name in ("block_size", "coupling"):
        found = sorted({getattr(trajectory, name) for trajectory in texts})
        if len(found) > 1:
            raise ValueError(
                f"the texts were written with a {name} of {found[0]} and of {found[1]}; train on one kind after the"
                " other, by --from"
            )
    blocks = -(-max(len(trajectory.completion) for trajectory in texts) // texts[0].block_size)
    if window > blocks:
        raise ValueError(
            f"the noise's window is {window} blocks, but the longest text has {blocks} of"
            f" {texts[0].block_size} tokens; take --set window={blocks}, or collect longer texts"
        )
    return texts


def _truncate(trajectory: Trajectory, max_length: int) -> Trajectory | None:
    """Its beginning, in whole blocks if it is truncated; None unless that is more than one block."""
    size = len(trajectory.completion)
    if len(trajectory.prompt) + size > max_length:
        size = max(max_length - len(trajectory.prompt), 0) // trajectory.block_size * trajectory.block_size
    if size <= trajectory.block_size:
        return None
    return replace(
        trajectory, completion=trajectory.completion[:size], calls=[call for call in trajectory.calls if call[0] < size]
    )


def trajectories_digest(trajectories: Sequence[Trajectory]) -> str:
    """A digest of the texts and of their iterates."""
    digest = blake2b(digest_size=16)
    for trajectory in trajectories:
        digest.update(
            json.dumps(
                [
                    trajectory.block_size,
                    trajectory.seed,
                    [*trajectory.prompt],
                    [*trajectory.completion],
                    [*trajectory.calls],
                ]
            ).encode()
        )
    return digest.hexdigest()
