"""The plug-in for SGLang, on a runner with the interface of its release 0.5.23. No GPU and no SGLang."""

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from saltus.core.coupling import pick_token
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling, token_distribution
from saltus.core.tree import Branch, grow_tree
from saltus.integrations.sglang.plugin import register_with
from saltus.integrations.sglang.verification import (
    WrittenText,
    padded_tree,
    request_noise,
    request_sampling,
    verify_tree,
)
from saltus.integrations.sglang.worker import saltus_worker, sample_by_match
from tiny_models import tiny_llama

NODES = 5


def request(rid: str, prompt: list[int], **changes):
    given = {
        "temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "min_new_tokens": 0,
        "stop_token_ids": None, "sampling_seed": 7,
    }  # fmt: skip
    parameters = SimpleNamespace(**given | changes)
    return SimpleNamespace(
        rid=rid, origin_input_ids_unpadded=array("q", prompt), output_ids=array("q"), sampling_params=parameters
    )


class ForwardMode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_idle(self) -> bool:
        return False


class ModelRunner:
    """Computes logits after prompts, and of the nodes of trees by their masks."""

    def __init__(self) -> None:
        self.model = tiny_llama()

    def sample(self, logits_output, forward_batch):
        raise AssertionError("SGLang's own random numbers are not used")

    @torch.inference_mode()
    def after(self, tokens) -> torch.Tensor:
        return self.model(torch.tensor([list(tokens)])).logits[0, -1]


class NgramWorker:
    """The released NGRAMWorker as far as a plug-in sees it."""

    overlap = False

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        self.enable_overlap, self.draft_token_num = self.overlap, NODES
        self.model_runner, self.server_args = target_worker.model_runner, server_args
        self.page_size, self.topk = server_args.page_size, 10  # resolved, as `context` below

    def _prepare_for_speculative_decoding(self, batch) -> None:
        if not batch.forward_mode.is_decode():
            return
        tokens, mask = self._prepare_draft_tokens(batch)
        assert tokens.shape == (len(batch.reqs) * NODES,)
        assert tokens.dtype == np.int64
        assert mask.shape == (len(batch.reqs) * NODES * NODES,)
        assert mask.dtype == np.bool_
        batch.forward_mode = ForwardMode("verify")
        batch.spec_info = SimpleNamespace(tokens=tokens, mask=mask)

    def forward_batch_generation(self, batch, on_publish=None, pp_proxy_tensors=None):
        self._prepare_for_speculative_decoding(batch)
        if not batch.forward_mode.is_target_verify():
            logits = torch.stack([self.model_runner.after(one.origin_input_ids_unpadded) for one in batch.reqs])
            given = SimpleNamespace(sampling_info=SimpleNamespace(), return_logprob=False)
            return [[int(one)] for one in self.model_runner.sample(SimpleNamespace(next_token_logits=logits), given)]
        tokens = batch.spec_info.tokens.reshape(-1, NODES)
        masks = batch.spec_info.mask.reshape(-1, NODES, NODES)
        rows = []
        for one, own, mask in zip(batch.reqs, tokens, masks, strict=True):
            text = [*one.origin_input_ids_unpadded, *one.output_ids]
            assert own[0] == text[-1]
            rows += [self.model_runner.after([*text[:-1], *own[mask[node]]]) for node in range(NODES)]
        predict, lengths, index = eagle_sample(
            batch.spec_info, batch, SimpleNamespace(next_token_logits=torch.stack(rows)), None, watermark_state=None
        )
        accepted = predict[index]
        self._update_ngram_corpus(batch)
        return [row[:length].tolist() for row, length in zip(accepted, lengths.tolist(), strict=True)]


def refuse(*given, **settings):
    raise AssertionError("SGLang's own verification is not used")


eagle_sample = sample_by_match(refuse)


@dataclass
class Scheduler:
    worker: object
    steps: int = 0
    accepted: list[int] = field(default_factory=list)

    def run(self, requests, length: int) -> dict[str, list[int]]:
        self._step(list(requests), "extend")
        while running := [one for one in requests if len(one.output_ids) < length]:
            running = running[self.steps % len(running) :] + running[: self.steps % len(running)]
            self._step(running, "decode")
        return {one.rid: one.output_ids[:length].tolist() for one in requests}

    def _step(self, requests, mode: str) -> None:
        self.steps += 1
        batch = SimpleNamespace(reqs=requests, forward_mode=ForwardMode(mode), spec_info=None)
        for one, new in zip(requests, self.worker.forward_batch_generation(batch), strict=True):
            one.output_ids.extend(new)
            self.accepted.append(len(new) - 1)


def scheduler() -> Scheduler:
    target = SimpleNamespace(model_runner=ModelRunner())
    return Scheduler(worker(target))


def worker(target, base=NgramWorker, page_size=1, backend="triton", attn_dp_size=1):
    """A SaltusWorker. `server_args` holds what was typed: nothing of what SGLang resolved itself."""
    context = SimpleNamespace(
        attention_backends=lambda: ("fa3", backend), get_parallel=lambda: SimpleNamespace(attn_dp_size=attn_dp_size)
    )
    typed = SimpleNamespace(page_size=page_size, attention_backend=None, enable_dp_attention=None)
    return saltus_worker(base, context)(typed, gpu_id=0, nccl_port=0, target_worker=target)


def plain(one, length: int) -> list[int]:
    """The text of the seed, token by token, by the engine's own rule."""
    runner, prompt, new = ModelRunner(), list(one.origin_input_ids_unpadded), []
    sampling, noise = request_sampling(one), request_noise(one)
    for index in range(length):
        text = np.array([*prompt, *new])
        distribution = token_distribution(runner.after(text.tolist()), sampling, text, index)
        new.append(pick_token(distribution, noise, "text", len(text)))
    return new


PERIODIC = [5, 6, 7, 5, 6, 7, 5, 6]
CASES = {
    "greedy": {"top_k": 1},
    "sampled": {"temperature": 0.7},
    "truncated": {"temperature": 0.9, "top_p": 0.8, "top_k": 40},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_new_tokens": 3,
                  "stop_token_ids": {4, 9}, "logit_bias": {"11": 1.5}},
    "present": {"top_k": 1, "presence_penalty": 2.0},
    "long": {"temperature": 0.9, "min_new_tokens": 12, "stop_token_ids": set(range(150))},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_seed_is_one_text_whatever_is_drafted_and_whatever_else_the_batch_holds(case):
    run = scheduler()
    asked = [
        request("a", PERIODIC, **CASES[case]),
        request("b", [9, 8, 20, 31], **CASES[case] | {"sampling_seed": 8}),
        request("c", [44, 45] * 6, **CASES[case]),
    ]
    found = run.run(asked, 24)
    for one in asked:
        one.output_ids = array("q")
        assert found[one.rid] == plain(one, 24)
    if case == "greedy":
        assert sum(run.accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_right_drafts_are_accepted_and_wrong_ones_beside_them_change_nothing(monkeypatch, case):
    one, run = request("a", [9, 8, 20, 31], **CASES[case]), scheduler()
    right = plain(one, 40)

    def trees(asked):
        known = right[len(asked[0].tokens) - 4 :]
        wrong = [Branch([(known[0] + 1) % 300], [0.95]), Branch([known[0], (known[1] + 1) % 300], [0.9, 0.9])]
        return [grow_tree([*wrong, Branch(known[:2], [0.9, 0.5])], 8, 8)]

    monkeypatch.setattr(run.worker.drafting, "trees", trees)
    assert run.run([one], 24)["a"] == right[:24]
    assert run.accepted[1:] == [2] * len(run.accepted[1:])


def test_an_id_that_a_client_uses_again_has_the_seed_of_each_request():
    run = scheduler()
    for seed in (1, 2):
        one = request("a", PERIODIC, sampling_seed=seed)
        assert run.run([one], 8)["a"] == plain(request("a", PERIODIC, sampling_seed=seed), 8)


def test_other_seeds_are_other_texts_and_without_a_seed_the_id_is_one():
    texts = [
        plain(request(rid, PERIODIC, sampling_seed=seed), 6)
        for rid, seed in (("a", 1), ("a", 2), ("a", None), ("b", None))
    ]
    assert len({tuple(text) for text in texts}) == 4
    assert plain(request("z", PERIODIC, sampling_seed=1), 6) == texts[0]
    assert request_noise(request("a", PERIODIC, sampling_seed=-3)).seed >= 0


def test_a_tree_that_is_too_small_is_filled_with_drafts_and_a_large_one_keeps_its_best_nodes():
    tree = grow_tree([Branch([1, 2], [0.9, 0.8]), Branch([3], [0.1])], 8, 8)
    assert padded_tree(9, tree, 6).tokens.tolist() == [9, 1, 2, 3, 0, 0]
    assert padded_tree(9, tree, 6).parents.tolist() == [-1, 0, 1, 0, 0, 0]
    assert padded_tree(9, tree, 3).tokens.tolist() == [9, 1, 2]
    mask = padded_tree(9, tree, 6).mask
    assert mask[2].tolist() == [True, True, True, False, False, False]
    assert mask[5].tolist() == [True, False, False, False, False, True]


def test_accepted_nodes_begin_with_the_last_decided_token_and_each_has_the_token_after_it():
    tree = padded_tree(9, grow_tree([Branch([1, 2], [0.9, 0.8]), Branch([3], [0.1])], 8, 8), 5)
    picks = {0: 1, 1: 2, 2: 4, 3: 5, 4: 5}  # after each node
    logits = torch.zeros(5, 8)
    for node, token in picks.items():
        logits[node, token] = 9.0
    assert verify_tree(WrittenText([7, 9], []), tree, logits, Sampling(), Noise(0)) == ([0, 1, 2], [1, 2, 4])
    logits[0] = torch.eye(8)[6]
    assert verify_tree(WrittenText([7, 9], []), tree, logits, Sampling(), Noise(0)) == ([0], [6])
    logits[0] = torch.eye(8)[0]  # the padding's token is a draft like others
    assert verify_tree(WrittenText([7, 9], []), tree, logits, Sampling(), Noise(0)) == ([0, 4], [0, 5])


def test_greedy_decoding_is_recognised_by_its_top_k():
    assert request_sampling(request("a", PERIODIC, top_k=1)).temperature == 0
    assert request_sampling(request("a", PERIODIC, temperature=0.6, top_k=-1)) == Sampling(temperature=0.6)


def test_batches_of_other_workers_are_verified_as_before():
    batch = SimpleNamespace(forward_mode=ForwardMode("verify"))
    original = sample_by_match(lambda *given, **settings: ("theirs", settings))
    assert original(SimpleNamespace(), batch, None, None, watermark_state=3) == ("theirs", {"watermark_state": 3})


def test_overlap_is_refused():
    overlapping = type("Overlapping", (NgramWorker,), {"overlap": True})
    with pytest.raises(ValueError, match="--disable-overlap-schedule"):
        worker(SimpleNamespace(model_runner=ModelRunner()), overlapping)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [({"page_size": 16}, "--page-size 1"), ({"attn_dp_size": 2}, "--attn-dp-size")],
)
def test_settings_with_which_trees_are_wrong_are_refused(changes, cure):
    with pytest.raises(ValueError, match=cure):
        worker(SimpleNamespace(model_runner=ModelRunner()), **changes)


def test_pages_are_allowed_with_a_backend_that_sglang_chose_itself():
    worker(SimpleNamespace(model_runner=ModelRunner()), page_size=16, backend="flashinfer")


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {"5": 1e31, "6": float("nan"), "7": float("-inf"), "-1": 1.0}},
        {"repetition_penalty": 1e-9},
        {"temperature": 1e39, "top_k": -1},
        {"stop_token_ids": {-1, 4}},
    ],
)
def test_no_parameter_that_sglang_lets_pass_ends_the_server(changes):
    one, run = request("a", PERIODIC, **changes), scheduler()
    assert len(run.run([one], 4)["a"]) == 4


def test_the_algorithm_registers_and_chooses_the_settings_of_ngrams():
    made = {}

    class Algorithms:
        @staticmethod
        def register(name, *, supports_overlap, spec_class):
            made[name] = spec_class
            return lambda factory: factory

    register_with(Algorithms, type("CustomSpecAlgo", (), {}))
    settings = SimpleNamespace(
        disable_overlap_schedule=False, enable_mixed_chunk=True, max_running_requests=None, speculative_num_steps=None,
        speculative_num_draft_tokens=None, speculative_eagle_topk=None, speculative_ngram_max_bfs_breadth=10,
    )  # fmt: skip
    made["SALTUS"]().handle_server_args(settings)
    assert made["SALTUS"]().is_ngram()
    assert settings.disable_overlap_schedule
    assert not settings.enable_mixed_chunk
    assert settings.speculative_num_draft_tokens == 12
