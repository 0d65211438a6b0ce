"""`pulse record` on a process that calls NCCL all the while: cut short, stopped, and with processes that come later."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest
from live import Target, compiled, entry_bytes, real_nccl, running
from terminal import COLOUR, lines, on_terminal

from pulse_bpf.elf import Elf
from pulse_bpf.errors import NO_DATA, OK, PARTIAL, USAGE
from pulse_bpf.probes.identity import ACCESSORS, rank_offset

pytestmark = pytest.mark.bcc

PULSE = [sys.executable, "-m", "pulse_bpf"]
CALLS_PER_S = 2000
# A second, and another for a busy machine.
KEPT_WITHIN_S = 2.0
RESTORED_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def library() -> Path:
    return real_nccl()


@pytest.fixture
def caller(library: Path, tmp_path: Path) -> list[str | Path]:
    """The command of a program that calls ncclAllReduce at the pace it is told."""
    with Elf(library) as elf:
        code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
        rank_at = rank_offset(code, elf.machine)
    return [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]


@contextmanager
def recording(directory: Path, *arguments: str | int) -> Iterator[subprocess.Popen[str]]:
    """A running `pulse record` that has stored operators already."""
    command = [*PULSE, "record", *map(str, arguments), "-o", str(directory)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_ops(directory, process)
            yield process
        finally:
            process.kill()


def wait_for_ops(directory: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not any(pl.read_parquet(part).height for part in directory.glob("ops/*.parquet")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "nothing is stored"
        time.sleep(0.02)


def stored_ops(directory: Path) -> pl.DataFrame:
    ops = pl.read_parquet(directory / "ops/*.parquet")
    assert ops["seq"].sort().to_list() == list(range(ops.height))
    return ops


def called_as_paced(target: Target) -> None:
    """That it missed none of its calls, and that each returned what the first did."""
    called, elapsed_ns, wrong = map(int, target.act().split())
    assert wrong == 0
    assert called == pytest.approx(elapsed_ns * CALLS_PER_S / 1e9, abs=0.1 * CALLS_PER_S)
    assert target.end() == 0


def test_a_terminal_shows_how_it_goes(caller: list[str | Path], tmp_path: Path) -> None:
    with running(caller) as target:
        target.begin(f"0 {CALLS_PER_S}")
        command = [*PULSE, "record", "-p", str(target.pid), "-d", "2", "-o", tmp_path / "rec"]
        _, written = on_terminal(command, NO_COLOR="1")
    shown = lines(written)
    assert any(
        re.search(r"1 of 2 s  .* operators \(.*/s\)  0 samples \(0/s\)  0 lost", line) for line in shown
    )
    assert shown[-2].strip() == f"next: pulse analyze {tmp_path / 'rec'}"
    assert re.search(r"recorded [\d.]+ s: [\d,]+ operators, 0 samples, 0 events lost", shown[-3])
    assert not COLOUR.search(written)


def test_a_killed_recording_keeps_what_it_had_and_leaves_nothing_armed(
    caller: list[str | Path], library: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "recording"
    with running(caller) as target:
        target.begin(f"0 {CALLS_PER_S}")
        with recording(directory, "-p", target.pid) as process:
            in_memory, in_file = entry_bytes(target.pid, library)
            assert in_memory != in_file
            killed_ns, killed = time.time_ns(), time.monotonic()
            process.kill()
            while in_memory != in_file:
                assert time.monotonic() - killed < RESTORED_WITHIN_S
                in_memory, in_file = entry_bytes(target.pid, library)
        called_as_paced(target)
        ops = stored_ops(directory)
        behind_ns = killed_ns - ops["call_ns"].max()
        assert behind_ns < KEPT_WITHIN_S * 1e9
        result = subprocess.run([*PULSE, "analyze", directory], capture_output=True, text=True)
        assert result.returncode in (OK, NO_DATA), result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_recording_that_is_told_to_stop_stores_all_and_lets_go(
    caller: list[str | Path], library: Path, tmp_path: Path, number: signal.Signals
) -> None:
    directory = tmp_path / "recording"
    with running(caller) as target:
        target.begin(f"0 {CALLS_PER_S}")
        with recording(directory, "-p", target.pid) as process:
            told_ns = time.time_ns()
            os.kill(process.pid, number)
            assert process.wait(30) in (OK, PARTIAL)
            in_memory, in_file = entry_bytes(target.pid, library)
            assert in_memory == in_file
        called_as_paced(target)
        assert stored_ops(directory)["call_ns"].max() >= told_ns


def test_a_recording_begins_at_the_moment_it_is_given(caller: list[str | Path], tmp_path: Path) -> None:
    directory = tmp_path / "recording"
    with running(caller) as target:
        target.begin(f"0 {CALLS_PER_S}")
        start_ns = time.time_ns() + 8_000_000_000
        command = [*PULSE, "record", "-p", str(target.pid), "-d", "1", "--start-at", str(start_ns)]
        done = subprocess.run([*command, "-o", directory], capture_output=True, text=True)
        ended_ns = time.time_ns()
        called_as_paced(target)
    assert done.returncode in (OK, PARTIAL), done.stderr
    assert "late" not in done.stderr
    call_ns = pl.read_parquet(directory / "ops/*.parquet")["call_ns"]
    first_ns, last_ns = int(call_ns.min()), int(call_ns.max())  # type: ignore[arg-type]
    assert 0 <= first_ns - start_ns < 0.1e9
    assert call_ns.len() == pytest.approx((last_ns - first_ns) * CALLS_PER_S / 1e9, rel=0.1)
    assert last_ns - start_ns >= 0.9e9
    assert ended_ns - start_ns >= 1e9
    assert pl.read_parquet(directory / "coverage.parquet")["first_ns"].min() == start_ns


def test_a_recording_that_begins_late_says_so(caller: list[str | Path], tmp_path: Path) -> None:
    with running(caller) as target:
        target.begin(f"0 {CALLS_PER_S}")
        start_ns = time.time_ns() - 1_000_000_000
        command = [*PULSE, "record", "-p", str(target.pid), "-d", "2", "--start-at", str(start_ns)]
        done = subprocess.run([*command, "-o", tmp_path / "rec"], capture_output=True, text=True)
    assert done.returncode == PARTIAL
    assert re.search(r"warning: the recording begins \d+\.\d s late", done.stderr)


def test_a_child_that_starts_later_is_recorded(caller: list[str | Path], tmp_path: Path) -> None:
    launch = (
        "import subprocess, sys; print('ready', flush=True); sys.stdin.readline();"
        "subprocess.run(sys.argv[1:], input='120000 2000\\n', text=True)"
    )
    directory = tmp_path / "recording"
    with running([sys.executable, "-c", launch, *caller]) as launcher:
        command = [*PULSE, "record", "-p", str(launcher.pid), "-o", str(directory)]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert refused.returncode == NO_DATA
        assert f"process {launcher.pid} has no NCCL" in refused.stderr
        with subprocess.Popen([*command, "--wait"], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "processes attached: 0" in process.stderr.readline()
            launcher.begin("")
            wait_for_ops(directory, process)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        (child,) = set(stored_ops(directory)["pid"])
        os.kill(child, signal.SIGKILL)
        assert child != launcher.pid
        assert pl.read_parquet(directory / "processes.parquet")["pid"].to_list() == [child]


@pytest.mark.parametrize(("option", "value"), [("--job", "my job"), ("--container", "12ab")])
def test_what_can_be_no_job_and_no_container_is_refused(tmp_path: Path, option: str, value: str) -> None:
    command = [*PULSE, "record", option, value, "-o", tmp_path / "recording"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == USAGE
    assert value in result.stderr
