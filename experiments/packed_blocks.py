"""How much quicker an iterate of every block is learned from in one packed forward than in a forward of its own.

    python experiments/packed_blocks.py [MODEL] [--blocks 16] [--size 16] [--prompt 64] [--rounds 5]

Both compute the same losses of the same weights (tests/methods/jacobi/test_jacobi_training.py) and their gradients: the
divergence of what each block's iterate says from what the text says, every block after the iterates before it.
Separate forwards read the text once, for what it says, and then for each block the prompt, the iterates before and its
own.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

import saltus
from saltus.evaluation.reports.environment import git_commit, machine_info
from saltus.methods.jacobi.training.block_packing import BlockNoise
from saltus.methods.jacobi.training.forcing import JacobiTrainingTask
from saltus.methods.jacobi.training.trajectories import Trajectory
from saltus.training import losses
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import WindowSettings


def texts(blocks: int, size: int, prompt: int, vocabulary: int) -> list[Trajectory]:
    """Random tokens, and calls that guess at random: what they say does not change what they cost."""
    made = []
    for number in range(2):
        tokens = seeded_generator(0, "text", number).integers(3, vocabulary, prompt + blocks * size)
        guesses = seeded_generator(0, "guesses", number).integers(3, vocabulary, blocks * size)
        calls = [[done, *guesses[done : done + size].tolist()] for done in range(0, blocks * size, size)]
        made.append(Trajectory(tokens[:prompt].tolist(), tokens[prompt:].tolist(), 0.0, size, number, calls))
    return made


def separate(course: JacobiTrainingTask, one: Trajectory, iterate: list[int]) -> torch.Tensor:
    """The loss, a forward for each block, its gradient taken at once so that no forward waits for the others."""
    first, words, total = len(one.prompt), list(one.completion), 0.0
    with torch.no_grad():
        distributions = course.model(torch.tensor([[*one.prompt, *words]]), use_cache=False).logits[0, first:]
    for start in range(0, len(words), one.block_size):
        stop = start + one.block_size
        ids = torch.tensor([[*one.prompt, *iterate[:stop]]])
        logits = course.model(ids, use_cache=False, logits_to_keep=one.block_size).logits[0]
        loss = losses.kl_divergence(distributions[start:stop], logits).mean() * one.block_size / len(words)
        loss.backward()
        total += float(loss.detach())
    return torch.tensor(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--size", type=int, default=16, help="tokens of a block")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the blocks")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    model = saltus.load(given.model, "plain", dtype="float32", exact=False).network.model
    found = texts(given.blocks, given.size, given.prompt, model.config.vocab_size)
    windows = WindowSettings(batch_size=1, validation_fraction=0.5, max_length=10**6, discount=1.0)
    noise = BlockNoise("any", "noisy", given.blocks)
    course = JacobiTrainingTask(model, found, None, noise, text_weight=0.0, window_settings=windows)
    one = course.training_trajectories[0]
    iterate = [token for iterates in one.iterates_by_block() for token in iterates[0]]
    seconds: dict[str, list[float]] = {"packed": [], "separate": []}
    for number in range(given.rounds + 1):
        for way in seconds if number % 2 else reversed(seconds):
            model.zero_grad(set_to_none=True)
            model.set_attn_implementation("saltus" if way == "packed" else "sdpa")
            began = time.perf_counter()
            if way == "packed":
                course.batch_loss([one], [iterate]).backward()
            else:
                separate(course, one, iterate)
            if number:
                seconds[way].append(time.perf_counter() - began)
    tokens = given.blocks * given.size
    rates = {way: tokens / statistics.median(taken) for way, taken in seconds.items()}
    ratios = np.array(seconds["separate"]) / np.array(seconds["packed"])
    print(json.dumps({
        "model": given.model, "blocks": given.blocks, "size": given.size, "prompt": given.prompt,
        "tokens_per_second": {way: round(rate, 1) for way, rate in rates.items()},
        "ratio": round(float(np.median(ratios)), 2), "ratios": np.sort(ratios).round(2).tolist(),
        "machine": machine_info(), "commit": git_commit(),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
