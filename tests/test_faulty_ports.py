"""What ports of NICs show by themselves: a ceiling of what they send, and packets that receivers refuse."""

from __future__ import annotations

import polars as pl
import pytest

from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.capped import find_capped
from pulse_bpf.analysis.refused import find_refused
from pulse_bpf.schema import PORT_COUNTERS

NODES, NICS = ("a", "b", "c", "d", "e", "f"), ("mlx5_0", "mlx5_1")
US, MS = 1_000, 1_000_000
BIN_NS, OPERATORS = 100 * US, 30
LINE_GBPS, CEILING_GBPS = 400.0, 150.0
STEP = pl.Schema({**metrics.OPERATORS, "step": pl.Int64})
NO_MARKS = pl.DataFrame(
    [(node, nic, 0) for node in NODES for nic in NICS], schema=["node", "nic", "marks"], orient="row"
)
FLAT = {"max_gbps": CEILING_GBPS, "wmed_gbps": CEILING_GBPS, "active_ns": 5 * MS}


def rings(changed: dict[tuple[str, str], dict[str, object]], **of_all: object) -> pl.DataFrame:
    """One operator every 10 ms in a ring of each NIC; all but the `changed` ports send in bursts at line rate."""
    rows = []
    for step in range(OPERATORS):
        for nic in NICS:
            for rank, node in enumerate(NODES):
                row: dict[str, object] = {"node": node, "nic": nic, "pid": rank, "level": "flow"}
                row |= {"direction": "tx", "peer_node": NODES[(rank + 1) % len(NODES)], "peer_nic": nic}
                row |= {
                    "comm_id": "00-6",
                    "kind": "AllReduce",
                    "op_bytes": 10**8,
                    "nranks": 6,
                    "bytes": 10**8,
                }
                row |= {"op_seq": step, "step": step, "completion": 1.0, "bin_ns": BIN_NS}
                row |= {"start_ns": 10 * step * MS, "last_byte_ns": (10 * step + 5) * MS}
                row |= {"max_gbps": LINE_GBPS, "wmed_gbps": LINE_GBPS, "active_ns": 2 * MS}
                row |= {"gap_unknown_ns": 3 * MS, "stall_ns": 0}
                if (node, nic) in changed:
                    row |= {"gap_unknown_ns": 0} | changed[node, nic]
                rows.append(row | of_all)
    return pl.DataFrame(
        rows, schema_overrides={name: dtype for name, dtype in STEP.items() if name in rows[0]}
    )


def with_columns(rows: pl.DataFrame) -> pl.DataFrame:
    return pl.concat([pl.DataFrame(schema=STEP), rows], how="diagonal")


def capped(rows: pl.DataFrame, marks: dict[tuple[str, str], int] | None = None) -> list[tuple[object, ...]]:
    counted = [(node, nic, (marks or {}).get((node, nic), 0)) for node in NODES for nic in NICS]
    table = pl.DataFrame(counted, schema=["node", "nic", "marks"], orient="row")
    found = find_capped(with_columns(rows), table)
    return sorted((item.scope, item.node or item.nodes, item.nic) for item in found)


def test_ports_that_send_in_bursts_have_no_ceiling() -> None:
    assert capped(rings({})) == []


def test_the_port_that_never_sends_faster_is_named_and_not_those_that_wait_for_it() -> None:
    assert capped(rings({("c", "mlx5_1"): FLAT})) == [("nic", "c", "mlx5_1")]


def test_two_slow_ports_are_both_named() -> None:
    two = {("a", "mlx5_0"): FLAT, ("d", "mlx5_1"): FLAT}
    assert capped(rings(two)) == [("nic", "a", "mlx5_0"), ("nic", "d", "mlx5_1")]


def test_two_neighbours_with_one_ceiling_are_a_group() -> None:
    assert capped(rings({("b", "mlx5_0"): FLAT, ("c", "mlx5_0"): FLAT})) == [("group", ["b", "c"], None)]


def test_a_rate_that_many_ports_have_in_common_names_none() -> None:
    assert capped(rings({(node, "mlx5_0"): FLAT for node in NODES})) == []
    assert capped(rings({("b", nic): FLAT for nic in NICS})) == []


def test_who_waits_in_a_ring_with_a_slower_port_is_not_named() -> None:
    faster = {"max_gbps": 1.2 * CEILING_GBPS, "wmed_gbps": 1.2 * CEILING_GBPS}
    assert capped(rings({("b", "mlx5_0"): FLAT, ("e", "mlx5_0"): FLAT | faster})) == [("nic", "b", "mlx5_0")]


def test_slices_with_silences_between_are_no_ceiling() -> None:
    """Through a slow GPU they come one by one, each as fast as any."""
    assert capped(rings({("c", "mlx5_1"): FLAT | {"gap_unknown_ns": 2 * MS, "active_ns": 3 * MS}})) == []


def test_a_port_that_the_network_slows_down_is_not_named() -> None:
    assert capped(rings({("c", "mlx5_1"): FLAT}), {("c", "mlx5_1"): 500}) == []


def test_a_port_that_the_network_asks_less_often_than_it_is_slow_is_slow_by_itself() -> None:
    assert capped(rings({("c", "mlx5_1"): FLAT}), {("c", "mlx5_1"): OPERATORS // 2}) == [
        ("nic", "c", "mlx5_1")
    ]


def test_a_port_that_is_faster_at_times_has_no_ceiling() -> None:
    rows = rings({("c", "mlx5_1"): FLAT})
    rows = rows.with_columns(
        max_gbps=pl.when(pl.col("step") % 2 == 0).then(LINE_GBPS).otherwise(pl.col("max_gbps"))
    )
    assert capped(rows) == []


def test_a_port_half_of_whose_traffic_is_unknown_is_not_judged() -> None:
    rows = rings({("c", "mlx5_1"): FLAT})
    unknown = rows.filter(pl.col("node") == "c", pl.col("nic") == "mlx5_1").with_columns(
        level=pl.lit("unattributed"), comm_id=None, step=None
    )
    assert capped(pl.concat([rows, unknown], how="diagonal_relaxed")) == []


def test_without_counters_a_ring_tells_the_link() -> None:
    (item,) = find_capped(with_columns(rings({("c", "mlx5_1"): FLAT})), None)
    assert (item.scope, item.node, item.nic, item.peer_node) == ("link", "c", "mlx5_1", "d")


def test_what_is_sent_and_taken_at_one_rate_in_pairs_is_the_machine() -> None:
    """A GPU that moves data slowly: nobody waits in the midst of an exchange, so what comes in is slow for it alone."""
    into = {"wmed_gbps": CEILING_GBPS, "active_ns": 5 * MS, "gap_unknown_ns": 0}
    rows = rings({("c", "mlx5_1"): FLAT, ("b", "mlx5_1"): into}, kind="Group")
    assert capped(rows) == [("node", "c", None)]


def test_in_pairs_what_comes_in_faster_than_bins_can_tell_is_not_slow() -> None:
    into = {"wmed_gbps": CEILING_GBPS, "active_ns": 2 * BIN_NS, "gap_unknown_ns": 0}
    rows = rings({("c", "mlx5_1"): FLAT, ("b", "mlx5_1"): into}, kind="Group")
    assert capped(rows) == [("nic", "c", "mlx5_1")]


def test_a_trickle_of_credits_long_after_the_data_hides_no_ceiling() -> None:
    rows = rings({("c", "mlx5_1"): FLAT})
    trickle = rows.filter(pl.col("step") % 3 == 0).with_columns(
        op_seq=pl.col("op_seq") + 1000,
        step=pl.col("step") + 1000,
        bytes=pl.lit(10**6),
        op_bytes=pl.lit(10**6),
        active_ns=pl.lit(90 * MS),
        max_gbps=pl.lit(LINE_GBPS),
        wmed_gbps=pl.lit(LINE_GBPS),
    )
    assert capped(pl.concat([rows, trickle.cast(dict(rows.schema))])) == [("nic", "c", "mlx5_1")]


@pytest.mark.parametrize(("other_gbps", "place"), [(250.0, []), (150.0, [("nic", "c", "mlx5_1")])])
def test_who_shares_a_full_receiver_has_no_ceiling(
    other_gbps: float, place: list[tuple[str, str, str]]
) -> None:
    """c and e both send to d: at its line rate where the other has the rest of it, and below where c is slow."""
    rows = rings({("c", "mlx5_1"): FLAT, ("e", "mlx5_1"): {"wmed_gbps": other_gbps}})
    d = (pl.col("node") == "e") & (pl.col("nic") == "mlx5_1")
    rows = rows.with_columns(peer_node=pl.when(d).then(pl.lit("d")).otherwise("peer_node"))
    assert capped(rows) == place


@pytest.mark.parametrize(("share", "slow"), [(0.5, False), (1 / 3, False), (0.47, True)])
def test_just_a_half_or_a_third_a_few_times_is_what_sharers_of_a_receiver_get(
    share: float, slow: bool
) -> None:
    rows = rings({("c", "mlx5_1"): FLAT | dict.fromkeys(("max_gbps", "wmed_gbps"), share * LINE_GBPS)})
    few = rows.filter(pl.col("step") < 10)
    assert capped(few) == ([("nic", "c", "mlx5_1")] if slow else [])
    assert capped(rows) == [("nic", "c", "mlx5_1")]


def test_a_rate_beside_which_the_port_sends_more_is_no_ceiling() -> None:
    """Half of an operator is taken to be of one before: the other half alone is at half the rate of the port."""
    rows = rings({("c", "mlx5_1"): FLAT})
    c = (pl.col("node") == "c") & (pl.col("nic") == "mlx5_1")
    other = rows.filter(c).with_columns(peer_node=pl.lit("f"), op_seq=pl.col("op_seq") + 1000)
    assert capped(pl.concat([rows, other])) == []


def pieces(changed: dict[tuple[str, str], float]) -> pl.DataFrame:
    """Ports alone, by their own bins: all send in one go every 10 ms, the `changed` ones at another rate."""
    rows = rings(dict.fromkeys(changed, FLAT)).with_columns(
        level=pl.lit("port"),
        **{name: pl.lit(None) for name in ("comm_id", "kind", "op_bytes", "nranks", "step")},
    )
    rate = pl.lit(LINE_GBPS)
    for (node, nic), gbps in changed.items():
        rate = pl.when((pl.col("node") == node) & (pl.col("nic") == nic)).then(gbps).otherwise(rate)
    return rows.drop("op_seq", "peer_node", "peer_nic", "completion").with_columns(
        max_gbps=rate, wmed_gbps=rate
    )


def test_a_port_whose_queue_pairs_are_not_seen_is_named_by_what_it_sends_in_one_go() -> None:
    assert capped(pieces({})) == []
    assert capped(pieces({("c", "mlx5_1"): CEILING_GBPS})) == [("nic", "c", "mlx5_1")]


@pytest.mark.parametrize(("to", "scopes"), [("d", ["group"]), ("e", ["nic", "nic"]), (None, ["group"])])
def test_two_ports_alone_with_one_ceiling_are_a_group_where_one_may_send_to_the_other(
    to: str | None, scopes: list[str]
) -> None:
    sent = pieces({("c", "mlx5_1"): CEILING_GBPS, ("d", "mlx5_1"): CEILING_GBPS})
    flows = rings({}).filter(pl.col("node").is_in(["c", "d"]), pl.col("nic") == "mlx5_1")
    peer = pl.when(pl.col("node") == "c").then(pl.lit(to)).otherwise(pl.lit("f"))
    flows = flows.with_columns(
        level=pl.lit("traffic"),
        peer_node=peer if to else pl.lit(None, pl.String),
        step=pl.lit(None, pl.Int64),
    )
    found = find_capped(with_columns(pl.concat([sent, flows], how="diagonal_relaxed")), NO_MARKS)
    assert [item.scope for item in found] == scopes


def test_who_takes_at_the_ceiling_of_what_it_sends_is_the_machine() -> None:
    sent = pieces({("c", "mlx5_1"): CEILING_GBPS})
    received = sent.with_columns(direction=pl.lit("rx"))
    assert capped(pl.concat([sent, received])) == [("node", "c", None)]


@pytest.mark.parametrize(
    ("takes", "others", "expected"),
    [
        (True, [], [("node", "d", 0.98)]),
        (False, [], [("nic", "c", 0.4), ("nic", "e", 0.4)]),
        (True, ["a"], [("node", "c", 0.98), ("node", "e", 0.98)]),
    ],
)
def test_what_slows_down_two_ports_alike_is_the_machine_between_them(
    takes: bool, others: list[str], expected: list[tuple[str, str, float]]
) -> None:
    """Neighbours exchange with each other, c and e both with d; where `others` send to d too, it cannot be d."""
    sent = pieces({("c", "mlx5_1"): CEILING_GBPS, ("e", "mlx5_1"): CEILING_GBPS})
    received = sent.with_columns(direction=pl.lit("rx"))
    ways = [("c", "b"), ("c", "d"), ("d", "c"), ("d", "e"), ("e", "d"), ("e", "f")]
    ways += [(other, "d") for other in others]
    flows = pl.concat(
        rings({})
        .filter(pl.col("node") == node, pl.col("nic") == "mlx5_1")
        .with_columns(
            level=pl.lit("traffic"), peer_node=pl.lit(peer), kind=pl.lit("Group"), step=pl.lit(None, pl.Int64)
        )
        for node, peer in ways
    )
    rows = pl.concat([sent, *([received] if takes else []), flows], how="diagonal_relaxed")
    found = find_capped(with_columns(rows), NO_MARKS)
    assert [(item.scope, item.node, round(item.confidence, 2)) for item in found] == expected


@pytest.mark.parametrize(
    ("unseen", "into_gbps", "sure"),
    [("f", LINE_GBPS, True), ("b", LINE_GBPS, True), ("b", CEILING_GBPS, False), ("d", LINE_GBPS, False)],
)
def test_beside_a_machine_that_was_not_seen_a_ceiling_is_a_ports_own_where_more_comes_in(
    unseen: str, into_gbps: float, sure: bool
) -> None:
    """c gets from b and sends to d."""
    sent = rings({("c", "mlx5_1"): FLAT})
    received = sent.with_columns(
        direction=pl.lit("rx"),
        node=pl.col("peer_node"),
        peer_node=pl.col("node"),
        max_gbps=into_gbps,
        wmed_gbps=into_gbps,
    )
    rows = pl.concat([sent, received]).filter(pl.col("node") != unseen)
    (item,) = find_capped(with_columns(rows), NO_MARKS)
    assert (item.node, item.confidence > 0.5) == ("c", sure)


def counters(
    refused: dict[str, int], out_of_sequence: dict[str, int], **further: dict[str, int]
) -> dict[str, pl.DataFrame]:
    """Two readings of each node's port, which sent a million packets meanwhile."""
    rows = [
        {"node": node, "nic": "mlx5_0", "port": 1, "t_ns": t_ns, "source": "sysfs", "cumulative": True}
        | {"counter": name, "value": value * (t_ns > 0)}
        for node in NODES
        for t_ns in (0, 1000 * MS)
        for name, value in (
            ("port_xmit_data", 10**6 * 4096 // 4),
            ("packet_seq_err", refused.get(node, 0)),
            ("out_of_sequence", out_of_sequence.get(node, 0)),
            *((name, values.get(node, 0)) for name, values in further.items()),
        )
    ]
    return {"port_counters": pl.DataFrame(rows, schema=PORT_COUNTERS)}


@pytest.mark.parametrize(
    ("refused", "out_of_sequence", "place"),
    [
        ({}, {}, None),
        ({"b": 5}, {"c": 5}, None),
        ({"b": 500}, {"c": 300, "d": 200}, ("nic", "b", None)),
        ({"b": 500}, {"c": 500}, ("link", "b", "c")),
        ({"b": 500, "d": 400}, {"c": 500, "e": 400}, None),
    ],
)
def test_lost_packets_name_who_sent_them(
    refused: dict[str, int], out_of_sequence: dict[str, int], place: tuple[str, str, str | None] | None
) -> None:
    found = find_refused(with_columns(rings({})), counters(refused, out_of_sequence))
    assert [(item.scope, item.node, item.peer_node) for item in found] == ([place] if place else [])


@pytest.mark.parametrize(
    ("damaged", "marked", "scope"), [({}, {}, "nic"), ({"c": 400}, {}, "link"), ({}, {"b": 300}, "link")]
)
def test_what_the_only_receiver_did_not_see_damaged_was_lost_by_its_sender(
    damaged: dict[str, int], marked: dict[str, int], scope: str
) -> None:
    """A damaged packet is counted where the cable ends; a full queue loses packets as well, and marks others."""
    tables = counters({"b": 500}, {"c": 500}, port_rcv_errors=damaged, rp_cnp_handled=marked)
    (item,) = find_refused(with_columns(rings({})), tables)
    assert (item.scope, item.node) == (scope, "b")


def test_what_one_of_two_receivers_alone_refuses_is_no_fault_of_the_port() -> None:
    rows = rings({})
    other = rows.filter(pl.col("node") == "b").with_columns(peer_node=pl.lit("e"))
    tables = counters({"b": 500}, {"c": 500}, port_rcv_errors={}, rp_cnp_handled={})
    (item,) = find_refused(with_columns(pl.concat([rows, other])), tables)
    assert (item.scope, item.node, item.peer_node) == ("link", "b", "c")


def test_without_counts_of_refusals_nothing_is_said() -> None:
    assert find_refused(with_columns(rings({})), {"port_counters": pl.DataFrame(schema=PORT_COUNTERS)}) == []


def test_counters_that_were_read_once_say_nothing() -> None:
    """A port's total so far may be years old: only what is added while watched counts."""
    read = counters({"b": 500}, {"c": 500})["port_counters"].filter(pl.col("t_ns") == 0)
    assert find_refused(with_columns(rings({})), {"port_counters": read}) == []
