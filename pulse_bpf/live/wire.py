"""What agents say to a collector: one step of an agent as one Arrow record batch, checked on arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa

from pulse_bpf.analysis.attribute import FLOWS
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.errors import DataError
from pulse_bpf.schema import BOOL, TABLES

# No agent has a reason to send more at once: a second of 100,000 operators is about 60 MB before compression.
MOST_BYTES, MOST_RAW_BYTES, MOST_ROWS = 64 * 1024 * 1024, 256 * 1024 * 1024, 1_000_000
_CODEC = "zstd"

# `final`: the row will not change, and comes once. What is not replaces all that was not before.
_OPERATORS: dict[str, Any] = {**OPERATORS, "final": BOOL}
SENT_OPERATORS = pl.Schema(_OPERATORS)
# Tables that say how things are, sent whole and only when that changed; the others hold what is new.
STATE = ("nodes", "nics", "processes", "comms", "channels", "qps", "flows")
NEWS = ("operators", "coverage", "events", "port_counters")
SCHEMAS: dict[str, pl.Schema] = {
    "operators": SENT_OPERATORS,
    "flows": FLOWS,
    **{table: TABLES[table] for table in (*STATE, *NEWS) if table in TABLES},
}
# An agent's spools are remembered by their names, and named in each answer.
MOST_NAME = 64
# Made once: a frame of so many columns takes longer to make than to fill.
NONE = {table: pl.DataFrame(schema=schema) for table, schema in SCHEMAS.items()}

# One row per table: `data` is an Arrow IPC stream of `raw_bytes`, compressed.
ENVELOPE = pa.schema(
    [
        pa.field(name, dtype, nullable=False)
        for name, dtype in (
            ("spool", pa.string()),
            ("sequence", pa.uint64()),
            ("until_ns", pa.int64()),
            ("table", pa.string()),
            ("rows", pa.uint64()),
            ("raw_bytes", pa.uint64()),
            ("data", pa.binary()),
        )
    ]
)


@dataclass(frozen=True)
class Step:
    """What an agent learned up to `until_ns` on its nodes' clock, number `sequence` of what its `spool` holds.

    `tables`: of SCHEMAS; one of STATE is there only when it changed.
    """

    spool: str
    sequence: int
    until_ns: int
    tables: Mapping[str, pl.DataFrame] = field(default_factory=dict)


def encode(step: Step) -> pa.RecordBatch:
    """`step` as one record batch (ENVELOPE), compressed."""
    rows = [_row(step, name, _ipc(frame), frame.height) for name, frame in step.tables.items()]
    # A step without news still says that its agent is there, and how far it has come.
    return pa.RecordBatch.from_pylist(rows or [_row(step, "", b"", 0)], ENVELOPE)


def decode(batch: pa.RecordBatch) -> Step:
    """The step in `batch`; DataError when it is larger than it may be, or not what `encode` makes.

    Nothing of it is trusted: sizes are checked before anything is unpacked, and every offset before it is followed.
    """
    if not batch.schema.equals(ENVELOPE):
        raise DataError("a batch is refused", "its columns are not those of an envelope")
    if batch.nbytes > MOST_BYTES:
        raise DataError("a batch is refused", f"it has {batch.nbytes} bytes, {MOST_BYTES} is the most")
    try:
        batch.validate(full=True)
        rows = batch.to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise DataError("a batch is refused", f"it is malformed: {_line(error)}") from error
    if not 0 < len(rows) <= len(SCHEMAS):
        raise DataError("a batch is refused", f"it has {len(rows)} tables")
    heads = {(row["spool"], row["sequence"], row["until_ns"]) for row in rows}
    names = [row["table"] for row in rows if row["table"]]
    if len(heads) != 1 or len(set(names)) != len(names) or not set(names) <= set(SCHEMAS):
        raise DataError("a batch is refused", "its tables do not belong together")
    if sum(row["raw_bytes"] for row in rows) > MOST_RAW_BYTES or sum(row["rows"] for row in rows) > MOST_ROWS:
        raise DataError("a batch is refused", "it unpacks to more than a batch may hold")
    spool, sequence, until_ns = heads.pop()
    if len(spool) > MOST_NAME:
        raise DataError("a batch is refused", "the name of its spool is too long")
    tables = {row["table"]: _table(row) for row in rows if row["table"]}
    return Step(spool, sequence, until_ns, tables)


def packed(batch: pa.RecordBatch) -> bytes:
    """`batch` as the bytes of a file or message."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def unpacked(content: bytes) -> pa.RecordBatch:
    """The batch in `content`, of whatever columns; DataError when it is none."""
    try:
        with pa.ipc.open_stream(content) as reader:
            return reader.read_next_batch()
    except (pa.ArrowException, StopIteration, OSError, ValueError) as error:
        raise DataError("a batch cannot be read", _line(error)) from error


def _ipc(frame: pl.DataFrame) -> bytes:
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _row(step: Step, table: str, data: bytes, rows: int) -> dict[str, object]:
    return {
        "spool": step.spool,
        "sequence": step.sequence,
        "until_ns": step.until_ns,
        "table": table,
        "rows": rows,
        "raw_bytes": len(data),
        "data": pa.compress(data, codec=_CODEC, asbytes=True) if data else b"",
    }


def _table(row: Mapping[str, object]) -> pl.DataFrame:
    name, rows, schema = str(row["table"]), row["rows"], SCHEMAS[str(row["table"])]
    try:
        # Says so where the stream holds more or less than that, and never writes beyond it.
        content = pa.decompress(row["data"], decompressed_size=row["raw_bytes"], codec=_CODEC)
        with pa.ipc.open_stream(content) as reader:
            table = reader.read_all()
        table.validate(full=True)
        if table.num_rows != rows:
            raise ValueError(f"{table.num_rows} rows, not {rows}")
        frame = pl.DataFrame(pl.from_arrow(table))
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError, ValueError, OverflowError) as error:
        raise DataError("a batch is refused", f"its table {name} is malformed: {_line(error)}") from error
    if frame.schema != schema:
        raise DataError("a batch is refused", f"its table {name} has other columns")
    return frame


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
