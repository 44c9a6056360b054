"""The proposers for vLLM, in a batch that is run as vLLM's Model Runner V1 runs one."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from saltus import vllm
from saltus.core.tree import Branch
from saltus.integrations import drafted_texts
from saltus.integrations.drafted_texts import Drafting
from saltus.integrations.vllm import proposers
from saltus.integrations.vllm.target import StepStates, VllmTarget
from saltus.methods import make_methods
from saltus.shipped import SHIPPED
from tiny_models import tiny_llama

MAX_LENGTH = 64


def configuration(model=None, num_speculative_tokens: int = 4, options: dict | None = None):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens),
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH, hf_text_config=model and model.config),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        additional_config={"saltus": options or {}},
    )


class VllmModel(nn.Module):
    """A Transformers model in the clothes of vLLM's: rows of all texts in one call, layers' states if asked for."""

    def __init__(self, model) -> None:
        super().__init__()
        self.inner, self.lm_head, self.layers, self.texts = [model], model.lm_head, (), []
        self.model = SimpleNamespace(embed_tokens=model.get_input_embeddings())

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        ends = torch.cumsum(torch.tensor([count for _, count in self.texts]), 0).tolist()
        states = [all_states(self.inner[0], text, self.layers) for text, _ in self.texts]
        rows = [one[-count:] for one, (_, count) in zip(states, self.texts, strict=True)]
        assert ends[-1] == len(input_ids) == len(positions)
        *auxiliary, last = torch.cat(rows).chunk(len(self.layers) + 1, -1)
        return (last, auxiliary) if auxiliary else last


@torch.inference_mode()
def all_states(model, tokens, layers):
    """[positions, states]: after each of the layers, and the last ones."""
    found = model.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return torch.cat([*(found.hidden_states[layer][0] for layer in layers), found.last_hidden_state[0]], -1)


@dataclass
class Runner:
    """Decodes greedily as vLLM does: a batch of rows, drafts verified in order, and texts that change their place."""

    model: VllmModel
    proposer: proposers.Proposer
    texts: dict[str, list[int]]
    drafts: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    starts: np.ndarray | None = None
    accepted: int = 0
    steps: int = 0

    @torch.inference_mode()
    def step(self, order: list[str]) -> list[list[int]]:
        self.steps += 1
        token_ids, positions, self.model.texts = [], [], []
        for name in order:
            whole = self.texts[name] + self.drafts.get(name, [])
            begin = self.computed.get(name, 0)
            token_ids += whole[begin:]
            positions += range(begin, len(whole))
            self.model.texts.append((whole, len(whole) - begin))
        self.starts = np.cumsum([0, *(count for _, count in self.model.texts)])
        out = self.model(input_ids=torch.tensor(token_ids), positions=torch.tensor(positions))
        assert isinstance(out, torch.Tensor)
        sampled = [self._verify(name) for name in order]
        table = np.zeros((4, MAX_LENGTH + 8), dtype=np.int32)
        for row, name in enumerate(order):
            table[row, : len(self.texts[name])] = self.texts[name]
        lengths = np.array([len(self.texts[name]) for name in order] + [0] * (4 - len(order)), dtype=np.int32)
        proposed = self.proposer.propose(sampled, lengths, table, slot_mappings=None)
        assert len(proposed) == len(order)
        self.drafts = dict(zip(order, proposed, strict=True))
        return proposed

    def _verify(self, name: str) -> list[int]:
        text, drafts = self.texts[name], self.drafts.pop(name, [])
        logits = self.model.inner[0](torch.tensor([text + drafts])).logits[0]
        picks = logits[len(text) - 1 :].argmax(-1).tolist()
        agreed = next((i for i, draft in enumerate(drafts) if draft != picks[i]), len(drafts))
        self.accepted += agreed
        self.computed[name] = len(text) + agreed
        text += picks[: agreed + 1]
        return picks[: agreed + 1]


PROMPTS = {"a": [5, 6, 7, 5, 6, 7, 5, 6], "b": [9, 8, 20, 31], "c": [44, 45, 44, 45, 44]}


def runner(monkeypatch, method: str, options: dict | None = None) -> Runner:
    model = tiny_llama()
    proposer = getattr(vllm, method)(configuration(model, options=options))
    made = Runner(VllmModel(model), proposer, {name: list(prompt) for name, prompt in PROMPTS.items()})
    monkeypatch.setattr(proposers, "query_starts", lambda: made.starts)
    proposer.load_model(made.model)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Lookup", "Ptp", "Mtpc"])
def test_texts_are_recognised_and_drafts_accepted_while_texts_move_between_rows(monkeypatch, partners, method):
    run = runner(monkeypatch, method, partners)
    orders = [["a", "b", "c"], ["c", "a", "b"], ["b", "a"], ["b", "c", "a"]]
    while run.steps < 24 and max(map(len, run.texts.values())) < 50:
        run.step(orders[run.steps % 4])
    assert run.accepted
    assert len(run.proposer.texts) == 3  # each was recognised at every step


def test_drafters_keep_as_many_hidden_states_as_their_network_reads():
    (method,) = make_methods("ptp")
    (name,) = method.draft_models
    network = SimpleNamespace(max_unread=1000, new_kv_cache=list, forward=list)
    assert [one.max_unread for one in Drafting([method], {name: network}).new_text().drafters] == [1000]


@pytest.mark.parametrize("method", ["ptp", "mtpc"])
def test_drafters_get_the_hidden_states_before_the_tokens_just_decided(monkeypatch, partners, method):
    run = runner(monkeypatch, method.title(), {method: partners[method]})
    seen = []
    trees = run.proposer.drafting.trees
    monkeypatch.setattr(run.proposer.drafting, "trees", lambda requests, use: seen.append(requests) or trees(requests))
    for order in (["a", "b"], ["b", "a"], ["b"]):
        before = {name: run.computed.get(name, 0) for name in order}
        run.step(order)
        assert len(seen[-1]) == len(order)
        for name, request in zip(order, seen[-1], strict=True):
            text = run.texts[name]
            states = all_states(run.model.inner[0], text, run.model.layers)[before[name] : len(text) - 1]
            assert torch.allclose(request.hidden_states, states, atol=1e-5)
    assert run.model.layers == ((1,) if method == "ptp" else ())


def test_positions_in_three_dimensions_are_one_where_they_are_those_of_text(monkeypatch, partners):
    run = runner(monkeypatch, "Mtpc", {"mtpc": partners["mtpc"]})
    reader = run.proposer.reader
    tokens, line, last = torch.arange(5), torch.arange(5), torch.randn(5, 32)
    run.starts = np.array([0, 5])
    for positions, expected in [(line.expand(3, 5), line), (torch.stack([line, line, line + 1]), None)]:
        reader._keep((), {"input_ids": tokens, "positions": positions}, last, [], run.starts)
        found = reader.take()
        assert found is None if expected is None else found.positions.tolist() == expected.tolist()


def test_the_decoder_of_a_model_that_reads_images_has_its_output_layer_outside(partners):
    model = tiny_llama()
    inner = VllmModel(model)
    whole = SimpleNamespace(get_language_model=lambda: inner.model, lm_head=inner.lm_head)
    shared = VllmTarget(whole, model.config).model
    assert torch.equal(shared.get_output_embeddings().weight, model.lm_head.weight)
    with pytest.raises(ValueError, match=r"no embed_tokens in SimpleNamespace of vLLM; use saltus\.vllm\.Lookup"):
        VllmTarget(SimpleNamespace(model=SimpleNamespace(wte=None)), model.config)


def test_without_hidden_states_drafts_come_from_lookup_and_the_log_says_so_once(monkeypatch, partners, caplog):
    run = runner(monkeypatch, "Ptp", {"ptp": partners["ptp"]})
    monkeypatch.setattr(proposers.HiddenStateReader, "take", lambda self: None)
    proposed = [run.step(["a"])[0] for _ in range(16)]
    assert any(proposed)
    assert [record.message.split(",")[0] for record in caplog.records] == ["vLLM gave no hidden states for a text"]


def test_rows_of_a_step_are_those_that_a_layer_with_attention_says(monkeypatch):
    """Layers that keep a state, with which models such as Qwen3.5 begin, do not say where texts begin."""
    context = SimpleNamespace(attn_metadata={"layers.0": SimpleNamespace(non_spec_query_start_loc=torch.arange(9))})
    module = SimpleNamespace(get_forward_context=lambda: context)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(forward_context=module))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    assert proposers.query_starts() is None
    context.attn_metadata["layers.3"] = SimpleNamespace(query_start_loc=torch.tensor([0, 3, 4]))
    assert proposers.query_starts().tolist() == [0, 3, 4]
    context.attn_metadata = None
    assert proposers.query_starts() is None


def test_rows_of_rejected_drafts_are_left_out_and_foreign_rows_refused():
    states = torch.arange(6.0)[:, None]
    step = StepStates(np.array([7, 1, 2, 3, 9, 9]), np.array([4, 0, 1, 2, 3, 4]), states, np.array([0, 1, 6]))
    assert step.of_text(1, np.array([1, 2, 3, 4])).tolist() == [[1.0], [2.0], [3.0]]
    assert step.of_text(1, np.array([1, 5, 3, 4])) is None  # other tokens
    assert step.of_text(1, np.array([1, 2])).tolist() == [[1.0]]
    assert step.of_text(0, np.array([0, 0, 0, 0, 7, 8])).tolist() == [[0.0]]
    assert step.of_text(0, np.array([0, 0, 7, 8])) is None  # other positions
    assert step.of_text(2, np.array([1, 2])) is None


def propose(proposer, *texts: list[int], decided: tuple[int, ...] = ()) -> list[list[int]]:
    table = np.zeros((len(texts), MAX_LENGTH + 8), dtype=np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    sampled = [[text[-1]] * count for text, count in zip(texts, decided or (1,) * len(texts), strict=True)]
    return proposer.propose(sampled, np.array([len(text) for text in texts]), table)


def test_a_repeat_in_the_text_is_drafted():
    assert propose(vllm.Lookup(configuration()), [3, 4, 5, 6, 7, 8, 9, 3, 4, 5])[0][:3] == [6, 7, 8]


def test_draft_tokens_are_in_the_vocabulary_also_behind_those_of_images():
    config = configuration()
    config.model_config.hf_text_config = SimpleNamespace(vocab_size=50)
    proposer = vllm.Lookup(config)
    assert propose(proposer, [3, 4, 5, 6, 90, 90, 9, 3, 4, 5])[0][:4] == [6, 0, 0, 9]
    (text,) = proposer.texts
    assert text.tokens[4] == 90
    text.drafters = [lambda canvas, last, max_depth: [Branch((50,), (0.5,), "stray")]]
    with pytest.raises(ValueError, match="the model's vocabulary has 50, so give ids below that"):
        propose(proposer, [3, 4, 5, 6, 90, 90, 9, 3, 4, 5, 6])


def test_a_text_in_the_middle_of_its_prompt_gets_no_drafts():
    proposer = vllm.Lookup(configuration())
    assert propose(proposer, [3, 4, 3, 4, 3, 4], [5, 6, 5, 6, 5, 6], decided=(0, 1))[0] == []
    assert len(proposer.texts) == 1


def test_drafts_never_reach_beyond_the_longest_text():
    proposer = vllm.Lookup(configuration())
    assert propose(proposer, [3, 4] * (MAX_LENGTH // 2)) == [[]]
    assert len(propose(proposer, [3, 4] * (MAX_LENGTH // 2 - 2) + [3])[0]) <= 2


def test_texts_with_the_same_tokens_are_two_texts():
    proposer = vllm.Lookup(configuration())
    propose(proposer, [3, 4, 3, 4], [3, 4, 3, 4])
    before = set(map(id, proposer.texts))
    propose(proposer, [3, 4, 3, 4, 3], [3, 4, 3, 4, 9])
    assert set(map(id, proposer.texts)) == before
    assert len(before) == 2


def test_texts_that_differ_in_their_first_token_alone_are_told_apart_when_they_change_places():
    proposer = vllm.Lookup(configuration())
    propose(proposer, [1, 4, 3, 4], [2, 4, 3, 4])
    first, second = proposer.texts
    propose(proposer, [2, 4, 3, 4, 9], [1, 4, 3, 4, 8])
    assert first.tokens.tolist() == [1, 4, 3, 4, 8]
    assert second.tokens.tolist() == [2, 4, 3, 4, 9]


def test_texts_that_have_gone_are_forgotten():
    proposer = vllm.Lookup(configuration())
    for first in range(40):
        propose(proposer, [first, 4, 3, 4])
    assert len(proposer.texts) == 8


def test_options_come_from_additional_config():
    proposer = vllm.Lookup(configuration(options={"lookup": {"max_ngram_size": 3}}))
    assert proposer.drafting.methods[0].max_ngram_size == 3
    with pytest.raises(ValueError, match="lookup has no option longer; it has max_ngram_size"):
        vllm.Lookup(configuration(options={"lookup": {"longer": 3}}))


def test_a_drafter_is_refused_where_the_embeddings_are_in_parts():
    model = tiny_llama()
    part = VllmModel(model)
    part.model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=model.get_input_embeddings().weight[:150]))
    with pytest.raises(ValueError, match="use tensor_parallel_size=1"):
        VllmTarget(part, model.config)


def test_a_drafter_for_another_model_is_refused(partners):
    other = tiny_llama(seed=3)
    proposer = vllm.Ptp(configuration(other, options={"ptp": partners["ptp"]}))
    with pytest.raises(ValueError, match="was trained for tiny"):
        proposer.load_model(VllmModel(other))


def test_lookup_has_an_n_gram_model_where_the_tokenizer_loads(monkeypatch, caplog):
    given = []
    monkeypatch.setattr(drafted_texts, "load_ngram_model", lambda tokenizer, size: given.append((tokenizer, size)))
    config = configuration()
    config.model_config.hf_text_config = SimpleNamespace(vocab_size=4096)
    config.model_config.tokenizer = str(SHIPPED / "code")
    proposers.Proposer(config, "lookup")
    ((tokenizer, size),) = given
    assert (len(tokenizer), size) == (4096, 4096)
    config.model_config.tokenizer = "/nowhere"
    assert proposers.Proposer(config, "lookup").drafting.ngram_model is None
    assert "the tokenizer /nowhere does not load" in caplog.text
    config.additional_config["saltus"]["lookup"] = {"ngram_model": False}
    caplog.clear()
    proposers.Proposer(config, "lookup")
    assert not caplog.text
    assert len(given) == 1
