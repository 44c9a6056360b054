"""A picture of the two tokens that each pair of uniforms gives: compatible pairs green, others red (PTP, Figure 5).

    python experiments/pair_map.py --out pairs.png

A tiny grammar replaces a language model, so that it takes seconds: a line begins with `def`, `import`, `for` or
`return`, and the possible next words depend on that. One student is conditioned on the uniforms, another is not. The
picture shows both beside the exact distribution.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ptp_lab import SkippedTokens, Student, distillation_loss, draft_window, prepend_start_position
from saltus.core.picking import Coupling
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import pick_tokens, uniform_intervals
from saltus.training.data.window_packing import UniformConditioning
from saltus.training.loop.training_loop import Schedule, train
from saltus.training.losses import DistillationSettings

GRAMMAR = {
    "def": (0.4, {"main": 0.5, "read": 0.3, "test": 0.2}),
    "import": (0.3, {"numpy": 0.45, "torch": 0.35, "json": 0.2}),
    "for": (0.2, {"i": 0.55, "row": 0.25, "key": 0.2}),
    "return": (0.1, {"None": 0.4, "True": 0.25, "row": 0.2, "i": 0.15}),
}
WORDS = list(dict.fromkeys([*GRAMMAR, *(word for _, names in GRAMMAR.values() for word in names)]))
GREEN, RED = (0.30, 0.62, 0.42), (0.78, 0.27, 0.24)


def distributions() -> tuple[Tensor, Tensor]:
    """Probabilities of the first word, [words], and of the second after each first, [words, words]."""
    first, second = torch.zeros(len(WORDS)), torch.zeros(len(WORDS), len(WORDS))
    for word, (probability, names) in GRAMMAR.items():
        first[WORDS.index(word)] = probability
        for name, share in names.items():
            second[WORDS.index(word), WORDS.index(name)] = share
    return first, second


def sample_pairs(uniforms: Tensor, coupling: Coupling) -> tuple[Tensor, Tensor]:
    """The exact pairs, [pairs, 2], and the logits that they were picked from."""
    first, second = distributions()
    first_logits = first.log().clamp_min(-40).expand(len(uniforms), -1)
    one = pick_tokens(uniforms[:, 0], first_logits, coupling=coupling)
    second_logits = second[one].log().clamp_min(-40)
    other = pick_tokens(uniforms[:, 1], second_logits, coupling=coupling)
    return torch.stack([one, other], 1), torch.stack([first_logits, second_logits], 1)


def train_student(form: UniformConditioning, steps: int, seed: int, coupling: Coupling) -> Student:
    """A student of the pairs."""
    student = Student(len(WORDS), 4, hidden=48, layers=2, heads=4, seed=seed)
    settings, skipped = DistillationSettings(form, "ce", 2), SkippedTokens()

    def loss(step: int) -> Tensor:
        generator = seeded_generator(seed, "pairs", step)
        texts, targets = sample_pairs(torch.from_numpy(generator.random((128, 2))), coupling)
        intervals, _ = prepend_start_position(uniform_intervals(targets, texts, coupling=coupling), targets)
        starts = torch.ones(len(texts), 1, dtype=torch.int64)
        return distillation_loss(
            student, student.prepend_start_token(texts), intervals, starts, settings, generator, skipped
        )

    with TemporaryDirectory() as folder:
        train(
            student, loss, Schedule(steps, 3e-3, warmup_steps=20, checkpoint_steps=steps), Path(folder) / "run.pt", {}
        )
    return student


def maps(steps: int, size: int, seed: int = 0, coupling: Coupling = "probability") -> dict[str, Tensor]:
    """For each way to predict, the pairs on a grid over the unit square, [size · size, 2], first uniform outer."""
    middle = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    square = torch.cartesian_prod(middle, middle)
    found = {"Token by token": sample_pairs(square, coupling)[0]}
    ways: dict[UniformConditioning, str] = {
        "one-hot": "PTP, one call",
        "independent": "Independent prediction, one call",
    }
    for form, name in ways.items():
        student = train_student(form, steps, seed, coupling)
        start = torch.full((len(square), 1), student.start_token)
        found[name] = draft_window(student, start, square, form, coupling)
    return found


def compatible(pairs: Tensor) -> Tensor:
    """True for pairs of the grammar."""
    first, second = distributions()
    return (first[pairs[:, 0]] * second[pairs[:, 0], pairs[:, 1]]) > 0


def paint(found: dict[str, Tensor], size: int, path: Path) -> None:
    """One panel for each way; regions of one pair are outlined, and large ones have a label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(4.6 * len(found), 5), sharey=True, layout="constrained")
    for panel, (name, pairs) in zip(panels, found.items(), strict=True):
        good = compatible(pairs)
        colours = torch.where(good[:, None], torch.tensor(GREEN), torch.tensor(RED)).reshape(size, size, 3)
        numbers = (pairs[:, 0] * len(WORDS) + pairs[:, 1]).reshape(size, size)
        edge = torch.zeros(size, size, dtype=torch.bool)
        edge[1:] |= numbers[1:] != numbers[:-1]
        edge[:, 1:] |= numbers[:, 1:] != numbers[:, :-1]
        colours = torch.where(edge[..., None], 1.0, colours)
        panel.imshow(colours.transpose(0, 1).numpy(), origin="lower", extent=(0, 1, 0, 1), interpolation="nearest")
        for number in numbers.unique():
            places = (numbers == number).nonzero() / size
            if len(places) > 0.02 * size * size:
                words = f"{WORDS[int(number) // len(WORDS)]}\n{WORDS[int(number) % len(WORDS)]}"
                panel.text(*places.mean(0).tolist(), words, ha="center", va="center", fontsize=7, color="white")
        panel.set_title(f"{name}\n{1 - good.double().mean():.1%} of pairs are incompatible", fontsize=11)
        panel.set_xlabel("u₁")
    panels[0].set_ylabel("u₂")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pairs.png"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", type=int, default=200, help="points along each side of the square")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--coupling",
        choices=("probability", "token-order"),
        default="probability",
        help="order of the words in Pick: by falling probability, or by id as in Eq. 2",
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = maps(options.steps, options.size, options.seed, options.coupling)
    for name, pairs in found.items():
        print(f"{name}: {1 - compatible(pairs).double().mean():.2%} of pairs are incompatible")
    paint(found, options.size, options.out)
    print(f"painted {options.out}")


if __name__ == "__main__":
    main()
