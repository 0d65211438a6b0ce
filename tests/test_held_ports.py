"""Which port holds up its ring, by when bytes move before it, out of it and behind it, in bins as wide as operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.held_ports import find_held_ports

NODES, NICS = ("a", "b", "c", "d", "e", "f"), tuple(f"mlx5_{index}" for index in range(4))
US, MS = 1_000, 1_000_000
STEP = pl.Schema({**metrics.OPERATORS, "step": pl.Int64})
BIN_NS, LINE_GBPS = MS, 400.0
MARKS = pl.DataFrame({"node": ["a"], "nic": ["mlx5_0"], "marks": [0]})
PORT = ("c", "mlx5_0")
Later = Callable[[int, str, str], int]


def rings(
    later_ns: Later,
    slow: tuple[str, ...] = ("mlx5_0",),
    operators: int = 60,
    gbps: float | None = None,
    nodes: tuple[str, ...] = NODES,
) -> pl.DataFrame:
    """Operators of 1 ms, of twice that in the rings of `slow` NICs, whose bytes move `later_ns` (step, node, NIC).

    They begin anywhere in their bins, so that a moment is known to half a bin. `gbps` is what a port's fastest bin
    shows of those rings: by default their average, as wide bins do.
    """
    noise = np.random.default_rng(5)
    rows = []
    for step in range(operators):
        for nic in NICS:
            span_ns = 2 * MS if nic in slow else MS
            for rank, node in enumerate(nodes):
                start_ns = 10 * step * MS
                blur_ns = int(noise.uniform(-0.3, 0.3) * BIN_NS)
                row = {
                    "level": "flow",
                    "direction": "tx",
                    "comm_id": "00-6",
                    "kind": "AllReduce",
                    "nranks": 6,
                }
                row |= {
                    "node": node,
                    "nic": nic,
                    "peer_node": nodes[(rank + 1) % len(nodes)],
                    "peer_nic": nic,
                }
                row |= {"step": step, "start_ns": start_ns, "end_ns": start_ns + span_ns + BIN_NS}
                row |= {"last_byte_ns": start_ns + span_ns + BIN_NS, "bin_ns": BIN_NS, "bytes": 30_000_000}
                fastest = gbps if gbps and nic in slow else 30_000_000 * 8 / span_ns
                row |= {"byte_mean_ns": start_ns + span_ns + blur_ns + later_ns(step, node, nic)}
                rows.append(row | {"max_gbps": fastest})
    frame = pl.DataFrame(rows, schema_overrides={name: STEP[name] for name in rows[0]})
    return pl.concat([pl.DataFrame(schema=STEP), frame], how="diagonal")


def behind(*ports: tuple[str, str]) -> Later:
    """What these ports send moves later, by less than the width of a bin; what comes before is still to be sent."""
    return lambda step, node, nic: 400 * US if (node, nic) in ports else 0


def named(rows: pl.DataFrame, marks: pl.DataFrame | None = MARKS) -> list[tuple[str | None, str | None]]:
    return sorted((finding.node, finding.nic) for finding in find_held_ports(rows, marks))


def test_a_slow_port_is_named_though_no_bin_lies_inside_an_operator() -> None:
    rows = rings(behind(PORT))
    assert named(rows) == [PORT]
    (finding,) = find_held_ports(rows, MARKS)
    assert (finding.scope, finding.kind, finding.peer_node) == ("nic", "nic-slow", None)
    assert finding.evidence[0].value == pytest.approx(2 * 400 * US, rel=0.2)


def test_two_slow_ports_of_different_rings_are_named_though_their_rings_are_as_slow() -> None:
    ports = (PORT, ("d", "mlx5_1"))
    assert named(rings(behind(*ports), slow=("mlx5_0", "mlx5_1"))) == sorted(ports)


def test_it_is_the_way_to_its_receiver_where_nobody_counted_what_the_network_marked() -> None:
    (finding,) = find_held_ports(rings(behind(PORT)), None)
    assert (finding.scope, finding.node, finding.peer_node) == ("link", "c", "d")


@pytest.mark.parametrize(
    ("own", "others", "slow"),
    [(100, 0, False), (1500, 1000, False), (200, 1000, True), (5, 0, True)],
)
def test_who_sends_into_a_queue_is_not_named_and_who_is_marked_less_than_others_is(
    own: int, others: int, slow: bool
) -> None:
    """Where ranks exchange in pairs all are marked, and who is slow by itself less."""
    marks = pl.DataFrame(
        {"node": [*NODES], "nic": ["mlx5_0"] * 6, "marks": [others] * 2 + [own] + [others] * 3}
    )
    assert named(rings(behind(PORT)), marks) == ([PORT] if slow else [])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (rings(lambda step, node, nic: 0), "all alike"),
        (
            rings(behind(*((PORT[0], nic) for nic in NICS))),
            "all ports of a machine: it is slow inside, or late",
        ),
        (
            rings(lambda step, node, nic: (300 + 400 * (nic == PORT[1])) * US if node == PORT[0] else 0),
            "much of the same on its machine's other ports",
        ),
        (rings(behind(PORT), slow=()), "its ring takes no longer"),
        (rings(behind(PORT), gbps=LINE_GBPS), "it sends in bursts, and waits in between"),
        (rings(behind(PORT), operators=4), "a few operators"),
        (rings(lambda step, node, nic: 400 * US if (node, step % 6) == ("c", 0) else 0), "now and then"),
        (rings(behind(PORT, ("e", "mlx5_0"))), "two ports of one ring"),
        (rings(behind(*((NODES[at], NICS[at]) for at in range(3))), slow=NICS[:3]), "three ports"),
    ],
)
def test_others_are_not(rows: pl.DataFrame, why: str) -> None:
    assert named(rows) == [], why
