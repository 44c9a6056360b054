"""Adapters in training: packed windows are what each is alone, the model stays as it is, and what is learned drafts."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import saltus
from architectures import ARCHITECTURES, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.drafting.ptp_queries import with_query_chains
from saltus.networks.adapters.gated_lora import Gate, GatedLoraSettings, gated_adapter
from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.networks.loading.metadata import read_metadata
from saltus.networks.loading.target_drafters import load_drafter_for_target
from saltus.networks.models.causal import CausalNetwork
from saltus.training.data.hidden_states import Sample, collect_hidden_states, load_hidden_states
from saltus.training.data.packed_forward import packed_logits
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.text_intervals import collect_uniform_intervals, load_uniform_intervals
from saltus.training.data.uniform_intervals import uniform_intervals
from saltus.training.data.window_dataset import WindowSettings
from saltus.training.data.window_packing import query_uniforms
from saltus.training.loop.training_loop import Schedule, train
from saltus.training.tasks.adapter import AdapterTrainingTask
from saltus.training.tasks.distillation import DistillationSettings
from saltus.training.tasks.training_task import TrainingTask

WINDOW, TEMPERATURES = 4, (0.7, 1.0)
LESSONS = WindowSettings(texts=2, windows=3, greedy=0.5, slots=40, held_out=0.3)
KINDS = [
    ("one-hot", "ce"), ("one-hot", "bce"), ("categorical", "ce"), ("categorical", "kl"), ("categorical", "reverse-kl"),
    ("independent", "ce"), ("independent", "kl"),
]  # fmt: skip
EXPERTS = ["DeepseekV3", "Mixtral", "Qwen2Moe", "Qwen3Moe"]  # Transformers multiplies them in no float64
every_kind = pytest.mark.parametrize(("form", "loss"), KINDS)


def samples(count: int = 6) -> list[Sample]:
    """Random texts of unlike lengths, half of them written greedily, as it were."""
    made = []
    for number in range(count):
        tokens = text(18 + 3 * number, number).tolist()
        made.append(Sample(tokens[: 3 + number], tokens[3 + number :], 0.0 if number % 2 else 0.7))
    return made


def course_on(
    model, folder: Path, *, lessons: WindowSettings = LESSONS, learned: float = 0.3, **settings
) -> AdapterTrainingTask:
    """A course whose adapter changes much already."""
    for _ in collect_uniform_intervals(model, samples(), folder, TEMPERATURES, lessons.slots):
        pass
    gating = settings.pop("gating", GatedLoraSettings(rank=4, alpha=4.0))
    objective = DistillationSettings(settings.pop("form", "one-hot"), settings.pop("loss", "ce"), WINDOW)
    course = AdapterTrainingTask(model, load_uniform_intervals(folder), gating, objective, lessons, **settings)
    with torch.no_grad():
        for name, weight in course.module.named_parameters():
            drawn = seeded_generator(1, name).normal(0, learned, tuple(weight.shape))
            weight.add_(torch.from_numpy(drawn).to(weight) * min(weight.shape[-1], 8) ** -0.5)
    return course


def gradients(course: AdapterTrainingTask, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    course.module.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in course.module.named_parameters() if weight.grad is not None}


def one_by_one(course: AdapterTrainingTask, step: int) -> torch.Tensor:
    """The loss by the library's own causal attention: each window behind its own context, in a forward of its own."""
    cut, total, weight = course.window_dataset.training_batch(step), 0.0, 0.0
    course.model.set_attn_implementation("eager")
    for row in range(len(cut.window_starts)):
        for window, split in enumerate(cut.window_starts[row].tolist()):
            temperature, known = cut.temperatures[row, window], cut.targets[row, window]
            whole = torch.cat([cut.tokens[row, :split], known])[None]
            inputs = torch.cat([whole[:, :split], torch.zeros(1, WINDOW, dtype=torch.long)], 1)
            queries = torch.arange(split, split + WINDOW)
            told = query_uniforms(cut.uniforms[row, window], course.distillation.form)
            with gated_adapter(course.model, course.module, Gate(queries, told, temperature.expand(WINDOW))):
                logits = course.model(inputs, use_cache=False).logits[0, split:]
            distributions = course.model(whole, use_cache=False).logits[0, split - 1 : -1].detach()
            warm = 1.0 if temperature == 0 else float(temperature)
            if course.distillation.form != "one-hot":
                logits, distributions = logits / warm, distributions / warm
            own, teacher = logits.log_softmax(-1), distributions.log_softmax(-1)
            loss = -own.gather(-1, known[:, None])[:, 0]
            if course.distillation.loss == "bce":
                others = torch.log1p(-own.exp())
                loss = loss - others.sum(-1) + others.gather(-1, known[:, None])[:, 0]
            if temperature > 0 and course.distillation.loss == "kl":
                loss = (teacher.exp() * (teacher - own)).sum(-1)
            if temperature > 0 and course.distillation.loss == "reverse-kl":
                loss = (own.exp() * (own - teacher)).sum(-1)
            for depth in range(WINDOW):
                if cut.loss_mask[row, window, depth]:
                    share = course.window_settings.discount ** max(depth - 1, 0)
                    total, weight = total + share * loss[depth], weight + share
    course.model.set_attn_implementation("saltus")
    return total / weight


def assert_same_as_one_by_one(course: AdapterTrainingTask) -> None:
    course.model.double()
    course.module.double()
    for step in range(2):
        loss = course.loss(step)
        packed = gradients(course, loss)
        alone = one_by_one(course, step)
        torch.testing.assert_close(loss, alone)
        for name, gradient in gradients(course, alone).items():
            largest = float(gradient.abs().max())
            assert largest > 0 or (course.distillation.form == "independent" and name.startswith("auxiliary.map"))
            torch.testing.assert_close(packed[name], gradient, rtol=0, atol=1e-5 * largest)  # some layers use float32


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in EXPERTS])
def test_packed_windows_have_the_loss_and_gradients_of_separate_forwards(name, tmp_path):
    """Also where windows slide, logits are capped or scaled, and positions are learned."""
    assert_same_as_one_by_one(course_on(tiny(name), tmp_path))


@every_kind
def test_so_they_have_for_every_form_and_loss(form, loss, tmp_path):
    assert_same_as_one_by_one(course_on(tiny("Llama"), tmp_path, form=form, loss=loss))


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_layers_that_are_computed_again_give_the_same_gradients(name, tmp_path):
    kept, again = (
        course_on(tiny(name), tmp_path, gating=GatedLoraSettings(4, 4.0, dropout=0.2), recompute=recompute)
        for recompute in (False, True)
    )
    calls = []
    again.model.get_submodule(next(iter(again.module.sizes))).register_forward_hook(lambda *_: calls.append(0))
    expected, found = gradients(kept, kept.loss(0)), gradients(again, again.loss(0))
    assert len(calls) == 2
    assert expected.keys() == found.keys()
    for gradient, other in zip(expected.values(), found.values(), strict=True):
        assert torch.equal(gradient, other)
    assert not any("forward" in vars(module) for module in again.model.modules())


def test_dropout_is_a_function_of_the_step_and_leaves_other_randomness_alone(tmp_path):
    course = course_on(tiny("Llama"), tmp_path, gating=GatedLoraSettings(4, 4.0, dropout=0.3))
    state = torch.get_rng_state()
    first = course.loss(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(course.loss(0), first)
    course.module.eval()
    assert not torch.equal(course.loss(0), first)


def test_autocast_computes_nearly_the_same(tmp_path):
    exact, quick = (course_on(tiny("Llama"), tmp_path, autocast=autocast) for autocast in (False, True))
    assert quick.loss(0).dtype == torch.float32
    torch.testing.assert_close(quick.loss(0), exact.loss(0), rtol=0.1, atol=0.1)
    assert not torch.equal(quick.loss(0), exact.loss(0))


# What windows are


def test_queries_are_asked_as_they_are_at_decoding(tmp_path):
    """The logits of a window are those of a group behind the same text: at its positions, told what it is told."""
    for greedy in (0.0, 1.0):
        course = course_on(tiny("Llama"), tmp_path, lessons=replace(LESSONS, greedy=greedy))
        cut = course.window_dataset.training_batch(1)
        packed, rows = course._pack(cut)
        logits = packed_logits(course.model, packed, rows.flatten(), course.module, cut.temperatures).view(
            *rows.shape, -1
        )
        network = CausalNetwork(course.model)
        network.attach_adapter(course.module.eval())
        for row, window in np.ndindex(*cut.window_starts.shape):
            decided = cut.tokens[row, : cut.window_starts[row, window]].numpy()
            uniforms = cut.uniforms[row, window].nan_to_num(0.5).tolist()  # at temperature 0 none is told, whatever
            inputs = ForwardInputs(continuation(decided, 9))
            ask = with_query_chains(inputs, [(-1, uniforms)], float(cut.temperatures[row, window]))
            own = network.forward([ask], [network.new_kv_cache()])[0].logits[1:]
            torch.testing.assert_close(own, logits[row, window].detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["one-hot", "categorical"])
def test_students_of_laws_learn_at_the_temperature_of_the_text(form, tmp_path):
    course = course_on(tiny("Llama"), tmp_path, form=form)
    found = {0.0: set(), 0.7: set()}
    for step in range(20):
        cut = course.window_dataset.training_batch(step)
        for row, rows in enumerate(cut.corpus_rows[:, 0].tolist()):
            written = next(one[3] for one in course.corpus.text_table if one[0] == rows) / 1000
            found[written] |= set(cut.temperatures[row].tolist())
    expected = {0.0: {0.0, 0.7, 1.0}, 0.7: {0.7, 1.0}} if form == "one-hot" else {0.0: {0.0}, 0.7: {0.7}}
    assert found == expected


def test_laws_without_edges_at_their_temperature_are_refused(tmp_path):
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
        AdapterTrainingTask(model, corpus, GatedLoraSettings(4), window_settings=replace(LESSONS, slots=4))


def test_edges_are_those_that_are_kept_beside_states(tmp_path):
    """Read by another attention, and cut where the slots end."""
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
    with pytest.raises(ValueError, match="another model or other texts"):
        list(collect_uniform_intervals(tiny("Llama"), samples(), tmp_path / "20", TEMPERATURES, 21))


def test_an_exam_counts_right_drafts_behind_the_first_query_and_one_token_more(tmp_path, monkeypatch):
    """By a student that says what it should up to a place: the first query's answer never matters."""
    course = course_on(tiny("Llama"), tmp_path)
    for cut in course.window_dataset.validation_batches(False):
        monkeypatch.setattr(course.window_dataset, "validation_batches", lambda greedy, cut=cut: iter([cut]))
        for right in range(WINDOW):
            answers = cut.targets.clone()
            answers[..., 0] += 1
            answers[..., right + 1 :] += 1
            monkeypatch.setattr(course, "_drafted_tokens", lambda cut, answers=answers: answers)
            known = cut.loss_mask[..., 1:].sum(-1)
            assert course.evaluate()["sampled"] == float((1 + known.clamp_max(right)).double().mean())
        break


# What is learned


def texts_of(engine, prompts, temperature: float) -> list[Sample]:
    settings = {"temperature": temperature, "max_new_tokens": 24, "raw": True, "ignore_eos": True}
    texts = [engine.generate(prompt, method="plain", seed=seed, **settings) for seed, prompt in enumerate(prompts)]
    return [Sample(engine.encode(text.prompt, raw=True), text.tokens, temperature) for text in texts]


PROMPTS = ["the cat", "a dog on", "sat the mat", "log"]
SCHEDULE = Schedule(200, 0.01, warm_up=10, every=40)


def school(folder: Path, work: Path, form: str, temperature: float) -> tuple[AdapterTrainingTask, list[float]]:
    """An adapter that has read a few texts again and again, and is examined on one of them."""
    engine = saltus.load(str(folder), "plain", device="cpu")
    written = texts_of(engine, PROMPTS, temperature)
    model = engine.network.model
    again = [Sample([*one.prompt, one.completion[0]], one.completion[1:], temperature) for one in written]
    for _ in collect_uniform_intervals(model, written + again, work / "edges", (1.0,)):
        pass
    lessons = WindowSettings(texts=4, windows=12, greedy=0.8, held_out=0.1, discount=0.9)
    objective = DistillationSettings(form, window=5)
    course = AdapterTrainingTask(
        model, load_uniform_intervals(work / "edges"), GatedLoraSettings(16, 16.0), objective, lessons, "tiny"
    )
    return course, train(course.module, course.loss, SCHEDULE, work / "run.pt", {"form": form})


@pytest.mark.slow
@pytest.mark.parametrize(("form", "temperature"), [("one-hot", 0.0), ("one-hot", 1.0), ("categorical", 0.0)])
def test_a_trained_adapter_writes_the_same_text_in_fewer_calls(form, temperature, tiny_folder, tmp_path):
    folder = tiny_folder(3)
    course, curve = school(folder, tmp_path, form, temperature)
    assert isinstance(course, TrainingTask)
    assert curve[-1] < curve[0] / 3
    report = course.evaluate()
    assert report["sampled" if temperature else "greedy"] > 2
    assert math.isnan(report["greedy" if temperature else "sampled"])
    course.save(tmp_path / "adapter", {"steps": 200})
    assert read_metadata(tmp_path / "adapter").training == {"steps": 200, "form": form, "window": 5}
    own = {"model": str(tmp_path / "adapter")}
    engine = saltus.load(str(folder), "ptp", device="cpu", options={"ptp": own})
    apart = saltus.load(str(folder), "ptp", device="cpu", options={"ptp": own | {"two_calls": True}}, adaptive=False)
    settings = {"temperature": temperature, "max_new_tokens": 24, "raw": True, "ignore_eos": True}
    for seed, prompt in enumerate(PROMPTS):
        drafted, plain = (engine.generate(prompt, method=method, seed=seed, **settings) for method in ("ptp", "plain"))
        assert drafted.tokens == plain.tokens
        assert drafted.statistics.tokens_per_call > 1.5
        again = apart.generate(prompt, seed=seed, **settings)
        assert again.tokens == plain.tokens
        steps = len(again.statistics.accepted)
        assert len(drafted.statistics.accepted) == drafted.statistics.calls
        assert steps < again.statistics.calls <= 2 * steps
        assert again.statistics.tokens_per_call == 24 / again.statistics.calls
    network = CausalNetwork(saltus.load(str(folder), "plain", device="cpu").network.model)
    assert load_drafter_for_target(f"adapter:{tmp_path / 'adapter'}", network, "tiny") is None
    assert model_fingerprint(network.model) == read_metadata(tmp_path / "adapter").target_fingerprint


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_training_leaves_the_model_and_its_rows_as_they_are(name, tmp_path):
    model = tiny(name)
    course = course_on(model, tmp_path, learned=0.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    cut = course.window_dataset.training_batch(0)
    packed, rows = course._pack(cut)
    context = torch.arange(packed.context_length)
    plain = packed_logits(model, packed, context, course.module, cut.temperatures)
    curve = train(course.module, course.loss, Schedule(30, 0.02, every=10), tmp_path / "run.pt", {})
    assert curve[-1] < curve[0] - 0.3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(packed_logits(model, packed, context, course.module, cut.temperatures), plain)
    inputs = [
        packed_logits(model, packed, rows.flatten(), adapter, cut.temperatures) for adapter in (course.module, None)
    ]
    assert not torch.equal(*inputs)
    assert not any(module._forward_hooks for module in model.modules())
    network, bare = CausalNetwork(model), CausalNetwork(tiny(name))
    network.attach_adapter(course.module)
    ask = ForwardInputs(continuation(text(20), 9), (5, 6), (-1, 0))
    own = network.forward([with_query_chains(ask, [(1, [0.1, 0.9])], 0.7)], [network.new_kv_cache()])[0].logits[:3]
    assert torch.equal(own, bare.forward([ask], [bare.new_kv_cache()])[0].logits)


def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path):
    schedule = Schedule(12, 0.02, every=4)

    def begun() -> AdapterTrainingTask:
        return course_on(tiny("Llama"), tmp_path / "edges", gating=GatedLoraSettings(4, 4.0, dropout=0.1))

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


def test_the_teachers_edges_are_those_of_its_plain_forward(tmp_path):
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
