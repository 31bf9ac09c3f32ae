"""The report of a run: reading, tables, the page, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from html.parser import HTMLParser

import pytest
from cli_helpers import refused, runner
from result_rows import base, found, grid, row, save, text

from mcretrofit import _charts as charts
from mcretrofit import report
from mcretrofit._canvas import spread

VOID = {"meta", "br", "hr", "img", "link", "input"}


@pytest.fixture
def run(capsys):
    return runner(capsys)


def test_bad_lines_are_named_by_number_and_the_rest_is_kept(tmp_path):
    short = {k: v for k, v in row().items() if k != "score"}
    bad = ["[1]", '{"task": ', json.dumps(short), json.dumps(row(score=0.5, n="many"))]
    bad += [json.dumps(row()).replace("0.8", "NaN"), json.dumps(row(controls={"random": "x"}))]
    some = found(tmp_path, [row()], *bad, "", json.dumps(row(128)))
    assert [one["segment"] for one in some.rows] == [64, 128]
    numbers = [re.search(r"line (\d+): (.*); left out", line).groups() for line in some.warnings]
    assert numbers == [
        *(("2", "not a JSON object"), ("3", "not JSON"), ("4", "score is missing")),
        *(("5", "n is not a whole number of at least 1"), ("6", "score is not a finite number")),
        ("7", "controls are not numbers"),
    ]


def test_one_row_for_an_id_and_the_newest_for_a_cell(tmp_path):
    some = found(tmp_path, [row(id="a"), row(score=0.6, id="a"), row(128, id="b")])
    assert [one["score"] for one in some.rows] == [0.8, 0.8] and not some.warnings
    some = found(tmp_path, [row(score=0.6), row(128), row(score=0.7)])
    assert [one["score"] for one in some.rows] == [0.8, 0.7]
    assert "1 rows are left out" in some.warnings[0]
    other = found(tmp_path, [row(haystack="a.txt"), row(haystack="b.txt"), row(seed=2)])
    assert len(other.rows) == 3


def test_tables_keep_dialects_models_and_haystacks_apart(tmp_path):
    rows = [base(), row(), row(dialect="ruler"), row(haystack="a.txt"), row(model="other")]
    made = report.build(found(tmp_path, rows))
    assert [len(part.tables) for part in made.parts] == [3, 1]
    first = made.parts[0].tables[0]
    assert [line.label for line in first.lines] == ["base", "ssc 64"]
    assert made.parts[0].tables[2].title == "niah_single_1 (compact dialect, a.txt)"
    same = report.build(found(tmp_path, [row(model_hash="a" * 64), row(model_hash="b" * 64)]))
    assert [part.model for part in same.parts] == ["m aaaaaaaa", "m bbbbbbbb"]


def test_terminal_tables_and_json(tmp_path, run):
    folder = save(tmp_path / "run", [*grid(), row(128, 0.1, length=4096, depth=0.0)], "{")
    done = run("report", folder)
    assert done.status == 0 and "line 16: not JSON; left out" in done.err
    assert "niah_single_1 (compact dialect): accuracy" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert ["setting", "512", "1024", "4096"] in lines
    at = lines.index(["base", "0.500", "0.500", "0.500"])
    assert lines[at + 1] == ["ssc", "64", "0.900", "helps", "0.900", "helps", "-"]
    assert lines[at + 3][:3] == ["random", "segments", "0.400"]
    assert "0.100 hurts" in done.out and done.out.splitlines()[-1].startswith("keep the base: ")
    *entries, last = run("report", folder / "rows.jsonl", "--json").rows
    assert last["recommendation"].startswith("keep the base: ") and last["setting"] is None
    one = next(e for e in entries if e["kind"] == "setting" and e["length"] == 1024)
    assert (one["setting"], round(one["score"], 9), one["verdict"]) == ("ssc 64", 0.9, "helps")
    assert one["low"] == pytest.approx(0.4 - 0.1 / 3**0.5)


class Page(HTMLParser):
    """Whether tags nest, what the page refers to, its ids and its text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.references, self.ids, self.words, self.tags = [], [], [], "", []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.note(attributes)

    def handle_startendtag(self, tag, attributes):
        self.note(attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data

    def note(self, attributes):
        found = dict(attributes)
        self.references += [found[n] for n in ("src", "href", "xlink:href") if n in found]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(str(v) for v in found.values()))
        self.ids += [found["id"]] if "id" in found else []


def test_the_page_is_whole_and_needs_nothing_but_itself(tmp_path, run):
    rows = [{**r, "command": "mcretrofit eval m", "model_hash": "c0ffee"} for r in grid()]
    target = tmp_path / "page.html"
    done = run("report", save(tmp_path / "run", rows), "--html", target)
    assert done.status == 0 and f"wrote {target}" in done.err
    source = target.read_text(encoding="utf-8")
    page = Page(source)
    assert not page.open and "script" not in page.tags and "://" not in source
    assert page.references and all(one.startswith("#") for one in page.references)
    assert len(set(page.ids)) == len(page.ids)
    assert {one.removeprefix("#") for one in page.references} <= set(page.ids)
    # a scale, the base's map and two settings; two costs; text and its difference
    assert page.tags.count("svg") == 1 + 3 + 2 + 2
    for words in ("use ssc 64", "c0ffee", "mcretrofit eval m", "none"):
        assert words in page.words
    assert "#0102" not in source and "var(--ink)" in source


def test_what_rows_say_is_text_never_markup(tmp_path):
    evil = "<script>alert(1)</script>$x^2$|"
    rows = [{**one, "model": evil, "task": f"a{evil}", "dialect": evil} for one in grid()]
    checks = {"controls": {evil: 0.1}, "command": evil, "version": evil}
    made = report.build(found(tmp_path, [{**one, **checks, "variant": evil} for one in rows]))
    page = Page(report.html(made))
    assert "script" not in page.tags and evil in page.words
    marked = report.markdown(made)
    assert "<script" not in marked
    lines = [line for line in marked.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} <= {3, 4, 7}


def test_markdown_and_csv(tmp_path, run):
    folder = save(tmp_path / "run", [base(), *grid()])
    done = run("report", folder, "--markdown", tmp_path / "r.md", "--csv", tmp_path / "r.csv")
    assert done.status == 0
    marked = (tmp_path / "r.md").read_text()
    assert marked.startswith("# m\n\n**use ssc 64: recall rises")
    assert "| ssc 64 | 0.900 helps (+0.342 .. +0.458) |" in marked
    assert "- not recorded: commands, versions, threads, model hashes, started" in marked
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert len(rows) == 15 and rows[1]["control_random"] == "0.4" and rows[1]["segment"] == "64"


def test_base_alone_and_lines_without_depths_make_a_page(tmp_path):
    for rows in ([base()], [row()], [text(cache_bytes=0)], [row(cache_bytes=0, segment=10**6)]):
        made = report.build(found(tmp_path, rows))
        assert not Page(report.html(made)).open
        assert report.markdown(made) and report.table_of_rows(made)


def test_refusals(tmp_path, run, monkeypatch):
    refused(run("report", tmp_path / "none"), 1, "no such file of results", "mcretrofit sweep")
    refused(run("report", save(tmp_path / "bad", [], "{")), 1, "no rows of results", "line 1")
    strange = save(tmp_path / "strange", [], '{"task": "niah"}\n{\n[1]\n')
    refused(run("report", strange), 1, "line 1: metric is missing", "line 3: not a JSON object")
    folder = save(tmp_path / "run", [row()])
    kept = (folder / "rows.jsonl").read_text()
    done = run("report", folder, "--csv", folder / "rows.jsonl")
    assert done.status == 1 and "holds the results themselves" in done.err
    assert (folder / "rows.jsonl").read_text() == kept
    done = run("report", folder, "--csv", tmp_path / "no" / "r.csv")
    assert done.status == 1 and "cannot be written: no such file" in done.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("report", folder, "--html", tmp_path / "r.html")
    refused(done, 1, "pip install 'mcretrofit[report]'")
    assert run("report", folder, "--markdown", tmp_path / "r.md").status == 0
    assert not list(tmp_path.glob("*.html")) and not list(tmp_path.glob(".*"))


def test_the_frontier_and_labels_that_keep_apart():
    points = [
        charts.Point(*p) for p in (("a", 1, 0.5), ("b", 2, 0.4), ("c", 2, 0.7), ("d", 3, 0.7))
    ]
    assert [p.label for p in charts.frontier(points)] == ["a", "c"]
    heights = spread([0.5, 0.5, 0.52, 0.99], 0.1, 0.0, 1.0)
    ordered = sorted(heights)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
    assert ordered[0] >= 0 and ordered[-1] <= 1 and heights[3] == ordered[-1]
