"""Whatever is wrong with a file, it is refused in one line, or the model loads and writes: no crash, no hang."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from reference_eagle import published_head
from test_dflash import dflash_model, published_folder
from test_gguf import folder_with_its_file, gguf
from transformers import LlamaForCausalLM

from forked_python import FOR_COMMANDS, forked_python
from reference_evabyte import write_folder
from saltus.loading import gguf_index, sources
from saltus.methods.shared.drafter_files import save_drafter
from tiny_models import TEMPLATE

PROGRAM = Path(__file__).parents[1] / "corrupt_files.py"


@pytest.fixture(scope="module")
def originals(tiny_folder, tiny_drafter, tiny_heads, tmp_path_factory) -> Path:
    """What is corrupted: a GGUF file, models, and drafters for the first of them."""
    folder = tmp_path_factory.mktemp("originals")
    shutil.copytree(tiny_folder(num_hidden_layers=6), folder / "model-a")
    target = LlamaForCausalLM.from_pretrained(folder / "model-a")
    for name, made in {"ptp-own": tiny_drafter(target), "mtpc-own": tiny_heads(target)}.items():
        shutil.copytree(made, folder / f"drafter-{name}")
    save_drafter("drafter", dflash_model(target), folder / "drafter-ptp-dflash", "tiny", target, {})
    for layout in ("flat", "speculators"):
        published_folder(folder / f"drafter-ptp-{layout}", layout)
    for form in ("original", "speculators"):
        (folder / f"drafter-ptp-eagle3-{form}").mkdir()
        published_head(folder / f"drafter-ptp-eagle3-{form}", form)
    write_folder(folder / "model-evabyte", shards=2)
    with pytest.MonkeyPatch.context() as patch:
        real = gguf.GGUFWriter.write_header_to_file
        patch.setattr(
            gguf.GGUFWriter,
            "write_header_to_file",
            lambda self, *arguments: (self.add_chat_template(TEMPLATE), real(self, *arguments)),
        )
        for module in (sources, gguf_index):
            patch.setattr(module, "cache_folder", lambda: folder / "cache")
        shutil.move(folder_with_its_file(folder), folder / "model-gguf")
    shutil.rmtree(folder / "cache")
    return folder


def outcomes(originals: Path, kind: str, numbers: range) -> list[dict]:
    """What became of each case. A case that ends the process, as by a signal, is the last one that has begun."""
    command = [*forked_python(*FOR_COMMANDS), PROGRAM, originals, kind, numbers.start, numbers.stop]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, (records[-1:], done.stderr[-2000:])
    return [record for record in records if "end" in record]


def check(originals: Path, kind: str, numbers: range) -> None:
    found = outcomes(originals, kind, numbers)
    assert [record["end"] for record in found] == list(numbers)
    assert [record for record in found if record["is"] == "fault"] == []
    assert {record["is"] for record in found} == {"used", "refused"}, "some of each"


@pytest.mark.parametrize(
    ("kind", "count"), [("gguf", 40), ("folder", 20), ("configuration", 12), ("quantised", 10), ("metadata", 18)]
)
def test_a_corrupt_file_is_refused_in_a_line_or_can_be_used(kind, count, originals):
    check(originals, kind, range(count))


@pytest.mark.external
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "end"),
    [
        ("gguf", 40, 90), ("folder", 20, 50), ("configuration", 12, 60), ("quantised", 10, 30), ("metadata", 18, 40),
    ],
)  # fmt: skip
def test_more_corrupt_files_are_refused_in_a_line_or_can_be_used(kind, first, end, originals):
    """CORRUPT_CASES=600 tries as many of each kind, which takes minutes."""
    check(originals, kind, range(first, max(end, int(os.environ.get("CORRUPT_CASES", 0)))))
