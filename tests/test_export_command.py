"""`pulse export` at the command line: which files come, what is in them, and what is refused."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import polars as pl
import pytest
import recordings
from recordings import Fault

from pulse_bpf import analysis
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, OK, PARTIAL, USAGE
from pulse_bpf.export.tables import FINDINGS


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    return recordings.write(tmp_path_factory.mktemp("slow") / "rec", tables)


def export(*arguments: str | Path) -> int:
    return main(["export", *map(str, arguments)])


def test_operators_as_parquet_are_the_table_of_the_analysis(slow: Path, tmp_path: Path) -> None:
    assert export(slow, "--format", "parquet", "--table", "operators", "-o", tmp_path / "ops.parquet") == OK
    found = pl.read_parquet(tmp_path / "ops.parquet")
    assert found.schema == OPERATORS
    assert found.equals(analysis.operators([slow]))


def test_both_tables_go_into_a_directory(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(slow, "--format", "csv", "-o", tmp_path / "new/out") == OK
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in (tmp_path / "new/out").iterdir()) == ["findings.csv", "operators.csv"]
    operators = pl.read_csv(tmp_path / "new/out/operators.csv", infer_schema_length=None)
    assert operators.columns == list(OPERATORS)
    assert operators["bytes"].sum() == analysis.operators([slow])["bytes"].sum()
    (finding,) = pl.read_csv(tmp_path / "new/out/findings.csv").to_dicts()
    assert list(finding) == list(FINDINGS)
    assert (finding["id"], finding["kind"], finding["node"]) == ("F1", "nic-slow", "node1")
    assert "what rxe0 of node1 sends" in finding["evidence"]


def test_one_table_goes_to_standard_output(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(slow, "--format", "csv", "--table", "findings") == OK
    assert pl.read_csv(io.StringIO(capsys.readouterr().out))["node"].to_list() == ["node1"]
    assert export(slow, "--format", "json", "--table", "operators") == OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == analysis.operators([slow]).height
    assert list(json.loads(lines[0])) == list(OPERATORS)


def test_findings_as_json_are_the_contract(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(slow, "--format", "json", "--table", "findings") == OK
    exported = capsys.readouterr().out
    assert main(["analyze", str(slow), "--json"]) == OK
    assert exported == capsys.readouterr().out
    assert json.loads(exported)["format"] == "pulse-findings"


def test_a_window_of_the_operators(slow: Path, tmp_path: Path) -> None:
    for name, window in (("part", "0ms..100ms"), ("all", "0ms..")):
        arguments = ("--format", "parquet", "--table", "operators", "--window", window)
        assert export(slow, *arguments, "-o", tmp_path / name) == OK
    part, whole = pl.read_parquet(tmp_path / "part"), pl.read_parquet(tmp_path / "all")
    assert 0 < part.height < whole.height
    assert part.schema == OPERATORS


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--format", "csv"], "there are two tables"),
        (["--format", "perfetto"], "a timeline is no text"),
        (["--format", "parquet", "--table", "findings"], "Parquet is no text"),
        (["--format", "perfetto", "--table", "operators", "-o", "x"], "--table does not go with"),
    ],
)
def test_what_has_no_place_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Before the recording, which may be large, is read.
    assert export("nowhere", *arguments) == USAGE
    assert why in capsys.readouterr().err


def test_a_timeline_is_written_whole_or_not_at_all(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(slow, "--format", "perfetto", "-o", tmp_path / "trace.pftrace") == OK
    assert "ui.perfetto.dev" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["trace.pftrace"]
    (tmp_path / "file").touch()
    assert export(slow, "--format", "perfetto", "-o", tmp_path / "file/trace") == HOST
    assert "cannot write to" in capsys.readouterr().err


def test_a_device_stays_a_device(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(slow, "--format", "csv", "--table", "findings", "-o", "/dev/null") == OK
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert export(slow, "--format", "csv", "--table", "findings", "-o", "/dev/full") == HOST
    assert "Free some space" in capsys.readouterr().err


def test_a_damaged_part_makes_the_work_partial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = recordings.write(tmp_path / "rec", recordings.tables(recordings.run(steps=4)))
    (directory / "port_samples").mkdir()
    (directory / "port_samples/000000.parquet").write_bytes(b"PAR1nonsense")
    assert export(directory, "--format", "csv", "--table", "findings") == PARTIAL
    assert "damaged: " in capsys.readouterr().err
