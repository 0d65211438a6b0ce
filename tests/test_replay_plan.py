"""What of a recording is replayed, and the packets that are planned for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_recordings import COUNTS, MTU, T0_NS, counts, job, nic, queue_pair, write

from pulse_bpf.cli import main
from pulse_bpf.errors import DataError
from pulse_bpf.lab.replay_packets import PSN_MASK, ROW, Planner
from pulse_bpf.lab.replay_rows import Rows

FIRST, MIDDLE, LAST_IMM, ONLY, ONLY_IMM, ACK = 6, 7, 9, 10, 11, 17
BIN_NS = 100_000

# Rows of two flows: (flow, bin, bytes, repeats, packets beyond what these take, ctl, ack).
rows = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 3),
        st.integers(0, 6 * MTU),
        st.integers(0, 3 * MTU),
        st.integers(0, 5),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=12,
)


def as_rows(drawn: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    """In the order of time; a flow's first row repeats nothing."""
    result = np.zeros(len(drawn), ROW)
    known: set[int] = set()
    for row, (flow, bin_, size, again, more, ctl, ack) in zip(
        result, sorted(drawn, key=lambda d: d[1]), strict=True
    ):
        again = min(again, size) if flow in known else 0
        if size:
            known.add(flow)
        data = -(-(size - again) // MTU) - (-again // MTU)
        row["t_ns"], row["bin_ns"], row["flow"], row["mtu"] = T0_NS + bin_ * BIN_NS, BIN_NS, flow, MTU
        row["bytes"], row["retx_bytes"], row["packets"] = size, again, data + more + ctl + ack
        row["ctl_packets"], row["ack_packets"] = ctl, ack
    return result


def meter(packets: np.ndarray[Any, Any]) -> Counter[tuple[int, int, str]]:
    """A plain account of packets by (flow, bin, column), like that of probes/bpf/roce.c."""
    counted: Counter[tuple[int, int, str]] = Counter()
    seen: set[tuple[int, int]] = set()
    for packet in packets:
        at = (int(packet["flow"]), int(packet["due_ns"]) // BIN_NS)
        counted[(*at, "packets")] += 1
        if packet["opcode"] == ACK:
            counted[(*at, "ack_packets")] += 1
            continue
        number = (at[0], int(packet["psn"]))
        if packet["opcode"] == ONLY and packet["message_bytes"] <= 512:
            counted[(*at, "ctl_packets")] += 1
        else:
            counted[(*at, "bytes")] += int(packet["payload_bytes"])
            counted[(*at, "retx_bytes")] += int(packet["payload_bytes"]) if number in seen else 0
        seen.add(number)
    return +counted


def planned(planner: Planner, *parts: tuple[np.ndarray[Any, Any], int | None]) -> np.ndarray[Any, Any]:
    return np.concatenate([packets for part in parts for packets in planner.plan(*part)])


def expected(rows: np.ndarray[Any, Any]) -> Counter[tuple[int, int, str]]:
    counted: Counter[tuple[int, int, str]] = Counter()
    for row in rows:
        for column in COUNTS:
            counted[int(row["flow"]), (int(row["t_ns"]) - T0_NS) // BIN_NS, column] += int(row[column])
    return +counted


def planner(flows: int = 2, first_psn: int = PSN_MASK - 5) -> Planner:
    return Planner(np.full(flows, first_psn), np.full(flows, -1), T0_NS, 1.0)


@given(rows, st.integers(0, 4))
def test_a_plan_measures_as_its_rows(drawn: list[tuple[int, ...]], cut: int) -> None:
    drawn = list({(d[0], d[1]): d for d in drawn}.values())
    all_rows = as_rows(drawn)
    until_ns = T0_NS + cut * BIN_NS
    early = all_rows["t_ns"] < until_ns
    plan = planner()
    packets = planned(plan, (all_rows[early], until_ns), (all_rows[~early], None))
    assert meter(packets) == expected(all_rows)
    assert (np.diff(packets["due_ns"].astype(np.int64)) >= 0).all()
    assert (plan.crowded_rows, plan.unrepeated_bytes) == (0, 0)


@given(rows)
def test_planned_messages_are_ones_that_a_card_would_send(drawn: list[tuple[int, ...]]) -> None:
    all_rows = as_rows(list({(d[0], d[1]): d for d in drawn}.values()))
    for flow in (0, 1):
        packets = planned(planner(), (all_rows, None))
        packets = packets[(packets["flow"] == flow) & (packets["opcode"] != ACK)]
        left = 0
        for packet in packets:
            opcode, payload = packet["opcode"], int(packet["payload_bytes"])
            assert (opcode in (FIRST, ONLY, ONLY_IMM)) == (left == 0)
            if opcode == FIRST:
                left = int(packet["message_bytes"])
                assert left > MTU
            if opcode in (FIRST, MIDDLE):
                assert payload == MTU
            if opcode in (ONLY, ONLY_IMM):
                assert packet["message_bytes"] == payload <= MTU
            else:
                left -= payload
            assert (left == 0) == (opcode not in (FIRST, MIDDLE))
        assert left == 0


def test_new_numbers_follow_each_other_around_the_wrap() -> None:
    all_rows = as_rows([(0, bin_, 5 * MTU, 0, 0, 1, 0) for bin_ in range(4)])
    psns = planned(planner(), (all_rows, None))["psn"]
    assert psns.tolist() == [(PSN_MASK - 5 + i) & PSN_MASK for i in range(24)]


def test_repeats_go_back_and_new_data_go_on() -> None:
    all_rows = as_rows(
        [(0, 0, 3 * MTU, 0, 0, 0, 0), (0, 1, 4 * MTU, 3 * MTU, 0, 0, 0), (0, 2, MTU, 0, 0, 0, 0)]
    )
    assert planned(planner(1, 10), (all_rows, None))["psn"].tolist() == [10, 11, 12, 13, 11, 12, 13, 14]


def test_acknowledgements_name_what_came_the_other_way() -> None:
    drawn = [(0, bin_, 2 * MTU, 0, 0, 0, 1) for bin_ in range(4)] + [(1, 0, MTU, 0, 0, 0, 1)]
    all_rows = as_rows(drawn)
    plan = Planner(np.array([100, 200]), np.array([1, 0]), T0_NS, 1.0)
    until_ns = T0_NS + 2 * BIN_NS
    early = all_rows["t_ns"] < until_ns
    latest = [99, 199]
    for packet in planned(plan, (all_rows[early], until_ns), (all_rows[~early], None)):
        if packet["opcode"] == ACK:
            assert packet["psn"] == latest[1 - packet["flow"]]
        else:
            latest[packet["flow"]] = int(packet["psn"])
    assert latest == [107, 200]


def test_a_flow_that_opens_with_repeats_is_told() -> None:
    row = as_rows([(0, 0, 2 * MTU, 0, 0, 0, 0)])
    row["retx_bytes"] = 2 * MTU
    plan = planner()
    assert planned(plan, (row, None))["psn"].tolist() == [PSN_MASK - 5, PSN_MASK - 4]
    assert plan.unrepeated_bytes == 2 * MTU


def test_a_row_whose_packets_cannot_carry_its_bytes_gets_more_and_is_told() -> None:
    row = as_rows([(0, 0, 3 * MTU, 0, 0, 0, 0)])
    row["packets"] = 1
    plan = planner()
    assert len(planned(plan, (row, None))) == 3
    assert plan.crowded_rows == 1


def test_packets_that_are_not_counted_are_as_few_as_can_be() -> None:
    row = as_rows([(0, 0, 3 * MTU + 1, 0, 0, 2, 0)])
    row["packets"] = -1
    plan = planner()
    assert planned(plan, (row, None))["payload_bytes"].tolist() == [64, 64, MTU, MTU, MTU, 1]
    assert plan.crowded_rows == 0


def test_speed_divides_times() -> None:
    all_rows = as_rows([(0, bin_, MTU, 0, 0, 0, 0) for bin_ in range(4)])
    fast = planned(Planner(np.zeros(1, np.int64), np.full(1, -1), T0_NS, 4.0), (all_rows, None))["due_ns"]
    slow = planned(Planner(np.zeros(1, np.int64), np.full(1, -1), T0_NS, 1.0), (all_rows, None))["due_ns"]
    assert (fast == slow // 4).all()


def test_large_batches_come_in_pieces_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    all_rows = as_rows([(flow, bin_, 5 * MTU, 0, 0, 0, 0) for bin_ in range(40) for flow in (0, 1)])
    monkeypatch.setattr("pulse_bpf.lab.replay_packets.CHUNK_PACKETS", 25)
    pieces = list(planner().plan(all_rows, None))
    assert max(map(len, pieces)) == 30
    assert (np.diff(np.concatenate(pieces)["due_ns"].astype(np.int64)) > 0).all()


# What of a recording is taken


def test_both_ends_of_a_flow_are_one_packet(tmp_path: Path) -> None:
    _, _, wired = job(tmp_path / "r", BIN_NS, 50, 3, 4, 5.0)
    found = Rows(tmp_path / "r")
    taken = np.concatenate([part for part, _ in found.before(None)])
    assert len(found.flows.headers) == 6
    assert taken["bytes"].sum() == wired["bytes"].sum()
    assert taken["packets"].sum() == wired["packets"].sum()
    assert (np.diff(taken["t_ns"]) >= 0).all()
    assert not found.flows.skipped
    assert set(found.flows.partners) == {-1}


def test_parts_of_one_bin_are_one_row(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    write(tmp_path / "r", [nic(1)], [qp], [rows_, rows_])
    taken = np.concatenate([part for part, _ in Rows(tmp_path / "r").before(None)])
    assert taken["t_ns"].tolist() == rows_["t_ns"].to_list()
    assert taken["bytes"].tolist() == (2 * rows_["bytes"]).to_list()


def test_of_two_sources_the_finer_is_taken(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    fine, coarse = (counts(qp, "tx", bin_ns, 50, 1, 5.0) for bin_ns in (BIN_NS, 10 * BIN_NS))
    write(tmp_path / "r", [nic(1)], [qp], [coarse.with_columns(source=pl.lit("other")), fine])
    taken = np.concatenate([part for part, _ in Rows(tmp_path / "r").before(None)])
    assert set(taken["bin_ns"]) == {BIN_NS}


def test_rows_without_a_flow_are_those_of_their_queue_pair(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    write(tmp_path / "r", [nic(1)], [qp], [rows_.with_columns(flow=pl.lit(None))])
    taken = np.concatenate([part for part, _ in Rows(tmp_path / "r").before(None)])
    assert taken["bytes"].sum() == rows_["bytes"].sum()


def test_an_unknown_path_mtu_is_the_smallest_that_carries_the_packets(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500) | {"path_mtu": None}
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    for root, found, mtu in (
        ("full", rows_, 1024),
        ("double", rows_.with_columns(bytes=2 * pl.col("bytes"), retx_bytes=0), 2048),
        ("uncounted", rows_.with_columns(packets=pl.lit(None)), 4096),
    ):
        write(tmp_path / root, [nic(1)], [qp], [found])
        assert Rows(tmp_path / root).flows.index["mtu"].to_list() == [mtu]


def test_a_flow_without_a_peer_is_left_out_and_told(tmp_path: Path) -> None:
    qps = [queue_pair(1, 2, 100, 500), queue_pair(1, 2, 101, 501) | {"peer_gid": None}]
    write(tmp_path / "r", [nic(1)], qps, [counts(qp, "tx", BIN_NS, 50, 1, 5.0) for qp in qps])
    assert main(["lab", "replay", str(tmp_path / "r"), "--pcap", str(tmp_path / "p")]) == 1
    assert Rows(tmp_path / "r").flows.skipped == ["1 flows whose peer is unknown"]


def test_a_recording_of_unknown_peers_is_no_use(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500) | {"peer_gid": None}
    write(tmp_path / "r", [nic(1)], [qp], [counts(qp, "tx", BIN_NS, 50, 1, 5.0)])
    with pytest.raises(DataError, match="1 flows whose peer is unknown"):
        Rows(tmp_path / "r")
    write(tmp_path / "empty", [nic(1)], [qp], [])
    with pytest.raises(DataError, match="holds no samples"):
        Rows(tmp_path / "empty")


def test_a_damaged_part_is_left_out_and_told(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    write(tmp_path / "r", [nic(1)], [qp], [counts(qp, "tx", BIN_NS, 50, 1, 5.0)] * 2)
    (tmp_path / "r/samples/000001.parquet").write_bytes(b"PAR1 and then nothing")
    found = Rows(tmp_path / "r")
    assert len(found.damaged) == 1
    assert "000001.parquet" in found.damaged[0]


def test_only_the_first_seconds(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    write(tmp_path / "r", [nic(1)], [qp], [rows_])
    found = Rows(tmp_path / "r")
    taken = np.concatenate([part for part, _ in found.before(20 * BIN_NS / 1e9)])
    assert taken["t_ns"].tolist() == [t for t in rows_["t_ns"] if t < found.first_ns + 20 * BIN_NS]
