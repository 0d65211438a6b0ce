"""Which queue pairs are two ends of one connection, where identical nodes number theirs alike."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.pairing import with_peers
from pulse_bpf.schema import conform

NODES = ("a", "b", "c")
# Each node sends on queue pair 1 to the next and receives on 2 from the one before it.
QPNS = {1: 2, 2: 1}


def _lives(gids: dict[tuple[str, int], str] | None = None) -> pl.DataFrame:
    rows = [
        {"node": node, "nic": "m", "port": 1, "qpn": qpn, "peer_qpn": peer, "flow": 10 * number + qpn}
        | {"pid": 100, "peer_gid": (gids or {}).get((node, qpn)), "origin": "netlink"}
        for number, node in enumerate(NODES)
        for qpn, peer in QPNS.items()
    ]
    return conform(pl.DataFrame(rows), "qps")


def _comms(*members: tuple[str, str], nranks: int = 3) -> pl.DataFrame:
    ranks: dict[str, int] = {}
    rows = []
    for node, comm in members:
        ranks[comm] = ranks.get(comm, -1) + 1
        rows.append({"node": node, "pid": 100, "comm_id": comm, "rank": ranks[comm], "nranks": nranks})
    return conform(pl.DataFrame(rows), "comms")


WHOLE = _comms(*((node, "x") for node in NODES))
NICS = conform(
    pl.DataFrame({"node": list(NODES), "nic": "m", "port": 1, "gids": [[f"::{n}"] for n in NODES]}), "nics"
)
# What left at each 1 arrived at the next one's 2.
TOTALS = pl.DataFrame(
    {"flow": [1, 12, 11, 22, 21, 2], "tx": [9_000_000, 300, 8_000_000, 200, 7_000_000, 100], "rx": 0}
)
BOTH = TOTALS.with_columns(rx=pl.Series([300, 9_000_000, 200, 8_000_000, 100, 7_000_000]))
NOTHING = TOTALS.clear()
TRUE = {1: 12, 12: 1, 11: 22, 22: 11, 21: 2, 2: 21}


def _pairs(lives: pl.DataFrame, comms: pl.DataFrame, totals: pl.DataFrame) -> tuple[dict[int, int], int]:
    """The pairs found, and how many others are possible for the rest."""
    known, possible = with_peers(lives, NICS, comms, totals.cast({"flow": pl.UInt64}))
    return dict(known.drop_nulls("peer_flow").select("flow", "peer_flow").iter_rows()), possible.height


def test_of_alike_numbers_nothing_is_known_without_more() -> None:
    assert _pairs(_lives(), WHOLE, NOTHING) == ({}, 12)


def test_what_one_end_sent_the_other_received() -> None:
    assert _pairs(_lives(), WHOLE, BOTH) == (TRUE, 0)


def test_where_only_the_sender_counts_both_ends_do_not_send_data() -> None:
    pairs, possible = _pairs(_lives(), WHOLE, TOTALS)
    assert pairs == {}
    assert possible == 12
    backwards = TOTALS.with_columns(tx=pl.when(pl.col("flow") == 12).then(10_000_000).otherwise("tx"))
    assert _pairs(_lives(), WHOLE, backwards) == ({1: 22, 22: 1, 21: 2, 2: 21}, 0)


def test_an_address_at_one_end_tells_of_both_and_leaves_the_rest() -> None:
    assert _pairs(_lives({("a", 1): "::b"}), WHOLE, NOTHING) == (
        {1: 12, 12: 1, 11: 22, 22: 11, 21: 2, 2: 21},
        0,
    )


def test_an_address_elsewhere_is_of_no_node_here() -> None:
    lives = _lives({(node, qpn): "::elsewhere" for node in NODES for qpn in QPNS})
    assert _pairs(lives, WHOLE, NOTHING) == ({}, 0)


def test_processes_without_a_common_communicator_are_no_peers() -> None:
    comms = _comms(("a", "x"), ("b", "x"), ("c", "y"), ("c", "y"), nranks=2)
    pairs, _ = _pairs(_lives(), comms, NOTHING)
    assert pairs == {1: 12, 12: 1, 11: 2, 2: 11}


def test_where_members_were_not_recorded_one_of_them_may_be_the_peer() -> None:
    comms = _comms(("a", "x"), ("b", "x"), ("c", "y"), nranks=4)
    pairs, possible = _pairs(_lives(), comms, NOTHING)
    assert pairs == {}
    assert possible == 4
    assert _pairs(_lives({("a", 1): "::b"}), comms, NOTHING)[0] == {1: 12, 12: 1}
