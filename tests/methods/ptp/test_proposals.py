"""Where training texts and their uniforms come from: the teacher, the student, a data set, or the adapter itself."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_adapter_training import WINDOW, make_task
from test_cli import complaint, lines, saltus_
from test_train import ADAPTER, RECIPE, training
from test_uniform_intervals import logits, text_uniform_intervals

import saltus
from architectures import tiny
from saltus.core.picking import uniform_interval
from saltus.core.sampling import Sampling, token_distribution
from saltus.loading.metadata import read_metadata
from saltus.methods.ptp.training.own_uniforms import find_own_uniforms
from saltus.methods.ptp.training.student_windows import choose_windows, window_logits, with_student_windows
from saltus.training.data.packed_forward import PackedMemory, pack_causal, packed_logits
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.teacher_texts import read_teacher_texts
from saltus.training.data.uniform_intervals import Truncation, pick_tokens, uniform_intervals
from saltus.training.data.window_packing import pack_windows, query_uniforms, slice_rows
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.loop.training_loop import Schedule, train

ARCHITECTURES = ["Llama", "Mistral", "Gemma2", "GPT2"]  # among them one whose attention slides
each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder()


@pytest.fixture(scope="module")
def teacher(folder, tmp_path_factory):
    room = tmp_path_factory.mktemp("teacher")
    inputs = lines(room / "prompts.jsonl", *({"prompt": f"the cat sat {number} times"} for number in range(8)))
    saltus_("collect", "text", "-f", inputs, "-m", folder, "-n", 16, "--out", room / "teacher")
    return room / "teacher"


def query_logits(task, batch, uniforms) -> torch.Tensor:
    """The adapter's logits of all queries at once, with the temperatures applied."""
    packed = pack_windows(batch.tokens, batch.window_starts, query_uniforms(uniforms, task.distillation.form))
    rows = packed.queries_by_window(torch.arange(packed.tokens.numel()).view(packed.tokens.shape))
    found = packed_logits(task.model, packed, rows.flatten(), task.module, batch.temperatures).view(*rows.shape, -1)
    return found / torch.where(batch.temperatures == 0, 1.0, batch.temperatures)[..., None, None].to(found.dtype)


# Inverse autoregressive training


@each_architecture
def test_rows_that_follow_a_memory_have_the_logits_of_the_whole(name, tmp_path):
    task = make_task(tiny(name), tmp_path)
    batch = task.window_dataset.training_batch(0)
    packed = pack_windows(batch.tokens, batch.window_starts, batch.uniforms)
    numbers, memory = torch.arange(packed.tokens.numel()).view(packed.tokens.shape), PackedMemory(packed.positions)
    whole = packed_logits(task.model, packed, numbers.flatten(), task.module, batch.temperatures)
    whole, start = whole.view(*numbers.shape, -1), packed.context_length
    for first, last in ((0, start), (start, start + 3), (start + 3, packed.tokens.shape[1])):
        part = slice_rows(packed, first, last)
        gated = (task.module, batch.temperatures) if first else ()
        found = packed_logits(task.model, part, torch.arange(part.tokens.numel()), *gated, memory=memory)
        expected = whole[:, first:last].flatten(0, 1)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@each_architecture
def test_under_its_own_uniforms_the_adapter_writes_the_text(name, tmp_path):
    """The property that Algorithm 3 gives its uniforms."""
    task = make_task(tiny(name), tmp_path, form="categorical")
    for step in range(3):
        batch = task.window_dataset.training_batch(step)
        uniforms, valid = find_own_uniforms(task.model, task.module, batch, seeded_generator(0, "place", step))
        greedy = batch.temperatures == 0
        assert torch.equal(uniforms.isnan().any(-1), greedy)
        assert valid.double().mean() > 0.95, "rounding may leave an interval empty, but seldom"
        picked = pick_tokens(uniforms.nan_to_num(), query_logits(task, batch, uniforms))
        right = (picked == batch.targets)[valid & ~greedy[..., None]]
        assert right.double().mean() > 0.98
        assert len(right)
        others = seeded_generator(1, "u", step).random(tuple(uniforms.shape))
        picked = pick_tokens(torch.from_numpy(others), query_logits(task, batch, uniforms))
        assert (picked == batch.targets).double().mean() < 0.5, "or the test shows nothing"


def test_inverse_training_brings_the_loss_down_without_a_teacher(tmp_path):
    task = make_task(tiny("Llama"), tmp_path, form="categorical", learned=0.0, inverse=True)
    validation = task.window_dataset.training_batch(0)

    @torch.no_grad()
    def nats() -> float:
        """−log P of a batch that stays the same (Eq. 13)."""
        batch = task._with_uniforms(validation, 0)
        logs = query_logits(task, batch, batch.uniforms).log_softmax(-1).gather(-1, batch.targets[..., None])
        return -float(logs[..., 0][batch.loss_mask].mean())

    before = nats()
    train(task.module, task.loss, Schedule(60, 1e-2, checkpoint_steps=60), tmp_path / "checkpoint.pt", {})
    assert nats() < 0.7 * before


@pytest.mark.slow
def test_an_adapter_of_inverse_training_drafts_and_leaves_texts_as_they_are(folder, teacher, tmp_path):
    file, out = tmp_path / "gated.toml", tmp_path / "out"
    file.write_text(ADAPTER, encoding="utf-8")
    assert "inverse training is for the form categorical" in complaint(
        *training(file, folder, teacher, tmp_path / "work", "--set", "inverse=true")
    )
    given = ["--set", "inverse=true", "--set", "form=categorical"]
    assert "leave student out" in complaint(
        *training(file, folder, teacher, tmp_path / "work", *given, "--set", f"student={folder}")
    )
    saltus_(*training(file, folder, teacher, tmp_path / "work", *given, "--out", out))
    assert read_metadata(out).training["recipe"]["adapter"]["inverse"]
    engine = saltus.load(str(folder), "ptp", options={"ptp": {"model": str(out)}}, adaptive=False)
    for temperature in (0.0, 0.7):
        settings = {"max_new_tokens": 24, "temperature": temperature, "coupling": "probability"}
        drafted, plain = (engine.generate("the cat", method=method, **settings) for method in ("ptp", "plain"))
        assert drafted.tokens == plain.tokens


# Texts of the student


@pytest.mark.parametrize("form", ["one-hot", "categorical", "independent"])
def test_windows_of_the_student_are_its_drafts_with_uniforms_of_the_teacher(form, tmp_path):
    task = make_task(tiny("Llama"), tmp_path, form=form, learned=0.05)
    batch = task.window_dataset.training_batch(1)
    chosen = choose_windows(batch, 1.0, seeded_generator(0, "choose"))
    assert torch.equal(chosen, batch.temperatures > 0)
    drafted = with_student_windows(
        batch, chosen, task.model, task.module, task.model, form, seeded_generator(2, "student")
    )
    assert torch.equal(drafted.targets[~chosen], batch.targets[~chosen])
    assert not torch.equal(drafted.targets[chosen], batch.targets[chosen])
    uniforms = torch.from_numpy(seeded_generator(2, "student").random(tuple(batch.targets.shape)))
    logits_ = query_logits(task, batch, uniforms)
    expected = logits_.argmax(-1) if form == "one-hot" else pick_tokens(uniforms, logits_)
    assert torch.equal(drafted.targets[chosen], expected[chosen])
    for row, window in chosen.nonzero().tolist():
        start, temperature = int(batch.window_starts[row, window]), float(batch.temperatures[row, window])
        whole = torch.cat([batch.tokens[row, :start], drafted.targets[row, window]])
        rows = packed_logits(task.model, pack_causal(whole[None]), torch.arange(start - 1, len(whole) - 1))
        known = drafted.loss_mask[row, window]
        intervals = uniform_intervals(rows, drafted.targets[row, window], temperature)
        found = drafted.uniforms[row, window]
        inside = (intervals.low - 1e-6 <= found) & (found <= intervals.high + 1e-6)
        assert inside[known].all()
    assert drafted.loss_mask[chosen].any()


def test_the_logits_of_windows_are_those_of_their_texts(tmp_path):
    task = make_task(tiny("Llama"), tmp_path)
    batch = task.window_dataset.training_batch(0)
    found = window_logits(task.model, batch)
    for row in range(len(batch.tokens)):
        for window, start in enumerate(batch.window_starts[row].tolist()):
            whole = torch.cat([batch.tokens[row, :start], batch.targets[row, window]])
            rows = torch.arange(start - 1, start - 1 + WINDOW)
            expected = packed_logits(task.model, pack_causal(whole[None]), rows)
            torch.testing.assert_close(found[row, window], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("form", "loss"), [("one-hot", "ce"), ("categorical", "reverse-kl")])
def test_an_adapter_learns_from_mixed_proposals(form, loss, tmp_path):
    task = make_task(tiny("Llama"), tmp_path, form=form, loss=loss, learned=0.05, student_windows=0.5)
    losses = [task.loss(step).item() for step in range(8)]
    train(task.module, task.loss, Schedule(60, 5e-3, checkpoint_steps=60), tmp_path / "checkpoint.pt", {})
    assert np.mean([task.loss(step).item() for step in range(8)]) < np.mean(losses)


def test_a_window_of_the_student_ends_with_its_text(tmp_path):
    task = make_task(tiny("Llama"), tmp_path, form="categorical")
    batch = task.window_dataset.training_batch(1)
    chosen = choose_windows(batch, 1.0, seeded_generator(0, "choose"))
    many = list(range(3, 90))  # nearly every token ends a text
    task.model.config.eos_token_id = many
    drafted = with_student_windows(
        batch, chosen, task.model, task.module, task.model, "categorical", seeded_generator(2, "student")
    )
    ends = torch.isin(drafted.targets, torch.tensor(many))
    after = ends.long().cumsum(-1) - ends.long() > 0
    assert not (drafted.loss_mask & after)[chosen].any()


# Texts of a data set


def test_texts_of_a_data_set_are_tokenized_and_mixed_with_the_teacher_s(folder, teacher, tiny_folder, tmp_path):
    file = lines(
        tmp_path / "answers.jsonl",
        {"prompt": "the cat", "completion": "sat on the mat and sat on the log and the mat", "source": "mine"},
        {"messages": [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "sat on the log"}]},
        {"text": "the cat and the dog sat on the mat and on the log"},
    )
    data = tmp_path / "data"
    saltus_("collect", "data", "-f", file, "-m", folder, "--out", data)
    engine, texts = saltus.load(str(folder), "plain"), read_teacher_texts(data)
    assert [one.temperature for one in texts] == [1.0] * 3
    assert list(texts[0].prompt) == list(engine.encode("the cat"))
    assert list(texts[1].prompt) == list(engine.encode([{"role": "user", "content": "the dog"}]))
    own = engine.tokenizer.encode("sat on the mat and sat on the log and the mat", add_special_tokens=False)
    assert list(texts[0].completion)[:-1] == own
    assert texts[0].completion[-1] in engine.target.end_tokens
    whole = engine.tokenizer.encode("the cat and the dog sat on the mat and on the log")
    assert [*texts[2].prompt, *texts[2].completion] == whole
    saltus_("collect", "data", "-f", file, "-m", folder, "--out", data)  # the same again
    assert "holds other texts" in complaint("collect", "data", "-f", file, "-m", folder, "-n", 4, "--out", data)
    recipe = tmp_path / "gated.toml"
    recipe.write_text(ADAPTER.replace("temperatures = [0.7]", "temperatures = [0.7, 1.0]"), encoding="utf-8")
    saltus_(*training(recipe, folder, teacher, tmp_path / "work", "--teacher", data, "--steps", 4))
    found = read_metadata(tmp_path / "work" / "adapter").training
    assert found["teacher_texts"] > 16, "texts of both"
    said = complaint(*training(recipe, tiny_folder(1), data, tmp_path / "other"))
    assert "were tokenized for" in said


def test_a_plain_text_has_empty_lines_between_its_texts(folder, tmp_path):
    file, data = tmp_path / "stories.txt", tmp_path / "data"
    file.write_text("the cat sat\non the mat\n\n\nthe dog sat on the log\n")
    saltus_("collect", "data", "-f", file, "-m", folder, "--out", data)
    tokenizer = saltus.load(str(folder), "plain").tokenizer
    texts = [[*one.prompt, *one.completion] for one in read_teacher_texts(data)]
    assert texts == [tokenizer.encode(text) for text in ("the cat sat\non the mat", "the dog sat on the log")]
    file.write_text("\n\n")
    assert "write texts with empty lines between them" in complaint("collect", "data", "-f", file, "--out", data)


@pytest.mark.parametrize(
    "row", ['{"prompt": "a"}', '{"messages": [{"role": "user", "content": "a"}]}', "[1]", "{", '{"text": ""}']
)
def test_rows_without_a_text_are_refused_by_their_line(row, tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"text": "the cat"}\n' + row + "\n", encoding="utf-8")
    assert f"{file}, line 2: " in complaint("collect", "data", "-f", file, "--out", tmp_path / "data")


# Top-k and top-p


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.6}, {"top_p": 0.05}])
@pytest.mark.parametrize("coupling", ["probability", "token-order"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_truncated_intervals_are_those_of_the_sampling_pipeline(cut, coupling, temperature):
    rows = logits(40, 25)
    rows[:, 5] = rows[:, 7]
    sampling = Sampling(temperature=temperature, coupling=coupling, **cut)
    for token in range(25):
        found = uniform_intervals(rows, torch.full((40,), token), temperature, coupling, Truncation(**cut))
        expected = []
        for row in rows:
            distribution = token_distribution(row, sampling)
            expected.append(
                uniform_interval(token, distribution)
                if distribution.tokens is None or token in distribution.tokens
                else None
            )
        for low, high, one in zip(found.low.tolist(), found.high.tolist(), expected, strict=True):
            if one is None:
                assert low == high
            else:
                assert (low, high) == pytest.approx(one, abs=1e-6)


def test_texts_are_written_with_top_k_and_top_p_and_their_intervals_are_cut(folder, tmp_path):
    inputs = lines(tmp_path / "prompts.jsonl", *({"prompt": f"the cat sat {number} times"} for number in range(8)))
    collect = "collect", "text", "-f", inputs, "-m", folder, "-n", 16, "-t", 1, "--out", tmp_path / "teacher"
    saltus_(*collect, "--top-k", 4, "--top-p", 0.9)
    described = json.loads((tmp_path / "teacher" / "collect.json").read_text())
    assert (described["top_k"], described["top_p"]) == (4, 0.9)
    assert "top-k" in complaint(*collect)
    file = tmp_path / "gated.toml"
    file.write_text(ADAPTER.replace("temperatures = [0.7]", "temperatures = [1.0]"), encoding="utf-8")
    given = training(file, folder, tmp_path / "teacher", tmp_path / "work")
    assert "set form=one-hot" in complaint(*given, "--set", "top_p=0.9", "--set", "form=categorical")
    saltus_(*given, "--set", "top_k=4", "--set", "top_p=0.9")
    from saltus.methods.ptp.training.text_intervals import load_uniform_intervals

    corpus, engine = load_uniform_intervals(tmp_path / "work" / "intervals"), saltus.load(str(folder), "plain")
    begin, prompt, length, _ = corpus.text_table[0].tolist()
    tokens = corpus.tokens[begin : begin + length]
    rows = packed_logits(engine.model, pack_causal(tokens[None]), torch.arange(prompt - 1, length - 1))
    sampling = Sampling(temperature=1.0, top_k=4, top_p=0.9, coupling="probability")
    expected = text_uniform_intervals(rows, tokens[prompt:], sampling, tokens[:prompt].numpy(), 0)
    found = corpus.uniform_intervals[0, begin + prompt : begin + length]
    torch.testing.assert_close(found[:, 0], expected.low, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[:, 1], expected.high, atol=1e-4, rtol=0)
    assert (found[:, 1] > found[:, 0]).all(), "every token that was written has an interval"
    assert load_checkpoint(tmp_path / "work" / "checkpoint.pt")["step"] == 12


def test_the_command_that_writes_a_teacher_s_texts_cuts_them_as_the_recipe_does(folder, tmp_path):
    file = tmp_path / "gated.toml"
    file.write_text(ADAPTER, encoding="utf-8")
    given = [*training(file, folder, tmp_path / "none", tmp_path / "work"), "--set", "top_k=4", "--set", "top_p=0.9"]
    assert "--temperature 0.7 --top-k 4 --top-p 0.9 --out" in complaint(*given)


def test_distributions_that_are_learned_are_not_cut(folder, teacher, tmp_path):
    file = tmp_path / "drafter.toml"
    file.write_text(RECIPE, encoding="utf-8")
    said = complaint(*training(file, folder, teacher, tmp_path / "work", "--set", "top_k=5"))
    assert "set reads_uniforms=true and distillation_weight=0" in said
    assert "top_p is -1.0, but must lie in [0, 1]" in complaint(
        *training(file, folder, teacher, tmp_path / "work", "--set", "top_p=-1")
    )


def test_settings_of_older_runs_are_those_of_new_ones(tmp_path):
    """A run that does not use what is new continues from its checkpoint."""
    from saltus.training.recipe import read_recipe

    file = tmp_path / "gated.toml"
    file.write_text(ADAPTER, encoding="utf-8")
    recipe = read_recipe(file)
    assert not {"top_k", "top_p", "inverse", "student_windows"} & {*recipe.identity, *recipe.identity["adapter"]}
    changed = replace(recipe, top_k=3, settings=replace(recipe.settings, student_windows=0.5))
    assert changed.identity["adapter"]["student_windows"] == 0.5
    assert changed.identity["top_k"] == 3
