"""Who holds up a ring from inside, by the clear-to-sends that came for each operator."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.grants import BEFORE, DURING, LAST, MEAN, START, Grants, granted, no_grants, used
from pulse_bpf.analysis.inside import behind_ports, find_inside
from pulse_bpf.analysis.shape import NOTHING, WHOLE

NODES, NICS = ("a", "b", "c", "d"), ("mlx5_0", "mlx5_1")
US, MS = 1_000, 1_000_000
STEP = pl.Schema({**metrics.OPERATORS, "step": pl.Int64})
MESSAGES, SPAN_NS, OPERATORS = 120, 4 * MS, 10
HEALTHY = -24.0


def ring(
    held: dict[tuple[str, str], float], nodes: tuple[str, ...] = NODES, every_ns: int = 10 * MS
) -> pl.DataFrame:
    """An operator `every_ns` in a ring of each NIC; on average so many messages more than at its start may be sent.

    `held` by sending node and NIC; HEALTHY where it says nothing.
    """
    rows = []
    for step in range(OPERATORS):
        for nic in NICS:
            for rank, node in enumerate(nodes):
                start_ns = step * every_ns
                middle_ns = start_ns + SPAN_NS // 2
                ahead_ns = held.get((node, nic), HEALTHY) * SPAN_NS / MESSAGES
                row = {"node": node, "nic": nic, "pid": rank, "level": "flow", "direction": "tx"}
                row |= {"peer_node": nodes[(rank + 1) % len(nodes)], "peer_nic": nic, "comm_id": "00-4"}
                row |= {"kind": "AllReduce", "op_bytes": 10**8, "bytes": 10**8, "op_seq": step, "step": step}
                row |= {"start_ns": start_ns, "last_byte_ns": start_ns + SPAN_NS, "bin_ns": 32 * US}
                row |= {"end_ns": start_ns + SPAN_NS, "byte_mean_ns": middle_ns}
                row |= {"credits_before": 0, "credits_during": MESSAGES}
                rows.append(row | {"credit_mean_ns": round(middle_ns - ahead_ns)})
    frame = pl.DataFrame(rows, schema_overrides={name: STEP[name] for name in rows[0]})
    return pl.concat([pl.DataFrame(schema=STEP), frame], how="diagonal")


def both(node: str, value: float) -> dict[tuple[str, str], float]:
    return {(node, nic): value for nic in NICS}


TIMES = ("start_ns", "last_byte_ns", "end_ns", "byte_mean_ns", "credit_mean_ns")
# c is slow inside: b, which sends to it, may send little, and c, which has little, could send much.
SLOW = both("b", -34.0) | both("c", -22.0) | both("d", -23.0)


def test_a_machine_that_is_slow_inside_is_between_one_that_may_not_send_and_one_that_could() -> None:
    found = find_inside(ring(SLOW))
    assert [(item.scope, item.node, item.kind) for item in found] == [("node", "c", "intra-node-slow")]
    assert found[0].victims == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ({}, "all alike"),
        (both("b", -27.0), "a little"),
        ({("b", "mlx5_0"): -34.0, ("c", "mlx5_0"): -22.0}, "one NIC of several: a port"),
        (both("b", -34.0) | both("d", -32.0), "two machines"),
    ],
)
def test_others_are_not(held: dict[tuple[str, str], float], why: str) -> None:
    assert find_inside(ring(held)) == [], why


def test_a_machine_that_became_slow_inside_is_told_by_the_operators_since_then() -> None:
    """Before, nothing was held up, and who differs most is chance."""
    noise = both("a", -24.5) | both("b", -23.8)
    later = ring(SLOW).with_columns(
        pl.col("op_seq") + OPERATORS,
        pl.col("step") + OPERATORS,
        *(pl.col(name) + 1000 * MS for name in TIMES),
    )
    found = find_inside(pl.concat([ring(noise), later]))
    assert [item.node for item in found] == ["c"]
    assert found[0].first_ns == 1000 * MS


def test_operators_that_follow_each_other_at_once_say_nothing() -> None:
    """What was granted for the operator before may be used for the next one."""
    assert find_inside(ring(SLOW, every_ns=SPAN_NS + 50 * US)) == []


def test_of_two_machines_either_is_before_and_after_the_other() -> None:
    assert find_inside(ring(both("a", -34.0), nodes=("a", "b"))) == []


def test_a_source_that_does_not_tell_clear_to_sends_says_nothing() -> None:
    blind = ring(SLOW).with_columns(pl.lit(None, pl.Int64).alias(name) for name in metrics.CREDITS)
    assert find_inside(blind) == []


def test_clear_to_sends_are_counted_for_the_operator_they_came_before_or_in() -> None:
    # One flow: stream 0 is what it receives, 1 what it sends, which is group 0; nothing else has a group.
    group_of = np.array([-1, 0])
    t_ns = np.array([5, 10, 12, 20, 30, 31, 40, 55], np.int64)
    ctl = np.array([1, 2, 0, 1, 1, 1, 3, 7], np.uint32)
    whole = np.full((2, len(WHOLE)), NOTHING)
    whole[:, START], whole[:, LAST] = [10, 35], [25, 50]
    wanted, since_ns = np.array([True]), np.array([NOTHING])
    held = no_grants(1)
    for first, last in ((0, 3), (3, 8)):
        rows = slice(first, last)
        held = granted(
            held, wanted, group_of, np.array([0]), np.array([0, last - first]), t_ns[rows], ctl[rows]
        )
    left = used(held, since_ns, np.array([0, 0]), whole, np.array([NOTHING]))
    # What came before the first operator is not known to be its own.
    assert whole[:, BEFORE].tolist() == [NOTHING, 2]
    assert whole[:, DURING].tolist() == [3, 3]
    assert whole[:, MEAN].tolist() == [10 + 10 // 3, 40]
    assert left.t_ns.tolist() == [55]
    assert since_ns.tolist() == [50]


def test_clear_to_sends_before_any_later_operator_become_one() -> None:
    held = Grants(np.array([0, 3]), np.array([60, 61, 70]), np.array([1, 2, 4]))
    nobody, nothing = np.zeros(0, np.int64), np.zeros((0, len(WHOLE)), np.int64)
    left = used(held, np.array([50]), nobody, nothing, np.array([65]))
    assert (left.t_ns.tolist(), left.number.tolist()) == ([61, 70], [3, 4])


def test_clear_to_sends_of_groups_that_are_not_wanted_are_not_held() -> None:
    held = Grants(np.array([0, 2]), np.array([1, 2]), np.array([1, 1]))
    none = np.zeros(0, np.int64)
    after = granted(
        held, np.array([False]), np.array([-1, 0]), none, np.zeros(1, np.int64), none, none.astype(np.uint32)
    )
    assert after.t_ns.tolist() == []


@pytest.mark.parametrize(
    ("into", "received", "named"),
    [
        (100.0, True, ("node", "b", None)),
        (400.0, True, ("nic", "b", "mlx5_0")),
        # Its acknowledgements leave by the slow port.
        (230.0, True, ("nic", "b", "mlx5_0")),
        (100.0, False, ("node", "b", None)),
    ],
)
def test_a_port_that_sends_and_receives_slowly_is_held_up_by_its_machine(
    into: float, received: bool, named: tuple[str, str, str | None]
) -> None:
    """Each sends to the next and gets from the one before; b sends slowly, and is or is not sent to as slowly."""
    rows = []
    for step in range(OPERATORS):
        for rank, node in enumerate(NODES):
            after, before = NODES[(rank + 1) % 4], NODES[rank - 1]
            for way, peer in (("tx", after), ("rx", before)):
                sender, receiver = (node, peer) if way == "tx" else (peer, node)
                gbps = 100.0 if sender == "b" else into if receiver == "b" else 400.0
                rows.append(
                    {"level": "flow", "node": node, "nic": "mlx5_0", "peer_node": peer, "peer_nic": "mlx5_0"}
                    | {"direction": way, "kind": "Group", "comm_id": "00-4", "step": step}
                    | {"start_ns": step * 10 * MS, "burst_gbps": gbps}
                )
    frame = pl.DataFrame(rows, schema_overrides={name: STEP[name] for name in rows[0]})
    exchanges = pl.concat([pl.DataFrame(schema=STEP), frame], how="diagonal")
    port = Finding("nic-slow", "nic", "nic", 0.9, 4.0, 0, 1000 * MS, [], node="b", nic="mlx5_0")
    (item,) = behind_ports(exchanges.filter(received | (pl.col("direction") == "tx")), [port])
    assert (item.scope, item.node, item.nic) == named
    assert item.kind == ("intra-node-slow" if named[0] == "node" else "nic-slow")


@pytest.mark.parametrize(("into", "named"), [(50.0, ("node", None)), (200.0, ("nic", "mlx5_0"))])
def test_what_several_send_to_a_slow_port_is_told_by_their_flows_where_only_what_is_sent_is_seen(
    into: float, named: tuple[str, str | None]
) -> None:
    """Each sends to two others, half of its port's rate to either; b sends slowly."""
    rows = []
    for step in range(OPERATORS):
        for rank, node in enumerate(NODES):
            peers = NODES[(rank + 1) % 4], NODES[rank - 1]
            rates = [50.0 if node == "b" else into if peer == "b" else 200.0 for peer in peers]
            row = {"node": node, "nic": "mlx5_0", "direction": "tx", "kind": "Group", "comm_id": "00-4"}
            row |= {"step": step, "start_ns": step * 10 * MS}
            rows += [
                row | {"level": "flow", "peer_node": peer, "peer_nic": "mlx5_0", "burst_gbps": gbps}
                for peer, gbps in zip(peers, rates, strict=True)
            ]
            rows.append(
                row
                | {"level": "nic", "peer_node": None, "peer_nic": None}
                | {"burst_gbps": 100.0 if node == "b" else 400.0}
            )
    frame = pl.DataFrame(rows, schema_overrides={name: STEP[name] for name in rows[0]})
    port = Finding("nic-slow", "nic", "nic", 0.9, 4.0, 0, 1000 * MS, [], node="b", nic="mlx5_0")
    (item,) = behind_ports(pl.concat([pl.DataFrame(schema=STEP), frame], how="diagonal"), [port])
    assert (item.scope, item.nic) == named


@pytest.mark.parametrize(("other", "named"), [(100.0, ("node", None)), (390.0, ("nic", "mlx5_0"))])
def test_a_machine_all_ports_of_which_send_slowly_in_rings_is_slow_behind_them(
    other: float, named: tuple[str, str | None]
) -> None:
    rows = [
        {"level": "flow", "node": node, "nic": nic, "peer_node": NODES[(rank + 1) % 4], "peer_nic": nic}
        | {
            "direction": "tx",
            "kind": "AllReduce",
            "comm_id": "00-4",
            "step": step,
            "start_ns": step * 10 * MS,
        }
        | {"burst_gbps": 400.0 if node != "b" else 100.0 if nic == "mlx5_0" else other}
        for step in range(OPERATORS)
        for rank, node in enumerate(NODES)
        for nic in NICS
    ]
    frame = pl.DataFrame(rows, schema_overrides={name: STEP[name] for name in rows[0]})
    port = Finding("nic-slow", "nic", "nic", 0.9, 4.0, 0, 1000 * MS, [], node="b", nic="mlx5_0")
    (item,) = behind_ports(pl.concat([pl.DataFrame(schema=STEP), frame], how="diagonal"), [port])
    assert (item.scope, item.nic) == named
