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


def counters(refused: dict[str, int], out_of_sequence: dict[str, int]) -> dict[str, pl.DataFrame]:
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


def test_without_counts_of_refusals_nothing_is_said() -> None:
    assert find_refused(with_columns(rings({})), {"port_counters": pl.DataFrame(schema=PORT_COUNTERS)}) == []


def test_counters_that_were_read_once_say_nothing() -> None:
    """A port's total so far may be years old: only what is added while watched counts."""
    read = counters({"b": 500}, {"c": 500})["port_counters"].filter(pl.col("t_ns") == 0)
    assert find_refused(with_columns(rings({})), {"port_counters": read}) == []
