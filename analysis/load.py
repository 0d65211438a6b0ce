"""Reading recordings: several directories become one set of tables, damaged parts named and skipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf.errors import DataError
from pulse_bpf.schema import FORMAT, FORMAT_VERSION, TABLES, conform, empty


@dataclass(frozen=True)
class Recording:
    """Everything that was recorded: `tables` has each table of schema.TABLES (empty where there was none).

    `problems` names what could not be read, in words for the user; `manifests` are the parsed manifests.
    """

    tables: dict[str, pl.DataFrame]
    manifests: list[dict[str, Any]]
    problems: list[str]

    def bytes_are_payload(self) -> bool:
        """Whether every source that says so counts payload only: then volumes are exact."""
        stated = [m.get("bytes_are") for m in self.manifests]
        stated += [s.get("bytes_are") for m in self.manifests for s in m.get("sources") or []]
        return "wire" not in stated and "payload" in stated


def load(dirs: Sequence[Path]) -> Recording:
    """The recordings in `dirs` as one; a directory or file given twice counts once.

    DataError when a directory is no recording, or when no calls and no samples can be read at all. Files with the
    same content are read once, because rows of one bin may repeat and add up. Truth files are never opened.
    """
    roots = list(dict.fromkeys(Path(d).resolve() for d in dirs))
    problems: list[str] = []
    manifests = [m for root in roots for m in _manifests(root, problems)]
    tables = {name: _table(name, roots, problems) for name in TABLES}
    if tables["ops"].is_empty() and tables["samples"].is_empty():
        where = ", ".join(map(str, roots)) or "no directory"
        why = problems[0] if problems else "it holds neither calls nor samples"
        raise DataError(f"Nothing usable in {where}", why, "Record again while the job is training")
    return Recording(tables, manifests, problems)


def _manifests(root: Path, problems: list[str]) -> list[dict[str, Any]]:
    paths = [p for p in (root / "manifest.json", *sorted((root / "manifest").glob("*.json"))) if p.is_file()]
    if not paths and not any(_parts(root, name) for name in TABLES):
        why = (
            "it has neither a manifest.json nor any table" if root.is_dir() else "there is no such directory"
        )
        raise DataError(f"{root} is not a recording", why, "Give the directory that `pulse record -o` wrote")
    found = []
    for path in paths:
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            problems.append(f"{path} is damaged and was skipped: {_short(error)}")
            continue
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(f"{root} is not a recording", f"{path.name} does not say format {FORMAT!r}")
        if manifest.get("version", FORMAT_VERSION) > FORMAT_VERSION:
            raise DataError(
                f"{root} is too new", f"version {manifest['version']} of the format", "Use a newer pulse"
            )
        found.append(manifest)
    if not paths:
        problems.append(f"{root} has no manifest: the recorder was killed, or the copy is incomplete")
    return found


def _parts(root: Path, table: str) -> list[Path]:
    return [p for p in (root / f"{table}.parquet", *sorted((root / table).glob("*.parquet"))) if p.is_file()]


def _table(name: str, roots: Sequence[Path], problems: list[str]) -> pl.DataFrame:
    frames = []
    for path in _distinct(path for root in roots for path in _parts(root, name)):
        try:
            frames.append(conform(pl.read_parquet(path, hive_partitioning=False), name))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            problems.append(f"{path} is damaged and was skipped: {_short(error)}")
    return pl.concat(frames) if frames else empty(name)


def _distinct(paths: Iterable[Path]) -> list[Path]:
    """`paths` without those whose content equals an earlier one's; only files of equal size are compared."""
    paths = list(paths)
    sizes = [path.stat().st_size for path in paths]
    seen: set[bytes] = set()
    kept = []
    for path, size in zip(paths, sizes, strict=True):
        if sizes.count(size) > 1:
            digest = hashlib.blake2b(path.read_bytes()).digest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(path)
    return kept


def _short(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
