"""Whose traffic a queue pair carries, and that no byte gets lost on the way."""

from __future__ import annotations

import polars as pl
import pytest
import recordings
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_bpf.analysis import attribute, measure
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.pairing import queue_pairs
from pulse_bpf.schema import conform, empty, flow_id

JOB = recordings.run(steps=3, hosts=3)
FRAMES = recordings.tables(JOB)


def flows_of(frames: dict[str, pl.DataFrame]) -> pl.DataFrame:
    return attribute.flows(Recording(frames))


def test_queue_pairs_numbered_alike_find_their_peers_by_gid() -> None:
    flows = flows_of(FRAMES)
    assert flows.height == 6
    for row in flows.iter_rows(named=True):
        host = int(row["node"][-1])
        peer = next(peer for peer in range(3) if peer != host and recordings.qpn(host, peer) == row["qpn"])
        assert (row["rank"], row["peer_rank"]) == (host, peer)
        assert (row["peer_node"], row["peer_pid"]) == (f"node{peer}", 100 + peer)
        assert row["comm_id"] == FRAMES["comms"]["comm_id"][0]
        assert row["reason"] is None


def test_one_life_seen_by_several_origins_is_one_row_with_the_best_of_each() -> None:
    rows = pl.DataFrame(
        {
            "node": "a",
            "nic": "m",
            "port": 1,
            "qpn": [7, 7, 7, 7],
            "peer_qpn": [9, 8, None, 5],
            "pid": [None, 11, 12, None],
            "created_ns": [100, None, 120, 500],
            "gone_ns": [None, 400, 390, None],
            "origin": ["capture", "netlink", "uprobe", "capture"],
        }
    )
    first = rows[1:3]
    merged = queue_pairs(conform(pl.concat([first, rows[3:]]), "qps"))
    assert merged.select("peer_qpn", "pid", "created_ns", "origin").rows() == [
        (8, 12, 120, "uprobe"),
        (5, None, 500, "capture"),
    ]
    assert merged["flow"].to_list() == [flow_id("a", "m", 1, 7, 0), flow_id("a", "m", 1, 7, 1)]


def test_samples_without_flow_belong_to_the_life_of_their_time() -> None:
    qps = pl.DataFrame(
        {
            "node": "a",
            "nic": "m",
            "port": 1,
            "qpn": 7,
            "created_ns": [None, 500],
            "gone_ns": [400, None],
            "origin": "uprobe",
        }
    )
    samples = pl.DataFrame(
        {
            "node": "a",
            "nic": "m",
            "port": 1,
            "qpn": 7,
            "direction": "tx",
            "t_ns": [10, 450, 600],
            "bin_ns": 10,
            "bytes": 1,
        }
    )
    frames = {"qps": conform(qps, "qps"), "samples": conform(samples, "samples")}
    lives = queue_pairs(frames["qps"])
    rows = attribute.samples(Recording(frames), lives).sort("t_ns")
    first, second = flow_id("a", "m", 1, 7, 0), flow_id("a", "m", 1, 7, 1)
    assert rows["flow"].to_list() == [first, first, second]


def test_rows_of_one_bin_add_up_and_two_sources_never_do() -> None:
    row = {"node": "a", "nic": "m", "port": 1, "qpn": 7, "flow": 1, "direction": "tx", "t_ns": 0}
    rows = [
        {**row, "source": "packets", "bin_ns": 10, "bytes": 5},
        {**row, "source": "packets", "bin_ns": 10, "bytes": 6},
        {**row, "source": "slow", "bin_ns": 1000, "bytes": 11},
    ]
    frames = {"samples": conform(pl.DataFrame(rows), "samples"), "qps": empty("qps")}
    summed = attribute.samples(Recording(frames), frames["qps"])
    assert summed["bytes"].to_list() == [11]
    assert summed["bin_ns"].to_list() == [10]


def test_a_queue_pair_of_two_possible_communicators_goes_where_its_calls_are() -> None:
    second = FRAMES["comms"].with_columns(
        pl.lit("other-3").alias("comm_id"), pl.lit(8192, pl.UInt64).alias("comm_ptr")
    )
    frames = FRAMES | {"comms": pl.concat([FRAMES["comms"], second])}
    assert flows_of(frames)["comm_id"].unique().to_list() == [FRAMES["comms"]["comm_id"][0]]
    ops = FRAMES["ops"].with_columns(
        pl.when(pl.col("seq") % 2 == 0).then(pl.lit("other-3")).otherwise("comm_id").alias("comm_id")
    )
    undecided = flows_of(frames | {"ops": ops})
    assert undecided["comm_id"].null_count() == undecided.height
    assert set(undecided["reason"]) == {"several communicators could use it"}


def test_a_peer_outside_the_recording_is_the_one_rank_that_was_not_seen() -> None:
    frames = {
        name: frame.filter(pl.col("node") != "node2") if "node" in frame.columns else frame
        for name, frame in FRAMES.items()
    }
    flows = flows_of(frames)
    towards = flows.filter(pl.col("peer_node") == "::ffff:10.0.0.3")
    assert towards["peer_rank"].to_list() == [2, 2]
    assert flows["reason"].null_count() == flows.height


def _dropped(table: str) -> dict[str, pl.DataFrame]:
    return FRAMES | {table: FRAMES[table].clear()}


@pytest.mark.parametrize("table", ["qps", "comms", "nics", "ops", "processes"])
def test_without_a_table_the_bytes_are_still_all_there(table: str) -> None:
    operators, _ = measure(Recording(_dropped(table)))
    counted = operators.filter(pl.col("level").is_in(["flow", "traffic", "unattributed"]))
    assert counted["bytes"].sum() == FRAMES["samples"]["bytes"].sum()
    unattributed = operators.filter(pl.col("level") == "unattributed")
    assert unattributed["reason"].null_count() == 0
    assert unattributed.is_empty() == (table in ("ops", "nics", "processes"))


@settings(max_examples=40)
@given(data=st.data())
def test_bytes_in_are_attributed_plus_unattributed(data: st.DataObject) -> None:
    """Whatever rows are missing from whatever table, every byte and repeat is in exactly one row."""

    def some(table: str) -> pl.DataFrame:
        frame = FRAMES[table]
        if table == "samples":
            share = data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.1]))
            return frame.sample(fraction=share, seed=data.draw(st.integers(0, 99))).with_columns(
                pl.when(pl.col("t_ns") % 7 == 0).then(pl.col("bytes") // 3).alias("retx_bytes")
            )
        keep = data.draw(
            st.lists(st.booleans(), min_size=min(frame.height, 24), max_size=min(frame.height, 24))
        )
        mask = (keep * (frame.height // max(len(keep), 1) + 1))[: frame.height]
        return frame.filter(pl.Series(mask, dtype=pl.Boolean))

    frames = FRAMES | {table: some(table) for table in ("qps", "comms", "nics", "ops", "samples")}
    operators, _ = measure(Recording(frames))
    counted = operators.filter(pl.col("level").is_in(["flow", "traffic", "unattributed"]))
    assert counted["bytes"].sum() == frames["samples"]["bytes"].sum()
    assert counted["retx_bytes"].sum() == frames["samples"]["retx_bytes"].sum()
