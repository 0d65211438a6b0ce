"""Reading recording directories: several as one, whatever part of them is usable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf.errors import DataError
from pulse_bpf.schema import FORMAT, FORMAT_VERSION, STREAMED, TABLES, conform, empty

# A row that lacks one of these says nothing.
ESSENTIAL = {
    "nics": ["node", "nic"],
    "processes": ["node", "pid"],
    "comms": ["node", "pid"],
    "ops": ["node", "pid", "kind", "call_ns"],
    "qps": ["node", "nic", "qpn"],
    "samples": ["node", "nic", "direction", "t_ns", "bin_ns", "bytes"],
    "coverage": ["node", "first_ns", "last_ns"],
    "events": ["node", "nic", "t_ns", "kind"],
}


@dataclass(frozen=True)
class Recording:
    """All tables of some recordings, each with exactly the columns of its schema, a missing one empty.

    `damaged` names every part that could not be read, with the reason, and counts rows that lack what they
    are about; their rows are missing.
    """

    tables: dict[str, pl.DataFrame]
    manifests: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def __getitem__(self, table: str) -> pl.DataFrame:
        return self.tables[table]


def load(directories: Sequence[Path]) -> Recording:
    """Reads `directories` as one recording; rows keep the order of directories and parts. One given twice counts once.

    Damaged parts are skipped and named. DataError when a directory is no recording, or when it has parts and
    none of them can be read.
    """
    parts: dict[str, list[pl.DataFrame]] = {table: [] for table in TABLES}
    manifests: list[dict[str, Any]] = []
    damaged: list[str] = []
    for directory in dict.fromkeys(path.resolve() for path in directories):
        files = _parts_of(directory)
        manifests += _manifests_of(directory, damaged)
        readable = 0
        for table, path in files:
            try:
                parts[table].append(conform(pl.read_parquet(path, hive_partitioning=False), table))
                readable += 1
            except (pl.exceptions.PolarsError, OSError) as error:
                damaged.append(f"{path}: {str(error).splitlines()[0]}")
        if files and not readable:
            raise DataError(
                f"{directory} holds nothing usable",
                f"none of its {len(files)} parts can be read, {damaged[-1]}",
                "Check that it was copied whole",
            )
    tables = {table: _together(table, frames) for table, frames in parts.items()}
    for table, columns in ESSENTIAL.items():
        whole = tables[table].drop_nulls(columns)
        if whole.height < tables[table].height:
            count = tables[table].height - whole.height
            damaged.append(f"{table}: {count} rows without one of {', '.join(columns)}")
        tables[table] = whole
    return Recording(tables, manifests, damaged)


def _together(table: str, frames: list[pl.DataFrame]) -> pl.DataFrame:
    if not frames:
        return empty(table)
    together = pl.concat(frames)
    # Two recorders may both describe a thing. What is counted adds up: equal rows of one bin are two counts.
    return together if table in STREAMED else together.unique(maintain_order=True)


def _parts_of(directory: Path) -> list[tuple[str, Path]]:
    """(table, file) of every part in `directory`."""
    if not directory.is_dir():
        reason = "it is not a directory" if directory.exists() else "it does not exist"
        raise DataError(f"{directory} is no recording", reason, "Give the directory that pulse record wrote")
    files = [
        (table, path)
        for table in TABLES
        for path in [directory / f"{table}.parquet", *sorted((directory / table).glob("*.parquet"))]
        if path.is_file()
    ]
    if not files and not _manifest_files(directory):
        raise DataError(
            f"{directory} is no recording",
            "it holds neither a manifest nor a table",
            "Give the directory that pulse record wrote",
        )
    return files


def _manifest_files(directory: Path) -> list[Path]:
    candidates = [directory / "manifest.json", *sorted((directory / "manifest").glob("*.json"))]
    return [path for path in candidates if path.is_file()]


def _manifests_of(directory: Path, damaged: list[str]) -> list[dict[str, Any]]:
    manifests = []
    for path in _manifest_files(directory):
        try:
            manifest = json.loads(path.read_text())
        except (ValueError, OSError) as error:
            damaged.append(f"{path}: {error}")
            continue
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(f"{directory} is no recording", f"{path.name} does not say it is one")
        if manifest.get("version") != FORMAT_VERSION:
            raise DataError(
                f"{directory} has version {manifest.get('version')} of the format",
                f"this Pulse reads version {FORMAT_VERSION}",
                "Analyze it with the version that recorded it",
            )
        manifests.append(manifest)
    return manifests
