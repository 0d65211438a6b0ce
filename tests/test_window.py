"""The verdict on a part of a recording: what its edges cut is no hang and no loss, and the rest does not count."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import polars as pl
import pytest
import recordings
from recordings import BIN_NS, T0_NS, Fault

from pulse_bpf import analysis
from pulse_bpf.analysis import Findings, Window
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.window import operators_in, resolved
from pulse_bpf.cli import main
from pulse_bpf.errors import OK, USAGE, UsageError

STEPS = 14


@cache
def played(fault: Fault | None = None) -> tuple[Recording, pl.DataFrame, pl.DataFrame]:
    """A job, its operators, and the owners of its queue pairs."""
    recording = Recording(recordings.tables(recordings.run(steps=STEPS, fault=fault)))
    return recording, *analysis.measure(recording)


@cache
def half_slow() -> tuple[Recording, pl.DataFrame, pl.DataFrame, int]:
    """A job in the second half of which a port is slow, and when that half begins."""
    first = recordings.run(steps=STEPS, seed=1)
    second = recordings.run(steps=STEPS, seed=1, fault=Fault("egress", 2, 1.0))
    frames, shift = recordings.followed(first, second)
    recording = Recording(frames)
    return recording, *analysis.measure(recording), T0_NS + shift


def _verdict(fault: Fault | None, window: Window) -> Findings:
    return analysis.conclude(*played(fault), window)


@pytest.mark.parametrize("since", range(0, 10, 2))
def test_wherever_a_window_cuts_a_healthy_job_it_is_healthy(since: int) -> None:
    whole = analysis.conclude(*played())
    length = whole.window_ns[1] - whole.window_ns[0]
    begin = since * length // 20
    # From in the midst of an operator, half of the recording.
    findings = _verdict(None, Window(begin, begin + length // 2))
    assert findings.verdict == "healthy", findings.missing
    assert findings.window_ns == (whole.window_ns[0] + begin, whole.window_ns[0] + begin + length // 2)
    assert findings.coverage["operators"] < whole.coverage["operators"]
    assert findings.coverage["bytes"] < whole.coverage["bytes"]


def test_a_fault_is_named_when_the_window_holds_it_and_not_before() -> None:
    recording, operators, flows, begins = half_slow()
    before = analysis.conclude(recording, operators, flows, Window(None, begins - 20 * BIN_NS))
    assert before.verdict == "healthy", before.missing
    after = analysis.conclude(recording, operators, flows, Window(begins + 20 * BIN_NS, None))
    assert [(item.scope, item.node) for item in after.findings] == [("nic", "node2")]
    assert after.findings[0].first_ns >= begins


def test_a_hang_shows_from_when_the_job_stands_still() -> None:
    fault = Fault("stop", 1, at=20)
    recording = played(fault)
    whole = analysis.conclude(*recording)
    (hang,) = whole.findings
    before = analysis.conclude(*recording, Window(None, hang.first_ns - 30 * BIN_NS))
    assert before.findings == []
    for since_ns in (None, hang.first_ns + 100 * BIN_NS):
        window = Window(since_ns, hang.first_ns + 500 * BIN_NS)
        (found,) = analysis.conclude(*recording, window).findings
        assert (found.kind, found.node) == ("hang", "node1")
        assert found.last_ns == window.until_ns
        assert found.lost_ns == found.last_ns - found.first_ns


def test_a_job_that_pauses_at_the_end_of_a_window_is_no_standstill() -> None:
    recording, operators, flows = played()
    ends = (
        operators.group_by("op_seq")
        .agg(pl.col("last_byte_ns").max(), pl.col("start_ns").min())
        .sort("op_seq")
    )
    # All but what came after a third of the operators comes much later: the job makes a long pause.
    late = pl.col("op_seq") >= ends.height // 3
    times = ["call_ns", "start_ns", "end_ns", "last_byte_ns", "prev_end_ns"]
    pause = 2000 * BIN_NS
    moved = operators.with_columns(pl.when(late).then(pl.col(times) + pause).otherwise(pl.col(times)))
    coverage = recording["coverage"].with_columns(last_ns=pl.col("last_ns") + pause)
    longer = Recording({**recording.tables, "coverage": coverage})
    paused_ns = int(ends["last_byte_ns"][ends.height // 3 - 1])
    findings = analysis.conclude(longer, moved, flows, Window(None, paused_ns + pause // 2))
    assert not [why for why in findings.missing if "stands still" in why]
    assert findings.findings == []


def test_operators_stay_whole_on_all_ranks() -> None:
    aligned = pl.DataFrame(
        {
            "comm_id": "c", "step": [0, 0, 1, 1, 2, None], "node": ["a", "b", "a", "b", "a", "a"], "pid": 1,
            "program_pos": [0, 0, 1, 1, 2, None], "call_ns": [0, 0, 10, 10, 20, None],
            "start_ns": [0, 5, 10, 14, None, 0], "last_byte_ns": [6, 8, 16, 18, None, 40],
            "bytes": [1, 1, 1, 1, 0, 400], "retx_bytes": [0, 0, 0, 0, 0, 40],
        }
    )  # fmt: skip
    inside = operators_in(aligned, 7, 13)
    assert inside["step"].to_list() == [0, 0, 1, 1, None]
    assert inside.select("bytes", "retx_bytes", "start_ns", "last_byte_ns").row(4) == (60, 6, 7, 13)
    assert operators_in(aligned, 19, 30)["step"].to_list() == [2, None]


def test_moments_are_from_the_start_or_since_the_epoch() -> None:
    whole = (T0_NS, T0_NS + 100)
    assert resolved(Window(10, T0_NS + 20), whole) == (T0_NS + 10, T0_NS + 20)
    assert resolved(Window(None, 500), whole) == whole
    for wrong, says in ((Window(20, 20), "ends before"), (Window(100, None), "nothing was recorded")):
        with pytest.raises(UsageError, match=says):
            resolved(wrong, whole)


def test_the_command_takes_a_window_of_several_recordings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = played()[0].tables | {"samples": played()[0]["samples"]}
    parts = [
        recordings.write(
            tmp_path / node,
            {
                name: frame.filter(pl.col("node") == node)
                for name, frame in frames.items()
                if "node" in frame.columns
            },
        )
        for node in frames["nodes"]["node"]
    ]

    def analyze(window: str) -> tuple[int, str, str]:
        try:
            status = main(["analyze", *map(str, parts), f"--window={window}"])
        except SystemExit as refused:
            status = int(str(refused.code))
        return (status, *capsys.readouterr())

    first_ns = analysis.conclude(*played()).window_ns[0]
    status, shown, _ = analyze("0.1s..500ms")
    assert status == OK
    assert "Coverage: 0.4 s" in shown
    assert analyze(f"{first_ns + 100_000_000}..{first_ns + 500_000_000}")[1] == shown
    for wrong in ("2s", "2..5", "x..5s", "-1s..", "5s..2s", "1m..2m", "1s...2s"):
        status, shown, told = analyze(wrong)
        assert (status, shown) == (USAGE, ""), wrong
        assert "window" in told
