"""What the collector has on its disk: operators by job and hour, how far it got with each agent, raw samples kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from pulse_bpf.errors import DataError
from pulse_bpf.live.wire import SENT_OPERATORS
from pulse_bpf.schema import STR, U64
from pulse_bpf.store import write_file

# Rows of the parts: whose they are, so that what came twice would show.
_STORED: dict[str, Any] = {**SENT_OPERATORS, "agent": STR, "spool": STR, "sequence": U64}
STORED = pl.Schema(_STORED)
HOUR_NS = 3_600_000_000_000
_LONGEST_NAME = 100

Marks = dict[str, dict[str, int]]
Write = Callable[[Path, Callable[[Path], object]], None]


def safe(name: str) -> str:
    """`name` as one component of a path: never empty, hidden, a way up, or longer than a file system takes."""
    text = quote(name, safe="").replace(".", "%2E") or "%"
    if len(text) > _LONGEST_NAME:
        text = f"{text[:60]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
    return text


class Store:
    """Operators under `root`/jobs/JOB/HOUR/COMMIT.parquet, and `marks`: what of each agent's spools they hold.

    A commit is its parts first and then the marks, by one rename: parts of a commit that the marks do not know were
    never confirmed to an agent, and are deleted at the start. HostError when the disk refuses; then nothing is
    committed.
    """

    def __init__(self, root: Path, write: Write = write_file) -> None:
        self.root, self._write = root, write
        self.marks: Marks = {}
        self._commit = 0
        path = root / "marks.json"
        try:
            if path.exists():
                content = json.loads(path.read_text())
                self._commit, self.marks = int(content["commit"]), dict(content["marks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"cannot read {path}", str(error), "Move the directory away to begin anew"
            ) from error
        for part in self._parts():
            if int(part.stem) > self._commit:
                part.unlink()

    def commit(self, parts: Mapping[str, pl.DataFrame], marks: Marks) -> None:
        """Stores the rows (STORED) of each job in `parts`, and that all up to `marks` is there."""
        number = self._commit + 1
        for job, frame in parts.items():
            for (hour,), rows in frame.group_by(_hour()):
                path = self.root / "jobs" / safe(job) / str(hour) / f"{number:012d}.parquet"
                self._write(path, rows.write_parquet)
        text = json.dumps({"commit": number, "marks": marks})
        self._write(self.root / "marks.json", lambda path: path.write_text(text))
        self._commit, self.marks = number, {agent: dict(of) for agent, of in marks.items()}

    def keep_state(self, agent: str, content: bytes) -> None:
        """What an agent last said of how things are (wire.packed)."""
        self._write(self.root / "agents" / f"{safe(agent)}.step", lambda path: path.write_bytes(content))

    def states(self) -> list[bytes]:
        """What all agents last said."""
        found = []
        for path in sorted((self.root / "agents").glob("*.step")):
            with suppress(OSError):
                found.append(path.read_bytes())
        return found

    def retain(self, hours: int, evidence_bytes: int, now_ns: int) -> int:
        """Deletes operators older than so many hours, and the oldest evidence beyond `evidence_bytes`; bytes left."""
        oldest = _name_of_hour(now_ns - hours * HOUR_NS)
        for hour in (self.root / "jobs").glob("*/*"):
            if hour.name < oldest:
                shutil.rmtree(hour, ignore_errors=True)
        for job in (self.root / "jobs").glob("*"):
            with suppress(OSError):
                job.rmdir()
        kept = sorted(
            (self.root / "evidence").glob("*"), key=lambda path: path.stat().st_mtime_ns, reverse=True
        )
        total = 0
        for recording in kept:
            total += _size(recording)
            if total > evidence_bytes:
                shutil.rmtree(recording, ignore_errors=True)
        return _size(self.root)

    def keep_raw(self, finding: str, node: str, name: str, content: bytes) -> None:
        """One file `name` of a node's recording, beside those of the others: "samples/000003.parquet" and the like."""
        directory = self.root / "evidence" / safe(finding)
        table, _, part = name.removesuffix(".parquet").partition("/")
        suffix = f"{safe(node)}.json" if name == "manifest.json" else f"{safe(node)}-{part or '0'}.parquet"
        table = "manifest" if name == "manifest.json" else table
        self._write(directory / table / suffix, lambda path: path.write_bytes(content))

    def evidence(self, finding: str) -> Path:
        """Where the recording of a finding is."""
        return self.root / "evidence" / safe(finding)

    def _parts(self) -> list[Path]:
        return sorted((self.root / "jobs").glob("*/*/*.parquet"))


def _hour() -> pl.Expr:
    """By when a row began; rows of bytes outside calls have no call."""
    begun = pl.coalesce("call_ns", "start_ns", pl.lit(0))
    return pl.from_epoch(begun, time_unit="ns").dt.strftime("%Y%m%dT%H").alias("hour")


def _name_of_hour(at_ns: int) -> str:
    return str(
        pl.select(pl.from_epoch(pl.lit(max(0, at_ns)), time_unit="ns").dt.strftime("%Y%m%dT%H")).item()
    )


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
