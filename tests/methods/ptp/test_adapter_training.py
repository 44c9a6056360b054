"""Training of adapters: packed windows equal separate ones, the model does not change, and a trained adapter drafts."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import saltus
from architectures import ONE_PER_FEATURE, RECURRENT, text, tiny
from saltus.cli.training_log import TrainingLog
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.picking import pick
from saltus.core.sampling import Sampling, token_distribution
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.loading.metadata import read_metadata
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.ptp.training.adapter import AdapterTrainingTask
from saltus.methods.ptp.training.text_intervals import (
    TextCorpus,
    collect_uniform_intervals,
    load_uniform_intervals,
)
from saltus.methods.shared.query_chains import with_query_chains
from saltus.models.causal import CausalNetwork
from saltus.models.gated_lora import Gate, GatedLoraSettings, gated_adapter
from saltus.training.data.hidden_states import Sample, collect_hidden_states, load_hidden_states
from saltus.training.data.packed_forward import packed_logits, prepare_model
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import uniform_intervals
from saltus.training.data.window_dataset import WindowDataset, WindowSettings, select_validation
from saltus.training.data.window_packing import query_uniforms
from saltus.training.loop.training_loop import Schedule, train
from saltus.training.losses import DistillationSettings
from saltus.training.training_task import TrainingTask

WINDOW, TEMPERATURES = 4, (0.7, 1.0)
WINDOW_SETTINGS = WindowSettings(
    batch_size=2, windows_per_text=3, greedy_fraction=0.5, max_length=40, validation_fraction=0.3
)
KINDS = [
    ("one-hot", "ce"), ("one-hot", "bce"), ("categorical", "ce"), ("categorical", "kl"), ("categorical", "reverse-kl"),
    ("independent", "ce"), ("independent", "kl"),
]  # fmt: skip
WITHOUT_EXPERTS = ["GraniteSWA", "Llama4 without experts"]  # sinks; chunks
# Transformers multiplies them in no float64
EXPERTS = ["DeepseekV3", "Glm4Moe", "GptOss", "Llama4", "MiniMaxM2", "Mixtral", "Qwen2Moe", "Qwen3Moe"]
PACKED = [name for name in ONE_PER_FEATURE if name not in (*EXPERTS, *RECURRENT)]  # several windows in one pass
STARTS = ["blank", "last-token"]
each_start = pytest.mark.parametrize("query_start", STARTS)
every_kind = pytest.mark.parametrize(("form", "loss"), KINDS)


def samples(count: int = 6) -> list[Sample]:
    """Random texts of different lengths, half of them at temperature 0."""
    made = []
    for number in range(count):
        tokens = text(18 + 3 * number, number).tolist()
        made.append(Sample(tokens[: 3 + number], tokens[3 + number :], 0.0 if number % 2 else 0.7))
    return made


def make_task(
    model, folder: Path, *, window_settings: WindowSettings = WINDOW_SETTINGS, learned: float = 0.3, **settings
) -> AdapterTrainingTask:
    """A task whose adapter already changes logits a lot."""
    for _ in collect_uniform_intervals(model, samples(), folder, TEMPERATURES, window_settings.max_length):
        pass
    gating = settings.pop("gating", GatedLoraSettings(rank=4, alpha=4.0))
    objective = DistillationSettings(settings.pop("form", "one-hot"), settings.pop("loss", "ce"), WINDOW)
    task = AdapterTrainingTask(model, load_uniform_intervals(folder), gating, objective, window_settings, **settings)
    with torch.no_grad():
        for name, weight in task.module.named_parameters():
            drawn = seeded_generator(1, name).normal(0, learned, tuple(weight.shape))
            weight.add_(torch.from_numpy(drawn).to(weight) * min(weight.shape[-1], 8) ** -0.5)
    return task


def gradients(task: AdapterTrainingTask, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    task.module.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in task.module.named_parameters() if weight.grad is not None}


def one_by_one(task: AdapterTrainingTask, step: int) -> torch.Tensor:
    """The loss by the library's own causal attention: each window in its own forward."""
    batch, total, weight = task.window_dataset.training_batch(step), 0.0, 0.0
    task.model.set_attn_implementation("eager")
    for row in range(len(batch.window_starts)):
        for window, split in enumerate(batch.window_starts[row].tolist()):
            temperature, known = batch.temperatures[row, window], batch.targets[row, window]
            whole = torch.cat([batch.tokens[row, :split], known])[None]
            inputs = torch.cat([whole[:, :split], torch.zeros(1, WINDOW, dtype=torch.long)], 1)
            queries = torch.arange(split, split + WINDOW)
            positions, first = torch.arange(split + WINDOW), task.gating.query_start == "last-token"
            if first:
                inputs[0, split], positions[split:] = whole[0, split - 1], positions[split:] - 1
            uniforms = query_uniforms(batch.uniforms[row, window], task.distillation.form)
            gate = Gate(queries, uniforms, temperature.expand(WINDOW), torch.arange(WINDOW) < first)
            with gated_adapter(task.model, task.module, gate):
                one_text = torch.ones_like(inputs)  # else positions that repeat are taken for another text's
                logits = task.model(
                    inputs, attention_mask=one_text, position_ids=positions[None], use_cache=False
                ).logits[0, split:]
            distributions = task.model(whole, use_cache=False).logits[0, split - 1 : -1].detach()
            warm = 1.0 if temperature == 0 else float(temperature)
            if task.distillation.form != "one-hot":
                logits, distributions = logits / warm, distributions / warm
            own, teacher = logits.log_softmax(-1), distributions.log_softmax(-1)
            loss = -own.gather(-1, known[:, None])[:, 0]
            if task.distillation.loss == "bce":
                others = torch.log1p(-own.exp())
                loss = loss - others.sum(-1) + others.gather(-1, known[:, None])[:, 0]
            if temperature > 0 and task.distillation.loss == "kl":
                loss = (teacher.exp() * (teacher - own)).sum(-1)
            if temperature > 0 and task.distillation.loss == "reverse-kl":
                loss = (own.exp() * (own - teacher)).sum(-1)
            for depth in range(WINDOW):
                if batch.loss_mask[row, window, depth]:
                    share = task.window_settings.discount ** max(depth - 1, 0)
                    total, weight = total + share * loss[depth], weight + share
    task.model.set_attn_implementation("saltus")
    return total / weight


def assert_same_as_one_by_one(task: AdapterTrainingTask) -> None:
    task.model.double()
    task.module.double()
    for step in range(2):
        loss = task.loss(step)
        packed = gradients(task, loss)
        alone = one_by_one(task, step)
        torch.testing.assert_close(loss, alone)
        for name, gradient in gradients(task, alone).items():
            largest = float(gradient.abs().max())
            assert largest > 0 or (task.distillation.form == "independent" and name.startswith("auxiliary.map"))
            torch.testing.assert_close(packed[name], gradient, rtol=0, atol=2e-5 * largest)  # some layers use float32


@pytest.mark.parametrize("name", ["Lfm2", "Qwen3_5", "FalconH1", "Mamba2"])
def test_layers_that_keep_a_state_are_refused_by_name(name):
    with pytest.raises(ValueError, match=r"^[^\n]*keeps a state in [^\n]* layers[^\n]*$"):
        prepare_model(tiny(name))


@pytest.mark.parametrize("name", [*PACKED, *WITHOUT_EXPERTS][::2])  # of the others test_jacobi_training.py packs blocks
def test_packed_windows_have_the_loss_and_gradients_of_separate_forwards(name, tmp_path):
    """Also where windows slide, logits are capped or scaled, and positions are learned."""
    assert_same_as_one_by_one(make_task(tiny(name), tmp_path))


@pytest.mark.parametrize(
    ("form", "loss", "query_start"), [(*kind, STARTS[number % 2]) for number, kind in enumerate(KINDS)]
)
def test_packed_windows_equal_separate_ones_for_every_form_and_loss(form, loss, query_start, tmp_path):
    gating = GatedLoraSettings(rank=4, alpha=4.0, query_start=query_start)
    assert_same_as_one_by_one(make_task(tiny("Llama"), tmp_path, form=form, loss=loss, gating=gating))


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_checkpointed_activations_give_the_same_gradients(name, tmp_path):
    kept, again = (
        make_task(tiny(name), tmp_path, gating=GatedLoraSettings(4, 4.0, dropout=0.2), recompute=recompute)
        for recompute in (False, True)
    )
    calls = []
    again.model.get_submodule(next(iter(again.module.sizes))).register_forward_hook(lambda *_: calls.append(0))
    expected, found = gradients(kept, kept.loss(0)), gradients(again, again.loss(0))
    assert len(calls) == 3  # the context, the queries, and the queries again
    assert expected.keys() == found.keys()
    for gradient, other in zip(expected.values(), found.values(), strict=True):
        assert torch.equal(gradient, other)
    assert not any("forward" in vars(module) for module in again.model.modules())


def test_dropout_is_a_function_of_the_step_and_leaves_other_randomness_alone(tmp_path):
    task = make_task(tiny("Llama"), tmp_path, gating=GatedLoraSettings(4, 4.0, dropout=0.3))
    state = torch.get_rng_state()
    first = task.loss(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(task.loss(0), first)
    task.module.eval()
    assert not torch.equal(task.loss(0), first)


def test_autocast_computes_nearly_the_same(tmp_path):
    exact, quick = (make_task(tiny("Llama"), tmp_path, autocast=autocast) for autocast in (False, True))
    assert quick.loss(0).dtype == torch.float32
    torch.testing.assert_close(quick.loss(0), exact.loss(0), rtol=0.1, atol=0.1)
    assert not torch.equal(quick.loss(0), exact.loss(0))


# What windows are


def test_a_prompt_is_held_out_whatever_other_texts_there_are():
    prompts = [text(12, number).tolist() for number in range(100)]
    held_out = select_validation([*prompts, *prompts], 0.3, 0)
    assert (held_out[:100] == held_out[100:]).all()
    assert 20 <= held_out[:100].sum() <= 40
    assert (select_validation(prompts[1:], 0.3, 0) == held_out[1:100]).all()
    assert (select_validation(prompts[::-1], 0.3, 0) == held_out[:100][::-1]).all()
    assert (select_validation(prompts, 0.3, 1) != held_out[:100]).any()


@pytest.mark.parametrize("fraction", [0.0, 1 - 1e-9])
def test_one_prompt_at_least_is_held_out_and_one_is_not(fraction):
    held_out = select_validation([[number, 7] for number in (1, 2, 3, 1)], fraction, 0)
    assert held_out[0] == held_out[3]
    assert 0 < held_out[:3].sum() < 3
    with pytest.raises(ValueError, match="all texts answer the same prompt"):
        select_validation([[1, 7]] * 3, fraction, 0)


def test_texts_without_a_prompt_are_held_out_one_by_one():
    """Their first token stands in its place, and is the same for all where a tokenizer begins every text by it."""
    table = np.array([[30 * number, 1, 30, 1000] for number in range(20)])
    tokens = torch.from_numpy(np.concatenate([[1, *text(29, number)] for number in range(20)]))
    corpus = TextCorpus(tokens, torch.zeros(1, 600, 2), table, (1.0,), "", "token-order")
    for max_length in (20, 40):  # of the parts that are trained on
        settings = replace(WINDOW_SETTINGS, validation_fraction=0.1, max_length=max_length)
        dataset = WindowDataset(corpus, settings, WINDOW, True)
        assert dataset.validation_table[:, 0].tolist() == [180, 390, 540]
        assert len(dataset.training_table) == 17


def test_texts_of_all_lengths_are_trained_on_equally_often(tmp_path):
    """Also the shortest and the longest."""
    lengths = 12 + 30 * np.arange(20)
    table = np.column_stack([lengths.cumsum() - lengths, 0 * lengths + 2, lengths, 0 * lengths])
    tokens = torch.from_numpy(text(int(lengths.sum())))
    corpus = TextCorpus(tokens, torch.zeros(1, len(tokens), 2), table, (1.0,), "", "token-order")
    settings = replace(WINDOW_SETTINGS, batch_size=8, validation_fraction=0.0, max_length=1000)
    dataset = WindowDataset(corpus, settings, WINDOW, True)
    counts = dict.fromkeys(dataset.training_table[:, 0].tolist(), 0)
    for step in range(100):
        for begin in dataset.training_batch(step).corpus_rows[:, 0].tolist():
            counts[begin] += 1
    assert sum(counts.values()) == 800
    assert min(counts.values()) > 25  # 42 are expected


@each_start
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral"])
def test_queries_are_those_of_decoding(name, query_start, tmp_path):
    """A window's logits equal those of a query window at decoding, with the same text and uniforms."""
    gating = GatedLoraSettings(rank=4, alpha=4.0, query_start=query_start)
    for greedy in (0.0, 1.0):
        window_settings = replace(WINDOW_SETTINGS, greedy_fraction=greedy)
        task = make_task(tiny(name), tmp_path, window_settings=window_settings, gating=gating)
        batch = task.window_dataset.training_batch(1)
        packed, rows = task._pack(batch)
        logits = packed_logits(task.model, packed, rows.flatten(), task.module, batch.temperatures).view(
            *rows.shape, -1
        )
        network = CausalNetwork(task.model)
        network.attach_adapter(task.module.eval())
        for row, window in np.ndindex(*batch.window_starts.shape):
            decided = batch.tokens[row, : batch.window_starts[row, window]].numpy()
            uniforms = batch.uniforms[row, window].nan_to_num(0.5).tolist()  # arbitrary at temperature 0
            inputs = ForwardInputs(continuation(decided, 9))
            ask = with_query_chains(inputs, [(-1, uniforms)], float(batch.temperatures[row, window]))
            own = network.forward([ask], [network.new_kv_cache()])[0].logits[1:]
            torch.testing.assert_close(own, logits[row, window].detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["one-hot", "categorical"])
def test_students_of_distributions_learn_at_the_temperature_of_the_text(form, tmp_path):
    task = make_task(tiny("Llama"), tmp_path, form=form)
    found = {0.0: set(), 0.7: set()}
    for step in range(20):
        batch = task.window_dataset.training_batch(step)
        for row, rows in enumerate(batch.corpus_rows[:, 0].tolist()):
            written = next(one[3] for one in task.corpus.text_table if one[0] == rows) / 1000
            found[written] |= set(batch.temperatures[row].tolist())
    expected = {0.0: {0.0, 0.7, 1.0}, 0.7: {0.7, 1.0}} if form == "one-hot" else {0.0: {0.0}, 0.7: {0.7}}
    assert found == expected


def test_a_temperature_without_intervals_is_refused(tmp_path):
    model = tiny("Llama")
    for _ in collect_uniform_intervals(model, samples(), tmp_path, (1.0,), 40):
        pass
    corpus = load_uniform_intervals(tmp_path)
    AdapterTrainingTask(model, corpus, GatedLoraSettings(4))
    with pytest.raises(ValueError, match=r"no intervals at 0\.7; collect them"):
        AdapterTrainingTask(model, corpus, GatedLoraSettings(4), DistillationSettings("categorical"))
    with pytest.raises(ValueError, match="take 2 or more"):
        AdapterTrainingTask(model, corpus, GatedLoraSettings(4), DistillationSettings(window=1))
    with pytest.raises(ValueError, match="fewer than two texts"):
        AdapterTrainingTask(model, corpus, GatedLoraSettings(4), window_settings=replace(WINDOW_SETTINGS, max_length=4))


def test_intervals_are_those_cached_beside_states(tmp_path):
    """Computed with another attention, and truncated at `max_length` tokens."""
    network = CausalNetwork(tiny("Llama"))
    for _ in collect_hidden_states(network, samples(), tmp_path / "states", TEMPERATURES):
        pass
    states = load_hidden_states(tmp_path / "states")
    for slots in (100, 20):
        for _ in collect_uniform_intervals(tiny("Llama"), samples(), tmp_path / str(slots), TEMPERATURES, slots):
            pass
        found = load_uniform_intervals(tmp_path / str(slots))
        assert found.temperatures == TEMPERATURES
        for (start, prompt, length, written), whole in zip(found.text_table, states.text_table, strict=True):
            assert (prompt, length, written) == (whole[1], min(slots, whole[2]), whole[3])
            assert torch.equal(found.tokens[start:][:length], states.tokens[whole[0] :][:length])
            expected = states.uniform_intervals[:, whole[0] :][:, :length]
            torch.testing.assert_close(found.uniform_intervals[:, start:][:, :length], expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="for other settings"):
        list(collect_uniform_intervals(tiny("Llama"), samples(), tmp_path / "20", TEMPERATURES, 21))


def test_tokens_per_call_are_the_correct_drafts_behind_the_first_query_and_one(tmp_path, monkeypatch):
    """With drafts that are correct up to some position; the first query's prediction is ignored."""
    task = make_task(tiny("Llama"), tmp_path)
    for batch in task.window_dataset.validation_batches(False):
        monkeypatch.setattr(task.window_dataset, "validation_batches", lambda greedy, *_, batch=batch: iter([batch]))
        for right in range(WINDOW):
            answers = batch.targets.clone()
            answers[..., 0] += 1
            answers[..., right + 1 :] += 1
            monkeypatch.setattr(task, "_drafted_tokens", lambda *_, answers=answers: answers)
            known = batch.loss_mask[..., 1:].sum(-1)
            assert task.evaluate()["sampled"] == float((1 + known.clamp_max(right)).double().mean())
        break


def test_windows_grow_by_the_same_factor_every_step(tmp_path, monkeypatch):
    """From two queries; the texts and the places of the windows are those of a run without growth."""
    task, whole = (make_task(tiny("Llama"), tmp_path, growth_steps=steps) for steps in (8, 0))
    task.distillation = replace(task.distillation, window=64)
    lengths = [task.window_at(step) for step in range(12)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[4], lengths[8], lengths[-1]) == (2, round(2 * 32**0.5), 64, 64)
    task.distillation = replace(task.distillation, window=WINDOW)
    packed: list = []
    for each in (task, whole):
        pack = each._pack
        monkeypatch.setattr(each, "_pack", lambda batch, pack=pack: packed.append(batch) or pack(batch))
    for step in (0, 8):
        losses = [each.loss(step) for each in (task, whole)]
        grown, full = packed[-2:]
        assert torch.equal(grown.window_starts, full.window_starts)
        assert torch.equal(grown.uniforms.nan_to_num(), full.uniforms[..., : 2 if step == 0 else WINDOW].nan_to_num())
        assert torch.equal(*losses) == (step == 8)


@pytest.mark.parametrize(("form", "loss"), [("categorical", "kl"), ("categorical", "ce")])
@pytest.mark.parametrize("more", [{}, {"inverse": True}, {"student_windows": 1.0}], ids=["given", "inverse", "student"])
def test_every_kind_of_window_grows_and_starts_from_the_last_token(form, loss, more, tmp_path):
    if more.get("inverse") and loss != "ce":
        pytest.skip("inverse training has the loss ce")
    gating = GatedLoraSettings(4, 4.0, query_start="last-token")
    task = make_task(tiny("Llama"), tmp_path, form=form, loss=loss, gating=gating, growth_steps=4, **more)
    for step in (0, 4):
        loss_of_step = task.loss(step)
        assert loss_of_step.isfinite()
        assert loss_of_step > 0
        assert gradients(task, loss_of_step)["auxiliary.blank"].any()


def test_accuracy_by_depth_counts_every_query_and_compares_with_other_uniforms(tmp_path, monkeypatch):
    """Whatever the queries are conditioned on, tokens are picked by the text's own uniforms."""
    task = make_task(tiny("Llama"), tmp_path)
    batches = {id(batch): batch for batch in task.window_dataset.validation_batches(False)}
    masks = torch.cat([batch.loss_mask.flatten(0, 1) for batch in batches.values()])

    def drafted(batch, given):
        """The first query is always right, the others where they are conditioned on the text's uniforms."""
        right = (given.uniforms == batch.uniforms) | (torch.arange(WINDOW) == 0)
        return torch.where(right, batch.targets, batch.targets + 1)

    monkeypatch.setattr(task, "_drafted_tokens", drafted)
    own, other = task.accuracy_by_depth().values()
    assert own == [float(any_counted) for any_counted in masks.any(0)]
    assert other == [1.0, *[0.0] * (WINDOW - 1)]
    assert make_task(tiny("Llama"), tmp_path, form="independent").accuracy_by_depth() == {}


@pytest.mark.parametrize(
    ("form", "shown"), [("one-hot", "first query right 0.5"), ("categorical", "second query right 0.4")]
)
def test_the_status_line_shows_the_first_query_that_reads_a_uniform(form, shown, tmp_path):
    task = make_task(tiny("Llama"), tmp_path, form=form)
    log = TrainingLog(dict, tmp_path, task)
    log.accuracy_by_depth = {"its own uniforms": [0.5, 0.4], "other uniforms": [0.3, 0.2]}
    assert shown in log.status_line
    reads = ~query_uniforms(torch.full((WINDOW,), 0.5), form).isnan()
    assert reads.nonzero()[0, 0] == task.first_conditioned_query


def test_own_uniforms_pick_the_tokens_of_queries_that_are_conditioned_on_others(tmp_path):
    """So that a query of C-PTP that reads no uniforms is as often right with others."""
    task = make_task(tiny("Llama"), tmp_path, form="categorical")
    with torch.no_grad():
        task.module.auxiliary.map.weight.zero_()
    for batch in task.window_dataset.validation_batches(False):
        others = torch.full_like(batch.uniforms, 0.25)
        assert torch.equal(task.matching_queries(batch), task.matching_queries(batch, others))


# What is learned


def texts_of(engine, prompts, temperature: float) -> list[Sample]:
    settings = {"temperature": temperature, "max_new_tokens": 24, "raw": True, "ignore_eos": True}
    texts = [engine.generate(prompt, method="plain", seed=seed, **settings) for seed, prompt in enumerate(prompts)]
    return [Sample(engine.encode(text.prompt, raw=True), text.tokens, temperature) for text in texts]


PROMPTS = ["the cat", "a dog on", "sat the mat", "log"]
SCHEDULE = Schedule(200, 0.01, warmup_steps=10, checkpoint_steps=40)


def school(folder: Path, work: Path, form: str, temperature: float) -> tuple[AdapterTrainingTask, list[float]]:
    """An adapter trained on a few texts, and evaluated on these."""
    engine = saltus.load(str(folder), "plain", device="cpu")
    written = texts_of(engine, PROMPTS, temperature)
    model = engine.network.model
    again = [Sample([*one.prompt, one.completion[0]], one.completion[1:], temperature) for one in written]
    for _ in collect_uniform_intervals(model, written + again, work / "intervals", (1.0,)):
        pass
    window_settings = WindowSettings(
        batch_size=4, windows_per_text=12, greedy_fraction=0.8, validation_fraction=0.1, discount=0.9
    )
    objective = DistillationSettings(form, window=5)
    task = AdapterTrainingTask(
        model,
        load_uniform_intervals(work / "intervals"),
        GatedLoraSettings(16, 16.0),
        objective,
        window_settings,
        "tiny",
    )
    dataset = task.window_dataset  # of so few texts none can be spared
    dataset.training_table = np.concatenate([dataset.training_table, dataset.validation_table])
    dataset.validation_table = dataset.training_table
    return task, train(task.module, task.loss, SCHEDULE, work / "run.pt", {"form": form})


@pytest.mark.slow
@pytest.mark.parametrize(("form", "temperature"), [("one-hot", 1.0), ("categorical", 0.0)])
def test_a_trained_adapter_writes_the_same_text_in_fewer_calls(form, temperature, tiny_folder, tmp_path):
    folder = tiny_folder(3)
    task, curve = school(folder, tmp_path, form, temperature)
    assert isinstance(task, TrainingTask)
    assert curve[-1] < curve[0] / 3
    report = task.evaluate()
    assert report["sampled" if temperature else "greedy"] > 2
    assert math.isnan(report["greedy" if temperature else "sampled"])
    task.save(tmp_path / "adapter", {"steps": 200})
    assert read_metadata(tmp_path / "adapter").training == {"steps": 200, "form": form, "window": 5}
    own = {"model": str(tmp_path / "adapter")}
    engine = saltus.load(str(folder), "ptp", device="cpu", options={"ptp": own}, adaptive=False)
    apart = saltus.load(str(folder), "ptp", device="cpu", options={"ptp": own | {"two_calls": True}}, adaptive=False)
    settings = {"temperature": temperature, "max_new_tokens": 24, "raw": True, "ignore_eos": True}
    for seed, prompt in enumerate(PROMPTS):
        drafted, plain = (engine.generate(prompt, method=method, seed=seed, **settings) for method in ("ptp", "plain"))
        assert drafted.tokens == plain.tokens
        assert drafted.statistics.tokens_per_call > 1.5
        again = apart.generate(prompt, seed=seed, **settings)
        assert again.tokens == plain.tokens
        steps = len(again.statistics.tokens_by_call)
        assert len(drafted.statistics.tokens_by_call) == drafted.statistics.calls
        assert steps < again.statistics.calls <= 2 * steps
        assert again.statistics.tokens_per_call == 24 / again.statistics.calls
    network = CausalNetwork(saltus.load(str(folder), "plain", device="cpu").network.model)
    assert load_drafter_for_target(f"adapter:{tmp_path / 'adapter'}", network, "tiny") is None
    assert model_fingerprint(network.model) == read_metadata(tmp_path / "adapter").target_fingerprint


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_training_leaves_the_model_and_its_rows_as_they_are(name, tmp_path):
    model = tiny(name)
    task = make_task(model, tmp_path, learned=0.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = task.window_dataset.training_batch(0)
    packed, rows = task._pack(batch)
    context = torch.arange(packed.context_length)
    plain = packed_logits(model, packed, context, task.module, batch.temperatures)
    curve = train(task.module, task.loss, Schedule(30, 0.02, checkpoint_steps=10), tmp_path / "run.pt", {})
    assert curve[-1] < curve[0] - 0.3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(packed_logits(model, packed, context, task.module, batch.temperatures), plain)
    inputs = [
        packed_logits(model, packed, rows.flatten(), adapter, batch.temperatures) for adapter in (task.module, None)
    ]
    assert not torch.equal(*inputs)
    assert not any(module._forward_hooks for module in model.modules())
    network, bare = CausalNetwork(model), CausalNetwork(tiny(name))
    network.attach_adapter(task.module)
    ask = ForwardInputs(continuation(text(20), 9), (5, 6), (-1, 0))
    own = network.forward([with_query_chains(ask, [(1, [0.1, 0.9])], 0.7)], [network.new_kv_cache()])[0].logits[:3]
    assert torch.equal(own, bare.forward([ask], [bare.new_kv_cache()])[0].logits)


def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path):
    schedule = Schedule(12, 0.02, checkpoint_steps=4)

    def begun() -> AdapterTrainingTask:
        return make_task(tiny("Llama"), tmp_path / "intervals", gating=GatedLoraSettings(4, 4.0, dropout=0.1))

    whole, interrupted, resumed = begun(), begun(), begun()
    expected = train(whole.module, whole.loss, schedule, tmp_path / "whole.pt", {})

    def dies(step: int) -> torch.Tensor:
        if step == 7:
            raise KeyboardInterrupt
        return interrupted.loss(step)

    with pytest.raises(KeyboardInterrupt):
        train(interrupted.module, dies, schedule, tmp_path / "run.pt", {})
    assert train(resumed.module, resumed.loss, schedule, tmp_path / "run.pt", {}) == expected
    for weight, other in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_the_teachers_intervals_are_those_of_its_plain_forward(tmp_path):
    model = tiny("GPT2")
    logits = model(torch.from_numpy(text(18))[None]).logits[0].detach()
    for _ in collect_uniform_intervals(model, samples(1), tmp_path, TEMPERATURES):
        pass
    found = load_uniform_intervals(tmp_path).uniform_intervals
    assert not found[:, :3].any()
    for place, temperature in enumerate(TEMPERATURES):
        expected = uniform_intervals(logits[2:-1], torch.from_numpy(text(18)[3:]), temperature)
        torch.testing.assert_close(found[place, 3:, 0], expected.low, rtol=0, atol=1e-5)
        torch.testing.assert_close(found[place, 3:, 1], expected.high, rtol=0, atol=1e-5)


@pytest.mark.parametrize("coupling", ["probability", "token-order", "gumbel"])
def test_uniforms_of_a_window_pick_its_tokens_under_the_corpus_s_coupling(coupling, tmp_path):
    model = tiny("Llama")
    for _ in collect_uniform_intervals(model, samples(), tmp_path, TEMPERATURES, 40, coupling):
        pass
    corpus = load_uniform_intervals(tmp_path)
    assert corpus.coupling == coupling
    batch = WindowDataset(corpus, replace(WINDOW_SETTINGS, greedy_fraction=0.0), WINDOW, True).training_batch(0)
    assert batch.loss_mask[..., 0].all()
    if coupling == "gumbel":
        assert batch.uniforms.isnan().all()
        return
    checked = 0
    for row, tokens in enumerate(batch.tokens):
        logits = model(tokens[None]).logits[0]
        for window, start in enumerate(batch.window_starts[row].tolist()):
            sampling = Sampling(float(batch.temperatures[row, window]), coupling=coupling)
            for k in torch.nonzero(batch.loss_mask[row, window])[:, 0].tolist():
                law = token_distribution(logits[start + k - 1].detach(), sampling)
                assert pick(float(batch.uniforms[row, window, k]), law) == int(batch.targets[row, window, k])
                checked += 1
    assert checked > 10
