"""A drafter of another package is measured beside those of this one."""

import importlib
import json
import sys

import pytest
from test_cli import saltus_

from saltus.engine.prompts import Prompt
from saltus.evaluation.benchmarks.benchmark_run import open_records
from saltus.evaluation.benchmarks.suites import Task
from saltus.evaluation.reports.environment import method_packages
from saltus.methods import available_methods

ECHO = '''
from dataclasses import dataclass, field

from saltus.core.tree import Branch


@dataclass(frozen=True)
class Echo:
    """Draft the last tokens once more."""

    num_draft_tokens: int = 4
    fails: bool = False
    draft_models: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def drafter(self, noise, sampling, rule):
        def draft(canvas, last, max_depth):
            tokens = canvas.decided_prefix[-self.num_draft_tokens :][:max_depth].tolist()
            return [Branch(tokens, [0.3] * len(tokens), "echo")][1 // (not self.fails) - 1 :]

        return draft
'''


@pytest.fixture
def installed(tmp_path, monkeypatch) -> None:
    metadata, module = tmp_path / "site" / "echoing-1.0.dist-info", tmp_path / "site" / "echoing.py"
    metadata.mkdir(parents=True)
    module.write_text(ECHO)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: echoing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[saltus.methods]\necho = echoing:Echo\n")
    monkeypatch.syspath_prepend(metadata.parent)
    importlib.invalidate_caches()
    available_methods.cache_clear()
    yield
    available_methods.cache_clear()
    sys.modules.pop("echoing", None)


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_a_drafter_of_another_package_is_compared_with_lookup(installed, tiny_folder, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    file.write_text(json.dumps({"prompt": "the cat sat on the mat and the dog sat on the mat"}))
    asked = ["bench", "-m", tiny_folder(), "--suite", f"prompts:{file}", "-n", 12, "--no-adaptive"]
    asked += ["--methods", "echo,lookup,echo+lookup"]
    shown = saltus_(*asked, "--out", out, "--vary", "echo.num_draft_tokens=2,4").stdout
    assert "  echo " in shown
    told = json.loads((out / "results.json").read_text())
    assert told["packages"] == method_packages(["echo", "lookup"]) == {"echo": "echoing 1.0"}
    for size in (2, 4):
        drafter = told["methods"][f"echo+lookup echo.num_draft_tokens={size}"]["by_drafter"]["echo"]
        assert drafter["verified_by_depth"][:size] == drafter["offered_by_depth"][:size]
        assert len(drafter["offered_by_depth"]) == size
        assert sum(drafter["calibration"]["offered"][3:4]) == sum(drafter["calibration"]["offered"]) > 0
    assert "; echo of echoing 1.0; commit" in (out / "results.md").read_text()
    assert "echo of echoing 1.0" in (out / "page.html").read_text()
    fault = saltus_(*asked, "--option", "echo.fails=true", code=70).stderr.splitlines()[-1]
    assert fault.startswith("saltus: ZeroDivisionError: ")
    assert fault.endswith("(a fault of saltus or echoing; SALTUS_DEBUG=1 shows where it happened)")


def test_a_run_is_not_continued_with_another_version_of_the_package(tmp_path):
    plan, begun = {"systems": ["plain", "echo"]}, {"commit": None, "packages": {"echo": "echoing 1.0"}}
    tasks = [Task("a", "", Prompt(("the cat",)))]
    assert open_records(tmp_path, plan, tasks, begun).records == []
    with pytest.raises(
        ValueError, match=r"was begun with echo of echoing 1\.0, and this is echoing 1\.1; give another"
    ):
        open_records(tmp_path, plan, tasks, begun | {"packages": {"echo": "echoing 1.1"}})
