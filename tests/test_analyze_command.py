"""`pulse analyze` at the command line: where data goes, and what the exit status says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
import recordings
from polars.testing import assert_frame_equal
from recordings import Fault

from pulse_bpf import analysis, cli
from pulse_bpf.errors import ANOMALY, HOST, NO_DATA, OK, PARTIAL, USAGE
from pulse_bpf.judge import COMPILING

PULSE = [sys.executable, "-m", "pulse_bpf", "analyze"]


# Root may read everything, but not without its capabilities.
ORDINARY = (
    ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs") if os.geteuid() == 0 else ()
)


def _analyze(*arguments: str | Path, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, *PULSE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return recordings.write(tmp_path / "rec", recordings.tables(recordings.run()))


def test_a_healthy_recording(healthy: Path) -> None:
    result = _analyze(healthy, "--exit-code")
    assert result.returncode == OK
    assert result.stdout.startswith("Verdict: HEALTHY")
    assert result.stderr.replace(f"{COMPILING}\n", "") == ""
    assert max(map(len, result.stdout.splitlines())) < 100


def test_json_is_the_findings_contract(healthy: Path) -> None:
    found = json.loads(_analyze(healthy, "--json").stdout)
    assert (found["format"], found["version"], found["verdict"]) == ("pulse-findings", 1, "healthy")


def test_a_finding_is_explained_with_what_was_measured(tmp_path: Path) -> None:
    slow = recordings.write(
        tmp_path / "rec", recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    )
    explained = _analyze(slow, "--explain", "F1")
    assert explained.returncode == OK
    assert explained.stdout.startswith("1. NIC rxe0 of node node1")
    assert "burst_gbps: " in explained.stdout
    missing = _analyze(slow, "--explain", "F2")
    assert missing.returncode == USAGE
    assert "there are F1" in missing.stderr
    assert _analyze(slow, "--top", "1").stdout.startswith("Verdict: ANOMALY")
    for wrong in ("0", "-1", "many"):
        refused = _analyze(slow, f"--top={wrong}")
        assert refused.returncode == USAGE
        assert f"--top: {wrong} is no number from 1 on" in refused.stderr


def test_operators_are_written_as_parquet(healthy: Path, tmp_path: Path) -> None:
    assert _analyze(healthy, "--operators", tmp_path / "ops.parquet").returncode == OK
    written = pl.read_parquet(tmp_path / "ops.parquet")
    assert_frame_equal(written, analysis.operators([healthy]), check_row_order=False, check_exact=True)
    assert written.filter(pl.col("end_ns").is_not_null()).height > 0


def test_ctrl_c_is_one_line_whatever_a_library_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_arguments: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("it was not compiled")

    monkeypatch.setattr(cli, "_check", fails)
    assert cli.main(["check"]) == PARTIAL
    assert capsys.readouterr().err == "pulse: interrupted\n"
    with pytest.raises(RuntimeError):
        cli.main(["--debug", "check"])


def test_ctrl_c_is_one_line_also_while_the_command_line_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parser", interrupted)
    assert cli.main(["check"]) == PARTIAL
    assert capsys.readouterr().err == "pulse: interrupted\n"


def test_a_damaged_part_makes_the_work_partial(healthy: Path) -> None:
    (healthy / "port_samples").mkdir()
    (healthy / "port_samples/000000.parquet").write_bytes(b"PAR1nonsense")
    result = _analyze(healthy)
    assert result.returncode == PARTIAL
    assert "damaged" in result.stdout


def test_a_directory_that_is_no_recording(tmp_path: Path) -> None:
    result = _analyze(tmp_path)
    assert result.returncode == NO_DATA
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", [".", "samples", "manifest.json", "nodes.parquet"])
def test_what_may_not_be_read_is_named(healthy: Path, closed: str) -> None:
    path = healthy / closed
    mode = path.stat().st_mode
    is_folder = path.is_dir()
    path.chmod(0)
    try:
        result = _analyze(healthy, prefix=ORDINARY)
    finally:
        path.chmod(mode)
    assert "Traceback" not in result.stderr
    if is_folder:
        assert result.returncode == NO_DATA
        assert str(path) in result.stderr
        assert "Permission denied" in result.stderr
        assert len(result.stderr.splitlines()) == 1
    else:
        assert result.returncode == PARTIAL
        assert closed in result.stdout


def test_exit_code_tells_an_anomaly(tmp_path: Path) -> None:
    slow = recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    directory = recordings.write(tmp_path / "rec", slow)
    assert _analyze(directory, "--exit-code").returncode == ANOMALY
    assert _analyze(directory).returncode == OK


def test_operators_that_cannot_be_written_leave_the_verdict(healthy: Path) -> None:
    result = _analyze(healthy, "--operators", "/dev/full/ops.parquet")
    assert result.returncode == HOST
    assert result.stdout.startswith("Verdict: HEALTHY")
    assert "cannot" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("sink", "status"), [("| true", OK), (">/dev/full", HOST)])
def test_a_reader_that_leaves_and_a_full_disk(healthy: Path, sink: str, status: int) -> None:
    script = f"set -o pipefail; env -u PYTHONUNBUFFERED {sys.executable} -m pulse_bpf analyze {healthy} --json {sink}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == status
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
