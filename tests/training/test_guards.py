"""What is refused before hours of reading, or kept apart: other models, other temperatures, lost files, lost steps."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from architectures import tiny
from saltus.loading.model_identity import layers_digest, model_fingerprint
from saltus.methods.assd.training.any_subset import AnySubsetTrainingTask
from saltus.methods.assd.training.pairwise_correction import PairwiseCorrectionTrainingTask
from saltus.methods.jacobi.training.forcing import JacobiTrainingTask
from saltus.methods.jacobi.training.trajectories import Trajectory
from saltus.methods.ptp.training.objectives import even_heads
from saltus.methods.shared.adapter_files import load_adapter, save_adapter
from saltus.models.causal import CausalNetwork
from saltus.models.gated_lora import GatedLoraSettings, new_adapter
from saltus.training.data.hidden_states import Sample, collect_hidden_states
from saltus.training.data.packed_forward import prepare_model
from saltus.training.data.teacher_texts import CollectionPlan, TokenizedPrompt, prepare_folder
from saltus.training.data.uniform_intervals import Truncation
from saltus.training.objectives import OBJECTIVES
from saltus.training.recipe import find_recipe, overrides_without_effect, read_recipe
from saltus.training.run import check_teacher_model


def fine_tuned():
    """The tiny Llama, with other layers under the same embeddings."""
    model = tiny("Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.1
    return model


def test_a_model_with_other_layers_under_the_same_embeddings_is_another_one():
    base, tuned = tiny("Llama"), fine_tuned()
    assert model_fingerprint(base) == model_fingerprint(tuned)
    assert layers_digest(base) != layers_digest(tuned)
    half = tiny("Llama").to(torch.bfloat16)
    assert layers_digest(half) == layers_digest(half.float())
    assert layers_digest(tiny("Llama").half()) is None


def test_states_of_a_fine_tuned_model_are_not_taken_for_those_of_its_base(tmp_path):
    texts = [Sample([3, 4, 5], list(range(20, 40)), 0.7)]
    list(collect_hidden_states(CausalNetwork(tiny("Llama")), texts, tmp_path))
    list(collect_hidden_states(CausalNetwork(tiny("Llama")), texts, tmp_path))
    with pytest.raises(ValueError, match=r"states for other settings \(model\); take another --work"):
        list(collect_hidden_states(CausalNetwork(fine_tuned()), texts, tmp_path))
    with pytest.raises(ValueError, match=r"other settings \(temperatures\)"):
        list(collect_hidden_states(CausalNetwork(tiny("Llama")), texts, tmp_path, (0.5,)))


def test_states_of_texts_of_one_temperature_are_not_taken_for_those_of_another(tmp_path):
    """Of the same tokens: a data set may hold what a model wrote greedily."""
    network = CausalNetwork(tiny("Llama"))
    list(collect_hidden_states(network, [Sample([3, 4, 5], list(range(20, 40)), 0.0)], tmp_path))
    with pytest.raises(ValueError, match=r"other settings \(temperatures of texts\)"):
        list(collect_hidden_states(network, [Sample([3, 4, 5], list(range(20, 40)), 1.0)], tmp_path))


@pytest.mark.unchecked
def test_texts_of_a_fine_tuned_model_do_not_join_those_of_its_base(tmp_path):
    plan = CollectionPlan([TokenizedPrompt("x", (1, 2))], (0.0,), 8, 0, 4)

    def metadata(model):
        target = SimpleNamespace(name="any")
        network = SimpleNamespace(model=model, batch_invariant=True)
        return plan.metadata(SimpleNamespace(target=target, network=network))

    prepare_folder(tmp_path, plan, metadata(tiny("Llama")))
    prepare_folder(tmp_path, plan, metadata(tiny("Llama")))
    with pytest.raises(ValueError, match="answers of another model"):
        prepare_folder(tmp_path, plan, metadata(fine_tuned()))
    check_teacher_model(tmp_path, tiny("Llama"), None, "any")
    with pytest.raises(ValueError, match="written by any, not tuned"):
        check_teacher_model(tmp_path, fine_tuned(), None, "tuned")
    file = tmp_path / "collect.json"
    file.write_text(json.dumps({name: value for name, value in metadata(tiny("Llama")).items() if name != "layers"}))
    prepare_folder(tmp_path, plan, metadata(fine_tuned()))  # an older folder does not say


def test_an_adapter_is_saved_beside_what_a_folder_has(tmp_path):
    model = tiny("Llama")
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "states").mkdir()
    for _ in range(2):
        save_adapter(new_adapter(model, GatedLoraSettings(rank=2)), tmp_path, model, "mine")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert {"states", "thesis.txt", "saltus.json"} < {file.name for file in tmp_path.iterdir()}
    assert not list(tmp_path.glob(".*"))
    assert load_adapter(tmp_path, model, "mine").settings.rank == 2


def recipe_of(name, *changes):
    return read_recipe(find_recipe(name, [name]), changes)


def test_a_model_s_own_weights_are_trained_in_float32():
    assert recipe_of("smollm2-jacobi", "trains=model").settings.trains == "model"
    with pytest.raises(ValueError, match="not in bfloat16; set dtype=float32"):
        recipe_of("smollm2-jacobi", "trains=model", "dtype=bfloat16")


def test_settings_that_change_nothing_are_named():
    changes = ["text_weight=3", "rank=4"]
    (line,) = overrides_without_effect(recipe_of("smollm2-jacobi", *changes), changes)
    assert "text_weight=3 changes nothing" in line
    changes.append("trains=model")
    (line,) = overrides_without_effect(recipe_of("smollm2-jacobi", *changes), changes)
    assert "rank=4 changes nothing" in line
    changes = ["architecture=left-to-right", "order=any", "correction_steps=3"]
    assert len(overrides_without_effect(recipe_of("stories", *changes), changes)) == 2


def test_texts_at_a_temperature_that_is_not_learned_are_refused_before_they_are_read(monkeypatch):
    objective, tokens = OBJECTIVES["drafter"], list(range(20))
    texts = [Sample([1], tokens, 0.0), Sample([2], tokens, 0.8)]
    monkeypatch.setattr(objective, "read_texts", lambda path: texts)
    with pytest.raises(ValueError, match=r"at temperature 0\.8.*set temperatures=\[0\.7,0\.8,1\]"):
        objective.select_texts(recipe_of("smollm2"), [Path("any")])
    assert len(objective.select_texts(recipe_of("smollm2", "temperatures=[0.8]"), [Path("any")])) == 2


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Starcoder2", "OPT"])
def test_dropout_of_a_trained_model_is_off(name):
    model = prepare_model(tiny(name, **({"attn_pdrop": 0.5, "resid_pdrop": 0.5} if name == "GPT2" else {})))
    model.train()
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    floats = [
        (name, value) for module in model.modules() for name, value in vars(module).items() if type(value) is float
    ]
    assert not [name for name, value in floats if "dropout" in name and value]


def test_heads_have_an_even_size():
    assert even_heads(576, 9, 3) == (9, 3)
    assert even_heads(90, 2, 1) == (1, 1)
    assert even_heads(2880, 64, 8) == (60, 4)
    assert even_heads(5120, 96, 8) == (80, 8)


def test_a_step_is_judged_by_the_distribution_that_its_text_was_picked_from(monkeypatch):
    logits = torch.tensor([[0.0, 1.0, 2.0, 5.0]]).repeat(50, 1)
    task = object.__new__(JacobiTrainingTask)
    for coupling in ("gumbel", "probability"):
        text = Trajectory([1], [3] * 50, 5.0, 8, 0, [[0, 3]], coupling)
        assert set(task._predicted_tokens(text, logits)) == {0, 1, 2, 3}
        cut = Trajectory([1], [3] * 50, 5.0, 8, 0, [[0, 3]], coupling, Truncation(top_k=2))
        assert set(task._predicted_tokens(cut, logits)) == {2, 3}


def test_a_correction_is_of_one_model():
    digests = set()
    for added in (0.0, 0.1):
        base = object.__new__(AnySubsetTrainingTask)
        base.texts, base.validation_texts, base.module = [], [], torch.nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            base.module.weight.fill_(1 + added)
        task = object.__new__(PairwiseCorrectionTrainingTask)
        task.base_task = base
        digests.add(task.dataset_digest())
    assert len(digests) == 2
