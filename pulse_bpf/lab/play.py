"""`pulse lab play`: what one node recorded, recorded again in this moment, for a rehearsal without a job.

Every row appears when it is due: with its times moved so that the recording begins at a given moment, on all nodes
that play the same recording. It ends as `pulse record` does, after its time or on SIGINT or SIGTERM, and leaves what
was due.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import polars as pl

from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.errors import OK, DataError
from pulse_bpf.schema import I64, STREAMED, TABLES
from pulse_bpf.start import READY, Start
from pulse_bpf.store import RecordingWriter

ROTATE_S = 0.5
# Lengths of time, not moments.
_LENGTHS = ("bin_ns", "clock_error_ns", "error_ns")
# What a row of a growing table is due by.
_DUE = {"ops": "call_ns", "op_details": None, "clocks": "wall_ns"}


def play(directory: Path, node: str, output: Path, start_at: Start, seconds: float | None) -> int:
    """Records what `node` did in the recording `directory` as if it began at `start_at`, for `seconds` or all of it.

    DataError where it has nothing of that node; else what the writer of recordings raises.
    """
    recording = load([directory])
    if node not in recording["nodes"]["node"]:
        raise DataError(f"{directory} has nothing of {node}", "", "Play a recording in which it took part")
    start_ns = _awaited(start_at)
    shift_ns = start_ns - recording.samples.start_ns
    tables = {table: _moved(_of_node(recording, table, node), shift_ns) for table in TABLES}
    due_ns = [frame[at].max() for table, frame in tables.items() if (at := _due(table)) and frame.height]
    end_ns = max((int(ns) for ns in due_ns if isinstance(ns, int)), default=start_ns) + 1
    if seconds is not None:
        end_ns = min(end_ns, start_ns + round(seconds * 1e9))
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        writer = RecordingWriter(output)
        for table, frame in tables.items():
            if table not in STREAMED and frame.height:
                writer.replace(table, frame)
        told_ns = 0
        while not stopped and told_ns < end_ns:
            until_ns = min(max(told_ns, time.time_ns()), end_ns)
            for table in STREAMED:
                at = _due(table)
                if at is not None:
                    writer.append(
                        table, tables[table].filter(pl.col(at).is_between(told_ns, until_ns, "left"))
                    )
            writer.manifest(*_manifest(recording))
            told_ns = until_ns
            if told_ns < end_ns:
                time.sleep(ROTATE_S)
        writer.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return OK


def _awaited(start_at: Start) -> int:
    print(READY, file=sys.stderr, flush=True)
    try:
        while (start_ns := start_at()) is None:
            time.sleep(0.05)
    except EOFError as error:
        raise DataError("it was never said when to begin") from error
    return start_ns


def _due(table: str) -> str | None:
    return _DUE.get(table, "t_ns") if table in STREAMED else None


def _of_node(recording: Recording, table: str, node: str) -> pl.DataFrame:
    frame = recording[table]
    return frame.filter(pl.col("node") == node) if "node" in frame.columns else frame


def _moved(frame: pl.DataFrame, shift_ns: int) -> pl.DataFrame:
    moments = [
        name
        for name, dtype in frame.schema.items()
        if dtype == I64 and name.endswith("_ns") and name not in _LENGTHS
    ]
    return frame.with_columns(pl.col(moments) + shift_ns)


def _manifest(recording: Recording) -> tuple[list[dict[str, object]], dict[str, object]]:
    first = json.loads(json.dumps(recording.manifests[0])) if recording.manifests else {}
    sources = first.get("sources", [])
    extra = {name: first[name] for name in ("bin_ns", "bytes_are") if name in first}
    return sources, {**extra, "played": True}
