"""Where recordings are, directories or object stores, and which of their files hold whose data."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import polars as pl
import pyarrow.parquet as pq

from pulse_bpf.analysis.load import DERIVED, LAZY
from pulse_bpf.analysis.pipelines import components
from pulse_bpf.analysis.ports import UNREADABLE
from pulse_bpf.errors import DataError, HostError
from pulse_bpf.schema import TABLES

# Tables of which each row is read by its own node's tasks only.
OF_NODES = (*LAZY, "operators")
# Stands for the node of a file without rows.
NOBODY = ""


class Seen(NamedTuple):
    """The files of the recording at `place`, by their names in it, each with the node that all of its rows are of: None
    where they are of several, or of none in particular. The `nodes` of OF_NODES, the time of the first sample, and the
    files of OF_NODES that are `damaged`, which are not among the others.
    """

    place: str
    files: dict[str, str | None]
    nodes: list[str]
    start_ns: int | None
    damaged: list[str]


class Piece(NamedTuple):
    """Some files of the recording at `place`."""

    place: str
    files: list[str]


def table_of(name: str) -> str:
    """The table that the file `name` of a recording is a part of."""
    return name.split("/")[0].removesuffix(".parquet")


def look(place: str) -> Seen:
    """What the recording at `place` consists of, by the footers of its files.

    DataError when it is none or may not be read, HostError when reading from there needs a package.
    """
    store, root = _opened(place)
    files: dict[str, str | None] = {}
    nodes, starts, damaged = set[str](), list[int](), list[str]()
    for name in _names(store, root, place):
        found, start_ns = list[str](), None
        try:
            if name.endswith(".parquet"):
                with store.open(f"{root}/{name}", "rb") as file:
                    found, start_ns = _in_file(file)
        except UNREADABLE as error:
            if table_of(name) in OF_NODES:
                damaged.append(f"{place}/{name}: {str(error).splitlines()[0]}")
                continue
        files[name] = found[0] if len(found) == 1 else None
        if table_of(name) in OF_NODES:
            nodes |= set(found)
            files[name] = NOBODY if not found else files[name]
            if table_of(name) == "samples" and start_ns is not None:
                starts.append(start_ns)
    return Seen(place, files, sorted(nodes), min(starts, default=None), damaged)


def partitions(seen: Sequence[Seen]) -> list[list[Piece]]:
    """The files of each node, in order of nodes; nodes that have files in common are one partition."""
    together: list[list[str]] = []
    for part in seen:
        mixed = any(node is None and table_of(name) in OF_NODES for name, node in part.files.items())
        together += [part.nodes] if mixed else [[node] for node in part.nodes]
    number = components([nodes for nodes in together if nodes])
    groups: dict[int, set[str]] = {}
    for node in sorted(number):
        groups.setdefault(number[node], set()).add(node)
    return [
        [
            Piece(part.place, [name for name, node in part.files.items() if node is None or node in nodes])
            for part in seen
            if nodes & set(part.nodes)
        ]
        for nodes in groups.values()
    ]


@contextmanager
def staged(pieces: Sequence[Piece]) -> Iterator[list[Path]]:
    """Directories with just these files, as load.load reads them: links here, copies of what is elsewhere."""
    with tempfile.TemporaryDirectory(prefix="pulse-") as scratch:
        directories = []
        for number, (place, files) in enumerate(pieces):
            store, root = _opened(place)
            directory = Path(scratch).resolve() / str(number)
            directory.mkdir()
            for name in files:
                (directory / name).parent.mkdir(exist_ok=True)
                if "://" in place:
                    store.get_file(f"{root}/{name}", str(directory / name))
                else:
                    (directory / name).symlink_to(f"{root}/{name}")
            directories.append(directory)
        yield directories


def _opened(place: str) -> tuple[Any, str]:
    """The file system of `place`, and its path in it."""
    try:
        import fsspec

        store, root = fsspec.core.url_to_fs(place)
    except (ImportError, ValueError) as error:
        next_step = "Install what reads from there, for example: pip install 'pulse-trace[dask]' s3fs"
        raise HostError(f"cannot read {place}", str(error), next_step) from error
    return store, str(root).rstrip("/")


def _names(store: Any, root: str, place: str) -> list[str]:
    """The files of a recording: its manifests and the parts of its tables."""
    try:
        found = [path[len(root) + 1 :] for path in store.find(root, maxdepth=2)]
    except Exception as error:  # of which each store has its own
        raise DataError(f"cannot read {place}", str(error), "Analyze it as a user who may read it") from error
    tables = {*TABLES, *DERIVED}
    names = [
        name
        for name in sorted(found)
        if (name.endswith(".parquet") and table_of(name) in tables)
        or (name.endswith(".json") and name.split("/")[0] in ("manifest", "manifest.json"))
    ]
    if not names:
        raise DataError(
            f"{place} is no recording",
            "it holds neither a manifest nor a table" if found else "nothing is there",
            "Give the directory that pulse record wrote",
        )
    return names


def _in_file(file: IO[bytes]) -> tuple[list[str], int | None]:
    """The nodes in a part of a table, and its first t_ns; nothing where it has no rows."""
    meta = pq.read_metadata(file)
    bounds = {name: _bounds(file, meta, name) for name in ("node", "t_ns") if name in meta.schema.names}
    nodes = [name for name in dict.fromkeys(bounds.get("node", ())) if name is not None]
    if len(nodes) > 1:
        nodes = _column(file, "node").drop_nulls().unique().sort().to_list()
    return nodes, bounds.get("t_ns", (None,))[0]


def _column(file: IO[bytes], name: str) -> pl.Series:
    file.seek(0)
    return pl.read_parquet(file, columns=[name])[name]


def _bounds(file: IO[bytes], meta: pq.FileMetaData, name: str) -> tuple[Any, Any]:
    """The least and the greatest value of a column, by the footer if it says."""
    column = meta.schema.names.index(name)
    told = [meta.row_group(group).column(column).statistics for group in range(meta.num_row_groups)]
    if all(each is not None and each.has_min_max for each in told):
        return min((each.min for each in told), default=None), max((each.max for each in told), default=None)
    values = _column(file, name)
    return values.min(), values.max()
