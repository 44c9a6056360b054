"""Keep README and docs true: their commands exist, their methods are the methods, their Python runs."""

import importlib
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from functools import cached_property
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType
from typing import Any, get_type_hints

import pytest
from click import Command
from typer.main import get_command

import saltus
from saltus.cli.app import app
from saltus.core.canvas import continuation
from saltus.core.noise import Noise
from saltus.core.rules import match
from saltus.core.sampling import Sampling
from saltus.methods import available_methods
from saltus.models import architectures
from saltus.models.architectures import find_architecture, gguf_architectures, gguf_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHODS = sorted(available_methods())


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def undocumented(shown: Any) -> list[str]:
    """The function, or the class and its public methods, that have no docstring, not even an inherited one."""
    of_protocols = {"drafter", "draft_models", "new_kv_cache", "forward"}  # which say what these do
    kinds = FunctionType, property, cached_property, staticmethod, classmethod
    found = {shown.__name__: shown}
    for name, member in vars(shown).items() if inspect.isclass(shown) else ():
        is_field = name in getattr(shown, "__dataclass_fields__", {})
        if isinstance(member, kinds) and not (name.startswith("_") or is_field or name in of_protocols):
            found[f"{shown.__name__}.{name}"] = getattr(member, "__func__", member)
    return [name for name, each in found.items() if not inspect.getdoc(each)]


@pytest.mark.parametrize(
    "name", re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text("utf-8"), flags=re.MULTILINE)
)
def test_what_the_api_reference_shows_has_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:  # of one class or function
        where, _, last = name.rpartition(".")
        assert not undocumented(getattr(importlib.import_module(where), last))
        return
    assert module.__doc__
    for label, each in vars(module).items():
        is_own = getattr(each, "__module__", None) == name and not label.startswith("_")
        if is_own and (inspect.isclass(each) or inspect.isfunction(each)):
            assert not undocumented(each)


def test_the_api_s_table_has_every_setting():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    table = text.partition("| setting | default | meaning |")[2].partition("\n\n")[0]
    names = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    assert names == set(get_type_hints(saltus.Settings))


def test_the_citation_names_this_version_and_licence():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"].strip('"') == saltus.__version__
    assert f'license = "{fields["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {"message", "title", "abstract"} <= set(fields)
    assert "authors:" in lines


def test_the_first_two_commands_are_the_first_two_targets():
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.findall(r"\$ make (\w+)", README)[:2] == targets[:2] == ["demo", "test"]


def test_the_table_lists_every_method():
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)) == METHODS


def test_every_method_has_its_paragraph_in_the_docs():
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## `(\w+)`$", text, flags=re.MULTILINE)) == METHODS


def test_the_table_of_architectures_says_what_the_code_has():
    """Every file has a row, with its name in GGUF files, and says that these are tested if there is one."""
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    table = text.partition("## Architectures\n")[2].partition("\n- ")[0]
    found, in_files = set(), set()
    for line in table.splitlines():
        row = re.split(r"\s*\|\s*", line)[1:-1]
        if len(row) != 7 or "`" not in row[0] or row[0] == "`model_type`":
            continue
        names, gguf = (set(re.findall(r"`([\w-]+)`", row[column])) for column in (0, 4))
        described = {name: find_architecture(name) for name in names}
        runs_on_kernels = [module is not None and bool(module.CLASSES) for module in described.values()]
        assert all(runs_on_kernels) == row[3].startswith("kernels"), names
        assert ("G" in row[6].split(", ")) == bool(gguf), names
        assert {each.name for module in described.values() if module for each in gguf_of(module)} <= gguf, names
        found |= names
        in_files |= gguf
    assert found >= {module.name for module in iter_modules(architectures.__path__)}
    assert in_files == set(gguf_architectures())


def test_the_page_on_architectures_shows_a_file_as_it_is():
    page = (ROOT / "docs/adding-an-architecture.md").read_text(encoding="utf-8")
    shown = (ROOT / "src/saltus/models/architectures/arcee.py").read_text(encoding="utf-8")
    assert blocks("python", page) == [shown]


def test_linked_pages_exist():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def commands_of(page: Path) -> list[list[str]]:
    """The words of each `saltus` command of a page's console blocks; variables of the shell get their values."""
    found: list[list[str]] = []
    for block in blocks("console", page.read_text(encoding="utf-8")):
        values: dict[str, str] = {}
        for line in re.sub(r"\\\n *", "", block).splitlines():
            command = line.removeprefix("$ ")
            for name, value in values.items():
                command = command.replace(f"${name}", value)
            words = shlex.split(command, comments=True)
            values |= {name: value for name, mark, value in (word.partition("=") for word in words) if mark}
            if words[:1] == ["saltus"]:
                found.append(words[1:])
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOLD = [(page, words) for page in PAGES for words in commands_of(page)]


@pytest.mark.parametrize(("page", "words"), TOLD, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(TOLD)])
def test_the_commands_of_the_docs_exist_with_their_options(page: Path, words: list[str]):
    command: Command = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]  # pyright: ignore[reportAttributeAccessIssue]
    if command.name == "lm-eval":
        return  # they are another program's
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"-h", "--help"}
    own = words[: words.index("--")] if "--" in words else words
    used = {word.partition("=")[0] for word in own if re.match(r"--?[a-zA-Z]", word)}
    assert used <= known, f"{page.name}: {command.name} has no {', '.join(sorted(used - known))}"


def test_programs_beside_the_package_use_no_name_that_they_do_not_define():
    # The linter's rule is off (pyproject.toml), and pyright reads src/ only.
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "benchmarks", "examples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_the_example_method_of_the_docs_offers_branches():
    example = {"__name__": __name__}
    exec(blocks("python", (ROOT / "docs/adding-a-method.md").read_text(encoding="utf-8"))[0], example)
    draft = example["Echo"](num_draft_tokens=2).drafter(Noise(0), Sampling(), match)
    (branch,) = draft(continuation([5, 6, 7], length=4), None, 3)
    assert list(branch.tokens) == [6, 7]


def test_the_package_of_the_docs_names_what_is_there():
    page = (ROOT / "docs/adding-a-method.md").read_text(encoding="utf-8")
    package = tomllib.loads(blocks("toml", page)[0])
    names = [name for group in package["project"]["entry-points"].values() for name in group.values()]
    places = {"my_package.echo": blocks("python", page)[0]}
    for file in (ROOT / "examples").rglob("linear_head/**/*.py"):
        module = ".".join(file.relative_to(ROOT / "examples").with_suffix("").parts)
        places[f"my_package.{module}"] = file.read_text(encoding="utf-8")
    for name in names:
        module, _, attribute = name.partition(":")
        assert re.search(rf"^(class )?{attribute}\b", places[module], re.MULTILINE), name


def test_the_phrases_of_the_docs_become_token_ids(tiny_folder, tmp_path, monkeypatch):
    found = blocks("python", (ROOT / "docs/adding-a-method.md").read_text(encoding="utf-8"))
    (block,) = [each for each in found if "phrases.json" in each]
    monkeypatch.chdir(tmp_path)
    exec(block.replace('"smollm2-135m"', repr(str(tiny_folder()))), {})
    assert all(json.loads(Path("phrases.json").read_text()))


@pytest.mark.model
def test_the_python_of_the_readme_runs(capsys):
    exec(blocks("python", README)[0], {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", ["index.md", "api.md", "requests.md", "integrations.md", "benchmarks.md"])
def test_the_python_of_the_docs_runs(page, tiny_folder, capsys):
    model = repr(str(tiny_folder()))
    names: dict[str, Any] = {}
    for block in blocks("python", (ROOT / "docs" / page).read_text(encoding="utf-8")):
        if "LLM" not in block:  # vLLM's
            exec(re.sub(r'"(smollm2-135m|some-model)"', lambda _: model, block), names)
    assert page == "integrations.md" or capsys.readouterr().out.strip()


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tiny_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [name, "--model", str(tiny_folder()), "--max-new-tokens", "8"])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_list_of_examples_is_complete():
    listed = re.findall(r"\((\w+\.py)\)", (ROOT / "examples/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == EXAMPLES
