"""Spec-Bench's own tools can read our runs."""

import json
from statistics import fmean

import pytest

from invented_run import invented_records
from saltus.evaluation.reports.spec_bench import spec_bench_answers


def spec_bench_speedup(lines: list[str], baseline: list[str], tokenize) -> tuple[float, float]:
    """Its formula: mean of the texts' tokens/s over that of the baseline, whose tokens it counts in the text."""
    ours, theirs = ([json.loads(line)["choices"][0] for line in some] for some in (lines, baseline))
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in ours]
    counted = [sum(len(tokenize(turn)) - 1 for turn in choice["turns"]) for choice in theirs]
    baseline_speeds = [tokens / sum(choice["wall_time"]) for tokens, choice in zip(counted, theirs, strict=True)]
    accepted = [length for choice in ours for length in choice["accept_lengths"]]
    return fmean(speeds) / fmean(baseline_speeds), fmean(accepted)


def lines_of(records, system):
    return [json.dumps(answer) for answer in spec_bench_answers(records, system)]


def test_its_speed_up_and_mean_accepted_tokens_come_out_of_our_lines():
    records = invented_records()
    speedup, accepted = spec_bench_speedup(
        lines_of(records, "lookup"), lines_of(records, "plain"), lambda text: ["<s>", *text.split()]
    )
    speeds = {
        system: fmean(len(record["tokens"]) / record["seconds"] for record in records if record["system"] == system)
        for system in ("plain", "lookup")
    }
    assert speedup == pytest.approx(speeds["lookup"] / speeds["plain"])
    own = [record for record in records if record["system"] == "lookup"]
    assert accepted == pytest.approx(
        sum(len(record["tokens"]) for record in own) / sum(len(record["calls"]) for record in own)
    )


def test_an_answer_has_the_fields_of_spec_bench_and_its_turns_in_order():
    first, second = (dict(record) for record in invented_records(2, systems={"lookup": 0.4}))
    second |= {"task": first["task"], "turn": 1, "category": first["category"]}
    [answer] = spec_bench_answers([second, first], "lookup", "smollm2-135m")
    assert list(answer) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
    assert answer["question_id"] == 80
    assert answer["model_id"] == "smollm2-135m-lookup"
    [choice] = answer["choices"]
    assert list(choice) == ["index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"]
    assert choice["turns"] == ["".join(record["pieces"]).strip() for record in (first, second)]
    assert choice["wall_time"] == [first["seconds"], second["seconds"]]
    assert choice["decoding_steps"] == [len(first["calls"]), len(second["calls"])]
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])


def test_a_task_without_a_number_keeps_its_name_and_a_silent_baseline_has_no_accept_lengths():
    [record] = invented_records(1, systems={"transformers": None})
    [answer] = spec_bench_answers([record | {"task": "HumanEval/3"}], "transformers")
    assert answer["question_id"] == "HumanEval/3"
    assert answer["choices"][0]["accept_lengths"] == []
    assert answer["choices"][0]["decoding_steps"] == [None]


def test_tokens_are_those_that_a_server_counts():
    [record] = invented_records(1, systems={"endpoint:b": None})
    [answer] = spec_bench_answers([record | {"new_tokens": len(record["tokens"]) + 3}], "endpoint:b")
    assert answer["choices"][0]["new_tokens"] == [len(record["tokens"]) + 3]


def test_what_was_measured_again_counts_once():
    [record] = invented_records(1, systems={"plain": 0.0})
    [answer] = spec_bench_answers([record, record | {"seconds": 9.0}], "plain")
    assert answer["choices"][0]["wall_time"] == [9.0]


def test_an_unknown_side_is_refused_with_the_sides_there_are():
    with pytest.raises(ValueError, match=r"^no record is of system jacobi; the run has plain$"):
        spec_bench_answers(invented_records(1, systems={"plain": 0.0}), "jacobi")
