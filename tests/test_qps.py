"""What is known about queue pairs: lives of reused numbers, and which one sent to whom."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.nic.nldev import QUEUE_PAIRS
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.probes.verbs import QP_EVENTS
from pulse_bpf.schema import NICS, TABLES, flow_id

NIC = pl.DataFrame(
    [
        {"node": "a", "nic": "rxe1", "port": 1, "gids": ["::ffff:10.0.0.1"]},
        {"node": "b", "nic": "rxe2", "port": 1, "gids": ["::ffff:10.0.0.2"]},
    ],
    schema=NICS,
)
B, C = "::ffff:10.0.0.2", "::ffff:10.0.0.3"
RESET, INIT, RTR, RTS = range(4)


def event(t_ns: int, qpn: int, state: int | None = None, **more: Any) -> dict[str, Any]:
    seen = {"node": "a", "nic": "rxe1", "port": 1, "qpn": qpn, "pid": 7, "state": state, "t_ns": t_ns}
    return {"destroyed": False, **seen, **more}


def uprobe(qps: QpTable, *events: dict[str, Any]) -> None:
    qps.observe_uprobe(pl.DataFrame(list(events), schema=QP_EVENTS))


def netlink(qps: QpTable, t_ns: int, *pairs: tuple[int, int | None], nic: str = "rxe1", pid: int = 7) -> None:
    rows = [(nic, 1, qpn, peer, pid, "RC", RTS) for qpn, peer in pairs]
    qps.observe_netlink(pl.DataFrame(rows, schema=QUEUE_PAIRS, orient="row"), t_ns)


def capture(qps: QpTable, *seen: tuple[int, str, int]) -> None:
    """Packets received: (qpn, peer gid, packets)."""
    rows = [("a", "rxe1", 1, qpn, "::ffff:10.0.0.1", gid, packets) for qpn, gid, packets in seen]
    columns = ["node", "nic", "port", "qpn", "local_gid", "peer_gid", "packets"]
    qps.observe_capture(pl.DataFrame(rows, schema=columns, orient="row"))


def sender(qps: QpTable, gid: str, peer_qpn: int, t_ns: int = 10**6) -> int | None:
    asked = pl.DataFrame(
        {"nic": ["rxe1"], "peer_gid": [gid], "peer_qpn": [peer_qpn], "last_ns": [t_ns]},
        schema_overrides={"peer_qpn": pl.UInt32},
    )
    answer = qps.resolve_tx(asked)
    assert answer.height == 1
    return answer["qpn"][0]


def lives(qps: QpTable) -> list[tuple[int, int | None, int | None]]:
    return list(qps.frame().select("qpn", "created_ns", "gone_ns").iter_rows())


def test_one_queue_pair_known_from_three_sides_is_one_row() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21))
    capture(qps, (0x11, B, 3))
    uprobe(qps, event(100, 0x11, RTS, timeout=18, retry_count=7))
    frame = qps.frame()
    assert dict(frame.schema) == dict(TABLES["qps"])
    row = frame.row(0, named=True)
    expected = {
        "node": "a",
        "flow": flow_id("a", "rxe1", 1, 0x11, 0),
        "peer_qpn": 0x21,
        "peer_gid": B,
        "local_gid": "::ffff:10.0.0.1",
        "pid": 7,
        "timeout": 18,
        "origin": "uprobe",
        "created_ns": None,
        "gone_ns": None,
    }
    assert frame.height == 1
    assert {name: row[name] for name in expected} == expected


def test_a_reused_number_is_a_new_life() -> None:
    qps = QpTable(NIC)
    uprobe(qps, event(10, 0x11, INIT), event(20, 0x11, RTR, peer_qpn=0x21, peer_gid=B), event(30, 0x11, RTS))
    uprobe(qps, event(40, 0x11, destroyed=True))
    uprobe(qps, event(60, 0x11, INIT), event(70, 0x11, RTR, peer_qpn=0x31, peer_gid=C))
    assert lives(qps) == [(0x11, 10, 40), (0x11, 60, None)]
    assert [sender(qps, B, 0x21, 35), sender(qps, C, 0x31, 75)] == [0x11, 0x11]
    asked = pl.DataFrame({"nic": ["rxe1"] * 4, "qpn": [0x11] * 4, "last_ns": [5, 35, 59, 65]})
    flows = qps.flows(asked.cast({"qpn": pl.UInt32}))["flow"].to_list()
    first, second = (flow_id("a", "rxe1", 1, 0x11, n) for n in (0, 1))
    assert flows == [first, first, first, second]


def test_a_life_whose_end_was_not_seen_ends_where_the_next_begins() -> None:
    qps = QpTable(NIC)
    uprobe(qps, event(20, 0x11, RTR, peer_qpn=0x21, peer_gid=B))
    uprobe(qps, event(60, 0x11, INIT), event(70, 0x11, RTR, peer_qpn=0x21, peer_gid=B))
    assert lives(qps) == [(0x11, None, 60), (0x11, 60, None)]


def test_calls_read_after_the_listing_that_shows_their_effect_make_no_second_life() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50)
    netlink(qps, 100, (0x11, 0x21))
    uprobe(qps, event(60, 0x11, INIT), event(70, 0x11, RTR, peer_qpn=0x21, peer_gid=B))
    assert lives(qps) == [(0x11, 60, None)]


def test_the_end_of_an_earlier_life_read_late_does_not_end_the_later_one() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21))
    netlink(qps, 100, (0x11, 0x31))
    uprobe(qps, event(60, 0x11, destroyed=True), event(70, 0x11, INIT), event(80, 0x11, RTR, peer_qpn=0x31))
    assert qps.frame()["gone_ns"].to_list() == [50, None]
    assert qps.frame()["peer_qpn"].to_list() == [0x21, 0x31]


def test_what_netlink_no_longer_lists_is_gone() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21), (0x12, 0x22))
    uprobe(qps, event(55, 0x13, INIT))
    netlink(qps, 100, (0x12, 0x22))
    assert lives(qps) == [(0x11, None, 100), (0x12, None, None), (0x13, 55, None)]
    netlink(qps, 150, (0x11, 0x41), (0x12, 0x22))
    assert lives(qps)[:2] == [(0x11, None, 100), (0x11, 100, None)]


def test_a_listing_does_not_revive_what_was_destroyed() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21))
    uprobe(qps, event(80, 0x11, destroyed=True))
    netlink(qps, 100, (0x11, 0x21))
    assert lives(qps) == [(0x11, None, 80)]


def test_another_process_on_the_same_number_is_another_life() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21))
    netlink(qps, 100, (0x11, 0x21), pid=8)
    assert lives(qps) == [(0x11, None, 50), (0x11, 50, None)]


def test_late_packets_of_an_earlier_peer_change_nothing() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21))
    capture(qps, (0x11, B, 100), (0x11, C, 2))
    capture(qps, (0x11, C, 5))
    assert qps.frame()["peer_gid"].to_list() == [B]
    assert qps.frame().height == 1


def test_devices_that_are_not_recorded_are_skipped() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21), nic="mlx5_9")
    assert qps.frame().is_empty()


def test_a_peer_gid_learnt_from_packets_tells_equal_peer_numbers_apart() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21), (0x12, 0x21))
    assert sender(qps, B, 0x21) is None, "two candidates: no guess"
    capture(qps, (0x11, B, 1))
    assert sender(qps, B, 0x21) == 0x11
    assert sender(qps, C, 0x21) == 0x12, "the only one left whose peer is not known to be another"
    capture(qps, (0x12, C, 1))
    assert sender(qps, C, 0x21) == 0x12
    assert sender(qps, "::ffff:10.0.0.9", 0x21) is None


def test_a_gone_queue_pair_keeps_what_it_sent_but_is_not_guessed() -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, (0x11, 0x21), (0x12, 0x22))
    capture(qps, (0x11, B, 1))
    netlink(qps, 100)
    assert sender(qps, B, 0x21) == 0x11
    assert sender(qps, B, 0x22) is None


@pytest.mark.parametrize("first", [0x11, 0x12])
def test_two_lives_with_one_peer_since_ever_are_not_told_apart(first: int) -> None:
    qps = QpTable(NIC)
    second = 0x11 + 0x12 - first
    netlink(qps, 50, (first, 0x21), (second, 0x21))
    capture(qps, (first, B, 1), (second, B, 1))
    assert sender(qps, B, 0x21) is None


pairs = st.dictionaries(
    st.integers(1, 6), st.tuples(st.integers(1, 4), st.sampled_from([B, C, None])), max_size=6
)


@given(
    pairs, st.lists(st.tuples(st.sampled_from([B, C]), st.integers(1, 5), st.integers(0, 10**6)), max_size=8)
)
def test_senders_are_those_of_a_plain_search(
    known: dict[int, tuple[int, str | None]], asked: list[tuple[str, int, int]]
) -> None:
    qps = QpTable(NIC)
    netlink(qps, 50, *((qpn, peer) for qpn, (peer, _) in known.items()))
    capture(qps, *((qpn, gid, 1) for qpn, (_, gid) in known.items() if gid))
    frame = pl.DataFrame(
        [("rxe1", gid, peer, t_ns, i) for i, (gid, peer, t_ns) in enumerate(asked)],
        schema={
            "nic": pl.String,
            "peer_gid": pl.String,
            "peer_qpn": pl.UInt32,
            "last_ns": pl.Int64,
            "row": pl.Int64,
        },
        orient="row",
    )
    answer = qps.resolve_tx(frame)
    expected = []
    for gid, peer, _ in asked:
        exact = [qpn for qpn, seen in known.items() if seen == (peer, gid)]
        unknown = [qpn for qpn, seen in known.items() if seen == (peer, None)]
        if exact:
            expected.append(exact[0] if len(exact) == 1 else None)
        else:
            expected.append(unknown[0] if len(unknown) == 1 else None)
    assert answer.sort("row")["qpn"].to_list() == expected
