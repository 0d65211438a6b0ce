"""On a terminal: progress, few columns, colour where it is wanted. In a pipe: nothing but what was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import recordings
from recordings import Fault
from terminal import COLOUR, lines, on_terminal

from pulse_bpf.analysis.findings import Finding, Findings
from pulse_bpf.analysis.text import render
from pulse_bpf.errors import HOST, OK, PARTIAL
from pulse_bpf.judge import COMPILING
from pulse_bpf.pace import Pace, summary
from pulse_bpf.schema import conform

ANALYZE = [sys.executable, "-m", "pulse_bpf", "analyze"]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    return recordings.write(tmp_path_factory.mktemp("slow") / "rec", tables)


def test_analyze_shows_progress_and_then_the_verdict(slow: Path) -> None:
    status, written = on_terminal([*ANALYZE, slow])
    assert status == OK
    shown = lines(written)
    assert any(line.startswith("reading tables") for line in shown)
    assert any(line.startswith("comparing ranks") for line in shown)
    verdict = shown.index("Verdict: ANOMALY")
    assert not any("comparing" in line for line in shown[verdict:])
    assert max(map(len, shown)) <= 100
    assert COLOUR.search(written)


def test_analyze_shows_what_is_lost(tmp_path: Path) -> None:
    tables = recordings.tables(recordings.run(steps=4))
    coverage = pl.DataFrame(
        {"node": ["node0", "node1"], "source": "packets", "first_ns": 0, "last_ns": 1, "lost": 7}
    )
    directory = recordings.write(tmp_path / "rec", {**tables, "coverage": conform(coverage, "coverage")})
    (directory / "events").mkdir()
    (directory / "events/000000.parquet").write_bytes(b"PAR1nonsense")
    status, written = on_terminal([*ANALYZE, directory])
    assert status == PARTIAL
    assert any(
        line.startswith("comparing") and "7 events lost, 1 damaged parts" in line for line in lines(written)
    )


def test_no_color_is_respected(slow: Path) -> None:
    status, written = on_terminal([*ANALYZE, slow], NO_COLOR="1")
    assert status == OK
    assert "comparing ranks" in written
    assert not COLOUR.search(written)


def test_a_pipe_gets_only_the_verdict(slow: Path) -> None:
    piped = subprocess.run([*ANALYZE, slow], capture_output=True, text=True, check=True)
    assert piped.stderr.replace(f"{COMPILING}\n", "") == ""
    assert "\x1b" not in piped.stdout
    _, written = on_terminal([*ANALYZE, slow])
    shown = lines(written)
    assert [line for line in piped.stdout.splitlines() if line] == shown[shown.index("Verdict: ANOMALY") : -1]


def test_a_closed_stdout_is_an_error(slow: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *ANALYZE, slow]
    closed = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert closed.returncode == HOST
    assert closed.stderr == (
        "pulse: cannot write the result: stdout is closed. Let it go to a file or a pipe\n"
    )


def test_many_long_names_fit_into_100_columns() -> None:
    nodes = [f"rack-{number:03d}-of-a-large-cluster.example.org" for number in range(12)]
    finding = Finding("unknown", "host", "group", 0.7, 1.5, 0, 10**9, [], nodes=nodes, victims=nodes)
    coverage = {
        "operators": 1, "nodes": nodes, "queue_pairs": 1, "queue_pairs_unattributed": 0, "bytes": 1,
        "bytes_outside_calls": 0, "bytes_unattributed": {}, "lost": 0, "damaged_parts": [], "judged_share": 1.0,
        "not_judged": [],
    }  # fmt: skip
    text = render(Findings("anomaly", (0, 10**9), [finding], [], coverage))
    assert nodes[-1] in text
    assert max(map(len, text.splitlines())) < 100


def test_a_recording_says_its_rates_and_losses() -> None:
    pace = Pace(60)
    assert pace.line(1.0, {"ops": 500, "samples": 20_000}, 0).plain == (
        "1 of 60 s  500 operators (500/s)  20.0 k samples (20.0 k/s)  0 lost"
    )
    later = pace.line(3.0, {"ops": 700, "samples": 2_420_000}, 12)
    assert later.plain == "3 of 60 s  700 operators (100/s)  2.4 M samples (1.2 M/s)  12 lost"
    assert later.spans
    assert Pace(None).line(5.0, {}, 0).plain.startswith("5 s  0 operators (0/s)")


def test_lines_of_a_recording_fit_into_100_columns() -> None:
    rows = {"ops": 999_999_999, "samples": 99_999_999_999}
    assert Pace(999_999).line(999_999.0, rows, 9_999_999).cell_len < 100
    counted, following = summary(99_999.9, rows, 9_999_999, Path("rec"))
    assert counted.cell_len < 100
    assert following.plain == "next: pulse analyze rec"
