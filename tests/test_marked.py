"""Flows that share a queue in the network, by operators that last longer while their ports are asked to slow down."""

from __future__ import annotations

import polars as pl
import pytest

from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.attribute import FLOWS
from pulse_bpf.analysis.marked import find_marked, pressed

NODES = ("a", "b", "c", "d")
MS = 1_000_000
OPERATORS = 60
STEP = pl.Schema({**metrics.OPERATORS, "step": pl.Int64})


def ring(**columns: object) -> pl.DataFrame:
    """One row per operator and flow of a ring over the nodes, 5 ms every 10 ms."""
    rows = [
        {
            "node": node,
            "nic": "mlx5_0",
            "peer_node": NODES[(rank + 1) % 4],
            "peer_nic": "mlx5_0",
            "level": "flow",
        }
        | {"direction": "tx", "comm_id": "00-4", "kind": "AllReduce", "op_bytes": 10**8, "bytes": 10**8}
        | {"step": step, "start_ns": 10 * step * MS, "last_byte_ns": (10 * step + 5) * MS, "end_ns": 1}
        | {"stall_ns": 0, "gap_unknown_ns": 0, "active_ns": 5 * MS, "bin_ns": 100_000}
        for step in range(OPERATORS)
        for rank, node in enumerate(NODES)
    ]
    return pl.DataFrame(rows, schema=STEP).with_columns(**columns)  # type: ignore[arg-type]


def asked(steps: range, *ports: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The senders of `ports` are asked to slow down in these operators: how often, and how often in each 10 ms."""
    rows = [
        {"node": node, "nic": "mlx5_0", "since_ns": 10 * step * MS, "t_ns": 10 * (step + 1) * MS}
        | {"rp_cnp_handled": 9 if node in ports and step in steps else 0}
        for step in range(OPERATORS)
        for node in NODES
    ]
    since = pl.DataFrame(rows)
    return since.group_by("node", "nic").agg(marks=pl.col("rp_cnp_handled").sum()), since


def test_operators_that_last_longer_while_a_sender_is_marked_name_the_network() -> None:
    steps = range(0, OPERATORS, 3)
    longer = pl.when(pl.col("step") % 3 == 0).then(4 * MS).otherwise(0)
    flows = pl.DataFrame(
        {"node": ["b", "c"], "nic": "mlx5_0", "qpn": [7, 8], "peer_node": ["c", "d"], "peer_nic": "mlx5_0"},
        schema_overrides=FLOWS,
    )
    marks, since = asked(steps, "b")
    stretched = ring(last_byte_ns=pl.col("last_byte_ns") + longer, active_ns=pl.col("active_ns") + longer)
    (item,) = find_marked(stretched, flows, marks, since)
    assert (item.scope, item.node) == ("network", None)
    assert [(flow["node"], flow["peer_node"]) for flow in item.flows or []] == [("b", "c")]
    assert item.slowdown == pytest.approx(9 / 5)
    assert find_marked(ring(), flows, marks, since) == []
    waiting = ring(last_byte_ns=pl.col("last_byte_ns") + longer)
    assert find_marked(waiting, flows, marks, since) == []
    assert find_marked(stretched, flows, None, since) == []
    # Of a job that does little else flows collide now and then, and it costs nothing.
    idle = stretched.with_columns(
        pl.when(pl.col("step") == OPERATORS - 1).then(pl.col(name) + 20_000 * MS).otherwise(name).alias(name)
        for name in ("start_ns", "last_byte_ns")
    )
    assert find_marked(idle, flows, marks, since) == []
    coarse = stretched.with_columns(bin_ns=pl.lit(5 * MS))
    assert find_marked(coarse.filter(pl.col("step") < OPERATORS // 2), flows, marks, since) == []
    assert find_marked(coarse, flows, marks, since) != []
    # A little longer, but surely so.
    little = pl.when(pl.col("step") % 3 == 0).then(MS // 4).otherwise(0)
    slightly = ring(active_ns=pl.col("active_ns") + little)
    (item,) = find_marked(slightly, flows, marks, since)
    assert item.slowdown == pytest.approx(1.05)
    assert find_marked(slightly.filter(pl.col("step") < OPERATORS // 2), flows, marks, since) == []


def test_where_the_receiver_was_not_recorded_its_own_port_may_be_the_queue() -> None:
    flows = pl.DataFrame(schema=FLOWS)
    marks, since = asked(range(0, OPERATORS, 3), "b")
    longer = pl.when((pl.col("step") % 3 == 0) & (pl.col("node") == "b")).then(4 * MS).otherwise(0)
    stretched = ring(active_ns=pl.col("active_ns") + longer)
    (sure,) = find_marked(stretched, flows, marks, since)
    (unsure,) = find_marked(stretched.filter(pl.col("node") != "c"), flows, marks, since)
    assert sure.confidence > 0.5 > unsure.confidence
    # Two receivers share no port.
    other = ring(peer_node=pl.when(pl.col("step") % 2 == 0).then(pl.lit("d")).otherwise("peer_node"))
    both = other.with_columns(active_ns=stretched["active_ns"]).filter(pl.col("node") != "c")
    (again,) = find_marked(both, flows, marks, since)
    assert again.confidence == sure.confidence


def test_a_sender_that_is_always_marked_is_compared_with_those_that_never_are() -> None:
    flows = pl.DataFrame(
        {"node": ["b"], "nic": "mlx5_0", "qpn": [7], "peer_node": ["c"], "peer_nic": "mlx5_0"},
        schema_overrides=FLOWS,
    )
    marks, since = asked(range(OPERATORS), "b")
    longer = pl.when(pl.col("node") == "b").then(3 * MS).otherwise(0)
    (item,) = find_marked(ring(active_ns=pl.col("active_ns") + longer), flows, marks, since)
    assert item.slowdown == pytest.approx(8 / 5)
    assert find_marked(ring(), flows, marks, since) == []


def test_a_communicator_whose_sender_is_always_marked_is_compared_with_others_alike() -> None:
    """In bins that are wider than the operators no single port tells; all of the communicator together do."""
    nics = [f"mlx5_{number}" for number in range(8)]
    rows = ring().join(pl.DataFrame({"nic_of": nics}), how="cross")
    rows = rows.with_columns(nic="nic_of", peer_nic="nic_of", comm_id="nic_of").drop("nic_of")
    # As many of ten operators take two bins as one, but in the first communicator two more.
    first = pl.col("comm_id") == nics[0]
    phase = (7 * pl.col("step") + 3 * pl.col("node").replace_strict(NODES, range(4))) % 10
    bins = 1 + (phase < pl.when(first).then(7).otherwise(5)).cast(pl.Int64)
    rows = rows.with_columns(active_ns=5 * MS * bins, bin_ns=pl.lit(5 * MS))
    marks, since = asked(range(OPERATORS), "b")
    since = since.with_columns(nic=pl.lit(nics[0]))
    more = since.drop("nic").join(pl.DataFrame({"nic": nics[1:]}), how="cross")
    since = pl.concat(
        [since, more.with_columns(rp_cnp_handled=0).select(since.columns)], how="vertical_relaxed"
    )
    marks = since.group_by("node", "nic").agg(marks=pl.col("rp_cnp_handled").sum())
    flows = pl.DataFrame(
        {"node": "b", "nic": nics, "qpn": range(8), "peer_node": "c", "peer_nic": nics},
        schema_overrides=FLOWS,
    )
    (item,) = find_marked(rows, flows, marks, since)
    assert [(flow["node"], flow["nic"]) for flow in item.flows or []] == [("b", nics[0])]
    assert item.slowdown == pytest.approx(1.7 / 1.5, abs=0.001)
    # One communicator is none to compare with, and neither are others that are as slow.
    assert find_marked(rows.filter(pl.col("nic") == nics[0]), flows, marks, since) == []
    alike = rows.with_columns(active_ns=pl.col("active_ns").first().over("node", "step"))
    assert find_marked(alike, flows, marks, since) == []


def test_the_network_is_pressed_where_few_ports_are_marked_much_and_the_others_not() -> None:
    def counted(*marks: int) -> pl.DataFrame:
        return pl.DataFrame({"node": NODES, "nic": "mlx5_0", "marks": marks})

    assert pressed(counted(0, 500, 0, 0))
    assert not pressed(None)
    assert not pressed(counted(0, 50, 0, 0))
    assert not pressed(counted(0, 150, 40, 0))
    assert not pressed(counted(500, 500, 500, 500))


@pytest.mark.parametrize(("ports", "named"), [(4, True), (5, False)])
def test_as_many_ports_as_can_share_a_path_are_marked_together(ports: int, named: bool) -> None:
    """Where more are marked, the job itself sends too much at once, or each port has a small tenant of its own."""
    nics = [f"mlx5_{number}" for number in range(8)]
    hot = pl.col("nic").is_in(nics[:ports]) & (pl.col("node") == "b")
    rows = ring().join(pl.DataFrame({"nic": nics}), how="cross", suffix="_of")
    rows = rows.with_columns(nic="nic_of", peer_nic="nic_of").drop("nic_of")
    marks, since = asked(range(OPERATORS), "b")
    since = since.drop("nic").join(pl.DataFrame({"nic": nics}), how="cross")
    since = since.with_columns(pl.when(hot).then("rp_cnp_handled").otherwise(0))
    marks = since.group_by("node", "nic").agg(marks=pl.col("rp_cnp_handled").sum())
    longer = rows.with_columns(active_ns=pl.col("active_ns") + pl.when(hot).then(3 * MS).otherwise(0))
    flows = pl.DataFrame(
        {"node": "b", "nic": nics, "qpn": range(8), "peer_node": "c", "peer_nic": nics},
        schema_overrides=FLOWS,
    )
    assert bool(find_marked(longer, flows, marks, since)) == named
