"""Reading recordings: several as one, parts, what is missing, and what is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import recordings

from pulse_bpf.analysis.load import load
from pulse_bpf.errors import DataError
from pulse_bpf.schema import TABLES


@pytest.fixture(scope="module")
def frames() -> dict[str, pl.DataFrame]:
    return recordings.tables(recordings.run(steps=2, hosts=3))


def test_every_table_has_its_schema_and_all_rows(tmp_path: Path, frames: dict[str, pl.DataFrame]) -> None:
    loaded = load([recordings.write(tmp_path / "r", frames)])
    for table, schema in TABLES.items():
        assert loaded[table].schema == schema, table
        assert loaded[table].equals(frames[table]), table
    assert loaded.damaged == []


def test_recordings_of_single_nodes_are_one(tmp_path: Path, frames: dict[str, pl.DataFrame]) -> None:
    directories = [
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
    together = load(directories)
    for table in ("samples", "ops", "qps", "comms"):
        assert together[table].sort(pl.all()).equals(frames[table].sort(pl.all())), table


def test_the_same_recording_twice_counts_once(tmp_path: Path, frames: dict[str, pl.DataFrame]) -> None:
    directory = recordings.write(tmp_path / "r", frames)
    assert load([directory, directory])["samples"].height == frames["samples"].height


def test_equal_counts_of_one_bin_in_two_parts_are_both_kept(
    tmp_path: Path, frames: dict[str, pl.DataFrame]
) -> None:
    directory = recordings.write(tmp_path / "r", frames)
    again = frames["samples"][:1]
    again.write_parquet(directory / "samples" / "000002.parquet")
    assert load([directory])["samples"].height == frames["samples"].height + 1


def test_missing_tables_and_columns_are_empty_and_unknown_ones_ignored(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    directory.mkdir()
    pl.DataFrame({"node": ["a"], "colour": ["blue"]}).write_parquet(directory / "nodes.parquet")
    pl.DataFrame({"x": [1]}).write_parquet(directory / "weather.parquet")
    loaded = load([directory])
    assert loaded["nodes"].to_dicts() == [
        {"node": "a", "clock_source": None, "clock_error_ns": None, "boot_id": None, "kernel": None}
    ]
    assert loaded["samples"].is_empty()
    assert loaded["samples"].schema == TABLES["samples"]


@pytest.mark.parametrize("damage", [b"", b"PAR1 and then nothing", None])
def test_a_damaged_part_is_named_and_the_rest_read(
    tmp_path: Path, frames: dict[str, pl.DataFrame], damage: bytes | None
) -> None:
    directory = recordings.write(tmp_path / "r", frames)
    part = directory / "samples" / "000000.parquet"
    part.write_bytes(part.read_bytes()[:-10] if damage is None else damage)
    (directory / "samples" / "000002.parquet.tmp").write_bytes(b"half")
    loaded = load([directory])
    assert len(loaded.damaged) == 1
    assert str(part) in loaded.damaged[0]
    assert loaded["samples"].height == frames["samples"].height - frames["samples"].height // 2


def test_a_part_with_another_type_in_a_column_is_damaged(
    tmp_path: Path, frames: dict[str, pl.DataFrame]
) -> None:
    directory = recordings.write(tmp_path / "r", frames)
    pl.DataFrame({"node": ["a"], "t_ns": ["yesterday"]}).write_parquet(directory / "samples" / "9.parquet")
    loaded = load([directory])
    assert [("9.parquet" in text) for text in loaded.damaged] == [True]
    assert loaded["samples"].height == frames["samples"].height


def test_rows_that_lack_what_they_are_about_are_counted_and_dropped(
    tmp_path: Path, frames: dict[str, pl.DataFrame]
) -> None:
    holes = pl.when(pl.int_range(pl.len()) % 3 > 0).then("t_ns").alias("t_ns")
    directory = recordings.write(tmp_path / "r", frames | {"samples": frames["samples"].with_columns(holes)})
    loaded = load([directory])
    assert loaded["samples"]["t_ns"].null_count() == 0
    missing = frames["samples"].height - loaded["samples"].height
    assert missing == -(-frames["samples"].height // 3)
    assert len(loaded.damaged) == 1
    assert loaded.damaged[0].startswith(f"samples: {missing} rows without one of node, nic, direction, t_ns")


def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, frames: dict[str, pl.DataFrame]) -> None:
    good = recordings.write(tmp_path / "good", frames)
    empty = tmp_path / "empty"
    empty.mkdir()
    for bad in (tmp_path / "absent", empty, good / "manifest.json"):
        with pytest.raises(DataError, match=str(bad)):
            load([good, bad])


def test_a_recording_with_nothing_readable_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    directory.mkdir()
    (directory / "samples.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=str(directory)):
        load([directory])


@pytest.mark.parametrize("manifest", [{"format": "other"}, {"format": "pulse-recording", "version": 2}, []])
def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, frames: dict[str, pl.DataFrame], manifest: object
) -> None:
    directory = recordings.write(tmp_path / "r", frames)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=str(directory)):
        load([directory])


def test_a_broken_manifest_costs_only_itself(tmp_path: Path, frames: dict[str, pl.DataFrame]) -> None:
    directory = recordings.write(tmp_path / "r", frames)
    (directory / "manifest.json").write_text("{")
    loaded = load([directory])
    assert loaded["samples"].height == frames["samples"].height
    assert "manifest.json" in loaded.damaged[0]
