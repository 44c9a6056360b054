"""Which drafter offered a token, which of them were accepted, and whether the stated probabilities are true."""

import dataclasses
import json

import numpy as np
import pytest

import saltus
from invented_run import invented_records, results_of
from saltus.cli.bench_tables import print_tables
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.picking import one_hot
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch, DraftNodes, grow_tree
from saltus.engine.prompts import Prompt
from saltus.evaluation.benchmarks.benchmark_run import Benchmark
from saltus.evaluation.benchmarks.draft_counts import NUM_BINS, AcceptanceHistogram, DraftCounts, count_drafts
from saltus.evaluation.benchmarks.suites import Task
from saltus.evaluation.benchmarks.systems_under_test import methods_under_test
from saltus.evaluation.reports.aggregation import aggregate_records
from saltus.evaluation.reports.drafters import aggregate_by_drafter, reliability
from saltus.evaluation.reports.markdown import render_markdown
from saltus.evaluation.reports.page import render_page


def inputs_of(drafts, most: int = 16) -> ForwardInputs:
    tree = grow_tree(drafts, most, 8)
    return ForwardInputs(continuation([1, 2], 9), tree.tokens, tree.parents, drafts=drafts)


def test_a_token_that_two_drafters_offer_counts_for_both():
    nodes = DraftNodes(np.array([5, 6, 9]), np.array([-1, 0, 0]), np.array([0.9, 0.8, 0.1]), "ptp")
    drafts = [nodes, Branch([5, 6, 7], [0.5, 0.5, 0.5], "lookup"), Branch([8], [0.2], "lookup/corpus")]
    histograms: dict[str, AcceptanceHistogram] = {}
    found = count_drafts(inputs_of(drafts), [5, 6, 4], histograms)
    assert found == {"ptp": DraftCounts([1, 2], [1, 2], 2), "lookup": DraftCounts([2, 1, 1], [2, 1, 1], 2)}
    few = count_drafts(inputs_of(drafts, 2), [5, 6, 4], {})  # a tree of 5 and 6
    assert few == {"ptp": DraftCounts([1, 2], [1, 1], 2), "lookup": DraftCounts([2, 1, 1], [1, 1], 2)}
    assert count_drafts(inputs_of(drafts), [8, 3], {})["ptp"].accepted == 0


def test_probabilities_are_compared_with_what_was_decided_whether_verified_or_not():
    drafts = [
        Branch([5, 6, 7], [0.55, 1.0, 0.3], "a"), Branch([5, 8], [0.5, 0.05], "a"), Branch([3, 4], [0.25, 0.9], "b"),
    ]  # fmt: skip
    for most in (1, 16):
        found: dict[str, AcceptanceHistogram] = {}
        count_drafts(inputs_of(drafts, most), [5, 6], found)
        a, b = found["a"], found["b"]
        assert np.flatnonzero(a.offered).tolist() == [0, 5, 9]  # the third token's place was not decided
        assert np.flatnonzero(a.accepted).tolist() == [5, 9]
        assert a.stated[5] == 0.55  # the greater of both
        assert (sum(b.offered), b.offered[2], sum(b.accepted)) == (1, 1, 0)  # 4 stood after a wrong token


def test_sampled_drafts_count_where_they_were_verified():
    drafts = [Branch([token], [0.5], "a", [one_hot(token)]) for token in (5, 6)]
    found: dict[str, AcceptanceHistogram] = {}
    count_drafts(inputs_of(drafts, 1), [6], found)  # 6 would have been right, but was not tried
    assert (sum(found["a"].offered), sum(found["a"].accepted)) == (1, 0)


@pytest.fixture(scope="module")
def records(tiny_folder) -> list[dict]:
    engine = saltus.load(str(tiny_folder()), "plain")
    tasks = [Task(name, "a", Prompt((name + " and the cat sat on the mat" * 2,))) for name in ("the", "a")]
    settings = {"max_new_tokens": 24, "seed": 3, "sampling": Sampling(temperature=0.7), "ignore_eos": False}
    run = Benchmark(engine, methods_under_test(engine, ["plain", "jacobi+lookup"]), tasks, settings)
    run.warm_up()
    return [record for number in range(len(tasks)) for record in run.measure_task(number)]


def test_together_the_drafters_offered_what_was_verified_and_accepted(records):
    offered = set()
    for record in records:
        for call in record["calls"]:
            drafters, last = call["drafters"], call is record["calls"][-1]
            accepted = max((one["accepted"] for one in drafters.values()), default=0)
            assert accepted == call["decided"] - 1 or (last and accepted == call["decided"])
            verified = [sum(one["verified"]) for one in drafters.values()]
            assert max(verified, default=0) <= call["nodes"] <= sum(verified)
            assert all(len(one["verified"]) >= one["accepted"] for one in drafters.values())
            offered |= drafters.keys()
    assert offered == {"jacobi", "lookup"}
    assert records == json.loads(json.dumps(records))


def test_tokens_gained_alone_are_those_that_no_other_drafter_offered(records):
    told = aggregate_records(records)["jacobi+lookup"]
    calls = [call for record in records if record["system"] != "plain" for call in record["calls"]]
    union = sum(max((one["accepted"] for one in call["drafters"].values()), default=0) for call in calls)
    both = sum(min(one["accepted"] for one in call["drafters"].values()) for call in calls if len(call["drafters"]) > 1)
    jacobi, lookup = (told["by_drafter"][name] for name in ("jacobi", "lookup"))
    assert jacobi["accepted"] + lookup["accepted"] == union + both
    assert jacobi["accepted_alone"] + lookup["accepted_alone"] == union - both
    assert lookup["accepted_per_call"] == lookup["accepted"] / len(calls)
    assert sum(lookup["accepted_by_depth"]) == lookup["accepted"]
    assert aggregate_records(records)["plain"]["by_drafter"] == {}


def record_of(counts: list[tuple[int, int, float]]) -> dict:
    """A record whose drafter `a` stated so: tokens, accepted ones and the sum of the probabilities of each bin."""
    offered, accepted, stated = zip(*counts, strict=True)
    histogram = dataclasses.asdict(AcceptanceHistogram([*offered], [*accepted], [*stated]))
    call = {"decided": 2, "nodes": 1, "drafters": {"a": {"offered": [2], "verified": [1], "accepted": 1}}}
    return {"calls": [call], "acceptance": {"a": histogram}}


def test_the_calibration_error_is_the_mean_distance_of_shares_and_probabilities():
    true = [(20, 2 * bin_ + 1, 20 * (bin_ + 0.5) / NUM_BINS) for bin_ in range(NUM_BINS)]
    assert aggregate_by_drafter([record_of(true)])["a"]["expected_calibration_error"] == pytest.approx(0)
    wrong = [(0, 0, 0.0)] * 8 + [(30, 15, 0.85 * 30), (10, 0, 9.5)]
    told = aggregate_by_drafter([record_of(wrong), record_of(wrong)])["a"]
    assert told["expected_calibration_error"] == pytest.approx((30 * 0.35 + 10 * 0.95) / 40)
    assert reliability(told) == [pytest.approx((0.85, 0.5, 60)), pytest.approx((0.95, 0.0, 20))]
    assert reliability(aggregate_by_drafter([record_of([(0, 0, 0.0)] * 9 + [(9, 9, 9.0)])])["a"]) == []  # too few


def test_every_report_has_the_drafters(records, capsys):
    run = results_of(invented_records()) | {"methods": aggregate_records(records)}
    lookup = run["methods"]["jacobi+lookup"]["by_drafter"]["lookup"]
    cells = [f"{lookup[f'{name}_per_call']:.2f}" for name in ("offered", "verified", "accepted", "accepted_alone")]
    assert f"| `jacobi+lookup` | lookup | {' | '.join(cells)} |" in render_markdown(run)
    assert "".join(f"<td>{cell}</td>" for cell in ["lookup", *cells]) in render_page(run, records)
    print_tables(run)
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  lookup ")]
    assert row[1:5] == cells


@pytest.mark.parametrize("stated", [-0.5, 1.5, float("nan")])
def test_a_stated_probability_that_is_none_is_an_error_that_names_the_drafter(stated):
    drafts = [Branch([5, 6], [0.5, stated], "mine/part")]
    with pytest.raises(ValueError, match=r"^mine stated .* as the probability of a draft token; it must lie in"):
        count_drafts(inputs_of(drafts), [5, 6], {})
