"""Calls are read of some nodes at a time, whatever files they are in; what cannot be read is told."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import recordings
from polars.testing import assert_frame_equal

from pulse_bpf.analysis.calls import KINDS, Calls
from pulse_bpf.schema import OPS

OPS_OF_JOB = recordings.tables(recordings.run(steps=6, kinds=("AllReduce", "Group"), seed=3))["ops"]
NODES = OPS_OF_JOB["node"].unique().sort().to_list()


def _written(folder: Path, frames: list[pl.DataFrame]) -> list[Path]:
    paths = [folder / f"{number}.parquet" for number in range(len(frames))]
    for path, frame in zip(paths, frames, strict=True):
        frame.write_parquet(path)
    return paths


def test_calls_of_a_node_are_those_of_all_its_files(tmp_path: Path) -> None:
    first = pl.col("node") == NODES[0]
    half = OPS_OF_JOB.height // 2
    frames = [
        OPS_OF_JOB.head(half).filter(first),
        OPS_OF_JOB.head(half).filter(~first),
        OPS_OF_JOB.slice(half),
    ]
    calls = Calls(_written(tmp_path, frames), None)
    assert calls.rows == OPS_OF_JOB.height
    assert_frame_equal(calls.whole(), pl.concat(frames))
    for node in NODES:
        of_node = OPS_OF_JOB.filter(pl.col("node") == node)
        assert_frame_equal(calls.of([node], OPS.names()), of_node)
        assert_frame_equal(calls.of([node], ["node", "call_ns"]), of_node.select("node", "call_ns"))
    in_memory = Calls([], OPS_OF_JOB).kinds
    assert set(in_memory.schema) == set(KINDS)
    assert_frame_equal(calls.kinds, in_memory, check_row_order=False)


def test_calls_of_some_time_come_with_those_that_a_graph_holds(tmp_path: Path) -> None:
    moment = int(OPS_OF_JOB["call_ns"].max())  # type: ignore[arg-type]
    captured = OPS_OF_JOB.head(2).with_columns(origin=pl.lit("capture"))
    early = OPS_OF_JOB.filter(pl.col("call_ns") < moment)
    calls = Calls(_written(tmp_path, [captured, early, OPS_OF_JOB.filter(pl.col("call_ns") == moment)]), None)
    found = calls.begun([(moment, moment + 1)], ["call_ns", "origin"])
    assert found["call_ns"].to_list().count(moment) == (OPS_OF_JOB["call_ns"] == moment).sum()
    assert (found["origin"] == "capture").sum() == 2
    assert found.height < OPS_OF_JOB.height


def test_what_lacks_a_column_a_value_or_its_end_is_told(tmp_path: Path) -> None:
    without = OPS_OF_JOB.drop("nccl_seq")
    lacking = (
        OPS_OF_JOB.with_row_index().with_columns(pid=pl.when(pl.col("index") > 0).then("pid")).drop("index")
    )
    paths = _written(tmp_path, [without, lacking, OPS_OF_JOB, OPS_OF_JOB.cast({"call_ns": pl.String})])
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[: len(whole) // 2])
    calls = Calls(paths, None)
    assert calls.rows == 2 * OPS_OF_JOB.height - 1
    assert calls.whole()["nccl_seq"].head(OPS_OF_JOB.height).null_count() == OPS_OF_JOB.height
    cut, typed, rows = calls.damaged
    assert cut.startswith(f"{paths[2]}: ")
    assert typed.startswith(f"{paths[3]}: call_ns is ")
    assert rows == "ops: 1 rows without one of node, pid, kind, call_ns"
    # Damage that shows only when the rows are read.
    damaged = bytearray(whole)
    damaged[4 : len(whole) // 2] = bytes(len(whole) // 2 - 4)
    paths[2].write_bytes(damaged)
    late = Calls([paths[2]], None)
    assert late.damaged == []
    assert late.whole().is_empty()
    assert [text.startswith(f"{paths[2]}: ") for text in late.damaged] == [True]
