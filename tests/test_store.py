"""The recording store: readable at every moment, never over another one, clear about a full disk."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from pulse_bpf.errors import HOST, USAGE, PulseError
from pulse_bpf.schema import REQUIRED, TABLES, empty
from pulse_bpf.store import RecordingWriter, RowsFile, write_file

SAMPLES = pl.DataFrame(
    {"node": ["a", "a"], "qpn": [17, 17], "flow": [1, 2**63], "t_ns": [5, 9], "bytes": [7, 8]}
)


def test_every_required_table_is_there_with_its_schema(tmp_path: Path) -> None:
    RecordingWriter(tmp_path / "r").close()
    for table in REQUIRED:
        parts = [*(tmp_path / "r").glob(f"{table}.parquet"), *(tmp_path / "r" / table).glob("*.parquet")]
        assert len(parts) == 1
        assert pl.read_parquet(parts[0]).schema == TABLES[table]


def test_parts_grow_and_small_tables_are_replaced(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r")
    writer.append("samples", SAMPLES)
    writer.append("samples", empty("samples"))
    writer.append("samples", SAMPLES.head(1))
    writer.replace("nodes", pl.DataFrame({"node": ["a"]}))
    writer.replace("nodes", pl.DataFrame({"node": ["a", "b"]}))
    assert pl.read_parquet(tmp_path / "r/samples/*.parquet")["bytes"].to_list() == [7, 8, 7]
    assert pl.read_parquet(tmp_path / "r/nodes.parquet")["node"].to_list() == ["a", "b"]
    assert not list((tmp_path / "r").rglob("*.tmp"))


def test_an_unchanged_small_table_is_not_written_again(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r")
    writer.replace("nodes", pl.DataFrame({"node": ["a"]}))
    before = (tmp_path / "r/nodes.parquet").stat().st_ino
    writer.replace("nodes", pl.DataFrame({"node": ["a"]}))
    assert (tmp_path / "r/nodes.parquet").stat().st_ino == before


def test_samples_are_encoded_as_the_format_says(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r")
    writer.append("samples", SAMPLES)
    group = pq.ParquetFile(tmp_path / "r/samples/000000.parquet").metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert "DELTA_BINARY_PACKED" in columns["t_ns"].encodings
    assert "DELTA_BINARY_PACKED" in columns["bytes"].encodings
    assert columns["flow"].has_dictionary_page
    assert columns["node"].has_dictionary_page


def test_the_manifest_names_format_version_and_tool(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r")
    writer.manifest([{"name": "packets"}], {"lost": 3})
    manifest = json.loads((tmp_path / "r/manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["lost"]) == ("pulse-recording", 1, 3)
    assert manifest["sources"] == [{"name": "packets"}]
    assert manifest["tool"]["name"] == "pulse"


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(PulseError, match="not empty") as caught:
        RecordingWriter(tmp_path)
    assert caught.value.exit_status == USAGE
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.root
def test_a_disk_that_runs_full_in_polars_is_one_clear_line(tmp_path: Path) -> None:
    """Where in a file of 8 blocks that happens decides what polars says."""
    frame = pl.DataFrame({"t_ns": list(os.urandom(30_000))})
    for blocks in range(2, 8):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={4 * blocks}k", "tmpfs", tmp_path], check=True)
        try:
            with pytest.raises(PulseError, match=r"cannot write to .*full\.parquet") as caught:
                write_file(tmp_path / "full.parquet", frame.write_parquet)
            assert caught.value.exit_status == HOST
            assert not list(tmp_path.iterdir())
        finally:
            subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.root
def test_a_full_disk_is_one_clear_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", tmp_path], check=True)
    try:
        writer = RecordingWriter(tmp_path / "r")
        writer.append("samples", SAMPLES)
        noise = pl.DataFrame({"t_ns": [0], "bytes": [0]}).select(
            pl.Series("t_ns", list(os.urandom(200_000))), pl.Series("flow", range(200_000))
        )
        with pytest.raises(PulseError, match=r"cannot write to .*No space left") as caught:
            writer.append("samples", noise)
        assert caught.value.exit_status == HOST
        assert pl.read_parquet(tmp_path / "r/samples/*.parquet")["bytes"].to_list() == [7, 8]
        assert not list((tmp_path / "r").rglob("*.tmp"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_rows_are_a_file_once_all_are_there(tmp_path: Path) -> None:
    target = tmp_path / "rows.parquet"
    with RowsFile(target) as file:
        for value in ("a", "b"):
            file.append(pl.DataFrame({"text": [value]}))
        assert not target.exists()
    assert pl.read_parquet(target)["text"].to_list() == ["a", "b"]
    assert pq.read_metadata(target).num_row_groups == 2

    def fail() -> None:
        with RowsFile(tmp_path / "other.parquet") as file:
            file.append(pl.DataFrame({"text": ["a"]}))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == ["rows.parquet"]


def test_rows_that_a_disk_refuses_say_where_another_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet.tmp").symlink_to("/dev/full")

    def write_all() -> None:
        with RowsFile(tmp_path / "rows.parquet") as file:
            file.append(pl.DataFrame({"value": list(range(3))}))

    with pytest.raises(PulseError, match=r"cannot write to .*No space left") as caught:
        write_all()
    assert caught.value.next_step is not None
    assert "TMPDIR" in caught.value.next_step
    assert not list(tmp_path.iterdir())
