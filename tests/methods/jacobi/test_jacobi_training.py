"""Training by Jacobi Forcing: packed blocks equal separate ones, and noise follows its schedule."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from test_adapter_training import PACKED, WITHOUT_EXPERTS, gradients
from test_cli import complaint, lines, saltus_
from transformers import DynamicCache

import saltus
from architectures import VOCAB, text, tiny
from saltus.loading.metadata import read_metadata
from saltus.methods.jacobi.training.block_packing import BlockNoise, pack_blocks
from saltus.methods.jacobi.training.forcing import JacobiTrainingTask
from saltus.methods.jacobi.training.trajectories import Trajectory, read_trajectories
from saltus.models.gated_lora import Gate, GatedLoraSettings, gated_adapter
from saltus.training import losses
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import WindowSettings
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.loop.training_loop import Schedule, train
from saltus.training.training_task import TrainingTask

BLOCK = 4
NOISES = [
    BlockNoise("linear", "noisy", 3), BlockNoise("random", "window", 2), BlockNoise("reverse", "noisy", 2),
    BlockNoise("linear", "large", 2), BlockNoise("any", "clean", 2),
]  # fmt: skip
WINDOW_SETTINGS = WindowSettings(batch_size=2, validation_fraction=0.3, discount=0.7, max_length=60)


def trajectories(count: int = 6) -> list[Trajectory]:
    """Random texts of different lengths, and calls that each decide one or two tokens and guess at random."""
    made = []
    for number in range(count):
        tokens = text(24 + 3 * number, number).tolist()
        prompt, completion = tokens[: 3 + number], tokens[3 + number :]
        chance, calls, done = np.random.default_rng(number), [], 0
        while done < len(completion):
            stop = min((done // BLOCK + 1) * BLOCK, len(completion))
            right = chance.random(stop - done) < 0.4
            guess = np.where(right, completion[done:stop], chance.integers(3, VOCAB, stop - done))
            calls.append([done, *guess.tolist()])
            done = min(done + int(chance.integers(1, 3)), len(completion))
        made.append(Trajectory(prompt, completion, 0.0 if number % 2 else 0.7, BLOCK, number, calls))
    return made


def make_task(model, noise: BlockNoise = NOISES[0], *, gated: bool = True, **settings) -> JacobiTrainingTask:
    """A task whose adapter, if it has one, already changes logits a lot."""
    gating = GatedLoraSettings(rank=4, alpha=4.0) if gated else None
    task = JacobiTrainingTask(
        model, trajectories(), gating, noise, window_settings=WINDOW_SETTINGS, text_weight=0.5, **settings
    )
    if gated:
        with torch.no_grad():
            for name, weight in task.module.named_parameters():
                drawn = seeded_generator(1, name).normal(0, 0.3, tuple(weight.shape))
                weight.add_(torch.from_numpy(drawn).to(weight) * min(weight.shape[-1], 8) ** -0.5)
    return task


def test_a_window_that_no_text_fills_is_refused_with_the_largest_that_one_does():
    with pytest.raises(
        ValueError, match=r"window is 99 blocks, but the longest text has (\d+) of 4 tokens; take --set window=\1,"
    ):
        make_task(tiny("Llama"), BlockNoise("linear", "noisy", 99))


def gate_of(task: JacobiTrainingTask, rows: torch.Tensor, one: Trajectory):
    if task.adapter is None:
        return nullcontext()
    none = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    gate = Gate(rows, none, torch.full_like(none, one.temperature), torch.ones_like(rows).bool())
    return gated_adapter(task.model, task.adapter, gate)


def alone(task: JacobiTrainingTask, one: Trajectory, iterate: list[int]) -> Iterator[torch.Tensor]:
    """Logits of each block's rows, in a forward of what they attend to: iterates before them, or the text."""
    first, takes = len(one.prompt), task.noise.mask == "noisy"
    for start in range(0, len(iterate), BLOCK):
        stop = min(start + BLOCK, len(iterate))
        seen = iterate[:start] if takes else list(one.completion[:start])
        whole = torch.tensor([[*one.prompt, *seen, *iterate[start:stop]]])
        with gate_of(task, torch.arange(first + (0 if takes else start), first + stop), one):
            yield task.model(whole, use_cache=False).logits[0, first + start :]


def behind_memories(task: JacobiTrainingTask, one: Trajectory, iterate: list[int]) -> Iterator[torch.Tensor]:
    """The same where rows attend to iterates of some blocks and to the text of others, by joined keys and values."""
    first, window = len(one.prompt), task.noise.window
    text_, known = DynamicCache(), []
    task.model(torch.tensor([[*one.prompt, *one.completion]]), past_key_values=text_, use_cache=True)
    for block, start in enumerate(range(0, len(iterate), BLOCK)):
        stop, past = min(start + BLOCK, len(iterate)), DynamicCache()
        for layer in range(task.model.config.num_hidden_layers):
            parts = [(text_.layers[layer].keys[:, :, :first], text_.layers[layer].values[:, :, :first])]
            for before in range(block):
                here = slice(first + before * BLOCK, first + (before + 1) * BLOCK)
                own = text_.layers[layer].keys[:, :, here], text_.layers[layer].values[:, :, here]
                apart = before // window != block // window
                parts.append(known[before][layer] if apart == (task.noise.mask == "window") else own)
            past.update(*(torch.cat(kind, 2) for kind in zip(*parts, strict=True)), layer)
        with gate_of(task, torch.arange(stop - start), one):
            out = task.model(
                torch.tensor([iterate[start:stop]]), past_key_values=past, use_cache=True,
                position_ids=torch.arange(first + start, first + stop)[None],
            )  # fmt: skip
        size = stop - start
        known.append([(layer.keys[:, :, -size:], layer.values[:, :, -size:]) for layer in past.layers])
        yield out.logits[0]


def one_by_one(task: JacobiTrainingTask, texts: list[Trajectory], iterates: list[list[int]]) -> torch.Tensor:
    """The loss by the library's own causal attention: each block in its own forward."""
    task.model.set_attn_implementation("eager")
    total, weights, of_text = 0.0, 0.0, []
    for one, iterate in zip(texts, iterates, strict=True):
        first, words = len(one.prompt), list(one.completion)
        wrong = np.array(iterate) != np.array(words)
        distributions = task.model(torch.tensor([[*one.prompt, *words]]), use_cache=False).logits[0, first - 1 :]
        of_text.append(losses.cross_entropy(distributions[:-1], torch.tensor(words)))
        mixed = task.noise.mask in ("window", "large")
        block_logits = (behind_memories if mixed else alone)(task, one, iterate)
        for block, logits in enumerate(block_logits):
            start, before = block * BLOCK, 0
            border = start - start % (BLOCK * task.noise.window)
            iterated = {"noisy": (0, start), "window": (0, border), "large": (border, start), "clean": (0, 0)}
            misled = bool(wrong[slice(*iterated[task.noise.mask])].any())
            for row, place in enumerate(range(start, min(start + BLOCK, len(words) - 1))):
                misled = misled or bool(wrong[place])
                if misled:
                    share = task.window_settings.discount**before
                    total = total + share * losses.kl_divergence(distributions[place + 1].detach(), logits[row])
                    weights, before = weights + share, before + 1
    task.model.set_attn_implementation("saltus")
    loss = total / weights
    return loss if task.adapter is not None else loss + task.text_weight * torch.cat(of_text).mean()


def assert_same_as_one_by_one(task: JacobiTrainingTask) -> None:
    task.model.double()
    task.module.double()
    for first in (0, 2):
        texts, generator = task.training_trajectories[first : first + 2], seeded_generator(0, "test", first)
        iterates = [task.noise.choose_iterates(one.iterates_by_block(), generator) for one in texts]
        loss = task.batch_loss(texts, iterates)
        packed = gradients(task, loss)
        alone = one_by_one(task, texts, iterates)
        torch.testing.assert_close(loss, alone, rtol=5e-7, atol=0)  # the weights of rows, and their sum, are float32
        for name, gradient in gradients(task, alone).items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(packed[name], gradient, rtol=0, atol=max(1e-5 * largest, 1e-12))


@pytest.mark.parametrize("name", [*PACKED, *WITHOUT_EXPERTS][1::2])  # of the others windows are packed alike
def test_packed_blocks_have_the_loss_and_gradients_of_separate_forwards(name):
    """Also where windows slide, logits are capped or scaled, and positions are learned."""
    assert_same_as_one_by_one(make_task(tiny(name)))


@pytest.mark.parametrize("gated", [True, False], ids=["adapter", "model"])
@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: f"{noise.schedule}-{noise.mask}")
def test_packed_blocks_equal_separate_ones_for_every_schedule_and_mask(noise, gated):
    assert_same_as_one_by_one(make_task(tiny("Llama"), noise, gated=gated))


def test_texts_of_several_block_sizes_or_couplings_are_refused():
    one, *others = trajectories()
    settings = {"window_settings": WINDOW_SETTINGS, "text_weight": 0.5}
    for changes, name in (
        ({"block_size": one.block_size + 1}, "block_size"),
        ({"coupling": "token-order"}, "coupling"),
    ):
        with pytest.raises(
            ValueError, match=f"written with a {name} of .* and of .*; train on one kind after the other"
        ):
            JacobiTrainingTask(tiny("Llama"), [replace(one, **changes), *others], None, NOISES[0], **settings)


def test_a_round_with_larger_blocks_validates_on_no_text_that_an_earlier_one_was_trained_on():
    """Texts of no more than a block are dropped; the others keep their places."""
    first = trajectories(40)
    second = [replace(one, block_size=30, calls=[[0, *one.completion[:30]]]) for one in first]
    model, windows = tiny("Llama"), replace(WINDOW_SETTINGS, max_length=200)
    before, after = (
        JacobiTrainingTask(model, texts, GatedLoraSettings(4, 4.0), NOISES[-1], window_settings=windows)
        for texts in (first, second)
    )
    trained, validated = before.training_trajectories, after.validation_trajectories
    assert len(after.training_trajectories) + len(validated) < len(first)
    assert len(validated) > 1
    assert not {tuple(one.prompt) for one in trained} & {tuple(one.prompt) for one in validated}


def test_a_block_takes_the_iterate_whose_share_of_wrong_tokens_is_nearest():
    final = [1, 2, 3, 4]
    iterates = [[9, 9, 9, 9], [1, 9, 9, 9], [1, 2, 9, 9], [1, 2, 9, 4], final]  # 4, 3, 2, 1, 0 wrong

    def wrong(noise: BlockNoise) -> list[int]:
        chosen = np.array(noise.choose_iterates([iterates] * 5, seeded_generator(0, "test"))).reshape(5, 4)
        return (chosen != final).sum(1).tolist()

    assert wrong(BlockNoise("linear", window=4)) == [0, 1, 2, 3, 0]
    assert wrong(BlockNoise("reverse", window=4)) == [3, 2, 1, 0, 3]
    assert wrong(BlockNoise("linear", window=2)) == [0, 2, 0, 2, 0]
    assert len(set(wrong(BlockNoise("random", window=2)))) > 2
    assert len(set(wrong(BlockNoise("any", "clean")))) > 2
    iterates = [[9, 9, 9, 9], [1, 9, 3, 9], [1, 2, 3, 9], final]  # diverge at 0, 1, 3, 4; 4, 2, 1, 0 wrong
    assert wrong(BlockNoise("linear", window=4)) == [0, 1, 2, 4, 0]
    assert wrong(BlockNoise("linear", window=4, measure="divergence")) == [0, 1, 2, 2, 0]


def test_rows_of_the_loss_attend_to_wrong_tokens_of_any_block_or_of_their_own():
    iterate, text = [1, 9, 3, 4, 6, 9], [1, 2, 3, 4, 6, 7]
    counted = {
        rows: pack_blocks([[5]], [text], [iterate], 2, BlockNoise(mask="noisy", window=2, loss_rows=rows))
        .counted[0]
        .tolist()
        for rows in ("attending", "block")
    }
    assert counted["attending"] == [False, True, True, True, True, True]
    assert counted["block"] == [False, True, False, False, False, True]


def test_the_text_loss_counts_every_token_of_a_completion_that_stands_behind_another():
    blocks = pack_blocks([[5, 6], []], [[1, 2, 3], [1, 2]], [[1, 9, 3], [1, 9]], 2, BlockNoise())
    assert blocks.has_text_row.tolist() == [[True, True, True], [False, True, False]]
    before = blocks.packed.tokens.flatten()[blocks.text_rows[blocks.has_text_row]]
    assert before.tolist() == [6, 1, 2, 1]


def test_the_consistency_loss_can_be_divided_by_the_blocks_of_a_text():
    task = make_task(tiny("Llama"), gated=False)
    texts, generator = task.training_trajectories[:2], seeded_generator(0, "test")
    iterates = [task.noise.choose_iterates(one.iterates_by_block(), generator) for one in texts]
    whole, divided = (replace(task, text_weight=0.0, divide_by_blocks=over) for over in (False, True))
    mean = sum(len(one.iterates_by_block()) for one in whole.training_trajectories) / len(whole.training_trajectories)
    assert mean > 1
    torch.testing.assert_close(divided.batch_loss(texts, iterates) * mean, whole.batch_loss(texts, iterates))


def test_rows_attend_by_their_mask():
    """Blocks of 2 in windows of 2: the third block's rows, of a text of three blocks behind a prompt of one token."""
    seen = {}
    for mask in ("noisy", "window", "large", "clean"):
        blocks = pack_blocks([[5]], [[1, 2, 3, 4, 6, 7]], [[1, 9, 3, 9, 6, 7]], 2, BlockNoise("linear", mask, 2))
        row = blocks.packed.mask[0, blocks.iterate_rows[0, 5]]
        seen[mask] = [blocks.packed.tokens[0, column].item() for column in row.nonzero().flatten()]
        assert blocks.packed.positions[0, blocks.iterate_rows[0]].tolist() == [1, 2, 3, 4, 5, 6]
    wrong, right = [5, 1, 9, 3, 9, 6, 7], [5, 1, 2, 3, 4, 6, 7]
    assert seen == {"noisy": wrong, "window": wrong, "large": right, "clean": right}
    for mask, within in (("window", [5, 1, 2, 3, 9]), ("large", [5, 1, 9, 3, 9])):
        blocks = pack_blocks([[5]], [[1, 2, 3, 4]], [[1, 9, 3, 9]], 2, BlockNoise("linear", mask, 2))
        row = blocks.packed.mask[0, blocks.iterate_rows[0, 3]]
        assert blocks.packed.tokens[0, row.nonzero().flatten()].tolist() == within


def test_iterates_are_read_back_block_by_block():
    one = Trajectory([1], [5, 6, 7, 8, 9], 0.0, 4, 0, [[0, 3, 3, 3, 3], [2, 3, 8], [4]])
    assert one.iterates_by_block() == [[[3, 3, 3, 3], [5, 6, 3, 8], [5, 6, 7, 8]], [[9], [9]]]


def test_the_anchor_is_the_divergence_from_the_initial_model():
    """It is zero for the initial model, and then the divergence of the distributions along the text."""
    task = make_task(tiny("Llama"), gated=False, anchor="distributions")
    texts, generator = task.training_trajectories[:2], seeded_generator(0, "test")
    iterates = [task.noise.choose_iterates(one.iterates_by_block(), generator) for one in texts]
    free = replace(task, text_weight=0.0)
    torch.testing.assert_close(task.batch_loss(texts, iterates), free.batch_loss(texts, iterates))
    with torch.no_grad():
        for weight in task.model.parameters():
            weight.mul_(1.05)
    drift, expected = task.batch_loss(texts, iterates) - free.batch_loss(texts, iterates), []
    for model in (task.model, task.reference_model):
        model.set_attn_implementation("eager")
    for one in texts:
        ids, first = torch.tensor([[*one.prompt, *one.completion]]), len(one.prompt)
        then, now = (
            model(ids, use_cache=False).logits[0, first - 1 : -1] for model in (task.reference_model, task.model)
        )
        expected.append(losses.kl_divergence(then, now))
    torch.testing.assert_close(drift, task.text_weight * torch.cat(expected).mean())
    assert drift > 1e-3


def test_texts_of_all_lengths_are_trained_on_equally_often(monkeypatch):
    task = JacobiTrainingTask(tiny("Llama"), trajectories(20), GatedLoraSettings(4, 4.0), NOISES[0],
                              window_settings=replace(WINDOW_SETTINGS, batch_size=6, max_length=200))  # fmt: skip
    used: list[int] = []

    def recorded(texts: list[Trajectory], iterates: list[list[int]]) -> torch.Tensor:
        used.extend(one.seed for one in texts)
        return torch.zeros(())

    monkeypatch.setattr(task, "batch_loss", recorded)
    for step in range(100):
        task.loss(step)
    counts = [used.count(one.seed) for one in task.training_trajectories]
    assert sum(counts) == 600
    assert min(counts) > 0.6 * np.mean(counts)


def test_a_model_is_frozen_beside_its_adapter():
    model = tiny("Llama")
    task = make_task(model)
    task.loss(0).backward()
    assert all(weight.grad is None for weight in model.parameters())


@pytest.fixture(scope="module")
def written(tiny_folder, tmp_path_factory) -> tuple[str, Path]:
    """A tiny model, and its trajectories."""
    model, room = str(tiny_folder()), tmp_path_factory.mktemp("jacobi")
    inputs = lines(room / "prompts.jsonl", *({"prompt": one} for one in ("the cat", "a dog on", "the mat sat", "log")))
    saltus_(
        "collect",
        "jacobi",
        "-f",
        inputs,
        "-m",
        model,
        "-n",
        30,
        "-b",
        6,
        "--out",
        room / "found",
        "--texts-per-file",
        3,
    )
    return model, room


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False], ids=["adapter", "model"])
def test_training_increases_the_tokens_per_call(gated, written, tmp_path):
    """On training texts."""
    model, room = written
    own, texts = saltus.load(model, "plain", exact=False).network.model, read_trajectories(room / "found")
    gating = GatedLoraSettings(rank=8, alpha=8.0) if gated else None
    task = JacobiTrainingTask(
        own, texts, gating, BlockNoise("any", "clean", 2), window_settings=replace(WINDOW_SETTINGS, batch_size=4)
    )
    assert isinstance(task, TrainingTask)
    task.validation_trajectories = task.training_trajectories
    before = task.evaluate()
    steps = 100 if gated else 50
    train(task.module, task.loss, Schedule(steps, 1e-2, checkpoint_steps=steps), tmp_path / "checkpoint.pt", {})
    after = task.evaluate()
    assert 1 <= before["greedy"] < after["greedy"]
    assert 1 <= before["sampled"] <= after["sampled"]


def settings(*more: str) -> list[str]:
    given = ["rank=4", "jacobi.window=2", "data.batch_size=2", "validation_fraction=0.3", "checkpoint_steps=2", *more]
    return [part for one in given for part in ("--set", one)]


def test_collected_iterates_are_those_of_decoding(written):
    model, room = written
    engine = saltus.load(model)
    for one in read_trajectories(room / "found"):
        for iterates in one.iterates_by_block():
            size = len(iterates[-1])
            assert all(len(iterate) == size for iterate in iterates)
            assert 1 <= len(iterates) - 1 <= size + 1
        prompt = engine.tokenizer.decode(list(one.prompt))
        answer = engine.generate(prompt, max_new_tokens=30, temperature=one.temperature, seed=one.seed, raw=True)
        assert answer.tokens == one.completion


@pytest.mark.slow
def test_an_adapter_is_trained_and_decodes_the_same_text_by_commands(written, tiny_folder):
    model, room = written
    common = ["train", "jacobi", "-m", model, "--teacher", room / "found"]
    output = saltus_(*common, *settings(), "--steps", 4, "--work", room / "run", "--out", room / "adapter")
    assert "held-out tokens per call" in output.stderr
    assert read_metadata(room / "adapter").training["coupling"] == "gumbel", "as the texts were collected"
    refused = complaint(*common, *settings("coupling=token-order"), "--work", room / "run-3")
    assert "write them with saltus collect jacobi --coupling token-order" in refused
    inputs = ["generate", "-m", model, "-n", 20, "-t", 0.8, "--seed", 3, "the cat sat"]
    plain = saltus_(*inputs, "--method", "plain").stdout
    for method in ("jacobi", "jacobi+lookup"):
        guided = ["--method", method, "--option", f"jacobi.model={room / 'adapter'}"]
        assert saltus_(*inputs, *guided).stdout == plain
        assert saltus_(*inputs, *guided, "--max-draft-tokens", 30, "--option", "jacobi.block_size=5").stdout == plain
    inputs = lines(room / "again.jsonl", {"prompt": "the cat"}, {"prompt": "dog"})
    collect = ["collect", "jacobi", "-f", inputs, "-m", model, "-n", 12, "-b", 6, "-t", 0]
    saltus_(*collect, "--out", room / "second", "--adapter", room / "adapter")
    assert json.loads((room / "second" / "collect.json").read_text())["guessed_by"]
    assert "guesses of another adapter" in complaint(*collect, "--out", room / "second")
    assert "other settings" in complaint(*common[:3], model, "--teacher", room / "second", *settings(), "--steps", 4,
                                         "--work", room / "run")  # fmt: skip
    again = [*settings(), "--steps", 2, "--work", room / "run-2", "--from", room / "adapter", "--out", room / "two"]
    saltus_("train", "jacobi", "-m", model, "--teacher", room / "second", *again)
    assert "an adapter for the method jacobi" in complaint(
        "generate", "-m", model, "--method", "ptp", "--option", f"ptp.model={room / 'adapter'}", "x"
    )
    both = saltus.load(model, "jacobi", options={"jacobi": {"model": str(room / "adapter")}})
    both.generate("the cat sat", temperature=0.8, max_new_tokens=20)
    assert {source for source, _ in both.decoder.setup("jacobi").acceptance.counts} >= {"jacobi/guided"}
    both.decoder.options = {"jacobi": {"model": str(room / "two")}}
    with pytest.raises(ValueError, match="has room for one"):
        both.generate("x", method="jacobi+lookup")
    other = ["generate", "-m", str(tiny_folder(seed=5)), "--method", "jacobi", "x"]
    assert "was trained for" in complaint(*other, "--option", f"jacobi.model={room / 'adapter'}")


def test_a_model_is_trained_and_loads_as_any(written):
    model, room = written
    common = ["train", "jacobi", "-m", model, "--teacher", room / "found", *settings("trains=model")]
    saltus_(
        *common, "--steps", 4, "--set", "schedule.learning_rate=1e-2", "--work", room / "model", "--out", room / "tuned"
    )
    inputs = ["generate", "-m", room / "tuned", "-n", 20, "the cat sat"]
    text_ = saltus_(*inputs, "--method", "plain").stdout
    assert saltus_(*inputs, "--method", "jacobi").stdout == text_


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True], ids=["random", "NaN"])
def test_no_adapter_changes_a_text(written, broken, tmp_path):
    """Any adapter, at any temperature, alone and in batches, with many blocks, and with logits that are not numbers."""
    model, room = written
    own = saltus.load(model, "plain").network.model
    task = JacobiTrainingTask(
        own, read_trajectories(room / "found"), GatedLoraSettings(rank=4, alpha=4.0), BlockNoise(window=2)
    )
    with torch.no_grad():
        for name, weight in task.module.named_parameters():
            drawn = torch.from_numpy(seeded_generator(1, name).normal(0, 0.5, tuple(weight.shape))).to(weight)
            weight.copy_(torch.full_like(weight, torch.nan) if broken else drawn)
    task.save(tmp_path / "adapter", {})
    adapter = {"model": str(tmp_path / "adapter")}
    options = {**adapter, "block_size": 5, "max_blocks": 3, "spawn_ratio": 0.2}
    prompts = ["the cat", "a dog on the mat", "log"]
    for adaptive, temperature in ((True, 0.9), (False, 0.9), (False, 0.0)):
        engine = saltus.load(model, "jacobi", options={"jacobi": options}, max_draft_tokens=20, adaptive=adaptive)
        how = {"max_new_tokens": 24, "temperature": temperature, "seed": 2}
        how["repetition_penalty"] = 1.2 if temperature else 1.0
        plain = [one.tokens for one in engine.generate(prompts, method="plain", **how)]
        found = engine.generate(prompts, **how)
        assert [one.tokens for one in found] == plain
        assert [engine.generate(prompt, **how).tokens for prompt in prompts] == plain
    most = saltus.load(
        model, "jacobi", options={"jacobi": {**adapter, "block_size": 200}}, max_draft_tokens=128, adaptive=False
    )
    long = {"max_new_tokens": 160}
    assert most.generate("the cat", **long).tokens == most.generate("the cat", method="plain", **long).tokens
    reject = saltus.load(model, "jacobi", rule="reject", options={"jacobi": options})
    assert (
        reject.generate(prompts[0], max_new_tokens=24).tokens == engine.generate(prompts[0], max_new_tokens=24).tokens
    )


@pytest.mark.slow
@pytest.mark.parametrize(("trains", "weights"), [("adapter", "adapter_model"), ("model", "model")])
def test_a_run_killed_at_any_moment_ends_with_the_weights_of_one_that_was_not(trains, weights, written, tmp_path):
    model, room = written

    def training(name: str) -> list[object]:
        work = "--work", tmp_path / name, "--out", tmp_path / name / "out"
        common = "train", "jacobi", "-m", model, "--teacher", room / "found", "--steps", 12, *work
        return [*common, *settings(f"trains={trains}", "checkpoint_steps=1")]

    saltus_(*training("whole"))
    run = get_context("fork").Process(target=saltus_, args=training("killed"))
    run.start()
    while not (tmp_path / "killed" / "checkpoint.pt").exists() and run.is_alive():
        time.sleep(0.002)
    run.kill()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    assert 1 <= load_checkpoint(tmp_path / "killed" / "checkpoint.pt")["step"] < 12
    saltus_(*training("killed"))
    one, other = (tmp_path / name / "out" / f"{weights}.safetensors" for name in ("whole", "killed"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_wrong_input_is_one_line(written, tiny_folder, tmp_path):
    model, room = written
    common = ["train", "jacobi", "-m", model, "--work", tmp_path, *settings()]
    found = room / "found"
    assert "saltus collect jacobi" in complaint(*common, "--teacher", tmp_path / "none")
    assert "no folder of trajectories" in complaint(*common, "--teacher", found / "00000.jsonl.gz")
    assert "holds a model" in complaint(
        "generate", "-m", model, "--method", "jacobi", "--option", f"jacobi.model={model}", "x"
    )
    early = [*common, "-m", "no/model", "--teacher", found]  # refused before a model is looked for
    assert "longest text has 5 of 6 tokens" in complaint(*early, "--set", "jacobi.window=9")
    assert "fewer than two texts of more than a block" in complaint(*early, "--set", "max_length=6")
    assert "must be one of linear" in complaint(*common, "--teacher", found, "--set", "noise_schedule=upwards")
    assert "has no windows" in complaint(*common, "--teacher", found, "--set", "windows_per_text=3")
    inputs = lines(tmp_path / "prompts.jsonl", {"prompt": "the cat"})
    collect = ["collect", "jacobi", "-f", inputs, "-m", model, "-n", 12, "--out"]
    narrow = str(tiny_folder(max_position_embeddings=32))
    assert "reads 32 in all" in complaint(*collect, tmp_path / "narrow", "-m", narrow, "-b", 64)
    saltus_("collect", "text", *collect[2:], tmp_path / "text")
    assert "holds texts without iterates" in complaint(*common, "--teacher", tmp_path / "text")
    assert "holds texts without iterates" in complaint(*collect, tmp_path / "text")
    saltus_(*collect, tmp_path / "six", "-b", 6)
    assert "holds texts with the iterates" in complaint("collect", "text", *collect[2:], tmp_path / "six")
    assert "block-size 6, not 7" in complaint(*collect, tmp_path / "six", "-b", 7)
    shard = tmp_path / "six" / "00000.jsonl.gz"
    shard.write_bytes(shard.read_bytes()[:60])
    assert "damaged" in complaint(*common, "--teacher", tmp_path / "six")
    assert "damaged" in complaint(*collect, tmp_path / "six", "-b", 6)
    shard.unlink()
    assert "lacks 1 of 1 shards" in complaint(*common, "--teacher", tmp_path / "six")


def test_texts_of_another_model_and_of_one_block_are_refused(written, tiny_folder):
    _, room = written
    texts = read_trajectories(room / "found")
    short = [replace(one, completion=one.completion[:6], calls=one.calls[:1]) for one in texts]
    with pytest.raises(ValueError, match="fewer than two texts of more than a block"):
        JacobiTrainingTask(tiny("Llama"), short, None, window_settings=WINDOW_SETTINGS)
    task = JacobiTrainingTask(tiny("Llama"), texts, None, BlockNoise(window=2), window_settings=WINDOW_SETTINGS)
    with pytest.raises(ValueError, match="give a trained model by --model"):
        task.initialize_from(room / "adapter")
    other = str(tiny_folder(seed=5))
    assert "were written by" in complaint("train", "jacobi", "-m", other, "--teacher", room / "found", *settings())
