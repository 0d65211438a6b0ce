"""Of ports that are equally slow, those that only pass on what another one sends."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.capped import CEILING
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.passing import not_passed_on
from pulse_bpf.schema import empty

NODES, MS = ("a", "b", "c", "d"), 1_000_000


def ports(*named: tuple[str, str, float, int]) -> list[Finding]:
    """Slow ports, by node, NIC, Gbit/s and what they cost."""
    return [
        Finding(
            *("nic-slow", "nic", "nic", 0.9, 1.8, 0, MS),
            [Evidence("burst_gbps", gbps, 398.0, 20, "")],
            node=node,
            nic=nic,
            lost_ns=lost_ns,
        )
        for node, nic, gbps, lost_ns in named
    ]


def ring(kind: str = "AllReduce", leaves_by: int = 0) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Two ranks on each node, rank 2n on mlx5_0 and 2n+1 on mlx5_1, in a ring that leaves a node by rank 2n+leaves_by,
    and enters it by the other one; in exchanges in pairs each rank sends to the one of its NIC on the next node."""
    rows, channels = [], []
    for number, node in enumerate(NODES):
        following = (number + 1) % len(NODES)
        for local in (0, 1):
            rank, peer = 2 * number + local, 2 * following + (local if kind == "Send" else 1 - local)
            channels.append({"comm_id": "r", "channel": 0, "rank": rank})
            channels[-1]["ring_next"] = peer if local == leaves_by else 2 * number + leaves_by
            if local == leaves_by or kind == "Send":
                row = {"level": "flow", "direction": "tx", "comm_id": "r", "kind": kind, "rank": rank}
                row |= {"node": node, "nic": f"mlx5_{local}", "peer_node": NODES[following]}
                rows.append(
                    row | {"peer_rank": peer, "peer_nic": f"mlx5_{local if kind == 'Send' else 1 - local}"}
                )
    aligned = pl.DataFrame(rows, schema_overrides={name: metrics.OPERATORS[name] for name in rows[0]})
    ways = pl.DataFrame(
        channels, schema_overrides={name: empty("channels").schema[name] for name in channels[0]}
    )
    return aligned, ways


@pytest.mark.parametrize(
    ("place", "gbps", "named"),
    [("b", 226.2, ["a"]), ("b", 180.0, ["a", "b"]), ("c", 226.2, ["a", "c"]), ("d", 226.2, ["a"])],
)
def test_a_port_that_passes_on_what_comes_slowly_is_not_named_beside_the_slow_one(
    place: str, gbps: float, named: list[str]
) -> None:
    aligned, channels = ring()
    found = ports(("a", "mlx5_0", 225.6, 34), (place, "mlx5_0", gbps, 31))
    for known in (channels, channels.clear(), None):
        assert [item.node for item in not_passed_on(aligned, known, found, [])] == named


@pytest.mark.parametrize(("place", "named"), [("b", []), ("c", ["c"]), ("d", [])])
def test_a_port_at_a_ceiling_passes_on_what_a_port_sends_that_says_what_is_wrong_with_it(
    place: str, named: list[str]
) -> None:
    """The switch is kept from sending to a, whose slot lost lanes; by that nothing is told of how fast it is."""
    aligned, channels = ring()
    (faulty,) = ports(("a", "mlx5_0", 62.8, 34))
    faulty = replace(faulty, kind="pcie-slow", evidence=[Evidence("paused_share", 0.55, 0.0, 1, "")])
    (capped,) = ports((place, "mlx5_0", 62.8, 31))
    capped = replace(capped, evidence=[Evidence(CEILING, 62.8, 398.0, 20, "")])
    assert [item.node for item in not_passed_on(aligned, channels, [capped], [faulty])] == named


def test_a_ring_may_leave_a_machine_by_another_nic_than_it_came() -> None:
    """What leaves a by mlx5_1 enters b there, and leaves it by mlx5_0 where another ring goes, of another rank."""
    aligned, channels = ring(leaves_by=1)
    beside, _ = ring(leaves_by=0)
    both = pl.concat([aligned, beside.with_columns(comm_id=pl.lit("other"))])
    also = pl.concat([channels, ring()[1].with_columns(comm_id=pl.lit("other"))])
    passes_on = ports(("a", "mlx5_1", 225.6, 34), ("b", "mlx5_1", 225.6, 31))
    assert [item.node for item in not_passed_on(both, also, passes_on, [])] == ["a"]
    own = ports(("a", "mlx5_1", 225.6, 34), ("b", "mlx5_0", 225.6, 31))
    assert [item.node for item in not_passed_on(both, also, own, [])] == ["a", "b"]


def test_in_exchanges_in_pairs_a_rank_passes_on_what_it_gets_itself() -> None:
    aligned, _ = ring("Send")
    same = ports(("a", "mlx5_1", 225.6, 34), ("b", "mlx5_1", 225.6, 31))
    assert [item.node for item in not_passed_on(aligned, None, same, [])] == ["a"]
    other = ports(("a", "mlx5_1", 225.6, 34), ("b", "mlx5_0", 225.6, 31))
    assert [item.node for item in not_passed_on(aligned, None, other, [])] == ["a", "b"]
