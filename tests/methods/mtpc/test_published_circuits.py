"""The circuits of MtPC's authors: files of their form become heads with the same joint distribution."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import saltus
from reference_circuits import token_losses
from reference_evabyte import write_folder
from saltus.engine.checkpoints import load_checkpoint
from saltus.methods.mtpc.files import load_heads

HIDDEN, VOCAB = 32, 320
SUMS = {  # from the leaves to the root: [folds, outputs, inputs]
    ("ff", 8, 1): [],
    ("cp", 8, 3): [(1, 1, 3)],
    ("hmm", 5, 3): [(1, 3, 3)] * 4 + [(1, 1, 3)],
    ("btree", 4, 3): [(2, 3, 3), (1, 1, 3)],
    ("btree", 8, 2): [(4, 2, 2), (2, 2, 2), (1, 1, 2)],
}
IDS = [f"{kind}-{window}" for kind, window, _ in SUMS]


def write_circuit(folder: Path, kind: str, window: int, rank: int, scopes: bool = True, **more) -> dict:
    """A folder as the authors' code writes it: the target's weights are None, and the optimizer's state is there."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(f"circuit:\n  kind: {kind}\n  n_token: {window}\n")
    generator = torch.Generator().manual_seed(window)
    positions = torch.arange(window)
    weights = {
        "lm._lm.model.norm.weight": None,
        "mt_head._categorical_log_probs_heads.0.head.proj": torch.randn(
            window, rank, VOCAB, HIDDEN, generator=generator
        ) / 4,
    }  # fmt: skip
    for number, shape in enumerate(SUMS[kind, window, rank]):
        weights[f"mt_head._sum_weights_heads.{number}.head.proj"] = torch.randn(*shape, HIDDEN, generator=generator)
    if scopes:
        order = positions.flip(0) if kind == "hmm" else positions
        weights["circuit._circuit._nodes.0._scope_idx"] = order[:, None]
    state = {"global_step": 900, "model_state_dict": weights | more, "optimizer_state_dict": {"state": {}}}
    torch.save(state, folder / "model@900.pt")
    torch.save({"model_state_dict": {}}, folder / "model@90.pt")  # an older one
    return weights


def joint(weights: dict, kind: str, state: torch.Tensor, tokens) -> torch.Tensor:
    """log p(tokens) straight from the layers: leaves, then products and sums up to the root."""
    logits = weights["mt_head._categorical_log_probs_heads.0.head.proj"] @ state
    laws = logits.log_softmax(-1).exp()  # [folds, rank, vocab]
    window = len(laws)
    order = reversed(range(window)) if kind == "hmm" else range(window)
    leaves = {position: laws[fold, :, tokens[position]] for fold, position in enumerate(order)}
    names = sorted(name for name in weights if "_sum_weights_heads" in name)
    sums = [(weights[name] @ state).softmax(-1) for name in names]  # [folds, outputs, inputs]
    if kind == "ff":
        return torch.stack([leaves[position].log() for position in range(window)]).sum()
    if kind == "cp":
        product = torch.stack([leaves[position] for position in range(window)]).prod(0)
        return (sums[0][0, 0] @ product).log()
    if kind == "hmm":
        value = leaves[window - 1]
        for step, position in enumerate(reversed(range(window - 1))):
            value = (sums[step][0] @ value) * leaves[position]
        return (sums[-1][0, 0] @ value).log()
    values = [leaves[position] for position in range(window)]
    for level in sums:
        pairs = [left * right for left, right in zip(values[::2], values[1::2], strict=True)]
        values = [table @ pair for table, pair in zip(level, pairs, strict=True)]
    return values[0][0].log()


@pytest.fixture(scope="module")
def evabyte(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("scopes", [True, False], ids=["with positions of folds", "without"])
@pytest.mark.parametrize(("kind", "window", "rank"), SUMS, ids=IDS)
def test_the_heads_have_the_joint_distribution_of_the_file(evabyte, tmp_path, kind, window, rank, scopes):
    weights = write_circuit(tmp_path, kind, window, rank, scopes)
    model = load_checkpoint(str(evabyte), "cpu").network.model
    heads = load_heads(tmp_path, model, "evabyte")
    assert (heads.shape.circuit, heads.shape.window, heads.shape.rank) == (kind, window, rank)
    draws = np.random.default_rng(0)
    for _ in range(5):
        state = torch.from_numpy(draws.normal(size=HIDDEN)).float()
        tokens = draws.integers(0, VOCAB, window)
        with torch.no_grad():
            parameters = heads(state, torch.tensor(0))
            leaves = torch.stack([heads.log_probabilities(parameters, i)[:, tokens[i]] for i in range(window)])
            circuit = heads.shape.circuit_structure
            found = -token_losses(circuit, parameters.initial, parameters.transitions, leaves).sum()
        assert torch.allclose(found, joint(weights, kind, state, tokens), atol=1e-4)


@pytest.mark.parametrize("kind", ["ff", "cp", "hmm", "btree"])
def test_they_draft_and_do_not_change_the_text(evabyte, tmp_path, kind):
    _, window, rank = next(one for one in SUMS if one[0] == kind)
    write_circuit(tmp_path, kind, window, rank)
    engine = saltus.load(str(evabyte), "mtpc", options={"mtpc": {"model": str(tmp_path)}}, adaptive=False, device="cpu")
    given = {"max_new_tokens": 24, "raw": True, "ignore_eos": True}
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1}):
        found = engine.generate("the cat", **given, **settings)
        assert found.tokens == engine.generate("the cat", method="plain", **given, **settings).tokens
        assert np.mean([call.num_draft_tokens for call in found.calls]) > 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lm._lm.layers.31.lora_A.default.weight": torch.zeros(1)}, "adapts layers of its target (LoRA)"),
        ({"mt_head._tok_transformer_head._norm.weight": torch.zeros(1)}, "other heads than linear ones"),
        ({"mt_head._sum_weights_heads.1.head.proj": torch.zeros(1, 3, 3, HIDDEN)}, "which no circuit of 8 tokens"),
        ({"mt_head._categorical_log_probs_heads.0.head.proj": torch.zeros(8, 3, 300, HIDDEN)}, "heads for 300 tokens"),
        ({"mt_head._categorical_log_probs_heads.0.head.proj": None}, "other heads than linear ones (no mt_head"),
    ],
)
def test_what_cannot_be_imported_is_said_in_a_line(evabyte, tmp_path, more, message):
    write_circuit(tmp_path, "cp", 8, 3, **more)
    model = load_checkpoint(str(evabyte), "cpu").network.model
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_heads(tmp_path, model, "evabyte")
    assert "\n" not in str(caught.value)


def test_shuffled_trees_and_damaged_files_are_refused_in_a_line(evabyte, tmp_path):
    model = load_checkpoint(str(evabyte), "cpu").network.model
    write_circuit(tmp_path, "btree", 8, 2)
    (tmp_path / "config.yaml").write_text("circuit:\n  kind: random-btree\n")
    with pytest.raises(ValueError, match="shuffled tokens"):
        load_heads(tmp_path, model, "evabyte")
    (tmp_path / "model@901.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"model@901\.pt is no checkpoint of MtPC's code, or damaged"):
        load_heads(tmp_path, model, "evabyte")
