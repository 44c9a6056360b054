"""`saltus check --server`: every planted fault is found, and none on an honest server with rounding noise."""

import json
import shlex
from dataclasses import replace
from functools import cache
from itertools import filterfalse
from types import SimpleNamespace

import numpy as np
import pytest
from test_cli import complaint, lines, saltus_

from audit_server import FAULTS as ALL_FAULTS
from audit_server import audited_server, is_changed
from saltus.core.noise import Noise
from saltus.evaluation.audit.audit_run import run_checks, summarize
from saltus.evaluation.audit.checks import CHECKS, seeds
from saltus.evaluation.audit.client import Side, Token, post
from saltus.evaluation.audit.context import Audit, AuditSettings, GradedSuite
from saltus.evaluation.audit.features import connect, find_features
from saltus.evaluation.audit.prompts import SHARED_PREFIX, default_prompts
from saltus.evaluation.audit.statistics import exchangeability_test, holm, mcnemar, rate_interval
from saltus.evaluation.audit.text_comparison import gap_in_reference, rounding_tolerance, token_differences
from saltus.evaluation.audit.verdicts import FIGURE, FINDING, NOT_CHECKED, NOTE, SAME, Verdict
from saltus.evaluation.benchmarks.suites import find_grader, load_tasks

SWITCH = '{"speculative": false}'


@cache
def draws(seed: int, stream: str, count: int) -> np.ndarray:
    return Noise(seed).uniforms(stream, np.arange(count))


@pytest.fixture(autouse=True)
def draws_known(monkeypatch):
    """The random numbers of a permutation test are the same in each audit with one seed, and fewer than usual."""
    monkeypatch.setattr(seeds, "DRAWS", 2000)
    same = SimpleNamespace(uniforms=lambda stream, positions: draws(0, stream, len(positions)))
    monkeypatch.setattr(seeds, "Noise", lambda seed: Noise(seed) if seed else same)


def audit_of(url, prompts=6, **settings):
    on = connect(Side("with speculation", url))
    off = replace(on, name="without", body={"speculative": False})
    return Audit(on, off, find_features(off), default_prompts(prompts), AuditSettings(**settings))


def findings(url, *checks, **settings):
    """The names of the checks that find something."""
    return [
        verdict.check
        for verdict in run_checks(audit_of(url, **settings), checks or tuple(CHECKS))
        if verdict.status == "finding"
    ]


FAULTS = {  # the check that finds it, the beginning of its verdict's name, prompts, and tokens where 48 are not needed
    "changed tokens": ("texts", "texts, all conditions", 8),
    "garbage after a prefix hit": ("texts", "texts shared prefix", 4, 24),
    "chunk repeated": ("texts", "texts, all conditions", 12, 24),
    "texts mixed up under load": ("texts", "texts, all conditions", 12, 24),
    "one prompt changed": ("texts", "texts alone", 6, 24),
    "seed ignored": ("seeds", "seeds repeat their texts", 8),
    "sampling biased": ("seeds", "sampled distribution", 4),
    "wrong logprobs": ("logprobs", "logprobs of both sides", 8),
    "split characters": ("streams", "streams with speculation", 4),
    "no likeliest tokens": ("logprobs", "logprobs with speculation", 4),
    "no end of streams": ("streams", "streams with speculation", 4),
    "stop dropped": ("limits", "stop strings with speculation", 4),
    "one token too many": ("limits", "max_tokens and usage with speculation", 4),
    "wrong usage": ("limits", "usage counts the tokens with speculation", 4),
    "wrong finish_reason": ("limits", "counts of both sides", 4),
    "invalid JSON under load": ("structured output", "valid JSON with speculation", 4),
    "invalid calls": ("structured output", "valid calls of tools with speculation", 4),
    "switch ignored": ("speed", "speculation is off where it should be", 4),
}


def test_every_fault_of_the_wrong_server_is_planted():
    assert {*FAULTS, "worse answers"} == set(ALL_FAULTS)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    check, found, prompts, *max_tokens = FAULTS[fault]
    with audited_server(fault) as url:
        named = findings(url, check, prompts=prompts, **dict(zip(["max_tokens"], max_tokens, strict=False)))
    assert any(name.startswith(found) for name in named)


@pytest.mark.slow
@pytest.mark.unchecked
def test_one_prompt_with_another_text_is_enough():
    prompts = [prompt for prompt in default_prompts(24) if not is_changed(SHARED_PREFIX + prompt)]
    prompts = [*filterfalse(is_changed, prompts)][:3] + [*filter(is_changed, prompts)][:1]
    with audited_server("one prompt changed", noise=0.0) as url:
        audit = replace(audit_of(url, max_tokens=24), prompts=prompts)
        found = [verdict.check for verdict in run_checks(audit, ["texts"]) if verdict.status == "finding"]
    assert "texts alone" in found
    assert not any("shared prefix" in check for check in found)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("seed", range(2))
def test_an_honest_server_with_rounding_noise_has_no_finding(seed):
    with audited_server(seed=seed, noise=0.003 if seed % 2 else 0.01) as url:
        assert findings(url, prompts=4, max_tokens=32) == []


def test_what_a_setting_explains_on_both_sides_is_a_note():
    with audited_server(noise=0.0, penalty=2.0) as url:
        verdicts = {one.check: one for one in run_checks(audit_of(url, prompts=4), ["logprobs"])}
    for side in ("with speculation", "without"):
        verdict = verdicts[f"logprobs {side}"]
        assert verdict.status == "note"
        assert "a greedy token has log-probability" in verdict.line


def test_a_near_tie_is_as_wide_as_the_largest_noise():
    assert rounding_tolerance([0.0] * 20 + [0.1]) == 0.2
    assert rounding_tolerance([0.0] * 20) == 0.05
    given, bare = Token(b"a", -0.6, {b"a": -0.6}), Token(b"a", 0.0)
    assert token_differences([given, bare], [given, given]) == [0.0]


def test_a_check_can_be_made_alone():
    with audited_server() as url:
        few = "--limit", 2, "-n", 8, "--clients", 4, "--json"
        said = json.loads(saltus_("check", "--server", url, "--off", SWITCH, "--only", "limits", *few).stdout)
    assert {one["check"].removesuffix(" without").removesuffix(" with speculation") for one in said["verdicts"]} == {
        "stop strings", "max_tokens and usage", "usage counts the tokens", "counts of both sides"
    }  # fmt: skip


def test_a_finding_names_a_command_that_repeats_it(tmp_path):
    with audited_server("wrong usage") as url:
        few = "--limit", 2, "-n", 8, "--clients", 4, "--api-key", "secret", "--out", tmp_path
        ran = saltus_("check", "--server", url, "--off", SWITCH, *few, code=1)
        assert "about 1 min" in ran.stderr
        shown = ran.stdout
        (command,) = [line for line in shown.splitlines() if '"max_tokens": 5' in line]
        words = shlex.split(command)
        again = post(Side("", url), "/v1/chat/completions", json.loads(words[-1]))
    assert words[:3] == ["curl", "-s", f"{url}/v1/chat/completions"]
    assert again.completion_tokens == 8
    assert "secret" not in shown + (tmp_path / "report.json").read_text()
    assert command in (tmp_path / "report.md").read_text()


def test_what_a_server_does_not_understand_is_named():
    with audited_server(missing=("logprobs", "tools", "metrics", "JSON schemas", "seed")) as url:
        verdicts = run_checks(audit_of(url, prompts=2, max_tokens=12), [n for n in CHECKS if n != "texts"])
    lacking = {verdict.check: verdict.line for verdict in verdicts if verdict.status == "not checked"}
    assert {"logprobs", "seeds", "valid JSON", "valid calls of tools", "acceptance"} <= set(lacking)
    assert "refuses" in lacking["logprobs"]
    assert "repeat" in lacking["seeds"]


def test_graded_suites_are_compared_by_pairs(tmp_path):
    rows = [{"question": f"What is {n} plus {n + 1}?", "answer": f"#### {2 * n + 1}"} for n in range(60)]
    file = lines(tmp_path / "sums.jsonl", *rows)
    tasks = load_tasks(f"gsm8k:{file}")
    suite = GradedSuite("sums", tasks, find_grader("gsm8k", tasks))
    for faults, expected in ((), "ok"), (("worse answers",), "finding"):
        with audited_server(*faults) as url:
            audit = replace(audit_of(url, prompts=1), suites=[suite])
            (verdict,) = run_checks(audit, ["graded suites"])
        assert verdict.status == expected
    assert verdict.figures["only_without"] > 10 > verdict.figures["only_with"] == 0


def test_a_server_that_counts_no_drafts_makes_none():
    with audited_server() as url, audited_server(missing=["draft counts"]) as plain:
        on, off = connect(Side("with speculation", url)), connect(Side("without", plain))
        audit = Audit(on, off, find_features(off), default_prompts(2), AuditSettings(max_tokens=8, clients=2))
        verdicts = {one.check: one for one in run_checks(audit, ["speed"])}
    assert verdicts["speculation is off where it should be"].status == "ok"


def test_a_header_switches_speculation_off():
    with audited_server("wrong finish_reason") as url:
        few = "--only", "limits", "--limit", 2, "-n", 8, "--clients", 4
        given = "--server", url, "--off-header", "X-Speculative: off", *few, "--json"
        said = json.loads(saltus_("check", *given, code=1).stdout)
    assert "counts of both sides" in [one["check"] for one in said["verdicts"] if one["status"] == "finding"]


def test_exact_tests_have_their_known_values():
    parted = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
    assert exchangeability_test([parted] * 5) == pytest.approx(2 / 3**5)  # one of three splits, each time
    assert exchangeability_test([np.zeros((4, 4), dtype=int)] * 5) == 1
    assert mcnemar(0, 5) == mcnemar(5, 0) == 2 / 32
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1
    assert holm([0.001, 0.04, 0.02], 0.05) == [True, True, True]
    assert holm([0.03, 0.04, 0.02], 0.05) == [False, False, False]
    low, high = rate_interval(0, 10)
    assert (low, high) == (0, pytest.approx(0.2775, abs=1e-3))


def test_a_gap_is_read_where_two_texts_part():
    tokens = [Token(b"a", -0.1, {b"a": -0.1, b"b": -3.0}), Token(b"cd", -0.5, {b"cd": -0.5, b"e": -0.7})]
    assert gap_in_reference(tokens, "acd", "ae") == (pytest.approx(0.2), False)
    assert gap_in_reference(tokens, "acd", "b") == (pytest.approx(2.9), False)
    assert gap_in_reference(tokens, "acd", "ax") == (pytest.approx(0.2), True)
    assert gap_in_reference(tokens, "xy", "xz") is None


@pytest.mark.slow
def test_two_servers_are_compared_from_the_command_line(tmp_path):
    few = "--only", "texts", "--limit", 4, "-n", 24, "--clients", 8
    with audited_server(noise=0.0) as honest, audited_server("one prompt changed", noise=0.0) as wrong:
        ran = saltus_("check", "--server", honest, "--off", SWITCH, *few, "--json")
        assert json.loads(ran.stdout)["findings"] == 0
        shown = saltus_("check", "--server", wrong, "--against", honest, *few, "--out", tmp_path, code=1).stdout
    assert "not rounding" in " ".join(shown.split())
    page, kept = (tmp_path / "page.html").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert kept["findings"] >= 1
    assert kept["summary"] in page
    assert {side["name"] for side in kept["sides"]} == {"with speculation", "without"}


def test_a_server_that_lists_no_model_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr("saltus.evaluation.audit.features.get_json", lambda side, route: {"data": []})
    with pytest.raises(ValueError, match=r"/v1/models lists no model; name it with --model$"):
        connect(Side("with speculation", "http://localhost:8000"))


def test_a_wrong_command_line_is_refused_with_the_cure():
    assert "--off" in complaint("check", "--server", "http://localhost:9")
    assert "does not answer" in complaint("check", "--server", "http://localhost:9", "--off", "{}", env={"X": "1"})
    assert "JSON object" in complaint("check", "--server", "http://localhost:9", "--off", "no")
    assert "NAME: VALUE" in complaint("check", "--server", "http://localhost:9", "--off-header", "no")
    assert "http://localhost:8000" in complaint("check", "--server", "localhost:9", "--off", SWITCH)
    assert "--server" in complaint("check", "--off", SWITCH)
    assert "take texts" in complaint("check", "--server", "http://localhost:9", "--off", SWITCH, "--only", "text")
    assert "leave the others out" in complaint("check", "--server", "http://x", "--off", SWITCH, "--method", "lookup")


def test_the_summary_counts_checks_by_their_verdicts():
    verdicts = [Verdict("texts", status, "") for status in (SAME, SAME, NOTE, FIGURE, NOT_CHECKED)]
    assert summarize(verdicts[:1]) == "No difference in 1 check."
    explained = "No difference in 2 checks; in 1, one that repetition or rounding may explain; 1 could not be checked."
    assert summarize(verdicts) == explained
    assert summarize([*verdicts, Verdict("seeds", FINDING, "")]).startswith("1 of 4 checks found something; 1 could")
