"""Samples read batch by batch: every row once, in the order of time, whatever parts they are in."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.samples import BATCH
from pulse_bpf.schema import conform, empty, flow_id
from pulse_bpf.store import RecordingWriter

SECOND_NS = 10**9
COUNTS = ["bytes", "retx_bytes", "ctl_packets"]


def _rows(node: str, first_ns: int, count: int = 300, **given: object) -> pl.DataFrame:
    """Rows of three QPs and both directions, in the order that a recorder writes."""
    row = pl.DataFrame({"number": range(count)})
    rows = row.select(
        pl.lit(node).alias("node"),
        nic=pl.lit("mlx5_0"),
        port=1,
        qpn=7 + pl.col("number") % 3,
        source=pl.lit("packets"),
        direction=pl.when(pl.col("number") % 2 == 0).then(pl.lit("tx")).otherwise(pl.lit("rx")),
        t_ns=first_ns + pl.col("number") * 1000,
        bin_ns=1000,
        bytes=pl.col("number") * 100,
        ctl_packets=pl.col("number") % 5,
    )
    flows = pl.Series("flow", [flow_id(node, "mlx5_0", 1, int(qpn), 0) for qpn in rows["qpn"]], pl.UInt64)
    rows = rows.with_columns(flows).with_columns(pl.lit(value).alias(name) for name, value in given.items())
    return conform(rows, "samples").sort("flow", "source", "direction", "t_ns")


def _qps(*nodes: str) -> pl.DataFrame:
    return conform(
        pl.DataFrame(
            [
                {"node": node, "nic": "mlx5_0", "port": 1, "qpn": 7 + number}
                for node in nodes
                for number in range(3)
            ]
        ).with_columns(origin=pl.lit("netlink")),
        "qps",
    )


def _write(directory: Path, parts: list[pl.DataFrame], qps: pl.DataFrame) -> Path:
    writer = RecordingWriter(directory)
    for part in parts:
        writer.append("samples", part)
    writer.replace("qps", qps)
    writer.manifest([], {})
    writer.close()
    return directory


def _read(recording: Recording) -> pl.DataFrame:
    """All batches as one; their order is checked on the way."""
    frames, until = [pl.DataFrame(schema=BATCH)], {}
    last: dict[tuple[int, int], int] = {}
    for batch in recording.samples.batches():
        assert batch.rows.schema == BATCH
        assert batch.rows.null_count().sum_horizontal().item() == 0
        if batch.rows.is_empty():
            continue
        begin_ns = batch.rows["t_ns"].min()
        before = until.get(batch.nodes, (0, 0))
        assert begin_ns >= (before[0] if before[1] == batch.until_ns else before[1])
        if before[1] != batch.until_ns:
            until[batch.nodes] = (before[1], batch.until_ns)
        assert batch.rows["t_ns"].max() < batch.until_ns
        for (flow, tx), rows in batch.rows.partition_by("flow", "tx", as_dict=True).items():
            assert rows["t_ns"].is_sorted()
            assert rows["t_ns"][0] >= last.get((flow, tx), 0)
            last[flow, tx] = rows["t_ns"][-1]
        frames.append(batch.rows)
    return pl.concat(frames)


def _as_batch(rows: pl.DataFrame) -> pl.DataFrame:
    return (
        rows.with_columns((pl.col("direction") == "tx").cast(pl.UInt8).alias("tx"))
        .with_columns(pl.col(COUNTS).fill_null(0))
        .select(BATCH.names())
        .sort(pl.all())
    )


def test_parts_of_two_nodes_come_node_by_node_and_whole(tmp_path: Path) -> None:
    parts = [_rows(node, second * SECOND_NS) for second in range(3) for node in ("a", "b")]
    recording = load([_write(tmp_path / "r", parts, _qps("a", "b"))])
    assert recording.samples.nodes == ["a", "b"]
    order = [batch.nodes for batch in recording.samples.batches()]
    assert order == [("a",)] * 3 + [("b",)] * 3
    assert _read(recording).sort(pl.all()).equals(_as_batch(pl.concat(parts)))
    assert recording.samples.unlisted.is_empty()
    assert recording.damaged == []


def test_parts_that_overlap_in_time_are_put_in_order(tmp_path: Path) -> None:
    parts = [_rows("a", first_ns) for first_ns in (0, 250_000, 290_000, 295_000, SECOND_NS)]
    recording = load([_write(tmp_path / "r", parts, _qps("a"))])
    assert _read(recording).sort(pl.all()).equals(_as_batch(pl.concat(parts)))


def test_nodes_in_one_part_come_together(tmp_path: Path) -> None:
    parts = [pl.concat([_rows("b", 0), _rows("a", 500)]), _rows("a", SECOND_NS)]
    recording = load([_write(tmp_path / "r", parts, _qps("a", "b"))])
    assert {batch.nodes for batch in recording.samples.batches()} == {("a", "b")}
    assert _read(recording).sort(pl.all()).equals(_as_batch(pl.concat(parts)))


@pytest.mark.parametrize("lacking", [{}, {"retx_bytes": None}, {"source": None}, {"bin_ns": 2000}])
def test_columns_of_one_value_are_what_they_were(tmp_path: Path, lacking: dict[str, object]) -> None:
    rows = _rows("a", 0, **lacking).filter(pl.col("direction") == "rx")
    assert _read(load([_write(tmp_path / "r", [rows], _qps("a"))])).sort(pl.all()).equals(_as_batch(rows))


@pytest.mark.parametrize("wrong", [{"bin_ns": 0}, {"direction": "aside"}, {"direction": "up"}])
def test_rows_of_no_width_or_direction_are_counted_and_dropped(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    parts = [_rows("a", 0), _rows("a", SECOND_NS, 30, **wrong)]
    recording = load([_write(tmp_path / "r", parts, _qps("a"))])
    assert _read(recording).sort(pl.all()).equals(_as_batch(parts[0]))
    assert len(recording.damaged) == 1
    assert recording.damaged[0].startswith("samples: 30 rows ")


def test_a_part_of_which_some_rows_have_no_direction_is_damaged(tmp_path: Path) -> None:
    aside = pl.when(pl.int_range(pl.len()) == 9).then(pl.lit("sideways")).otherwise("direction")
    part = _rows("a", SECOND_NS).with_columns(direction=aside)
    recording = load([_write(tmp_path / "r", [_rows("a", 0), part], _qps("a"))])
    assert _read(recording).sort(pl.all()).equals(_as_batch(_rows("a", 0)))
    assert ["sideways" in text for text in recording.damaged] == [True]


def test_repeats_are_never_more_than_the_bytes_they_are_among(tmp_path: Path) -> None:
    rows = _rows("a", 0).with_columns(retx_bytes=pl.when(pl.col("qpn") == 8).then(10**9).cast(pl.UInt64))
    read = _read(load([_write(tmp_path / "r", [rows], _qps("a"))]))
    assert read["bytes"].sum() == rows["bytes"].sum()
    assert read["retx_bytes"].sum() == rows.filter(pl.col("qpn") == 8)["bytes"].sum()


def test_a_part_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    parts = [_rows("a", 0), _rows("a", SECOND_NS)]
    one = _write(tmp_path / "one", parts, _qps("a"))
    shutil.copy(one / "samples" / "000000.parquet", one / "samples" / "again.parquet")
    shutil.copytree(one, tmp_path / "two")
    assert _read(load([one, tmp_path / "two", one])).sort(pl.all()).equals(_as_batch(pl.concat(parts)))


def test_of_two_sources_the_one_with_narrow_bins_counts(tmp_path: Path) -> None:
    slow = _rows("a", 0, source="counters", bin_ns=100_000)
    other = _rows("b", 0, source="counters", bin_ns=100_000)
    parts = [_rows("a", 0), slow, other]
    read = _read(load([_write(tmp_path / "r", parts, _qps("a", "b"))]))
    assert read.sort(pl.all()).equals(_as_batch(pl.concat([parts[0], other])))


def test_rows_without_a_flow_get_that_of_their_time_and_strangers_are_listed(tmp_path: Path) -> None:
    qps = (
        _qps("a")
        .with_columns(created_ns=pl.lit([None, SECOND_NS]), gone_ns=pl.lit([SECOND_NS - 1, None]))
        .explode("created_ns", "gone_ns")
    )
    parts = [_rows("a", second * SECOND_NS, flow=None) for second in (0, 1)]
    parts.append(_rows("b", 0))
    recording = load([_write(tmp_path / "r", parts, qps)])
    read = _read(recording)
    ids = {(life, qpn): flow_id("a", "mlx5_0", 1, qpn, life) for life in (0, 1) for qpn in (7, 8, 9)}
    assert {flow for (life, _), flow in ids.items() if life == 0} == set(
        read.filter(pl.col("t_ns") < SECOND_NS)["flow"]
    ) - set(recording.samples.unlisted["flow"])
    assert set(read.filter(pl.col("t_ns") >= SECOND_NS)["flow"]) == {
        flow for (life, _), flow in ids.items() if life == 1
    }
    assert sorted(recording.samples.unlisted.rows()) == sorted(
        (flow_id("b", "mlx5_0", 1, qpn, 0), "b", "mlx5_0", 1, qpn) for qpn in (7, 8, 9)
    )


def test_a_part_that_breaks_off_is_named_once_and_the_rest_is_read(tmp_path: Path) -> None:
    parts = [_rows("a", second * SECOND_NS, 5000) for second in range(3)]
    directory = _write(tmp_path / "r", parts, _qps("a"))
    path = directory / "samples" / "000001.parquet"
    content = bytearray(path.read_bytes())
    content[100 : len(content) // 2] = bytes(len(content) // 2 - 100)
    path.write_bytes(content)
    recording = load([directory])
    for _ in range(2):
        assert _read(recording).height == 10_000
    assert len(recording.damaged) == 1
    assert str(path) in recording.damaged[0]


@settings(max_examples=30)
@given(
    cuts=st.lists(st.integers(0, 600), max_size=4),
    dropped=st.sets(st.sampled_from(["flow", "source", "retx_bytes", "ctl_packets", "port", "qpn"])),
)
def test_memory_and_parts_read_alike(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], dropped: set[str]
) -> None:
    rows = pl.concat([_rows("a", 0), _rows("b", 70)]).with_columns(
        pl.when(pl.lit(name not in dropped)).then(name).alias(name)
        for name in ("source", *COUNTS[1:], "port", "qpn")
    )
    if "flow" in dropped:
        rows = rows.with_columns(pl.when(pl.col("t_ns") % 3 > 0).then("flow").alias("flow"))
    edges = sorted({0, *cuts, rows.height})
    parts = [rows[begin:end] for begin, end in pairwise(edges)]
    directory = _write(tmp_path_factory.mktemp("r") / "r", parts, _qps("a", "b"))
    from_files = _read(load([directory]))
    in_memory = _read(Recording({"samples": rows, "qps": _qps("a", "b")}))
    assert from_files.sort(pl.all()).equals(in_memory.sort(pl.all()))
    assert from_files["bytes"].sum() == rows["bytes"].sum()


def test_without_rows_there_are_no_batches(tmp_path: Path) -> None:
    recording = load([_write(tmp_path / "r", [], empty("qps"))])
    assert _read(recording).is_empty()
    assert recording.missing == ["nics", "ops", "comms", "qps", "samples"]
