"""The figures of a benchmark run say what the run measured, whoever is missing from it."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from invented_run import CATEGORIES, SYSTEMS, invented_records, results_of
from saltus.evaluation.reports import benchmark_plots
from saltus.evaluation.reports.benchmark_plots import STYLE, draw_figures, write_figures
from saltus.evaluation.reports.page import summarize_results
from saltus.evaluation.reports.palette import PLAIN, assign_colours
from saltus.evaluation.reports.text_figure import most_tokens_per_call, typical_record, wrap_pieces

pytest.importorskip("matplotlib")
NAMES = ("speed-up", "calls", "acceptance", "calibration", "text")


def texts(path: Path) -> list[str]:
    """What an SVG says, element by element."""
    return ["".join(one.itertext()) for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def drawn(folder: Path, records, results=None) -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_plots, "FORMATS", ("svg",))
        write_figures(results or results_of(records), records, folder)
    return {path.stem: texts(path) for path in folder.glob("*.svg")}


@pytest.mark.slow
def test_every_figure_is_written_in_each_format_and_names_the_sides(tmp_path):
    records = invented_records()
    paths = write_figures(results_of(records), records, tmp_path / "new")
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in NAMES for kind in ("svg", "pdf", "png")]
    for path in paths:
        assert path.stat().st_size > 5000
        if path.suffix == ".pdf":
            assert b"/Type3" not in path.read_bytes()  # conferences refuse such fonts
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    said = {path.stem: texts(path) for path in paths if path.suffix == ".svg"}
    assert set(SYSTEMS) <= set(said["speed-up"])
    assert set(CATEGORIES) <= set(said["speed-up"])
    assert {"plain", "lookup", "jacobi", "jacobi+lookup"} <= set(said["calls"])
    assert "not reported by transformers, endpoint:b" in said["calls"]
    assert {"lookup", "jacobi", "jacobi+lookup"} <= set(said["acceptance"])
    assert {"lookup", "jacobi", "jacobi+lookup", "stated probability"} <= set(said["calibration"])
    assert "plain" not in {*said["acceptance"], *said["calibration"]}


@pytest.mark.slow
def test_long_names_and_the_labels_of_speeds_have_room():
    import matplotlib

    renamed = {"jacobi": "bigram+lookup", "jacobi+lookup": "ptp+lookup ptp.model=drafter-a"}
    records = [{**record, "system": renamed.get(record["system"], record["system"])} for record in invented_records()]
    with matplotlib.rc_context(STYLE):
        figures = draw_figures(results_of(records), records)
        labels = [text.get_window_extent() for axes in figures["speed-up"].axes for text in axes.texts]
        assert min(box.x0 for box in labels) >= 0
        speeds = [text for text in figures["calls"].axes[0].texts if "tokens/s" in text.get_text()]
        plain = next(text.get_window_extent() for text in speeds if "plain" in text.get_text())
        rays = [text for text in figures["calls"].axes[0].texts if text.get_text().removesuffix(" tokens/s").isdigit()]
        assert speeds
        assert rays
        assert not any(plain.overlaps(text.get_window_extent()) for text in rays)


@pytest.mark.slow
def test_the_speed_ups_and_the_speed_of_plain_are_the_measured_ones(tmp_path):
    records = invented_records()
    results = results_of(records)
    said = drawn(tmp_path, records)
    for system, one in results["methods"].items():
        if system != "plain":
            low, high = one["ci95"]["speedup"]
            assert f"{one['speedup']:.2f} × [{low:.2f}, {high:.2f}]" in [" ".join(t.split()) for t in said["speed-up"]]
    plain = results["methods"]["plain"]
    assert f"plain: {1000 * plain['decode_tokens_per_call'] / plain['ms_per_call']:.0f} tokens/s" in said["calls"]


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(tmp_path):
    records = invented_records(3)
    for folder in ("one", "two"):
        drawn(tmp_path / folder, records)
    for name in NAMES:
        assert (tmp_path / "one" / f"{name}.svg").read_bytes() == (tmp_path / "two" / f"{name}.svg").read_bytes()


@pytest.mark.slow
def test_one_category_is_not_shown_beside_all(tmp_path):
    said = drawn(tmp_path, invented_records(3, ("writing",)))
    assert "writing" not in said["speed-up"]
    assert "lookup" in said["speed-up"]


@pytest.mark.slow
def test_many_categories_and_sides_stay_apart(tmp_path):
    """No two of the systems' names or categories share a line."""
    categories = tuple(f"category {number}" for number in range(13))
    systems = SYSTEMS | {"small_model": 0.6, "transformers-lookup": None}
    records = invented_records(26, categories, systems)
    drawn(tmp_path, records)
    heights = []
    for one in ElementTree.parse(tmp_path / "speed-up.svg").iter("{http://www.w3.org/2000/svg}text"):
        if "".join(one.itertext()) in (*categories, *systems):
            place = one.get("transform") or one.attrib["y"]
            heights.append(float(re.findall(r"[\d.]+", place)[-1]))
    heights.sort()
    assert len(heights) == len(categories) + len(systems)
    assert min(high - low for low, high in pairwise(heights)) > 8


def test_long_names_are_cut_and_leave_room(tmp_path):
    said = drawn(tmp_path, invented_records(4, ("a" * 90, "b"), {"plain": 0.0, "endpoint:" + "c" * 90: None}))
    assert {"a" * 12 + "…" + "a" * 15, "endpoint:ccc…" + "c" * 15} <= set(said["speed-up"])


def test_names_with_varied_options_stay_apart(tmp_path):
    """By the field and the end of its value: the folders of two drafters begin alike."""
    names = [f"ptp+lookup ptp.model=/a/folder/of/drafters/drafter-{letter}" for letter in "ab"]
    said = drawn(tmp_path, invented_records(4, systems={"plain": 0.0, **dict.fromkeys(names, 0.5)}))
    for figure in ("speed-up", "calls"):
        assert {"ptp+lookup model=drafter-a", "ptp+lookup model=drafter-b"} <= set(said[figure])


@pytest.mark.slow
def test_a_note_on_other_texts_fits_the_width():
    records = invented_records()
    results = results_of(records)
    for number, row in enumerate(list(results["methods"].values())[1:4]):
        results["methods"][f"endpoint:a-model.gguf@localhost:809{number}"] = {**row, "kind": "baseline", "identical": 1}
    figure = draw_figures(results, records)["speed-up"]
    (note,) = [text for text in figure.texts if text.get_text().startswith("other texts than")]
    assert note.get_text().endswith(", and 1 more")
    assert note.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.slow
def test_equal_acceptance_is_drawn_in_turn():
    import matplotlib

    records = invented_records()
    results = results_of(records)
    methods = results["methods"]
    methods["jacobi"]["acceptance_by_position"] = [0.8, 0.5, 0.3]
    methods["jacobi+lookup"]["acceptance_by_position"] = [0.8, 0.501, 0.3, 0.1]
    methods["lookup"]["acceptance_by_position"] = [0.8, 0.4, 0.3]
    with matplotlib.rc_context(STYLE):
        lines = draw_figures(results, records)["acceptance"].axes[0].lines
    drawn = {tuple(line.get_ydata()): (line.get_linestyle(), line.get_markevery()) for line in lines}
    assert drawn == {
        (0.8, 0.5, 0.3): ("-", (0, 2)), (0.8, 0.501, 0.3, 0.1): ("--", (1, 2)), (0.8, 0.4, 0.3): ("-", (0, 1)),
    }  # fmt: skip


def test_sides_without_calls_have_speed_ups_alone(tmp_path):
    records = invented_records(4, systems={"plain": None, "transformers": None})
    assert set(drawn(tmp_path, records)) == {"speed-up"}


def test_plain_alone_has_a_point_and_nothing_else(tmp_path):
    assert set(drawn(tmp_path, invented_records(4, systems={"plain": 0.0}))) == {"calls"}


def test_a_run_without_records_has_no_figures(tmp_path):
    assert write_figures(results_of([]), [], tmp_path) == []


@pytest.mark.slow
def test_texts_that_differ_and_problems_are_said(tmp_path):
    records = invented_records(4)
    for record in records:
        if record["system"] == "jacobi":
            record["pieces"] = ["something else"]
            record["problems"] = ["ended early"]
    said = drawn(tmp_path, records)
    assert "other texts than plain’s: jacobi 4 of 4" in said["speed-up"]
    assert "problems: jacobi 4" in said["speed-up"]


def test_the_text_is_drawn_whole_and_not_read_as_mathematics(tmp_path):
    [record] = invented_records(1, systems={"lookup": 0.4})
    plain = record | {"system": "plain"}
    pieces = ["It costs $5 & <b>$6</b>", " or", " \\frac{1}{2}"]
    record |= {"pieces": pieces, "calls": [{"decided": d, "nodes": 8, "seconds": 0.02, "read": 1} for d in (7, 1, 6)]}
    said = drawn(tmp_path, [plain, record])["text"]
    assert "".join(pieces).replace(" ", "") in "".join(said).replace(" ", "")


def test_lines_break_between_words_and_keep_every_letter():
    pieces = ["one two", " three", "\nfour ", "verylongwordindeed", " 漢字漢字漢字"]
    lines = ["".join(letter for letter, _ in line) for line in wrap_pieces(pieces, 10)]
    assert lines == ["one two", "three", "four", "verylongwo", "rdindeed", "漢字漢字漢", "字"]
    owners = {number for line in wrap_pieces(pieces, 10) for _, number in line}
    assert owners == {0, 1, 2, 3, 4}


def test_the_answer_shown_is_typical_and_not_the_best():
    records = invented_records(20)
    results = results_of(records)
    best = most_tokens_per_call(results)
    shown = typical_record(results, records, best)
    assert shown is not None
    rates = [len(r["tokens"]) / len(r["calls"]) for r in records if r["system"] == best]
    assert min(rates) < len(shown["tokens"]) / len(shown["calls"]) < max(rates)


def test_a_side_keeps_its_colour_whoever_is_beside_it():
    alone, together = assign_colours(["plain", "lookup"]), assign_colours(["plain", "endpoint:x", *SYSTEMS])
    assert alone["lookup"] == together["lookup"]
    assert together["plain"] == PLAIN
    assert len(set(together.values())) == len(together)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "lookup wrote the same 40 texts 1.31 × as fast as plain decoding [1.24, 1.38]."),
        ({"speedup": 0.8, "ci95": {"speedup": [0.7, 0.9]}},
         "lookup wrote the same 40 texts 0.80 × as fast as plain decoding [0.70, 0.90], which is slower."),
        ({"ci95": {"speedup": [0.9, 1.6]}},
         "lookup wrote the same 40 texts 1.31 × as fast as plain decoding [0.90, 1.60], no clear difference."),
        ({"identical": 37},
         "lookup wrote 40 texts 1.31 × as fast as plain decoding [1.24, 1.38], but 3 of them differ."),
        ({"identical": 0, "problems": ["one"]},
         "lookup wrote 40 texts 1.31 × as fast as plain decoding [1.24, 1.38], but not one of them is plain's, "
         "and 1 problem was found."),
        ({"identical": None, "ci95": {}},
         "lookup wrote 40 texts 1.31 × as fast as plain decoding, with other random numbers, so the texts"
         " are not compared."),
    ],
)  # fmt: skip
def test_the_headline_is_honest(changes, sentence):
    one = {"kind": "method", "texts": 40, "identical": 40, "speedup": 1.31, "ci95": {"speedup": [1.24, 1.38]},
           "problems": []}  # fmt: skip
    baseline = one | {"kind": "baseline", "speedup": 9.0}
    said = summarize_results(
        {"methods": {"plain": one | {"speedup": 1.0}, "transformers": baseline, "lookup": one | changes}}
    )
    assert said.sentence == sentence


def test_a_run_of_plain_alone_has_an_honest_headline():
    assert (
        summarize_results({"methods": {"plain": {"speedup": 1.0}}}).sentence
        == "Nothing was compared with plain decoding."
    )
