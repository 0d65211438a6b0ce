"""`pulse report`: what the page says, that it needs nothing else, and that names from a recording stay names."""

from __future__ import annotations

import json
import re
from copy import copy
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import recordings
from bs4 import BeautifulSoup, Tag
from recordings import Fault
from rich.console import Console

from pulse_bpf.analysis import Window
from pulse_bpf.analysis.text import suspect
from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, NO_DATA, OK, PARTIAL, USAGE
from pulse_bpf.judge import Judged, judge
from pulse_bpf.report.page import page

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = recordings.run(fault=Fault("egress", 1, 1.0))
    return recordings.write(tmp_path_factory.mktemp("rec") / "slow", recordings.tables(job))


@pytest.fixture(scope="module")
def judged(slow: Path) -> Judged:
    return _judged(slow)


@pytest.fixture(scope="module")
def soup(judged: Judged) -> BeautifulSoup:
    return _soup(judged, "slow")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recordings.write(tmp_path_factory.mktemp("rec") / "healthy", recordings.tables(recordings.run()))


def _judged(*directories: Path, window: Window | None = None) -> Judged:
    return judge(directories, window, Console(quiet=True))


def _soup(judged: Judged, *names: str, window: Window | None = None) -> BeautifulSoup:
    return BeautifulSoup(page(judged, names, window), "html.parser")


def _figures(soup: BeautifulSoup) -> dict[str, dict[str, object]]:
    element = soup.find(id="figures")
    assert isinstance(element, Tag)
    figures: dict[str, dict[str, object]] = json.loads(element.get_text())
    return figures


def _told(soup: BeautifulSoup, selector: str) -> str:
    element = soup.select_one(selector)
    assert element is not None
    return " ".join(element.get_text(" ").split())


def test_the_verdict_the_suspect_and_the_evidence_come_first(judged: Judged, soup: BeautifulSoup) -> None:
    first = judged.findings.findings[0]
    header = _told(soup, "header")
    assert _told(soup, "h1") == suspect(first) == "NIC rxe0 of node node1 (nic-slow)"
    assert header.startswith("anomaly")
    assert all(evidence.text in header for evidence in first.evidence)
    assert first.next_check is not None
    assert first.next_check in header
    sections = [section["id"] for section in soup.select("main > section")]
    assert [name for name in sections if name != "findings"] == ["why", "job", "coverage"]


def test_every_plot_is_told_in_words_and_the_words_have_numbers(soup: BeautifulSoup) -> None:
    figures = _figures(soup)
    plots = soup.select(".plot")
    assert [plot["id"] for plot in plots] == list(figures)
    assert {"rates1", "late", "slow", "ring", "matrix", "timeline"} <= set(figures)
    for plot in plots:
        assert plot["role"] == "img"
        title, says = (soup.find(id=str(plot[name])) for name in ("aria-labelledby", "aria-describedby"))
        assert title is not None
        assert says is not None
        assert title.get_text().strip()
        assert re.search(r"\d", says.get_text())
    assert soup.select_one("#says-slow").get_text().count("node1") == 1  # type: ignore[union-attr]
    # What is not drawn says why.
    assert all(_told(figure, "figcaption").endswith(".") for figure in soup.select("figure"))  # type: ignore[arg-type]


def test_the_page_needs_nothing_else(judged: Judged) -> None:
    text = page(judged, ["slow"])
    soup = BeautifulSoup(text, "html.parser")
    assert not soup.select("link, img, iframe, script[src], [href]:not([href^='#'])")
    policy = soup.select_one("meta[http-equiv='Content-Security-Policy']")
    assert policy is not None
    assert "default-src 'none'" in str(policy["content"])
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in str(soup.style)
    assert len(text) < 3_000_000


def test_a_hostile_name_is_shown_and_does_nothing(judged: Judged) -> None:
    renamed = _renamed(judged, "node1", HOSTILE)
    text = page(renamed, [HOSTILE])
    soup = BeautifulSoup(text, "html.parser")
    assert HOSTILE in _told(soup, "h1")
    scripts = [script.get("id") for script in soup.find_all("script")]
    assert scripts == ["figures", "library", None], "no script but the page's own"
    assert "alert(1)" not in "".join(script.get_text() for script in soup.find_all("script", id=None))
    assert HOSTILE.lower() not in text.lower()
    assert "&lt;script" in json.dumps(_figures(soup)), "plots show it as text"
    assert not re.search("&lt;|&amp;", soup.select_one("main").get_text()), "and the page no plot's markup"  # type: ignore[union-attr]


def test_what_steers_a_screen_is_shown_as_a_question_mark(judged: Judged) -> None:
    soup = _soup(_renamed(judged, "node1", "a\u202eb"), "x\u202ey")
    assert "\u202e" not in soup.get_text()
    assert "a?b" in _told(soup, "h1")


def _renamed(judged: Judged, old: str, new: str) -> Judged:
    """All of `judged` as if a node had another name."""

    def frame(of: pl.DataFrame) -> pl.DataFrame:
        return of.with_columns(
            pl.col(name).replace(old, new) for name in ("node", "peer_node") if name in of.columns
        )

    recording = copy(judged.recording)
    recording.tables = {name: frame(table) for name, table in recording.tables.items()}
    finding = judged.findings.findings[0]
    changed = replace(finding, node=new, victims=[*finding.victims, new])
    coverage = judged.findings.coverage | {"nodes": [new, "node0"]}
    findings = replace(judged.findings, findings=[changed], coverage=coverage, missing=[f"{new} is missing"])
    return Judged(recording, frame(judged.operators), frame(judged.flows), findings)


def test_a_healthy_job_has_a_page_that_accuses_nobody(healthy: Path) -> None:
    judged = _judged(healthy)
    soup = _soup(judged, "healthy")
    assert _told(soup, "header").startswith("healthy Nothing is wrong in what was seen")
    assert "suspect" not in json.dumps(_figures(soup)).lower()
    assert "▶" not in json.dumps(_figures(soup), ensure_ascii=False)


def test_an_undecided_page_says_what_would_settle_it(tmp_path: Path) -> None:
    tables = recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    alone = {
        name: frame.filter(pl.col("node") == "node0") if "node" in frame.columns else frame
        for name, frame in tables.items()
    }
    judged = _judged(recordings.write(tmp_path / "rec", alone))
    assert judged.findings.verdict == "undecided"
    soup = _soup(judged, "rec")
    header = _told(soup, "header")
    assert all(" ".join(why.split()) in header for why in judged.findings.missing)
    assert "What would settle it" in header
    assert "record on all nodes of the job at once" in header
    assert "▶" not in json.dumps(_figures(soup), ensure_ascii=False), "nobody is marked"
    assert "not enough to accuse a machine" in _told(soup, "#why")
    assert "on which the others wait" not in soup.get_text()


def test_a_recording_of_nothing_has_a_page(tmp_path: Path) -> None:
    tables = recordings.tables(recordings.run(steps=2))
    nothing = {name: frame.clear() for name, frame in tables.items()}
    soup = _soup(_judged(recordings.write(tmp_path / "rec", nothing)), "rec")
    assert _told(soup, "header").startswith("undecided")
    assert _figures(soup) == {}
    assert "No call was seen" in _told(soup, "header")


def test_coverage_names_what_was_seen_and_what_was_not(judged: Judged) -> None:
    coverage = {**judged.findings.coverage, "lost": 12345, "damaged_parts": ["samples/0.parquet: cut off"]}
    judged = judged._replace(findings=replace(judged.findings, coverage=coverage))
    told = _told(_soup(judged, "slow"), "#coverage")
    assert "12,345" in told
    assert "damaged: samples/0.parquet: cut off" in told
    for title in ("Clocks and kernels", "Sources", "Recorded by"):
        assert title in told


def test_a_part_of_the_time_is_reported(slow: Path, judged: Judged, soup: BeautifulSoup) -> None:
    first_ns, last_ns = judged.findings.window_ns
    window = Window(0, (last_ns - first_ns) // 2)
    part = _soup(_judged(slow, window=window), "slow", window=window)
    assert _told(part, ".when") != _told(soup, ".when")
    columns = [len(_figures(page)["slow"]["data"][0]["x"]) for page in (part, soup)]  # type: ignore[index]
    assert columns[0] < columns[1]


def test_the_command_writes_a_page_and_only_reads_the_recording(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def state() -> list[tuple[str, int, int]]:
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(slow.rglob("*"))]

    before = state()
    output = tmp_path / "report.html"
    output.write_text("an older one")
    assert main(["report", str(slow), "-o", str(output)]) == OK
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{output} is written" in captured.err
    assert "anomaly" in captured.err
    assert output.read_text().startswith("<!doctype html>")
    assert state() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_page_for_stdout_is_there_and_in_no_file(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(slow), "-o", "-"]) == OK
    captured = capsys.readouterr()
    assert captured.out.startswith("<!doctype html>")
    assert "the report is written" in captured.err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_is_told_in_one_line(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no directory")
    for arguments, status in (
        ([str(slow), "-o", str(tmp_path)], USAGE),
        ([str(tmp_path / "none"), "-o", str(tmp_path / "r.html")], NO_DATA),
        ([str(slow), "-o", str(tmp_path / "file" / "r.html")], HOST),
        ([str(slow), "-o", str(tmp_path / "r.html"), "--window", "900s.."], USAGE),
    ):
        assert main(["report", *arguments]) == status
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_damaged_part_makes_it_a_part(slow: Path, tmp_path: Path) -> None:
    recording = tmp_path / "rec"
    recording.mkdir()
    for path in slow.rglob("*"):
        if path.is_file():
            target = recording / path.relative_to(slow)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    (recording / "events").mkdir(exist_ok=True)
    (recording / "events" / "000099.parquet").write_bytes(b"PAR1 not")
    output = tmp_path / "report.html"
    assert main(["report", str(recording), "-o", str(output)]) == PARTIAL
    assert "000099.parquet" in output.read_text()
