"""`pulse analyze` at the command line: where data goes, and what the exit status says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import recordings
from recordings import Fault

from pulse_bpf.errors import ANOMALY, NO_DATA, OK, PARTIAL

PULSE = [sys.executable, "-m", "pulse_bpf", "analyze"]


def _analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PULSE, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return recordings.write(tmp_path / "rec", recordings.tables(recordings.run()))


def test_a_healthy_recording(healthy: Path) -> None:
    result = _analyze(healthy, "--exit-code")
    assert result.returncode == OK
    assert result.stdout.startswith("Verdict: HEALTHY")
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) < 100


def test_json_is_the_findings_contract(healthy: Path) -> None:
    found = json.loads(_analyze(healthy, "--json").stdout)
    assert (found["format"], found["version"], found["verdict"]) == ("pulse-findings", 1, "healthy")


def test_operators_are_written_as_parquet(healthy: Path, tmp_path: Path) -> None:
    assert _analyze(healthy, "--operators", tmp_path / "ops.parquet").returncode == OK
    assert pl.read_parquet(tmp_path / "ops.parquet").filter(pl.col("end_ns").is_not_null()).height > 0


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


def test_exit_code_tells_an_anomaly(tmp_path: Path) -> None:
    slow = recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    directory = recordings.write(tmp_path / "rec", slow)
    assert _analyze(directory, "--exit-code").returncode == ANOMALY
    assert _analyze(directory).returncode == OK
