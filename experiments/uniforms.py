"""What are uniforms worth to a drafter? Count its right drafts, given the text's own uniforms and given others.

    python experiments/uniforms.py --teacher held_out.jsonl.gz --out uniforms.json
    python experiments/uniforms.py --teacher held_out.jsonl.gz --coupling token-order --adapter adapter
    python experiments/uniforms.py --teacher held_out.jsonl.gz --checkpoints kept/*.pt --plot uniforms.png

The teacher's texts are read as `saltus collect text` wrote them; they should be none that the drafter was trained on.
With checkpoints of a training run, the same is counted for each, so that a plot shows when uniforms begin to pay.
Drafts are chains: a call brings the leading right ones, and the target's own token. An adapter's first query makes no
draft, since the target picks that token itself, but there uniforms are read first: its share is told, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.special import ndtr

import saltus
from saltus.core.picking import Coupling
from saltus.loading.metadata import read_metadata
from saltus.methods.ptp.files import load_drafter
from saltus.methods.ptp.network import DraftModel
from saltus.methods.ptp.training.adapter import AdapterTrainingTask
from saltus.methods.ptp.training.drafter import forward_windows
from saltus.methods.ptp.training.objectives import DrafterObjective
from saltus.methods.ptp.training.text_intervals import TextCorpus, collect_uniform_intervals, load_uniform_intervals
from saltus.methods.shared.adapter_files import load_adapter
from saltus.methods.shared.drafter_files import find_shipped
from saltus.training.data.hidden_states import HiddenStateCorpus, collect_hidden_states, load_hidden_states
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import pick_tokens
from saltus.training.data.window_dataset import Batch, WindowDataset, WindowSettings
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.loop.training_loop import Schedule
from saltus.training.losses import DistillationSettings
from saltus.training.settings import Recipe

LIKELY = 64  # tokens that can be nearest to a blurred uniform
Drafts = Callable[[Tensor, Tensor], Tensor]  # from logits and uniforms


def query_uniforms(uniforms: Tensor, intervals: Tensor) -> dict[str, Tensor]:
    """What queries may get as uniforms, by name."""
    other = torch.from_numpy(seeded_generator(0, "others").random(tuple(uniforms.shape)))
    return {
        "the text's uniforms": uniforms,
        "the middle of each token's interval": intervals.mean(-1),
        "0.5 for each": torch.full_like(uniforms, 0.5),
        "other uniforms": other,
        "none": torch.full_like(uniforms, torch.nan),
    }


def likeliest(logits: Tensor, uniforms: Tensor) -> Tensor:
    return logits.argmax(-1)


def picked(sharpness: float, coupling: Coupling) -> Drafts:
    """By the uniform, from the drafter's own distribution; sharpness 1 is the paper's independent prediction."""
    return lambda logits, uniforms: pick_tokens(uniforms, logits * sharpness, coupling=coupling)


def blurred(width: float) -> Drafts:
    """The token whose interval most probably holds the uniform, if a normal error of this width were added to it."""

    def nearest(logits: Tensor, uniforms: Tensor) -> Tensor:
        distribution, tokens = logits.double().softmax(-1).topk(LIKELY)
        high = distribution.cumsum(-1)
        above, below = ((edge - uniforms[..., None]) / width for edge in (high, high - distribution))
        return tokens.gather(-1, (ndtr(above) - ndtr(below)).argmax(-1, keepdim=True))[..., 0]

    return nearest


def ways_to_draft(coupling: Coupling) -> dict[str, Drafts]:
    """Blurred intervals are those of falling probability, so token order has none."""
    widths = (0.1, 0.3, 1.0) if coupling == "probability" else ()
    return {
        "the likeliest token": likeliest,
        "Pick by the uniform": picked(1.0, coupling),
        **{f"Pick, laws sharpened by {sharpness:g}": picked(sharpness, coupling) for sharpness in (1.3, 1.6, 2.0)},
        **{f"the interval nearest to the uniform, blurred by {width:g}": blurred(width) for width in widths},
    }


@torch.inference_mode()
def right(model: DraftModel, states: HiddenStateCorpus, cut: Batch, drafts: Drafts, uniforms: Tensor) -> Tensor:
    """Which drafts are right, with all before them: [windows, window]."""
    logits = model.llama.lm_head(forward_windows(model, states, cut)[1]).float()
    said = model.tokens[drafts(logits, uniforms)]
    return ((said == cut.targets) & cut.loss_mask).flatten(0, 1).long().cumprod(-1)


class Examination:
    """Windows of texts that were not trained on, always the same ones."""

    def __init__(self, states: HiddenStateCorpus, window: int) -> None:
        self.states = states
        self.curriculum = WindowDataset(states, WindowSettings(), window)

    def cuts(self, greedy: bool, texts: int = 8, windows: int = 24) -> Iterator[Batch]:
        every = self.states.text_table
        chosen = every[(every[:, 3] == 0) == greedy]
        for number in range(0, len(chosen), texts):
            part = chosen[number : number + texts]
            yield self.curriculum.make_batch(part, seeded_generator(1, "exam", number), windows, float(greedy))

    def intervals(self, cut: Batch) -> Tensor:
        """The uniform intervals of the windows' tokens, at the temperature of each."""
        temperatures = torch.tensor(self.states.temperatures, dtype=torch.float64)
        which = (cut.temperatures[..., None] - temperatures).abs().argmin(-1)
        starts = cut.window_starts.clamp_max(cut.corpus_rows.shape[1] - 1)  # windows after the last slot do not count
        places = cut.corpus_rows.gather(1, starts)[..., None] + torch.arange(cut.targets.shape[-1])
        return self.states.uniform_intervals[which[..., None], places.clamp_max(len(self.states.tokens) - 1)]

    def greedy(self, model: DraftModel) -> dict[str, Any]:
        nothing = (right(model, self.states, cut, likeliest, cut.uniforms) for cut in self.cuts(True))
        return summary(torch.cat(list(nothing)))

    def by_uniforms(self, model: DraftModel) -> dict[str, dict[str, Any]]:
        """By the uniforms that queries get, of texts that were sampled."""
        found: dict[str, list[Tensor]] = {}
        for cut in self.cuts(False):
            for name, given in query_uniforms(cut.uniforms, self.intervals(cut)).items():
                counts = right(model, self.states, replace(cut, uniforms=given), likeliest, cut.uniforms)
                found.setdefault(name, []).append(counts)
        return {name: summary(torch.cat(counts)) for name, counts in found.items()}

    def by_draft_rule(self, model: DraftModel) -> dict[str, dict[str, Any]]:
        """By what is drafted from the distributions of queries without uniforms."""
        found: dict[str, list[Tensor]] = {}
        for cut in self.cuts(False):
            without = replace(cut, uniforms=torch.full_like(cut.uniforms, torch.nan))
            for name, drafts in ways_to_draft(self.states.coupling).items():
                found.setdefault(name, []).append(right(model, self.states, without, drafts, cut.uniforms))
        return {name: summary(torch.cat(counts)) for name, counts in found.items()}


class AdapterExamination(Examination):
    """The same for a gated adapter, which drafts as its form has it."""

    def __init__(self, model: Any, model_name: str, folder: Path, corpus: TextCorpus) -> None:
        adapter = load_adapter(folder, model, model_name)
        drafts = DistillationSettings(
            form=read_metadata(folder, "adapter").training["form"], window=adapter.settings.window
        )
        settings = WindowSettings(batch_size=4, windows_per_text=8)
        self.task = AdapterTrainingTask(model, corpus, adapter.settings, drafts, settings, model_name, autocast=True)
        self.task.module.copy_weights_from(adapter)
        self.task.module.eval()
        self.states, self.curriculum = corpus, self.task.window_dataset

    def report(self) -> dict[str, Any]:
        """Tokens a call, and the share of tokens that each query predicts, the first one included."""
        found: dict[str, list[Tensor]] = {}
        masks: dict[str, list[Tensor]] = {}
        for greedy in (True, False):
            for cut in self.cuts(
                greedy, self.task.window_settings.batch_size, self.task.window_settings.windows_per_text
            ):
                given = {"greedy texts": cut.uniforms} if greedy else query_uniforms(cut.uniforms, self.intervals(cut))
                for name, uniforms in given.items():
                    if name != "none":  # its queries have always had uniforms
                        found.setdefault(name, []).append(self.task.matching_queries(cut, uniforms))
                        masks.setdefault(name, []).append(cut.loss_mask.flatten(0, 1))
        matches = {name: torch.cat(parts) for name, parts in found.items()}
        leading = self.task.num_undrafted_queries
        counts = {name: each[:, leading:].long().cumprod(-1) for name, each in matches.items()}
        own, other = (counts[name].sum(-1).double() for name in ("the text's uniforms", "other uniforms"))
        gain = {"tokens": float((own - other).mean()), "error": float((own - other).std() / len(own) ** 0.5)}
        first = {name: matches[name][:, 0].double() for name in ("the text's uniforms", "other uniforms")}
        difference = first["the text's uniforms"] - first["other uniforms"]
        error = float(difference.std() / len(difference) ** 0.5)
        return {
            **{
                name: {**summary(each), "by_query": shares(matches[name], torch.cat(masks[name]))}
                for name, each in counts.items()
            },
            "the text's less other uniforms": gain,
            "the same, first query right": {"tokens": float(difference.mean()), "error": error},
        }


def shares(matches: Tensor, mask: Tensor) -> list[float]:
    """The share of tokens that each query predicts."""
    return [round(float(share), 3) for share in matches.double().sum(0) / mask.sum(0).clamp_min(1)]


def examine_adapter(options: argparse.Namespace, model: Any, samples: Any) -> dict[str, Any]:
    """What an adapter makes of uniforms; prints it."""
    with TemporaryDirectory() as temporary:
        for done in collect_uniform_intervals(model, samples, Path(temporary), coupling=options.coupling):
            print(f"\rread {done} of {len(samples)} texts", end="", flush=True)
        print()
        name = options.student or options.model
        student = saltus.load(name, "plain", dtype="float32", exact=False).network.model if options.student else model
        found = AdapterExamination(student, name, options.adapter, load_uniform_intervals(Path(temporary))).report()
    for name, one in found.items():
        by_query = " ".join(f"{share:.2f}" for share in one.get("by_query", ()))
        print(f"{name:44} {one.get('tokens_per_call', one.get('tokens')):+.3f} ± {one['error']:.3f}  {by_query}")
    return found


def summary(counts: Tensor) -> dict[str, Any]:
    """Tokens a call, the standard error if windows were independent, and the share of chains right up to each depth."""
    calls = 1 + counts.sum(-1).double()
    error = float(calls.std() / len(calls) ** 0.5)
    return {
        "tokens_per_call": round(float(calls.mean()), 3),
        "error": round(error, 3),
        "right": [round(float(share), 3) for share in counts.double().mean(0)],
        "windows": len(counts),
    }


def plot(curves: list[dict[str, Any]], path: Path) -> None:
    """Tokens a call against query tokens of training, by the uniforms that queries get."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in curves[0]["by_uniforms"]:
        values = [one["by_uniforms"][name]["tokens_per_call"] for one in curves]
        axes.plot([one["queries"] / 1e6 for one in curves], values, marker="o", markersize=3, label=name)
    axes.set(xlabel="query tokens of training, millions", ylabel="tokens a call, sampled texts")
    axes.legend(title="uniforms of queries", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="texts of the model that no drafter was trained on")
    parser.add_argument("--texts", type=int, default=80, help="of them, evenly spread")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--coupling", choices=("probability", "token-order"), default="probability")
    parser.add_argument("--drafter", type=Path, help="a folder of saltus train ptp; else the one that is shipped")
    parser.add_argument("--adapter", type=Path, help="a gated adapter of saltus train ptp, in place of a drafter")
    parser.add_argument("--student", help="the model of the adapter, where it is not the one that wrote the texts")
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=[], help="of the run that made the drafter")
    parser.add_argument("--queries", type=int, default=1600, help="of a step of that run")
    parser.add_argument("--states", type=Path, help="where to keep what is read; else nowhere")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()

    network = saltus.load(options.model, "plain", dtype="float32", exact=False).network
    recipe = Recipe("drafter", None, Schedule(1), teacher_texts=options.texts)
    samples = DrafterObjective().select_texts(recipe, [options.teacher])
    if options.adapter:
        found = examine_adapter(options, network.model, samples)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    folder = options.drafter or find_shipped("drafter", network.model)
    if folder is None:
        parser.error(f"no drafter comes with Saltus for {options.model}; give one by --drafter")
    model = load_drafter(folder, network.model, options.model, trainable=True).float()
    network.add_hidden_state_layers(model.shape.hidden_state_layers)
    with TemporaryDirectory() as temporary:
        for done in collect_hidden_states(
            network, samples, options.states or Path(temporary), coupling=options.coupling
        ):
            print(f"\rread {done} of {len(samples)} texts", end="", flush=True)
        print()
        examination = Examination(load_hidden_states(options.states or Path(temporary)), model.shape.window)
    found = {"texts": len(samples), "drafter": str(folder)}
    found["greedy"] = examination.greedy(model)
    found["by_uniforms"], found["by_draft_rule"] = examination.by_uniforms(model), examination.by_draft_rule(model)
    for title in ("by_uniforms", "by_draft_rule"):
        for name, one in found[title].items():
            print(f"{title:13} {name:56} {one['tokens_per_call']:.3f} ± {one['error']:.3f}")
    print(f"greedy {found['greedy']['tokens_per_call']:.3f} ± {found['greedy']['error']:.3f}")
    found["curve"] = []
    for file in options.checkpoints:
        state = load_checkpoint(file)
        assert state is not None
        model.load_state_dict(state["module"])
        one = {"queries": state["step"] * options.queries, "by_uniforms": examination.by_uniforms(model)}
        found["curve"].append(one)
        print(state["step"], {name: value["tokens_per_call"] for name, value in one["by_uniforms"].items()}, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        plot(found["curve"], options.plot)


if __name__ == "__main__":
    main()
