"""Reading recording directories: several as one, whatever part of them is usable."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from pulse_bpf.analysis.calls import Calls
from pulse_bpf.analysis.pairing import queue_pairs
from pulse_bpf.analysis.ports import UNREADABLE, PortBins
from pulse_bpf.analysis.samples import Samples
from pulse_bpf.errors import DataError
from pulse_bpf.schema import FORMAT, FORMAT_VERSION, STREAMED, TABLES, conform, empty

# A row that lacks one of these says nothing.
ESSENTIAL = {
    "nics": ["node", "nic"],
    "processes": ["node", "pid"],
    "comms": ["node", "pid"],
    "qps": ["node", "nic", "qpn"],
    "coverage": ["node", "first_ns", "last_ns"],
    "events": ["node", "nic", "t_ns", "kind"],
}

# Tables with rows for every bin, which are never held as a whole.
LAZY = ("samples", "port_samples")
# Those that are read when they are asked for: calls are so many that a long recording of a large job holds no more.
READ_LATER = (*LAZY, "ops")

# Made by the analysis, and kept where the samples of a node are not: read when they are asked for.
DERIVED = ("operators", "flows")

# Parts that end alike are compared whole.
FOOTER_BYTES = 4096


class Recording:
    """All tables of some recordings, each with exactly the columns of its schema, a missing one empty.

    Those of READ_LATER are read when they are asked for, some nodes or some time of them: `samples`, `ports`, `calls`.
    They are given among `tables`, or in the files `parts` of each. `derived` has the files of DERIVED.
    """

    def __init__(
        self,
        tables: Mapping[str, pl.DataFrame],
        manifests: Sequence[dict[str, Any]] = (),
        damaged: Sequence[str] = (),
        parts: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        parts = parts or {}
        self.tables = {table: frame for table, frame in tables.items() if table not in READ_LATER}
        self.derived = {table: list(parts.get(table, ())) for table in DERIVED}
        self.manifests = list(manifests)
        self._damaged = list(damaged)
        self.calls = Calls(parts.get("ops", ()), tables.get("ops"))
        self.lives = queue_pairs(self.tables.get("qps", empty("qps")))
        self.ports = PortBins(parts.get("port_samples", ()), tables.get("port_samples"))
        self.samples = Samples(parts.get("samples", ()), tables.get("samples"), self.lives, self.ports)

    def __getitem__(self, table: str) -> pl.DataFrame:
        """The table in memory; of the samples, all rows of all sources."""
        if table == "samples":
            return self.samples.whole()
        if table == "port_samples":
            return self.ports.whole()
        if table == "ops":
            return self.calls.whole()
        return self.tables[table]

    def kept(self, table: str, schema: pl.Schema) -> pl.DataFrame:
        """What the recording holds of a `table` in DERIVED, with the columns of `schema`; a damaged part is missing."""
        frames = [pl.DataFrame(schema=schema)]
        for path in self.derived[table]:
            try:
                rows = pl.read_parquet(path, hive_partitioning=False)
                frames.append(
                    rows.select(
                        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(dtype).alias(name)
                        for name, dtype in schema.items()
                    )
                )
            except UNREADABLE as error:
                self._damaged.append(f"{path}: {str(error).splitlines()[0]}")
        return pl.concat(frames)

    @property
    def damaged(self) -> list[str]:
        """Names of all parts that could not be read, with the reason, and counts of rows that lack what they are about:
        these rows are missing. Of those of READ_LATER, what was met so far."""
        return self._damaged + self.calls.damaged + self.samples.damaged + self.ports.damaged

    @property
    def absent(self) -> dict[str, str]:
        """Nodes that should have been recorded and were not, with the reason, as manifests say."""
        said = [manifest.get("missing_nodes") for manifest in self.manifests]
        return {
            str(node): str(why) for nodes in said if isinstance(nodes, dict) for node, why in nodes.items()
        }

    @property
    def missing(self) -> list[str]:
        """The tables that hold nothing, of those without which something cannot be known."""
        rows = {table: self.tables[table].height for table in ("nics", "comms", "qps")}
        rows |= {"ops": self.calls.rows, "samples": len(self.samples.nodes)}
        return [table for table in ("nics", "ops", "comms", "qps", "samples") if not rows[table]]


def load(directories: Sequence[Path], wanted: Collection[str] = (*TABLES, *DERIVED)) -> Recording:
    """Reads `directories` as one recording; rows keep the order of directories and parts. One given twice counts once,
    and so does a part that is there twice.

    Tables not `wanted` are left empty.
    Damaged parts are skipped and named. DataError when a directory is no recording or may not be looked into, or
    when it has parts and none of them can be read.
    """
    frames: dict[str, list[pl.DataFrame]] = {table: [] for table in TABLES}
    lazy: dict[str, list[Path]] = {table: [] for table in (*READ_LATER, *DERIVED)}
    manifests: list[dict[str, Any]] = []
    damaged: list[str] = []
    unreadable: dict[Path, str] = {}
    listed: dict[Path, list[Path]] = {}
    seen: dict[tuple[str, int, bytes], list[Path]] = {}
    for directory in dict.fromkeys(path.resolve() for path in directories):
        try:
            files = [(table, path) for table, path in parts_of(directory) if table in wanted]
            manifests += _manifests_of(directory, damaged)
        except OSError as error:
            raise DataError(
                f"cannot read {error.filename}",
                error.strerror or str(error),
                "Analyze it as a user who may read it",
            ) from error
        listed[directory] = [path for _, path in files]
        for table, path in files:
            try:
                if _again(table, path, seen):
                    continue
                if table in DERIVED:
                    pq.read_metadata(path)
                if table in lazy:
                    lazy[table].append(path)
                else:
                    frames[table].append(conform(pl.read_parquet(path, hive_partitioning=False), table))
            except UNREADABLE as error:
                unreadable[path] = str(error).splitlines()[0]
    tables = {table: _together(table, parts) for table, parts in frames.items() if table not in READ_LATER}
    for table, columns in ESSENTIAL.items():
        whole = tables[table].drop_nulls(columns)
        if whole.height < tables[table].height:
            count = tables[table].height - whole.height
            damaged.append(f"{table}: {count} rows without one of {', '.join(columns)}")
        tables[table] = whole
    damaged += [f"{path}: {reason}" for path, reason in unreadable.items()]
    recording = Recording(tables, manifests, damaged, lazy)
    for of_rows in (recording.calls, recording.samples, recording.ports):
        unreadable |= of_rows.unreadable
    for directory, paths in listed.items():
        if paths and all(path in unreadable for path in paths):
            raise DataError(
                f"{directory} holds nothing usable",
                f"none of its {len(paths)} parts can be read, {paths[-1]}: {unreadable[paths[-1]]}",
                "Check that it was copied whole",
            )
    return recording


def _again(table: str, path: Path, seen: dict[tuple[str, int, bytes], list[Path]]) -> bool:
    """Whether a part that grows has the very bytes of one `seen`, as when a directory was copied."""
    if table not in STREAMED:
        return False
    # The end of a file is its footer, which has the place and bounds of every column of rows.
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - FOOTER_BYTES))
        key = (table, size, blake2b(file.read()).digest())
    others = seen.setdefault(key, [])
    twice = any(filecmp.cmp(path, other, shallow=False) for other in others)
    others.append(path)
    return twice


def _together(table: str, frames: list[pl.DataFrame]) -> pl.DataFrame:
    if not frames:
        return empty(table)
    together = pl.concat(frames)
    # Two recorders may both describe a thing. What is counted adds up: equal rows of one bin are two counts.
    return together if table in STREAMED else together.unique(maintain_order=True)


def parts_of(directory: Path) -> list[tuple[str, Path]]:
    """(table, file) of every part in `directory`."""
    if not directory.is_dir():
        reason = "it is not a directory" if directory.exists() else "it does not exist"
        raise DataError(f"{directory} is no recording", reason, "Give the directory that pulse record wrote")
    files = [(table, path) for table in (*TABLES, *DERIVED) for path in _files(directory, table, ".parquet")]
    if not files and not _files(directory, "manifest", ".json"):
        raise DataError(
            f"{directory} is no recording",
            "it holds neither a manifest nor a table",
            "Give the directory that pulse record wrote",
        )
    return files


def _files(directory: Path, name: str, suffix: str) -> list[Path]:
    """What `directory` holds under `name`: one file, files in a folder, or both. OSError when it may not be listed."""
    files = [path for path in [(directory / name).with_suffix(suffix)] if path.is_file()]
    # Not glob(): it takes a folder that may not be read for an empty one.
    with suppress(FileNotFoundError, NotADirectoryError):
        files += sorted(path for path in (directory / name).iterdir() if path.suffix == suffix)
    return files


def _manifests_of(directory: Path, damaged: list[str]) -> list[dict[str, Any]]:
    manifests = []
    for path in _files(directory, "manifest", ".json"):
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
