"""The page of a benchmark run shows its numbers, and no text of a model can break it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from invented_run import SYSTEMS, invented_records, results_of
from saltus.evaluation.reports.markdown import render_markdown
from saltus.evaluation.reports.page import render_page

COLUMNS = {
    "speedup": 2, "decode_speedup": 2, "tokens_per_second": 1, "tokens_per_call": 2, "ms_per_call": 1,
    "nodes_per_call": 1, "calls": 0, "tokens": 0, "accuracy": 2,
}  # fmt: skip
EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028"


class Reader(HTMLParser):
    """Rows of tables, ids, tags, scripts and words of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.ids, self.rows, self.words, self.scripts = [], [], [], [], []
        self.attributes: list[tuple[str, str]] = []
        self.inside, self.in_table = "", False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        self.inside = tag if tag in ("script", "style") else self.inside
        if tag == "script":
            self.scripts.append("")
        self.in_table = self.in_table or tag == "table"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag in ("data", "small") and self.rows and self.rows[-1]:
            self.rows[-1][-1] += f"|{dict(attrs).get('value', '')}|"

    def handle_endtag(self, tag):
        self.inside = "" if tag == self.inside else self.inside
        self.in_table = self.in_table and tag != "table"

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif not self.inside:
            self.words.append(data)
            if self.in_table and self.rows and self.rows[-1]:
                self.rows[-1][-1] += data.strip()

    @property
    def data(self):
        return json.loads(self.scripts[0])


def read(records, results=None) -> Reader:
    return Reader(render_page(results or results_of(records), records))


@pytest.mark.slow
def test_the_numbers_of_the_table_are_those_of_the_results():
    records = invented_records()
    results = results_of(records)
    rows = {row[0]: row for row in read(records).rows if len(row) == 11 and row[0] != "system"}
    assert list(rows) == list(SYSTEMS)
    for system, one in results["methods"].items():
        assert f"|{one['identical']}|{one['identical']}of {one['texts']}" == rows[system][1]
        for cell, (name, digits) in zip(rows[system][2:], COLUMNS.items(), strict=True):
            if one[name] is None:
                assert cell == "–"
                continue
            _, value, shown, *interval = cell.split("|")
            assert float(value) == one[name]
            assert shown.removesuffix("×") == f"{one[name]:,.{digits}f}"
            if bounds := one["ci95"].get(name):
                assert interval[1] == " – ".join(f"{bound:,.{digits}f}" for bound in bounds)


def test_the_numbers_of_the_categories_are_those_of_the_results():
    records = invented_records()
    methods = results_of(records)["methods"]
    found = [row for row in read(records).rows if len(row) == len(SYSTEMS)]
    rows = {row[0]: row[1:] for row in found}
    others = [system for system in SYSTEMS if system != "plain"]
    assert rows["speed-up"] == others
    for category in methods["plain"]["by_category"]:
        for system, cell in zip(others, rows[category], strict=True):
            assert float(cell.split("|")[1]) == methods[system]["by_category"][category]["speedup"]
    for row in others:
        of_speeds, of_calls = (cells for name, *cells in found if name == row)
        for entry, cells in {"speedup_over": of_speeds, "tokens_per_call_over": of_calls}.items():
            for column, cell in zip(others, cells, strict=True):
                pair = methods[row][entry].get(column) or {"ratio": None}
                assert cell.split("|")[1:2] == ([] if pair["ratio"] is None else [str(pair["ratio"])])


@pytest.mark.slow
def test_the_page_asks_for_nothing_from_elsewhere_and_its_ids_are_unique():
    records = invented_records()
    html = render_page(results_of(records), records)
    reader = Reader(html)
    assert len(reader.ids) == len(set(reader.ids)) > 20
    assert not {"link", "img", "iframe", "image", "object"} & set(reader.tags)
    for name, value in reader.attributes:
        assert name != "src"
        if name.endswith("href"):
            assert value.startswith("#")
            assert value[1:] in reader.ids
    assert all(found.startswith("#") and found[1:] in reader.ids for found in re.findall(r"url\(([^)]*)\)", html))
    assert "@import" not in html
    assert "@font-face" not in html
    assert reader.tags.count("svg") == 6  # four figures and two tracks


def test_only_our_own_script_may_run():
    records = invented_records(2)
    reader = read(records)
    allowed = dict(reader.attributes)["content"], [value for name, value in reader.attributes if name == "content"]
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    assert any(f"script-src 'sha256-{digest}'" in value for value in allowed[1])


@pytest.mark.filterwarnings("ignore:Glyph")
def test_what_a_model_wrote_stays_text():
    records = invented_records(4, (EVIL, "qa"))
    for record in records:
        record["pieces"][0] += EVIL
        record["problems"] = [EVIL]
        record["task"] += EVIL
    reader = read(records)
    assert reader.tags.count("script") == 2
    assert not {"img", "b>"} & set(reader.tags)
    assert EVIL in "".join(reader.data["tasks"][0]["by"]["1"]["pieces"])
    assert EVIL in "".join(reader.words)


def test_the_replay_has_every_token_and_ends_when_the_text_was_done():
    records = invented_records()
    for record in records:
        if record["calls"] is None:
            record["new_tokens"] += 3  # a server counts its tokens itself
    data = read(records).data
    assert [system["name"] for system in data["systems"]] == list(SYSTEMS)
    by = {(r["task"], r["system"]): r for r in records}
    assert len(data["tasks"]) == 8
    for task in data["tasks"]:
        for number, answer in task["by"].items():
            record = by[task["task"], data["systems"][int(number)]["name"]]
            assert answer["tokens"] == record["new_tokens"]
            assert "".join(answer["pieces"]) == "".join(record["pieces"])
            if record["calls"] is None:
                assert answer["calls"] is None
                continue
            assert [call[:2] for call in answer["calls"]] == [[c["decided"], c["nodes"]] for c in record["calls"]]
            last = sum(call[2] + answer["rest"] for call in answer["calls"])
            assert last == pytest.approx(1000 * record["seconds"], abs=1)


def test_pieces_and_calls_of_different_number_lose_no_letter():
    [record] = invented_records(1, systems={"plain": 0.0})
    text = "".join(record["pieces"])
    for pieces in ([text], [*record["pieces"], " and", " more"]):
        answer = read([record | {"pieces": pieces}], results_of([record])).data["tasks"][0]["by"]["0"]
        assert "".join(answer["pieces"]) == "".join(pieces)
        assert len(answer["pieces"]) == len(answer["calls"])


@pytest.mark.slow
def test_many_and_long_texts_keep_the_page_small():
    records = invented_records(60, ("a", "b", "c"))
    data = read(records).data
    assert len(data["tasks"]) == 30
    assert {task["category"] for task in data["tasks"]} == {"a", "b", "c"}
    for record in records:
        record["pieces"][-1] += "lorem ipsum" * 2000
    html = render_page(results_of(records), records)
    assert len(html.encode()) < 2_000_000
    assert 1 <= len(Reader(html).data["tasks"]) < 30


def test_problems_and_other_texts_stand_in_red():
    records = invented_records(4)
    for record in records:
        if record["system"] == "jacobi":
            record["pieces"] = ["something else"]
            record["problems"] = ["ended early"]
    html = render_page(results_of(records), records)
    assert '<td class="alarm"><data value="0">0</data> of 4</td>' in html
    assert html.index('class="problems"') < html.index('class="plots"')
    assert html.count("<li>ended early</li>") == 4


def test_a_run_that_ended_before_its_first_text_has_a_page():
    reader = read([])
    assert "No text was finished before the run ended." in "".join(reader.words)
    assert "saltus bench spec-bench --quick --methods lookup,jacobi" in reader.words
    assert "script" not in reader.tags


@pytest.mark.parametrize("systems", [{"plain": 0.0}, {"plain": None, "transformers": None}])
def test_a_run_of_few_sides_has_a_page(systems):
    reader = read(invented_records(3, ("qa",), systems))
    assert [system["name"] for system in reader.data["systems"]] == list(systems)


def test_the_facts_of_the_run_are_told():
    words = " ".join(read(invented_records(2)).words)
    for fact in ("abc1234", "AMD EPYC 9B14", "torch 2.13.0", "seed 0", "135 million parameters", "2026-05-04"):
        assert fact in words


def test_the_page_says_that_a_server_may_reuse_its_cache():
    without = {name: chance for name, chance in SYSTEMS.items() if not name.startswith("endpoint:")}
    assert "cache_salt" in " ".join(read(invented_records(2)).words)
    assert "cache_salt" not in " ".join(read(invented_records(2, systems=without)).words)


def test_without_matplotlib_the_page_says_how_to_get_figures(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reader = read(invented_records(2))
    assert reader.tags.count("figure") == 0
    assert any(".[bench]" in word for word in reader.words)


def test_the_page_and_the_tables_name_the_weights_and_the_threads_of_the_run():
    records = invented_records()
    results = results_of(records)
    results["model"]["weights"] = "Q4_1, int8 activations"
    results["machine"]["threads"] = 1
    words = " ".join(Reader(render_page(results, records)).words)
    assert words.count("Q4_1, int8 activations") == 2
    assert "bfloat16" not in words
    assert "1 thread on 2 cores" in words
    assert "1 thread on 2 cores of AMD EPYC" in render_markdown(results)
