"""Who holds up a ring from inside, by when bytes move on the ways into and out of each machine."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest

from pulse_bpf import schema
from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.held import beside, find_held, no_brake

NODES, NICS = ("a", "b", "c", "d", "e", "f"), tuple(f"mlx5_{index}" for index in range(4))
US, MS = 1_000, 1_000_000
STEP = pl.Schema({**metrics.OPERATORS, "step": pl.Int64})
SPAN_NS, OPERATORS = 4 * MS, 20
Later = Callable[[int, str, str], int]

LINKS = pl.DataFrame(
    [{"node": node, "nic": nic, "link_gbps": 400.0} for node in NODES for nic in NICS]
).select("node", "nic", pl.col("link_gbps").cast(schema.NICS["link_gbps"]))


def ring(
    later_ns: Later, gbps: float = 200.0, every_ns: int = 10 * MS, nodes: tuple[str, ...] = NODES
) -> pl.DataFrame:
    """An operator `every_ns` in a ring of each NIC, at `gbps`, whose bytes move `later_ns` (step, sender, NIC)."""
    rows = []
    size = round(gbps * SPAN_NS / 8)
    for step in range(OPERATORS):
        for nic in NICS:
            for rank, node in enumerate(nodes):
                peer = nodes[(rank + 1) % len(nodes)]
                start_ns = step * every_ns
                row = {"level": "flow", "comm_id": "00-6", "kind": "AllReduce", "op_seq": step, "step": step}
                row |= {
                    "start_ns": start_ns,
                    "last_byte_ns": start_ns + SPAN_NS,
                    "end_ns": start_ns + SPAN_NS,
                }
                row |= {"bytes": size, "bin_ns": 32 * US, "nic": nic, "peer_nic": nic}
                row |= {"byte_mean_ns": start_ns + SPAN_NS // 2 + later_ns(step, node, nic)}
                rows.append(row | {"node": node, "peer_node": peer, "direction": "tx"})
                rows.append(row | {"node": peer, "peer_node": node, "direction": "rx"})
    frame = pl.DataFrame(rows, schema_overrides={name: STEP[name] for name in rows[0]})
    return pl.concat([pl.DataFrame(schema=STEP), frame], how="diagonal")


def named(rows: pl.DataFrame) -> list[str | None]:
    return [finding.node for finding in find_held(rows, LINKS)]


def slow_inside(node: str, before: bool = True) -> Later:
    """What `node` sends moves later; where operators fill the buffers before it, also what is sent to it."""
    full = [node, NODES[NODES.index(node) - 1]] if before else [node]
    return lambda step, sender, nic: 400 * US if sender in full else 0


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("node", ["a", "c", "f"])
def test_a_machine_whose_buffers_are_full_is_named(node: str, before: bool) -> None:
    rows = ring(slow_inside(node, before))
    assert named(rows) == [node]
    (finding,) = find_held(rows, LINKS)
    assert (finding.scope, finding.kind) == ("node", "intra-node-slow")
    assert finding.confidence <= 0.9
    assert finding.victims == [other for other in NODES if other != node]


def test_a_machine_that_became_slow_inside_is_told_by_the_operators_since_then() -> None:
    assert named(ring(lambda step, sender, nic: 400 * US if sender == "c" and step >= 10 else 0)) == ["c"]


def test_the_edges_are_told_as_well_where_only_what_is_sent_was_seen() -> None:
    assert named(ring(slow_inside("c")).filter(pl.col("direction") == "tx")) == ["c"]


@pytest.mark.parametrize(
    ("later_ns", "why"),
    [
        (lambda step, sender, nic: 0, "all alike"),
        (lambda step, sender, nic: 20 * US if sender == "c" else 0, "less than a fiftieth of the operator"),
        (lambda step, sender, nic: 400 * US if (sender, nic) == ("c", NICS[0]) else 0, "one NIC: a port"),
        (lambda step, sender, nic: 400 * US if sender == NODES[step % 6] else 0, "another one each time"),
        (lambda step, sender, nic: 400 * US if sender in "be" else 0, "two machines far from each other"),
        (lambda step, sender, nic: 400 * US if sender == "cd"[step % 2] else 0, "two neighbours by turns"),
        (lambda step, sender, nic: 400 * US if sender == "c" and step % 10 < 7 else 0, "unequal by chance"),
        (lambda step, sender, nic: 400 * US if sender == "c" and step < 3 else 0, "a few operators"),
        (lambda step, sender, nic: {"c": 400, "d": 250}.get(sender, 0) * US, "a slow way behind it"),
        (lambda step, sender, nic: 3 * MS if sender == "c" else 0, "more than buffers can hold: cut wrongly"),
    ],
)
def test_others_are_not(later_ns: Later, why: str) -> None:
    assert named(ring(later_ns)) == [], why


def test_a_ring_at_the_speed_of_its_ports_is_held_up_by_nobody() -> None:
    assert named(ring(slow_inside("c"), gbps=380.0)) == []


def test_in_short_operators_another_machine_may_seem_to_hold_up() -> None:
    """As many short ones as long ones fit into the buffers before c, which is slow inside."""
    long = ring(slow_inside("c"))
    short = ring(lambda step, sender, nic: 400 * US if sender == "b" else 0, every_ns=10 * MS)
    start_ns = pl.col("start_ns") + 5 * MS
    short = short.with_columns(
        start_ns=start_ns,
        byte_mean_ns=start_ns + (pl.col("byte_mean_ns") - pl.col("start_ns")) // 8,
        last_byte_ns=start_ns + SPAN_NS // 8,
        end_ns=start_ns + SPAN_NS // 8,
        bytes=pl.col("bytes") // 8,
        step=pl.col("step") + OPERATORS,
    )
    assert named(pl.concat([long, short.filter(pl.col("step") % 2 == 0)])) == ["c"]
    # Where they last as long, nothing tells which of the two it is.
    other = ring(lambda step, sender, nic: 400 * US if sender == "f" else 0, every_ns=10 * MS)
    times = pl.col("start_ns", "last_byte_ns", "end_ns", "byte_mean_ns") + 5 * MS
    assert named(pl.concat([long, other.with_columns(times, step=pl.col("step") + OPERATORS)])) == []


def test_operators_whose_two_ends_disagree_were_cut_wrongly_and_say_nothing() -> None:
    """One machine's sending side was cut an eighth of an operator too late, in all operators."""
    rows = ring(lambda step, sender, nic: 0)
    cut = pl.when(pl.col("node") == "c", pl.col("direction") == "tx").then(SPAN_NS // 8).otherwise(0)
    assert named(rows.with_columns(pl.col("byte_mean_ns") + cut)) == []


def test_once_is_no_fault() -> None:
    """After a common pause, say to write a checkpoint, one machine came late to the operators of that moment."""
    moment = ring(slow_inside("c"), every_ns=MS)
    calm = ring(lambda step, sender, nic: 0, gbps=380.0, every_ns=20 * MS)
    assert named(pl.concat([moment, calm.with_columns(pl.col("step") + OPERATORS)])) == []


@pytest.mark.parametrize(("held_up", "expected"), [(range(5), ["c"]), (range(4), [])])
def test_few_iterations_tell_where_it_is_the_same_machine_in_all(held_up: range, expected: list[str]) -> None:
    """Five volleys of four operators each are in five of ten parts of the time."""
    late = slow_inside("c")
    rows = ring(lambda step, sender, nic: late(step, sender, nic) if step // 4 in held_up else 0, every_ns=0)
    later_ns = pl.col("step") // 4 * 100 * MS
    times = ["start_ns", "last_byte_ns", "end_ns", "byte_mean_ns"]
    assert named(rows.with_columns(pl.col(times) + later_ns)) == expected


def test_rings_of_three_machines_say_nothing() -> None:
    assert named(ring(slow_inside("b"), nodes=NODES[:3])) == []


def port(gbps: float, node: str = "b") -> Finding:
    seen = [Evidence("ceiling_gbps", gbps, 390.0, OPERATORS, "")]
    return Finding("nic-slow", "nic", "nic", 0.95, 2.0, 0, MS, seen, node=node, nic=NICS[0])


@pytest.mark.parametrize(("gbps", "held_up"), [(300.0, True), (210.0, False), (100.0, False)])
def test_a_ceiling_above_what_all_other_ports_do_on_average_holds_up_none_of_them(
    gbps: float, held_up: bool
) -> None:
    """All rings move 200 Gbit/s on average, in bursts; one port does so at a constant rate, or is the slowest."""
    rows = ring(lambda step, sender, nic: 0)
    assert no_brake(rows, port(gbps)) == held_up
    tree = pl.concat([rows, rows.with_columns(peer_node=pl.lit("a")).filter(pl.col("node") == "e")])
    assert not no_brake(tree, port(gbps))


def test_a_port_is_beside_the_machine_that_it_is_in_and_the_one_that_it_sends_to() -> None:
    rows = ring(lambda step, sender, nic: 0)
    (machine,) = find_held(ring(slow_inside("c")), LINKS)
    near = {node: beside(rows, port(100.0, node), machine) for node in NODES}
    assert near == {"a": False, "b": True, "c": True, "d": False, "e": False, "f": False}
