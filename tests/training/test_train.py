"""`saltus train`: results of recipes draft for their model, and an interruption does not change the weights."""

import json
import math
import os
import re
import shlex
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cache_files import full_disk
from test_cli import complaint, lines, saltus_
from typer.main import get_command

import saltus
from saltus.cli.app import app
from saltus.cli.training_result import check_result_folder, print_result
from saltus.loading.metadata import DrafterMetadata, read_metadata, write_metadata
from saltus.methods.assd.training.any_subset import AnySubsetTrainingTask
from saltus.methods.assd.training.infill_texts import train_tokenizer
from saltus.methods.assd.training.pairwise_correction import PairwiseCorrectionTrainingTask
from saltus.methods.jacobi.training.forcing import JacobiTrainingTask
from saltus.methods.mtp.training.head import MtpTrainingTask
from saltus.methods.mtpc.training.heads import HeadsTrainingTask
from saltus.methods.ptp.training.adapter import AdapterTrainingTask
from saltus.methods.ptp.training.drafter import DrafterTrainingTask
from saltus.methods.published.training.dflash import DFlashTrainingTask
from saltus.methods.shared import drafter_files, query_chains
from saltus.methods.shared.drafter_files import METADATA_FILE, WEIGHTS_FILES
from saltus.training import recipe as recipes
from saltus.training.data.teacher_texts import read_texts
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.objectives import OBJECTIVES
from saltus.training.training_task import TrainingTask

RECIPE = """
kind = "drafter"
temperatures = [0.7]

[drafter]
layers = 1
intermediate = 16
hidden_state_layers = [1]
window = 4
vocabulary = 120
embedding = "thermometer"

[data]
batch_size = 3
windows_per_text = 6
validation_fraction = 0.3

[schedule]
steps = 12
checkpoint_steps = 4
"""
ADAPTER = RECIPE.replace("drafter", "adapter").replace(
    "layers = 1\nintermediate = 16\nhidden_state_layers = [1]\nwindow = 4\nvocabulary = 120", "rank = 4\nwindow = 4"
)
HEADS = RECIPE.replace("drafter", "heads").replace(
    'layers = 1\nintermediate = 16\nhidden_state_layers = [1]\nwindow = 4\nvocabulary = 120\nembedding = "thermometer"',
    'circuit = "hmm"\nrank = 3\nwindow = 4\nvocabulary = 120',
)


@pytest.fixture(scope="module")
def folder(tiny_folder) -> Path:
    return tiny_folder()


@pytest.fixture(scope="module")
def teacher(folder, tmp_path_factory) -> Path:
    """Texts of the tiny model."""
    room = tmp_path_factory.mktemp("teacher")
    inputs = lines(room / "prompts.jsonl", *({"prompt": f"the cat sat {number} times"} for number in range(10)))
    saltus_("collect", "text", "-f", inputs, "-m", folder, "-n", 24, "--out", room / "teacher")
    return room / "teacher"


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE, encoding="utf-8")
    return tmp_path / "tiny.toml"


def training(recipe: Path, folder: Path, teacher: Path, work: Path, *more: object) -> list[object]:
    return ["train", "ptp", "-r", recipe, "-m", folder, "--teacher", teacher, "--work", work, *more]


def scalars(work: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(work / "tensorboard"))
    curves.Reload()
    return {tag: [(one.step, one.value) for one in curves.Scalars(tag)] for tag in curves.Tags()["scalars"]}


def begin_earlier(work: Path) -> None:
    """The curves so far, as of a run long ago: TensorBoard reads its files in the order of their names' seconds."""
    for file in (work / "tensorboard").rglob("events.out.tfevents.*"):
        file.rename(file.with_name(re.sub(r"tfevents\.\d+", "tfevents.1000000000", file.name)))


@pytest.mark.slow
def test_a_drafter_is_trained_saved_with_its_card_and_drafts(recipe, folder, teacher, tmp_path):
    out = tmp_path / "a drafter"
    output = saltus_(*training(recipe, folder, teacher, tmp_path / "work", "--out", out, "--seed", 3)).stderr
    assert re.search(r"step 8 of 12: loss [\d.]+ · greedy [\d.]+ a call · sampled [\d.]+ a call · [\d,]+ query", output)
    card = json.loads((out / METADATA_FILE).read_text())["training"]
    assert {"machine", "commit", "minutes", "loss"} <= card.keys()
    assert (card["steps"], card["seed"], card["teacher_texts"]) == (12, 3, 20)
    assert (card["recipe"]["name"], card["recipe"]["drafter"]["hidden_state_layers"]) == ("tiny", [1])
    assert card["held_out_tokens_per_call"].keys() == {"greedy", "sampled"}
    assert 1 <= card["held_out_tokens_per_call"]["greedy"] <= 5
    assert card["drafts_per_call"] == 4
    assert f"call, of 4 drafts at most: greedy {card['held_out_tokens_per_call']['greedy']:.2f}" in output
    for name, shares in card["acceptance_by_position"].items():  # the expected number of right drafts is their sum
        assert shares == sorted(shares, reverse=True)
        assert 1 + sum(shares) == pytest.approx(card["held_out_tokens_per_call"][name], abs=0.005)
    evaluations = [json.loads(line) for line in (tmp_path / "work/evaluations.jsonl").read_text().splitlines()]
    assert [each["step"] for each in evaluations] == [4, 8, 12]
    assert round(evaluations[-1]["greedy"], 3) == card["held_out_tokens_per_call"]["greedy"]
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "who reads the metadata reads the weights"
    decode, measure = (shlex.split(line)[1:] for line in output.splitlines() if line.startswith("  saltus "))
    assert "ptp" in saltus_(*decode, "-n", 4).stderr
    assert "ptp+lookup" in saltus_(*measure, "-n", 4, "--limit", 1).stdout
    engine = saltus.load(str(folder), "ptp", options={"ptp": {"model": str(out), "num_draft_tokens": 4}})
    for temperature in (0.0, 0.7):
        given = {"max_new_tokens": 24, "temperature": temperature}
        assert engine.generate("the cat", **given).tokens == engine.generate("the cat", method="plain", **given).tokens


@pytest.mark.parametrize(("greedy", "is_useless"), [(1.0, True), (1.01, False)])
def test_a_drafter_that_is_never_right_is_said_to_be_useless(greedy, is_useless, capsys):
    task = SimpleNamespace(metrics_name=TrainingTask.metrics_name)
    chosen = recipes.read_recipe(recipes.find_recipe("smollm2"))
    run = SimpleNamespace(objective=OBJECTIVES["drafter"], recipe=chosen)
    print_result(Path("out"), [(task, {"metrics": {"greedy": greedy, "sampled": 1.0}})], run)
    said = capsys.readouterr().err
    assert said.startswith(f"written: out; held-out tokens per call: greedy {greedy:.2f}, sampled 1.00\n")
    assert ("no draft was right on held-out texts; train for more steps" in said) is is_useless


@pytest.mark.parametrize(
    ("name", "change", "command"),
    [
        ("smollm2", "window=4", 'saltus generate --model smollm2-135m --method ptp --option ptp.model=out "Why'),
        (
            "smollm2-adapter",
            "rank=4",
            'saltus generate --model smollm2-135m --method ptp --option ptp.model=out --coupling probability "Why',
        ),
        ("smollm2-jacobi", "trains=adapter", "saltus generate --model smollm2-135m --method jacobi --option jacobi."),
        ("smollm2-jacobi", "trains=model", 'saltus generate --model out --method jacobi "Why'),
        ("stories", "architecture=any-subset", "saltus infill --model out "),
        ("stories", "architecture=left-to-right", "saltus generate --model out "),
    ],
)
def test_the_commands_for_a_result_are_those_of_its_kind(name, change, command):
    chosen = recipes.read_recipe(recipes.find_recipe(name), [change, *["dtype=float32"] * (change == "trains=model")])
    assert OBJECTIVES[chosen.kind].decoding_commands(chosen, "out")[0].startswith(command)


@pytest.mark.slow
def test_an_adapter_is_trained_saved_and_drafts(folder, teacher, tmp_path):
    file = tmp_path / "gated.toml"
    file.write_text(ADAPTER, encoding="utf-8")
    changes = ("rank=2", "query_start=last-token", "embedding=interpolated", "embedding_init=normal")
    changes = [*changes, "window_growth=0.5", "uniform_beta=0.3"]
    given = [part for change in changes for part in ("--set", change)]
    output = saltus_(*training(file, folder, teacher, tmp_path / "work", *given)).stderr
    assert re.search(r"sampled [\d.]+ a call · first query right [\d.]+ by its own uniforms, [\d.]+ by other", output)
    by_depth = scalars(tmp_path / "work")
    assert [step for step, _ in by_depth["accuracy by depth, other uniforms/3"]] == [4, 8, 12]
    metadata = json.loads((tmp_path / "work" / "adapter" / METADATA_FILE).read_text())
    assert metadata["settings"]["rank"] == metadata["settings"]["alpha"] == 2
    assert metadata["settings"]["query_start"] == "last-token"
    recorded = metadata["training"]["recipe"]
    assert (recorded["adapter"]["embedding_init"], recorded["adapter"]["window_growth"]) == ("normal", 0.5)
    assert recorded["data"]["uniform_beta"] == 0.3
    assert {name: len(each) for name, each in metadata["training"]["accuracy_by_depth"].items()} == {
        "its own uniforms": 4,
        "other uniforms": 4,
    }
    assert metadata["training"]["steps"] == 12
    assert metadata["training"]["held_out_tokens_per_call"].keys() == {"greedy", "sampled"}
    engine = saltus.load(str(folder), "ptp", options={"ptp": {"model": str(tmp_path / "work" / "adapter")}})
    given = {"max_new_tokens": 24, "temperature": 0.7}
    assert engine.generate("the cat", **given).tokens == engine.generate("the cat", method="plain", **given).tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drafter", "adapter"])
@pytest.mark.parametrize("coupling", ["token-order", "gumbel"])
def test_training_for_a_coupling_is_recorded_and_its_uniforms_are_those_of_the_coupling(
    kind, coupling, folder, teacher, tmp_path, monkeypatch
):
    file, given = tmp_path / "tiny.toml", ["--set", f"coupling={coupling}"]
    file.write_text(RECIPE if kind == "drafter" else ADAPTER, encoding="utf-8")
    if coupling == "gumbel":  # it has no uniforms
        given += ["--set", "form=independent" if kind == "adapter" else "reads_uniforms=false"]
    out = tmp_path / "out"
    saltus_(*training(file, folder, teacher, tmp_path / "work", "--out", out, *given))
    assert read_metadata(out).training["coupling"] == coupling
    told: list[bool] = []
    chains = query_chains.with_query_chains

    def listening(inputs, chains_, temperature):
        told.extend(not math.isnan(u) for _, chain in chains_ for u in chain)
        return chains(inputs, chains_, temperature)

    for module in ("saltus.methods.ptp.drafter", "saltus.methods.ptp.fused_drafter"):
        monkeypatch.setattr(f"{module}.with_query_chains", listening)
    engine = saltus.load(str(folder), "ptp", options={"ptp": {"model": str(out)}}, adaptive=False)
    for used in ("probability", "token-order", "gumbel"):
        told.clear()
        settings = {"max_new_tokens": 24, "temperature": 0.7, "coupling": used, "ignore_eos": True}
        plain = engine.generate("the cat", method="plain", **settings)
        assert engine.generate("the cat", **settings).tokens == plain.tokens
        assert told
        assert any(told) == (used == coupling == "token-order")
    assert "another" in complaint(*training(file, folder, teacher, tmp_path / "work", "--out", out))


def test_an_adapter_that_reads_uniforms_cannot_be_trained_for_a_coupling_without(folder, teacher, tmp_path):
    file = tmp_path / "gated.toml"
    file.write_text(ADAPTER, encoding="utf-8")
    said = complaint(*training(file, folder, teacher, tmp_path / "work", "--set", "coupling=gumbel"))
    assert "the coupling gumbel has no uniforms for the form one-hot; set form=independent" in said


def test_a_drafter_that_reads_uniforms_cannot_be_trained_for_a_coupling_without(folder, teacher, tmp_path):
    file = tmp_path / "drafter.toml"
    file.write_text(RECIPE.replace("[drafter]", 'coupling = "gumbel"\n\n[drafter]'), encoding="utf-8")
    said = complaint(*training(file, folder, teacher, tmp_path / "work"))
    assert "the coupling gumbel has no uniforms to condition queries on; set reads_uniforms=false" in said


@pytest.mark.slow
def test_a_student_of_its_own_is_trained_and_drafts_for_its_teacher(folder, tiny_folder, teacher, tmp_path):
    file, out = tmp_path / "student.toml", tmp_path / "student"
    file.write_text(ADAPTER, encoding="utf-8")
    own = tiny_folder(seed=1, num_hidden_layers=1)
    saltus_(*training(file, folder, teacher, tmp_path / "work", "--set", f"student={own}", "--out", out))
    metadata = json.loads((out / METADATA_FILE).read_text())
    assert (metadata["target_name"], metadata["training"]["student_of"]) == (str(own), str(folder))
    engine = saltus.load(str(folder), "ptp", options={"ptp": {"model": str(out)}}, adaptive=False)
    for temperature in (0.0, 0.7):
        given = {"max_new_tokens": 24, "temperature": temperature}
        found = engine.generate("the cat", **given)
        assert found.tokens == engine.generate("the cat", method="plain", **given).tokens
        assert found.statistics.draft_calls > 0
        assert max(call.num_draft_tokens for call in found.calls) == 4
    other = tiny_folder(words="the dog")
    file.write_text(ADAPTER, encoding="utf-8")
    output = complaint(*training(file, folder, teacher, tmp_path / "other", "--set", f"student={other}"))
    assert "has another vocabulary than" in output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drafter", "adapter"])
def test_training_starts_with_the_weights_of_a_saved_result(kind, folder, teacher, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(RECIPE if kind == "drafter" else ADAPTER, encoding="utf-8")
    first, second = tmp_path / "first", tmp_path / "second"
    saltus_(*training(file, folder, teacher, first))
    given = [
        *training(file, folder, teacher, second, "--from", first / kind),
        "--set",
        "learning_rate=1e-9",
        "--steps",
        4,
    ]
    if kind == "adapter":
        given += ["--set", "window=6"]  # windows may differ
    saltus_(*given)
    metadata = json.loads((second / kind / METADATA_FILE).read_text())
    assert metadata["training"]["begun_with"] == str(first / kind)
    before, after = (load_checkpoint(work / "checkpoint.pt")["module"] for work in (first, second))
    assert before.keys() == after.keys()
    assert all(
        torch.allclose(before[name], after[name], atol=0.01, rtol=0.01) for name in before if "embed_tokens" not in name
    )
    bare = [*training(file, folder, teacher, second), "--set", "learning_rate=1e-9", "--steps", 4]
    assert "belongs to a run with other settings" in complaint(*bare)
    if kind == "drafter":
        told = complaint(*given, "--set", "vocabulary=21", "--work", tmp_path / "third")
        assert re.search(r"was trained for a vocabulary of (\d+), which it keeps; set vocabulary=\1", told)
    change = "intermediate=24" if kind == "drafter" else "rank=2"
    output = complaint(*given, "--set", change, "--work", tmp_path / "third")
    assert re.search(
        f"the {kind} in .* has (another shape than the recipe|rank 4, but the recipe 2; set rank to that)", output
    )
    assert not (tmp_path / "third").exists(), "that is said before texts are read"


def test_heads_are_trained_saved_and_draft(folder, teacher, tmp_path):
    file = tmp_path / "heads.toml"
    file.write_text(HEADS, encoding="utf-8")
    given = training(file, folder, teacher, tmp_path / "work")
    given[1] = "mtpc"
    output = saltus_(*given, "--set", "optimizer=muon").stderr
    assert re.search(r"step 8 of 12: loss [\d.]+ · greedy [\d.]+ a call", output)
    metadata = json.loads((tmp_path / "work" / "heads" / METADATA_FILE).read_text())
    assert metadata["training"]["held_out_tokens_per_call"].keys() == {"greedy", "sampled"}
    engine = saltus.load(str(folder), "mtpc", options={"mtpc": {"model": str(tmp_path / "work" / "heads")}})
    for rule in ("match", "reject"):
        own, given = engine.copy_with(rule=rule), {"max_new_tokens": 24, "temperature": 0.0}
        assert own.generate("the cat", **given).tokens == own.generate("the cat", method="plain", **given).tokens
    assert "recipe heads is for mtpc; give it to saltus train mtpc" in complaint(
        *training(file, folder, teacher, tmp_path / "other")
    )


@pytest.mark.slow
def test_richer_heads_start_with_the_distribution_of_poorer_ones(folder, teacher, tmp_path):
    file = tmp_path / "heads.toml"
    file.write_text(HEADS, encoding="utf-8")

    def trained(work: str, *more: object) -> dict[str, float]:
        saltus_("train", "mtpc", *training(file, folder, teacher, tmp_path / work, *more)[2:])
        return load_checkpoint(tmp_path / work / "checkpoint.pt")["evaluations"][-1]

    trained("ff", "--set", "circuit=ff", "--steps", 12)
    still = ("--from", tmp_path / "ff" / "heads", "--set", "learning_rate=1e-9", "--steps", 1)
    ff = trained("ff again", "--set", "circuit=ff", *still)
    for circuit in ("cp", "hmm", "btree"):
        found = trained(circuit, "--set", f"circuit={circuit}", *still)
        assert found["loss"] == pytest.approx(ff["loss"], rel=1e-3)
        assert found["greedy"] == ff["greedy"]
    mixture = "--from", tmp_path / "ff" / "heads", "--set", "learning_rate=0.05", "--steps", 12
    trained("parted", "--set", "circuit=cp", *mixture)
    still = ("--from", tmp_path / "parted" / "heads", "--set", "learning_rate=1e-9", "--steps", 1)
    cp = trained("cp again", "--set", "circuit=cp", *still)
    assert cp["loss"] < 0.99 * ff["loss"], "its components have parted"
    for circuit in ("hmm", "btree"):
        assert trained(f"from {circuit}", "--set", f"circuit={circuit}", *still)["loss"] == pytest.approx(
            cp["loss"], 0.01
        )
    for number, change in enumerate(("window=6", "circuit=ff", "rank=5")):
        given = training(file, folder, teacher, tmp_path / f"unfit {number}", *still)[2:]
        assert "cannot go on from" in complaint("train", "mtpc", *given, "--set", change)
        assert not (tmp_path / f"unfit {number}").exists(), "that is said before texts are read"


def test_the_curves_hold_every_step_and_every_evaluation(recipe, folder, teacher, tmp_path):
    work = tmp_path / "work"
    saltus_(*training(recipe, folder, teacher, work))
    found, evaluations = scalars(work), load_checkpoint(work / "checkpoint.pt")["evaluations"]
    assert [step for step, _ in found["loss"]] == list(range(1, 13))
    assert [row["step"] for row in evaluations] == [4, 8, 12]
    for name in ("greedy", "sampled"):
        values = found[f"held-out tokens per call/{name}"]
        assert values == [(row["step"], pytest.approx(row[name])) for row in evaluations]
    assert [step for step, _ in found["query tokens per second"]] == [4, 8, 12]
    mean = sum(value for step, value in found["loss"] if step <= 4) / 4
    assert mean == pytest.approx(evaluations[0]["loss"])


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_with_the_weights_of_one_that_was_not(recipe, folder, teacher, tmp_path):
    saltus_(*training(recipe, folder, teacher, tmp_path / "whole"))
    killed, kills = tmp_path / "killed", 0
    for moment in ("states/00000.safetensors", "checkpoint.pt"):
        command = training(recipe, folder, teacher, killed)
        run = get_context("fork").Process(target=saltus_, args=command)
        run.start()
        while not (killed / moment).exists() and run.is_alive():
            time.sleep(0.002)
        run.kill()
        run.join()
        kills += run.exitcode == -signal.SIGKILL
    assert kills == 2
    assert load_checkpoint(killed / "checkpoint.pt")["step"] < 12
    assert not (killed / "drafter").exists()
    begin_earlier(killed)
    saltus_(*training(recipe, folder, teacher, killed))
    one, other = (tmp_path / work / "drafter" / WEIGHTS_FILES["drafter"] for work in ("whole", "killed"))
    assert one.read_bytes() == other.read_bytes()
    assert (
        load_checkpoint(killed / "checkpoint.pt")["evaluations"]
        == load_checkpoint(tmp_path / "whole" / "checkpoint.pt")["evaluations"]
    )
    assert scalars(killed)["loss"] == scalars(tmp_path / "whole")["loss"], "steps that are done again count once"


@pytest.mark.parametrize(
    ("times", "said", "onward"),
    [
        (1, "interrupted at step 7, which is saved; the same command goes on from there", 7),
        (2, "interrupted at step 6; the same command goes on from step 4", 4),
    ],
)
def test_ctrl_c_reports_the_step_and_how_to_continue(
    times, said, onward, recipe, folder, teacher, tmp_path, monkeypatch
):
    whole = DrafterTrainingTask.loss

    def interrupted(task: DrafterTrainingTask, step: int):
        for _ in range(times if step == 6 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return whole(task, step)

    monkeypatch.setattr(DrafterTrainingTask, "loss", interrupted)
    output = saltus_(*training(recipe, folder, teacher, tmp_path / "work"), code=130).stderr
    assert output.endswith(f"saltus: {said}\n")
    monkeypatch.undo()
    output = saltus_(*training(recipe, folder, teacher, tmp_path / "work")).stderr
    assert output.startswith(f"going on from step {onward}\nstep 8 of 12: ")


@pytest.mark.slow
def test_other_settings_and_other_texts_are_refused(recipe, folder, tiny_folder, teacher, tmp_path):
    work = tmp_path / "work"
    saltus_(*training(recipe, folder, teacher, work))
    assert "other settings" in complaint(*training(recipe, folder, teacher, work, "--seed", 1))
    assert "other settings" in complaint(*training(recipe, folder, teacher, work, "--steps", 20))
    assert "for other settings" in complaint(*training(recipe, folder, teacher, work, "--set", "teacher_texts=7"))
    assert "were written by" in complaint(*training(recipe, tiny_folder(1), teacher, tmp_path / "another"))
    assert "the model has 2 layers; take numbers from 1 to 1" in complaint(
        *training(recipe, folder, teacher, tmp_path / "hidden_state_layers", "--set", "hidden_state_layers=[1, 2]")
    )
    texts = [{"prompt": [1, number], "completion": [300] * 9, "temperature": 0} for number in range(2)]
    file = lines(tmp_path / "texts.jsonl", *texts)
    assert "tokens that" in complaint(*training(recipe, folder, file, tmp_path / "big"))
    lines(file, *texts[:1] * 2)  # refused before a model is looked for
    assert "all texts answer the same prompt" in complaint(*training(recipe, "no/model", file, tmp_path / "same"))


def test_a_step_that_draws_no_context_position_has_a_loss(folder, teacher, recipe, monkeypatch):
    from saltus.training.run import TrainingRun

    chosen = recipes.read_recipe(recipe)
    engine = saltus.load(str(folder), "plain")
    run = TrainingRun(
        chosen, OBJECTIVES[chosen.kind].select_texts(chosen, [teacher]), engine.network, "tiny", recipe.parent
    )
    for _ in run.collect():
        pass
    task = run.make_task()
    monkeypatch.setattr("saltus.training.query_drafter_task.CONTEXT_POSITIONS", 0.0)
    assert math.isfinite(float(task.loss(0)))


def test_all_answers_to_a_held_out_prompt_are_held_out(folder, teacher, recipe):
    from saltus.training.run import TrainingRun

    chosen = recipes.read_recipe(recipe)
    engine = saltus.load(str(folder), "plain")
    run = TrainingRun(
        chosen, OBJECTIVES[chosen.kind].select_texts(chosen, [teacher]), engine.network, "tiny", recipe.parent
    )
    for _ in run.collect():
        pass
    dataset = run.make_task().window_dataset
    assert len(dataset.training_table) + len(dataset.validation_table) == 20

    def prompts(texts) -> set[tuple[int, ...]]:
        return {tuple(dataset.corpus.tokens[begin : begin + length].tolist()) for begin, length, *_ in texts}

    assert 0 < len(prompts(dataset.validation_table)) < 10
    assert len(dataset.validation_table) == 2 * len(prompts(dataset.validation_table))
    assert not prompts(dataset.validation_table) & prompts(dataset.training_table)


def test_damaged_files_are_one_line_with_their_name(recipe, folder, teacher, tmp_path):
    work = tmp_path / "work"
    saltus_(*training(recipe, folder, teacher, work))
    for file in (work / "checkpoint.pt", work / "states" / "00000.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
        said = complaint(*training(recipe, folder, teacher, work))
        assert str(file) in said
    assert "delete it, and give the same command again" in said
    (tmp_path / "broken.jsonl.gz").write_bytes(b"x")
    assert "broken.jsonl.gz is damaged" in complaint(*training(recipe, folder, tmp_path / "broken.jsonl.gz", work))


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json", "saltus.json"])
def test_the_files_of_something_else_are_not_replaced_by_a_result(file, recipe, folder, teacher, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    if file == METADATA_FILE:
        write_metadata(out, DrafterMetadata("heads", "tiny", "0", training={"recipe": {"kind": "heads"}}))
    else:
        (out / file).write_text("{}")
    said = complaint(*training(recipe, folder, teacher, tmp_path / "work", "--out", out))
    assert f"{out} holds something else, whose files would be replaced; name another folder by --out" in said
    assert [each.name for each in out.iterdir()] == [file]
    assert not (tmp_path / "work").exists(), "it is said before anything is read"
    said = complaint(*training(recipe, folder, teacher, tmp_path / "work", "--out", out / file))
    assert "is a file; name a folder by --out" in said


@pytest.mark.parametrize(("before", "now"), [("model", "adapter"), ("adapter", "model")])
def test_a_trained_model_and_an_adapter_do_not_share_a_folder(before, now, tmp_path):
    card = {"recipe": {"kind": "jacobi", "jacobi": {"trains": before}}}
    write_metadata(tmp_path, DrafterMetadata(before, "tiny", None, training=card))
    check_result_folder(tmp_path, recipes.read_recipe(recipes.find_recipe("smollm2-jacobi"), [f"trains={before}"]))
    with pytest.raises(ValueError, match="holds something else, whose files would be replaced"):
        check_result_folder(tmp_path, recipes.read_recipe(recipes.find_recipe("smollm2-jacobi"), [f"trains={now}"]))


@pytest.mark.skipif(sys.platform != "linux", reason="where nobody can write, not even root")
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(recipe, folder, teacher, tmp_path):
    work = tmp_path / "work"
    said = complaint(*training(recipe, folder, teacher, work, "--out", "/proc/sys/drafter"))
    assert "nothing can be written in /proc/sys (" in said
    assert "make it writable, or name another by --out" in said
    (tmp_path / "file").touch()
    said = complaint(*training(recipe, folder, teacher, work, "--out", tmp_path / "file" / "out"))
    assert f"{tmp_path / 'file'} is a file; name a folder by --out" in said
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "heads.safetensors").symlink_to("/proc/sys/kernel/ostype")
    said = complaint(*training(recipe, folder, teacher, work, "--out", tmp_path / "out"))
    assert f"{tmp_path / 'out' / 'heads.safetensors'} cannot be replaced; make it writable" in said
    assert not work.exists()


def test_a_file_of_prompts_in_place_of_training_texts_is_not_called_damaged(recipe, folder, tmp_path):
    asked = lines(tmp_path / "prompts.jsonl", {"prompt": "the cat", "temperature": 0})
    said = complaint(*training(recipe, folder, asked, tmp_path / "work"))
    assert "prompts.jsonl, line 1 has no 'completion'; make training texts of it: saltus collect data --texts" in said
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_texts(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Once upon a time.\n", "is no file of JSON lines"),
        ('{"prompt": "Why?", "completion": [1], "temperature": 0}', "line 1: 'prompt' is no list of token ids"),
        ('{"prompt": [1], "completion": [2, "x"], "temperature": 0}', "line 1: 'completion' is no list of token ids"),
        ('{"prompt": [1], "completion": [2], "temperature": "warm"}', "line 1: 'temperature' is no number"),
    ],
)
def test_a_file_of_somebody_s_own_texts_is_not_called_damaged(content, said, tmp_path):
    """The cure for a damaged file is to delete it."""
    file = tmp_path / "texts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        read_texts(file)
    assert "make training texts of it: saltus collect data --texts" in str(error.value)
    assert "delete" not in str(error.value)


def test_a_result_that_the_disk_has_no_room_for_is_one_line_with_its_folder(
    recipe, folder, teacher, tmp_path, monkeypatch
):
    monkeypatch.setattr(drafter_files, "save_file", full_disk)
    said = saltus_(*training(recipe, folder, teacher, tmp_path / "work", "--steps", 1), code=2).stderr
    assert said.endswith(f"saltus: the disk of {tmp_path / 'work' / 'drafter'} is full; free some space\n")


def test_an_error_without_teacher_texts_names_the_command_that_writes_them(recipe, folder, tmp_path):
    work = tmp_path / "work"
    output = complaint("train", "ptp", "-r", recipe, "-m", folder, "--work", work)
    command = output.partition("first: saltus ")[2].split()
    inputs = tmp_path / "prompts.txt"
    inputs.write_text("the cat\nthe dog\nthe log\nthe mat\n")
    saltus_(*(inputs if word == "FILE" else word for word in command), "-n", 12)
    saltus_("train", "ptp", "-r", recipe, "-m", folder, "--work", work, "--steps", 1)
    assert (work / "drafter" / WEIGHTS_FILES["drafter"]).exists()


@pytest.mark.parametrize(
    ("old", "new", "cure"),
    [
        ("layers = 1", "layer = 1", "did you mean layers?"),
        ("[data]", "[datta]", "did you mean data?"),
        ("layers = 1", 'layers = "one"', "layers is 'one', but must be a whole number"),
        ("layers = 1", "layers = true", "must be a whole number"),
        ("layers = 1", "layers = 0", "must be 1 or more"),
        ("hidden_state_layers = [1]", "hidden_state_layers = 1", "must be a list, each a whole number"),
        ("hidden_state_layers = [1]", "hidden_state_layers = [0.5]", "is [0.5], but must be a list, each a whole"),
        ('"thermometer"', '"tt"', "must be one of bits"),
        ('kind = "drafter"', 'kind = "draft"', "must be one of adapter, any-subset, dflash, drafter"),
        ('kind = "drafter"', "", "lacks kind"),
        ("steps = 12", "", "lacks steps"),
        ("[data]", "[adapter]\n[data]", "leave that out"),
        ("[drafter]", "[drafter", "is not TOML"),
    ],
)
def test_a_wrong_recipe_is_one_line_with_the_cure(old, new, cure, recipe, tmp_path):
    recipe.write_text(RECIPE.replace(old, new), encoding="utf-8")
    assert cure in complaint("train", "ptp", "-r", recipe, "--teacher", tmp_path)


def test_an_adapter_s_recipe_with_a_distillation_weight_is_refused(tmp_path):
    (tmp_path / "gated.toml").write_text(
        ADAPTER.replace("batch_size = 3", "distillation_weight = 0.3"), encoding="utf-8"
    )
    assert "leave distillation_weight out and set loss=kl" in complaint("train", "ptp", "-r", tmp_path / "gated.toml")


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ("query_start=first-token", "query_start"),
        ("embedding_init=random", "embedding_init"),
        ("window_growth=1.5", "window_growth is 1.5, but is a fraction of the steps"),
        ("embedding=learned", "must be one of bits"),
    ],
)
def test_a_wrong_override_of_an_adapter_is_one_line_with_the_cure(change, cure, tmp_path):
    (tmp_path / "gated.toml").write_text(ADAPTER, encoding="utf-8")
    said = complaint("train", "ptp", "-r", tmp_path / "gated.toml", "--set", change, "--teacher", tmp_path)
    assert cure in said


def test_settings_that_a_recipe_does_not_change_leave_its_identity_as_it_was(tmp_path):
    """So that a run that began with an earlier version goes on."""
    (tmp_path / "gated.toml").write_text(ADAPTER, encoding="utf-8")
    rare = {"query_start", "embedding_init", "window_growth"}
    assert not rare & set(recipes.read_recipe(tmp_path / "gated.toml").settings.identity)
    changed = recipes.read_recipe(tmp_path / "gated.toml", ["query_start=last-token", "window_growth=0.5"])
    assert rare & set(changed.settings.identity) == {"query_start", "window_growth"}
    assert changed.settings.gating.query_start == "last-token"


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ("vocabulry=3", "did you mean vocabulary?"),
        ("drafter.layrs=3", "did you mean drafter.layers?"),
        ("rank=3", "no setting rank"),
        ("layers", "write KEY=VALUE"),
        ("layers=two", "must be a whole number"),
        ("kind=adapter", "no setting kind"),
        ("data.batch_size=0", "batch_size is 0, but must be 1 or more"),
        ("windows_per_text=0", "windows_per_text is 0, but must be 1 or more"),
        ("max_length=1", "max_length is 1"),
        ("discount=0", "discount is 0.0, but must be above 0"),
        ("uniform_beta=-1", "uniform_beta is -1.0, but must be above 0"),
        ("distillation_weight=-1", "distillation_weight is -1.0, but must be 0 or more"),
        ("greedy_fraction=1.5", "greedy_fraction is 1.5, but is a fraction"),
        ("validation_fraction=1", "validation_fraction is 1.0, but is a fraction"),
        ("temperatures=[0, 0.7]", "temperatures are those besides 0, and above it; leave 0 out"),
        ("temperatures=[]", "temperatures is empty"),
    ],
)
def test_a_wrong_override_is_one_line_with_the_cure(change, cure, recipe, tmp_path):
    assert cure in complaint("train", "ptp", "-r", recipe, "--set", change, "--teacher", tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("smollm2", ["greedy_fraction=0.2"], "at the temperature of their text"),
        ("smollm2", ["data.uniform_beta=0.5"], "no query has a uniform"),
        ("smollm2", ["coupling=token-order", "embedding=bits"], "no query has a uniform"),
        ("smollm2-mtp", ["coupling=token-order", "greedy_fraction=0.2"], "at the temperature of their text"),
        ("smollm2-adapter", ["form=categorical", "greedy_fraction=0.2"], "at the temperature of their text"),
        ("smollm2-adapter", ["form=independent", "adapter.embedding=bits"], "no query has a uniform"),
        ("smollm2-jacobi", ["temperatures=[0.3]"], "each text has its own; see saltus collect jacobi --temperature"),
    ],
)
def test_an_override_without_effect_is_noted(name, changes, why):
    recipe = recipes.read_recipe(recipes.find_recipe(name), changes)
    (line,) = recipes.overrides_without_effect(recipe, changes)
    assert line.startswith(f"--set {changes[-1]} changes nothing here, since ")
    assert line.endswith(why)


def test_overrides_that_have_an_effect_are_taken():
    told = ["reads_uniforms=true", "coupling=token-order", "greedy_fraction=0.2", "uniform_beta=0.5", "embedding=bits"]
    for name, changes in (("smollm2", told), ("smollm2-adapter", ["greedy_fraction=0.2", "uniform_beta=0.5"])):
        recipe = recipes.read_recipe(recipes.find_recipe(name), changes)
        assert recipe.data.greedy_fraction == 0.2
        assert recipes.overrides_without_effect(recipe, changes) == []


def test_some_of_the_texts_are_of_all_temperatures(tmp_path, recipe):
    """Files of `saltus collect text` hold the temperatures of a prompt one after the other."""
    texts = [
        {"prompt": [1, number // 2], "completion": [5] * 9, "temperature": 0.7 * (number % 2)} for number in range(64)
    ]
    file = lines(tmp_path / "texts.jsonl", *texts)
    for count in (16, 32):
        chosen = recipes.read_recipe(recipe, [f"teacher_texts={count}"])
        found = OBJECTIVES[chosen.kind].select_texts(chosen, [file])
        assert len(found) == count
        assert 0.25 < sum(sample.temperature > 0 for sample in found) / count < 0.75
        assert found == OBJECTIVES[chosen.kind].select_texts(chosen, [file])


def test_overrides_reach_the_section_with_their_key(recipe):
    changed = recipes.read_recipe(
        recipe, ["layers=3", "schedule.learning_rate=1", "embedding=arithmetic", "temperatures=[0.5]"]
    )
    assert (changed.settings.layers, changed.schedule.learning_rate, changed.settings.embedding) == (
        3,
        1.0,
        "arithmetic",
    )
    assert changed.temperatures == (0.5,)


def test_only_a_recipe_of_jacobi_needs_no_temperatures():
    found = recipes.read_recipe(recipes.find_recipe("smollm2-jacobi"), ["temperatures=[]"])
    assert found.temperatures == ()
    with pytest.raises(ValueError, match="temperatures is empty"):
        recipes.read_recipe(recipes.find_recipe("smollm2"), ["temperatures=[]"])


def test_shipped_recipes_are_valid_and_listed():
    output = {method: saltus_("train", method, "--list").stdout for method in ("ptp", "mtp", "mtpc", "jacobi", "assd")}
    package = Path(saltus.__file__).parent
    folders = re.findall(r"to copy and change: (\S+)", output["ptp"])
    assert len(folders) == 2
    assert all(any(Path(folder).glob("*.toml")) for folder in folders)
    own = [
        name for name, file in recipes.shipped_recipes().items() if file.is_relative_to(package)
    ]  # there may be more
    assert {"smollm2", "smollm2-adapter", "smollm2-code", "smollm2-heads", "vicuna-7b"} <= set(own)
    for name in own:
        found = recipes.read_recipe(recipes.find_recipe(name))
        assert [method for method in output if re.search(rf"^\s*{re.escape(name)} ", output[method], re.M)] == [
            OBJECTIVES[found.kind].method
        ]
        assert found.about
        assert found.time
    assert "did you mean smollm2" in complaint("train", "ptp", "-r", "smolm2")
    assert "there is no recipe nowhere.toml" in complaint("train", "ptp", "-r", "nowhere.toml")


def test_all_objectives_have_one_interface():
    own = {kind: each for kind, each in OBJECTIVES.items() if type(each).__module__.startswith("saltus.")}
    known = {"drafter", "adapter", "dflash", "mtp-head", "heads", "jacobi", "any-subset"}
    assert own.keys() == known  # others may be installed
    assert {objective.method for objective in own.values()} == {"ptp", "mtp", "mtpc", "jacobi", "assd"}
    tasks = DrafterTrainingTask, DFlashTrainingTask, HeadsTrainingTask, AdapterTrainingTask, JacobiTrainingTask
    for task in (*tasks, MtpTrainingTask, AnySubsetTrainingTask, PairwiseCorrectionTrainingTask):
        assert issubclass(task, TrainingTask)
        assert not task.__abstractmethods__


def test_a_tokenizer_is_made_without_a_progress_bar_of_its_own(capfd):
    train_tokenizer(["the cat sat on the mat\n"] * 8, 270)
    assert capfd.readouterr() == ("", "")


def test_training_of_any_subset_models_says_in_a_line_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text("one two three four five six seven eight nine")
    said = complaint("train", "assd", "--text", "few.txt")
    assert "only 1 stories or functions in few.txt; give 200 or more: --text FILE, whose stories" in said
    assert "only 0 stories or functions; give 200 or more" in complaint("train", "assd")
    assert "there is no text nowhere" in complaint("train", "assd", "--code", "nowhere")
    (tmp_path / "few.jsonl").write_text("3")
    assert "few.jsonl holds no programs" in complaint("train", "assd", "--code", "few.jsonl")
    (tmp_path / "tales.csv").write_text("document,text\n1,once\n")
    said = complaint("train", "assd", "--text", "tales.csv")
    assert "tales.csv holds no stories (there is no column 'document_id'); give a table" in said
    assert "recipe smollm2 is for ptp; give it to saltus train ptp" in complaint("train", "assd", "-r", "smollm2")


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ("temperatures=[1]", "training of an any-subset model has no temperatures; leave it out"),
        ("windows_per_text=3", "has no windows_per_text; leave it out"),
        ("spread=few", "a recipe has no setting spread"),
        ("length=48", "did you mean max_length?"),
        ("mask_ratio=broad", "must be one of few, narrow"),
        ("weights=q7", "must be one of bf16, q"),
        ("hidden=200", "attention heads have 64; take a multiple of that"),
        ("span_probability=2", "is a probability"),
        ("architecture=xlnet", "an XLNet is trained by adamw alone; set optimizer=adamw"),
    ],
)
def test_a_wrong_override_of_an_any_subset_recipe_is_one_line_with_the_cure(change, cure):
    assert cure in complaint("train", "assd", "--set", change)


def test_a_program_is_no_recipe(tmp_path):
    (tmp_path / "own.py").write_text("print(1)")
    assert "a file of yours ends in .toml" in complaint("train", "ptp", "-r", tmp_path / "own.py")


def test_training_without_tensorboard_names_the_package_to_install(recipe, folder, teacher, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install '.[train]'" in complaint(*training(recipe, folder, teacher, tmp_path / "work"))


def test_the_help_s_examples_use_options_that_exist():
    assert "Train a drafter" in saltus_("train").stdout
    groups = get_command(app).commands
    for group, name in (("train", "ptp"), ("train", "assd"), ("collect", "text")):
        command = groups[group].commands[name]
        known = {option for parameter in command.params for option in parameter.opts}
        examples = re.findall(rf"saltus {group} {name}(.*)", command.help)
        assert examples
        for rest in examples:
            assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest)) <= known
