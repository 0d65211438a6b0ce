"""`pulse record` when it cannot: one clear line each, the right exit status, nothing broken."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from pulse_bpf.errors import HOST, NO_DATA, OK, PARTIAL, USAGE
from pulse_bpf.lab.nccl import library_path

PULSE = [sys.executable, "-m", "pulse_bpf"]
CALLER = Path(__file__).with_name("targets") / "nccl_caller.py"


def _pulse(*arguments: str | Path | int, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, *PULSE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _one_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "300"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def caller() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(CALLER), str(library_path()), "1", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.bcc
def test_a_process_without_nccl(tmp_path: Path, sleeper: int) -> None:
    result = _pulse("record", "-p", sleeper, "-d", 1, "-o", tmp_path / "r")
    assert result.returncode == NO_DATA
    assert f"process {sleeper} has no NCCL" in _one_line(result)
    assert not (tmp_path / "r").exists()


@pytest.mark.bcc
def test_a_dead_pid(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    result = _pulse("record", "-p", process.pid, "-d", 1, "-o", tmp_path / "r")
    assert result.returncode == NO_DATA
    assert f"process {process.pid} cannot be observed: it has ended" in _one_line(result)
    assert not (tmp_path / "r").exists()


@pytest.mark.bcc
def test_without_root(tmp_path: Path, caller: subprocess.Popen[str]) -> None:
    tmp_path.chmod(0o777)
    # All capabilities gone and none to be gained, which is what an ordinary user has.
    prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
    result = _pulse("record", "-p", caller.pid, "-d", 1, "-o", tmp_path / "r", prefix=prefix)
    assert result.returncode == HOST
    line = _one_line(result)
    assert "root" in line
    assert caller.poll() is None


@pytest.mark.bcc
def test_a_full_disk(tmp_path: Path, caller: subprocess.Popen[str]) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", tmp_path], check=True)
    try:
        result = _pulse("record", "-p", caller.pid, "-d", 1, "-o", tmp_path / "r")
        assert result.returncode == HOST
        assert "cannot write to" in result.stderr
        assert "No space left" in result.stderr
        assert "Traceback" not in result.stderr
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert caller.poll() is None


@pytest.mark.bcc
def test_into_an_existing_recording(tmp_path: Path, caller: subprocess.Popen[str]) -> None:
    output = tmp_path / "r"
    assert _pulse("record", "-p", caller.pid, "-d", 0.5, "-o", output).returncode in (OK, PARTIAL)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    result = _pulse("record", "-p", caller.pid, "-d", 0.5, "-o", output)
    assert result.returncode == USAGE
    assert "is not empty" in _one_line(result)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


@pytest.mark.bcc
def test_ctrl_c_ends_a_recording_cleanly_and_the_target_lives(
    tmp_path: Path, caller: subprocess.Popen[str]
) -> None:
    output = tmp_path / "r"
    command = [*PULSE, "record", "-p", str(caller.pid), "-o", str(output)]
    recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (output / "manifest.json").exists():
        assert recorder.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert caller.stdin is not None
    assert caller.stdout is not None
    caller.stdin.write("go\n")
    caller.stdin.flush()
    caller.stdout.readline()
    recorder.send_signal(2)
    _, said = recorder.communicate(timeout=60)
    assert recorder.returncode in (OK, PARTIAL), said
    assert "Traceback" not in said
    assert pl.read_parquet(output / "ops/*.parquet").height > 0
    assert not list(output.rglob("*.tmp"))
    assert caller.poll() is None


def test_help_and_version_need_nothing() -> None:
    assert _pulse("--help").returncode == OK
    assert _pulse("--version").stdout.startswith("pulse ")


@pytest.mark.parametrize("bin_us", ["9", "10001"])
def test_a_bin_width_out_of_range(tmp_path: Path, bin_us: str, sleeper: int) -> None:
    result = _pulse("record", "-p", sleeper, "--bin-us", bin_us, "-o", tmp_path / "r")
    assert result.returncode == USAGE
    assert "--bin-us" in result.stderr


@pytest.mark.bcc
def test_one_bad_pid_costs_only_itself(tmp_path: Path, caller: subprocess.Popen[str]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    output = tmp_path / "r"
    result = _pulse("record", "-p", caller.pid, "-p", gone.pid, "-p", caller.pid, "-d", 0.5, "-o", output)
    assert result.returncode == PARTIAL
    assert "processes attached: 1;" in result.stderr
    assert f"warning: process {gone.pid} cannot be observed" in result.stderr
    assert pl.read_parquet(output / "processes.parquet")["pid"].to_list() == [caller.pid]


def test_a_directory_of_another_user_is_not_written_to(tmp_path: Path, sleeper: int) -> None:
    output = tmp_path / "r"
    output.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to make a directory of another user")
    os.chown(output, 12345, 12345)
    result = _pulse("record", "-p", sleeper, "-d", 1, "-o", output)
    assert result.returncode == USAGE
    assert "belongs to another user" in _one_line(result)


def test_a_length_that_is_no_number(tmp_path: Path, sleeper: int) -> None:
    result = _pulse("record", "-p", sleeper, "-d", "nan", "-o", tmp_path / "r")
    assert result.returncode == USAGE
    assert "more than 0" in result.stderr


@pytest.mark.bcc
def test_a_device_that_is_not_there_is_named(tmp_path: Path, caller: subprocess.Popen[str]) -> None:
    result = _pulse("record", "-p", caller.pid, "-d", 1, "--tap", "mlx5_9=eth9", "-o", tmp_path / "r")
    assert result.returncode == USAGE
    assert "no RDMA device mlx5_9" in _one_line(result)
    assert not (tmp_path / "r").exists()


@pytest.mark.bcc
def test_another_pid_namespace_is_refused(tmp_path: Path, sleeper: int) -> None:
    prefix = ("unshare", "-pf", "--mount-proc")
    result = _pulse("record", "--all", "-d", 1, "-o", tmp_path / "r", prefix=prefix)
    assert result.returncode == HOST
    assert "not the host's" in _one_line(result)


@pytest.mark.bcc
def test_a_job_that_is_not_here_is_named(tmp_path: Path, caller: subprocess.Popen[str]) -> None:
    result = _pulse("record", "--job", "4243", "-d", 1, "-o", tmp_path / "r")
    assert result.returncode == NO_DATA
    assert "no process of job 4243" in _one_line(result)
