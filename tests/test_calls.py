"""Calls are read of some nodes at a time, whatever files they are in; what cannot be read is told."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
import recordings
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pulse_bpf.analysis.calls import KINDS, Calls
from pulse_bpf.analysis.pairing import FOREVER
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
        for columns in (OPS.names(), ["node", "call_ns"]):
            (found,) = calls.in_time([node], columns)
            assert found[0] == FOREVER
            assert_frame_equal(found[1], of_node.select(columns).sort("call_ns"), check_row_order=False)
    in_memory = Calls([], OPS_OF_JOB).kinds
    assert set(in_memory.schema) == set(KINDS)
    assert_frame_equal(calls.kinds, in_memory, check_row_order=False)


@given(
    st.lists(st.integers(0, 3), min_size=OPS_OF_JOB.height, max_size=OPS_OF_JOB.height), st.integers(1, 40)
)
@settings(max_examples=20)
def test_calls_come_in_the_order_of_time_whatever_file_they_are_in(places: list[int], chunk: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("pulse_bpf.analysis.calls.CHUNK_ROWS", chunk)
        frames = [OPS_OF_JOB.filter(pl.Series(places) == place) for place in range(4)]
        lacking = frames[0].drop("nccl_seq")
        calls = Calls(_written(Path(folder), [lacking, *frames[1:]]), None)
        before_ns, rows = 0, []
        for until_ns, found in calls.in_time(NODES[:2], ["node", "pid", "seq", "call_ns"]):
            assert found["call_ns"].is_between(before_ns, until_ns, closed="left").all()
            before_ns = until_ns
            rows.append(found)
        assert before_ns == FOREVER
        wanted = OPS_OF_JOB.filter(pl.col("node").is_in(NODES[:2]))
        assert_frame_equal(pl.concat(rows), wanted.select(rows[0].columns), check_row_order=False)
        if not any(places):
            assert max(map(len, rows)) < 2 * chunk + OPS_OF_JOB["call_ns"].value_counts()["count"].max()


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
