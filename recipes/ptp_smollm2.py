"""Train the drafter of the default model: read teacher text with the target once, then train on what was kept.

    python recipes/ptp_smollm2.py --teacher teacher.jsonl.gz --work work --out drafter

The teacher file holds what the target wrote, a JSON object a line: prompt and completion as token ids, temperature (0
or that of sampling). Both steps go on where they were interrupted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import torch
from tqdm import tqdm

import saltus
from saltus.evaluation.machine import commit, machine
from saltus.networks.drafter import DraftModel, Shape, fingerprint, save_drafter
from saltus.training.drafter import Recipe, train
from saltus.training.states import Sample, collect, load_states

TEMPERATURES = (0.7, 1.0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--teacher", type=Path, required=True)
    options.add_argument("--texts", type=int, default=2400, help="of the teacher's, evenly spread")
    options.add_argument("--work", type=Path, required=True, help="states and checkpoints")
    options.add_argument("--out", type=Path, required=True, help="the trained drafter")
    options.add_argument("--vocabulary", type=int, default=8192, help="tokens that are drafted: the most frequent")
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--intermediate", type=int, default=960)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--window", type=int, default=8)
    options.add_argument("--embedding", default="bits")
    options.add_argument("--uninformed", action="store_true", help="a constant in place of the uniforms")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()

    data = args.teacher.read_bytes()
    text = gzip.decompress(data) if args.teacher.suffix == ".gz" else data
    rows = [json.loads(line) for line in text.decode().splitlines()]
    count = min(args.texts, len(rows))
    rows = [rows[number * len(rows) // count] for number in range(count)]
    samples = [
        Sample(row["prompt"], row["completion"], row["temperature"]) for row in rows if len(row["completion"]) > 8
    ]
    engine = saltus.load(args.model, "plain")
    target = engine.network.model
    with tqdm(total=len(samples), desc="reading", unit="text") as bar:
        for done in collect(engine.network, samples, args.work / "states", TEMPERATURES):
            bar.update(done - bar.n)
    states = load_states(args.work / "states")
    counts = torch.bincount(states.tokens)
    draft = counts.argsort(descending=True)[: args.vocabulary].sort().values
    print(
        f"{len(states.tokens):,} tokens; {counts[draft].sum() / counts.sum():.1%} are among the {len(draft):,} drafted"
    )
    torch.manual_seed(args.seed)
    shape = Shape(
        target.config.hidden_size, args.intermediate, args.layers, window=args.window, embedding=args.embedding,
        informed=not args.uninformed,
    )  # fmt: skip
    embeddings = target.get_input_embeddings().weight.detach()
    model = DraftModel(shape, draft, embeddings, target.get_output_embeddings().weight.detach())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(f"{trained:,} parameters, {2 * trained / 1e6:.1f} MB")
    recipe = Recipe(steps=args.steps, seed=args.seed)
    started = time.time()
    history = train(model, states, recipe, args.work / "checkpoints", draft, TEMPERATURES)
    card = {
        "recipe": vars(recipe), "teacher_tokens": len(states.tokens), "minutes": round((time.time() - started) / 60, 1),
        "held_out_tokens_per_call": history[-1:], "machine": machine(), "commit": commit(),
    }  # fmt: skip
    save_drafter(model, args.out, args.model, fingerprint(target), card)
    (args.work / "history.json").write_text(json.dumps(history, indent=1))
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
