"""A trained head drafts in decoding what its training saw, from a folder of its own beside its target."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import complaint, lines, saltus_
from test_dflash import corpus_of
from test_gguf import MIXED, write
from test_gguf import tiny as tiny_gguf

import saltus
from architectures import tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.mtp.drafter import Mtp
from saltus.methods.mtp.trained_head import save_head
from saltus.methods.mtp.training.head import MtpShape, MtpTrainingTask, TrainableHead
from saltus.models.causal import CausalNetwork
from saltus.models.packed_decoder import PackedDecoder, transformers_model
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.window_dataset import WindowSettings
from tiny_models import tiny_llama

RECIPE = """
kind = "mtp-head"
temperatures = [0.7]

[mtp-head]
window = 3
vocabulary = 120

[data]
batch_size = 3
windows_per_text = 6
validation_fraction = 0.3

[schedule]
steps = 12
checkpoint_steps = 4
"""


def head_task(target, corpus: HiddenStateCorpus, window: int = 3) -> MtpTrainingTask:
    """A task whose head has random weights of some size."""
    settings = WindowSettings(batch_size=3, windows_per_text=5, discount=0.8, validation_fraction=0.0)
    made = MtpTrainingTask(target, corpus, MtpShape(target.config.hidden_size, window), 90, settings, "tiny")
    generator = np.random.default_rng(5)
    with torch.no_grad():
        for weight in made.module.parts.parameters():
            weight += torch.from_numpy(generator.normal(0, 0.2, tuple(weight.shape))).to(torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def target() -> CausalNetwork:
    return CausalNetwork(tiny_llama(num_hidden_layers=3))


@pytest.fixture(scope="module")
def corpus(target) -> HiddenStateCorpus:
    return random_corpus(target)


def random_corpus(target: CausalNetwork) -> HiddenStateCorpus:
    """The target's states of random texts, one of them sampled."""
    found = corpus_of(target, [np.random.default_rng(seed).integers(5, 250, 30 + 7 * seed) for seed in range(4)])
    table = found.text_table.copy()
    table[1::2, 3] = 700
    return HiddenStateCorpus(
        **vars(found) | {"text_table": table, "target_fingerprint": model_fingerprint(target.model)}
    )


@torch.no_grad()
def test_in_training_windows_are_the_drafts_of_decoding(target, corpus, tmp_path):
    check_windows(target, corpus, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Cohere2", "Gemma2", "Granite"])
def test_scaled_and_limited_logits_are_learned_as_the_target_computes_them(name, tmp_path):
    softcap = {"final_logit_softcapping": 1.0} if name == "Gemma2" else {}
    target = CausalNetwork(tiny(name, vocab_size=300, **softcap))
    corpus = random_corpus(target)
    task = check_windows(target, corpus, tmp_path)
    begin, _, length, _ = corpus.text_table[1]
    tokens = corpus.tokens[begin : begin + length]
    own = target.model(tokens[None]).logits[0, :, task.module.tokens].float().softmax(-1)
    found = task._target_distributions(torch.arange(begin, begin + length))
    torch.testing.assert_close(found, own, rtol=0.05, atol=1e-3)  # states are rounded to bfloat16


def check_windows(target: CausalNetwork, corpus: HiddenStateCorpus, tmp_path: Path) -> MtpTrainingTask:
    """Assert that training's windows are decoding's drafts; the task."""
    task = head_task(target.model, corpus)
    task.save(tmp_path, {})
    task.initialize_from(tmp_path)  # weights as files round them
    network = Mtp(model=str(tmp_path)).load_network(target, "tiny")
    batch = task.window_dataset.training_batch(0)
    context, queries = task._forward(batch)
    hidden = target.model.config.hidden_size
    assert (context.shape[::2], queries.shape) == ((3, hidden), (3, 5, 3, hidden))
    for row, starts in enumerate(batch.window_starts.tolist()):
        read = corpus.hidden_states[batch.corpus_rows[row] - 1]
        for window, start in enumerate(starts):
            text = np.concatenate([[0], batch.tokens[row, :start].numpy()])  # any token, whose state is the first
            kv_cache, found = network.new_kv_cache(), []
            for drafts in range(3):
                tokens = np.concatenate([text, batch.targets[row, window, :drafts].numpy()])
                states = None if drafts else read[:start]
                inputs = ForwardInputs(continuation(tokens, 4), network_name="mtp", hidden_states=states)
                outputs = network.forward([inputs], [kv_cache])[0]
                assert torch.equal(outputs.token_ids, task.module.tokens)
                found.append(outputs.logits[0])
            torch.testing.assert_close(torch.stack(found), task._logits(queries[row, window]), rtol=1e-4, atol=1e-4)
    return task


def test_gradients_reach_all_weights_and_training_lowers_the_loss(target, corpus):
    task = head_task(target.model, corpus)
    before = [weight.clone() for weight in target.model.parameters()]
    optimizer = torch.optim.Adam(task.module.parameters(), lr=0.01)
    first = float(task.loss(0).detach())
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(0).backward()
        optimizer.step()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in task.module.parameters())
    assert float(task.loss(0).detach()) < first - 0.1
    assert all(torch.equal(one, other) for one, other in zip(before, target.model.parameters(), strict=True))
    assert task.evaluate().keys() == {"greedy", "sampled"}


def test_the_loss_of_a_sampled_window_is_that_of_the_targets_distributions(target, corpus):
    """Of a greedy one it is that of its tokens."""
    task = head_task(target.model, corpus)
    batch = task.training_batch(1)
    _, queries = task._forward(batch)
    logs, tokens = task.module.lm_head(queries).log_softmax(-1), task.draft_indices[batch.targets]
    states = corpus.hidden_states[batch.target_rows - 1]
    laws = target.model.lm_head(states)[..., task.module.tokens].softmax(-1)
    greedy = -logs.gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
    sampled = -(laws * logs).sum(-1)
    losses = torch.where((batch.temperatures == 0)[..., None], greedy, sampled)
    weights = 0.8 ** torch.arange(3) * (batch.loss_mask & (tokens >= 0))
    task.window_settings = WindowSettings(batch_size=3, windows_per_text=5, discount=0.8, distillation_weight=0.0)
    assert float(task.loss(1).detach()) == pytest.approx(
        float(((losses * weights).sum() / weights.sum()).detach()), rel=1e-4
    )
    assert 0 < float((batch.temperatures == 0).float().mean()) < 1


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_a_target_whose_layers_have_experts_is_refused_in_a_line(name):
    with pytest.raises(ValueError, match="which no head learns here; train a drafter") as error:
        TrainableHead(tiny(name), MtpShape(32, 3), torch.arange(300))
    assert "\n" not in str(error.value)


def test_a_head_drafts_beside_the_packed_weights_of_a_file(tmp_path):
    write(tiny_gguf("llama, tied"), tmp_path / "tiny.gguf", MIXED)
    engine = saltus.load(str(tmp_path / "tiny.gguf"), "plain", device="cpu")
    target, hidden = engine.network.model, engine.network.model.config.hidden_size
    assert isinstance(target, PackedDecoder)
    head = TrainableHead(transformers_model(target), MtpShape(hidden, 3), torch.arange(5, 90))
    save_head(head.parts.state_dict(), head.tokens, tmp_path / "head", target, "tiny", {})
    options = {"mtp": {"model": str(tmp_path / "head"), "min_probability": 0.0}}
    engine = saltus.load(str(tmp_path / "tiny.gguf"), "mtp", device="cpu", options=options, adaptive=False)
    given = {"raw": True, "max_new_tokens": 12, "ignore_eos": True}
    found, plain = (engine.generate("one two", method=method, **given) for method in ("mtp", "plain"))
    assert found.tokens == plain.tokens
    assert found.statistics.draft_calls > 0


@pytest.mark.slow
def test_a_head_is_trained_by_the_command_goes_on_from_a_folder_and_drafts(tiny_folder, tmp_path):
    folder, out = tiny_folder(), tmp_path / "head"
    (tmp_path / "tiny.toml").write_text(RECIPE)
    inputs = lines(tmp_path / "prompts.jsonl", *({"prompt": f"the cat sat {number} times"} for number in range(10)))
    saltus_("collect", "text", "-f", inputs, "-m", folder, "-n", 24, "-t", 0, "-t", 0.7, "--out", tmp_path / "teacher")
    train = "train", "mtp", "-r", tmp_path / "tiny.toml", "-m", folder, "--teacher", tmp_path / "teacher"
    saltus_(*train, "--work", tmp_path / "work", "--out", out)
    metadata = json.loads((out / "saltus.json").read_text())
    assert (metadata["kind"], metadata["training"]["recipe"]["mtp-head"]["window"]) == ("mtp-head", 3)
    assert len(load_file(out / "mtp.safetensors")["tokens"]) <= 120
    assert metadata["training"]["held_out_tokens_per_call"].keys() == {"greedy", "sampled"}
    for weights in ("bf16", "q8_0"):
        engine = saltus.load(str(folder), "mtp", options={"mtp": {"model": str(out)}}, adaptive=False, weights=weights)
        for temperature in (0.0, 0.7):
            given = {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True}
            found = engine.generate("the cat", **given)
            assert found.tokens == engine.generate("the cat", method="plain", **given).tokens
            assert found.statistics.draft_calls > 0
    onward = *train, "--work", tmp_path / "more", "--from", out, "--steps", 1, "--set", "learning_rate=1e-9"
    saltus_(*onward, "--out", tmp_path / "longer")
    one, other = (load_file(folder / "mtp.safetensors") for folder in (out, tmp_path / "longer"))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0.02, atol=1e-4)
    _folders_that_do_not_fit_are_refused(folder, tiny_folder(4), out, tmp_path / "copy")


def _folders_that_do_not_fit_are_refused(folder, another, head, copy):
    def said(model, place):
        return complaint("generate", "-m", model, "--method", "mtp", "--option", f"mtp.model={place}", "the cat")

    assert "was trained for" in said(another, head)
    assert "holds no mtp-head (saltus.json is missing); give a folder that saltus train mtp wrote" in said(
        folder, folder
    )
    assert "has no heads for multi-token prediction" in complaint(
        "generate", "-m", folder, "--method", "mtp", "the cat"
    )
    shutil.copytree(head, copy)
    weights = load_file(copy / "mtp.safetensors")
    save_file({name: weight for name, weight in weights.items() if name != "mtp.fc.weight"}, copy / "mtp.safetensors")
    assert "lack mtp.fc.weight" in said(folder, copy)
    save_file({name: weight for name, weight in weights.items() if name != "tokens"}, copy / "mtp.safetensors")
    assert "has no list of tokens; train it again" in said(folder, copy)
    save_file(weights | {"tokens": torch.tensor([3, 300])}, copy / "mtp.safetensors")
    assert "drafts token 300, and the target has 300" in said(folder, copy)
    (copy / "mtp.safetensors").unlink()
    assert "mtp.safetensors is missing); train it again" in said(folder, copy)
