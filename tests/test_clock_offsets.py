"""Offsets between the clocks of nodes from made packets: drift, asymmetric paths, queues, nodes without a way back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from pulse_bpf.analysis.clock_offsets import Offsets, solve

WALL_NS = 1_796_000_000_000_000_000
SECONDS = 4


@dataclass(frozen=True)
class Node:
    ahead_ns: int = 0
    ppm: float = 0.0

    def shows(self, t_ns: np.ndarray) -> np.ndarray:
        """The clock of the node at true times, ns from the start."""
        return WALL_NS + t_ns + self.ahead_ns + np.rint(t_ns * self.ppm * 1e-6).astype(np.int64)


def packets(
    nodes: dict[str, Node],
    pairs: list[tuple[str, str]],
    delay_ns: dict[tuple[str, str], int] | None = None,
    queue_ns: float = 20_000.0,
    one_way: bool = False,
    seconds: float = SECONDS,
    count: int = 4000,
) -> pl.DataFrame:
    """Packets both ways of each pair at random times; each waits in a queue on top of the delay of its path."""
    rng = np.random.default_rng(7)
    frames = []
    for pair in pairs:
        for sender, receiver in (pair,) if one_way else (pair, pair[::-1]):
            sent = rng.integers(0, int(seconds * 1e9), count)
            wait = (delay_ns or {}).get((sender, receiver), 2_000) + rng.exponential(queue_ns, count)
            frames.append(
                pl.DataFrame(
                    {
                        "node": sender,
                        "peer_node": receiver,
                        "sent_ns": nodes[sender].shows(sent),
                        "received_ns": nodes[receiver].shows(sent + wait.astype(np.int64)),
                    }
                )
            )
    return pl.concat(frames).sample(fraction=1.0, shuffle=True, seed=3)


def errors_ns(offsets: Offsets, nodes: dict[str, Node]) -> dict[str, float]:
    """How far each node's clock is off after correction, at its worst, with the residual it claims."""
    reference = nodes[offsets.nodes["group"][0]]
    t_ns = np.arange(0, SECONDS * 10**9, 10**7)
    found = {}
    for row in offsets.nodes.iter_rows(named=True):
        on_reference = np.array(
            [offsets._on_reference(row, int(moment)) for moment in nodes[row["node"]].shows(t_ns)]
        )
        truth = (reference.shows(t_ns) - offsets.first_ns).astype(float)
        found[row["node"]] = float(np.abs(on_reference - truth).max())
    return found


NODES = {
    "a": Node(),
    "b": Node(3_000_000, 50.0),
    "c": Node(-40_000_000, -50.0),
    "d": Node(2_000_000_000, 20.0),
}
RING = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d"), ("a", "c")]


def residuals(offsets: Offsets) -> dict[str, float]:
    return dict(offsets.nodes.select("node", "residual_ns").iter_rows())


@pytest.mark.parametrize("pairs", [RING, RING[:3]], ids=["a graph", "a chain"])
def test_offsets_and_drift_of_50_ppm_are_found_within_the_residual(pairs: list[tuple[str, str]]) -> None:
    offsets = solve(packets(NODES, pairs))
    errors, claimed = errors_ns(offsets, NODES), residuals(offsets)
    assert set(errors) == set(NODES)
    assert all(errors[node] <= claimed[node] for node in NODES)
    assert max(errors.values()) < 1_000
    assert max(claimed.values()) < 20_000


def test_an_asymmetric_path_is_within_the_residual_though_no_fit_shows_it() -> None:
    """30 us one way, 2 us back: the offset is off by 14 us and the pairs agree with each other."""
    slow = {("b", "a"): 30_000, ("b", "c"): 30_000}
    offsets = solve(packets(NODES, RING[:2], slow))
    errors, claimed = errors_ns(offsets, NODES), residuals(offsets)
    assert max(errors.values()) > 10_000, "the premise"
    assert all(errors[node] <= claimed[node] for node in errors)


def test_an_order_closer_than_three_residuals_is_never_claimed() -> None:
    offsets = solve(packets(NODES, RING))
    claimed = residuals(offsets)
    rng = np.random.default_rng(1)
    names = sorted(NODES)
    claims = 0
    for _ in range(2000):
        one, two = rng.choice(names, 2, replace=False)
        t_ns = int(rng.integers(0, SECONDS * 10**9))
        apart_ns = int(rng.integers(-100_000, 100_001))
        first, second = (
            int(NODES[name].shows(np.array([moment]))[0])
            for name, moment in ((one, t_ns), (two, t_ns + apart_ns))
        )
        claim = offsets.order(one, first, two, second)
        if claim is not None:
            claims += 1
            assert claim == (-1 if apart_ns > 0 else 1)
        limit_ns = 3 * max(claimed[one], claimed[two])
        assert claim is None or abs(apart_ns) > limit_ns - 2_000
        assert claim is not None or abs(apart_ns) <= limit_ns + 2_000 or not 0 < t_ns + apart_ns < 4e9
    assert claims > 200


def test_clocks_three_milliseconds_apart_order_a_collective_by_traffic_only() -> None:
    """E5: the wall clocks say that b came first; it came a millisecond later."""
    nodes = {"a": Node(3_000_000), "b": Node()}
    offsets = solve(packets(nodes, [("a", "b")]))
    at_a, at_b = (
        int(nodes[name].shows(np.array([moment]))[0]) for name, moment in (("a", 10**9), ("b", 10**9 + 10**6))
    )
    assert at_b < at_a
    assert offsets.order("a", at_a, "b", at_b) == -1
    assert offsets.order("b", at_b, "a", at_a) == 1
    assert offsets.order("a", at_a, "nobody", at_b) is None
    assert offsets.order("a", 5, "a", 6) == -1


def test_what_was_not_compared_is_not_put_in_order() -> None:
    apart = solve(packets(NODES, [("a", "b"), ("c", "d")]))
    assert apart.nodes["group"].n_unique() == 2
    assert apart.order("a", WALL_NS, "c", WALL_NS + 10**9) is None
    assert apart.order("a", WALL_NS, "b", WALL_NS + 10**12) is None, "long after the last packet"
    assert solve(packets(NODES, RING, one_way=True, seconds=1)).nodes.is_empty()
    assert solve(packets(NODES, RING, seconds=0.15)).nodes.is_empty(), "too short to tell the drift"
    assert solve(packets(NODES, RING).clear()).nodes.is_empty()
