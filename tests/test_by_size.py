"""Queue pairs of rings and of all-to-alls, told by how many there are of a size."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf.analysis.bursts import SILENCES, Bursts
from pulse_bpf.analysis.by_size import alike_to_all, channels
from pulse_bpf.schema import F64, I32, STR, U64

RING, ALL_TO_ALL = "the ring's", "the all-to-all's"
SCORED = pl.Schema(
    {
        "flow": U64,
        "node": STR,
        "comm_id": STR,
        "use": STR,
        "rank": I32,
        "peer_rank": I32,
        "peer_node": STR,
        "apart": F64,
        "called": F64,
        "carried": F64,
    }
)


def scored(
    sent_bytes: dict[int, list[int]], ring_to: int, called: float, ring_bytes: list[int]
) -> pl.DataFrame:
    """What rank 0 sends: of an all-to-all `sent_bytes` to each peer, and on a ring of which `called` was called
    `ring_bytes` to one; what that peer gets may be either's."""
    rows = []
    for peer, sizes in sent_bytes.items():
        for size in [*sizes, *(ring_bytes if peer == ring_to else [])]:
            flow = len({row["flow"] for row in rows}) + 1
            rank = {"flow": flow, "node": "n0", "rank": 0, "peer_rank": peer, "peer_node": f"n{peer}"}
            rank |= {"carried": size}
            rows.append(rank | {"comm_id": ALL_TO_ALL, "use": "alltoall", "apart": 0.1, "called": 1e9})
            if peer == ring_to:
                near = abs(called / size / round(called / size) - 1)
                rows.append(rank | {"comm_id": RING, "use": "collective", "apart": near, "called": called})
    return pl.DataFrame(rows, SCORED)


def to_all(sizes: list[int], peers: int = 4) -> dict[int, list[int]]:
    return dict.fromkeys(range(1, peers + 1), sizes)


def bursts_of(rows: pl.DataFrame) -> Bursts:
    flows = rows.unique("flow").sort("flow")
    total = np.zeros(2 * flows.height, np.int64)
    total[1::2] = flows["carried"].to_numpy()
    none = np.zeros(len(total), np.int64)
    ends = np.zeros(len(SILENCES) * len(total) + 1, np.int64)
    return Bursts(flows["flow"].to_numpy(), 0, none, total, none, none.astype(np.bool_), none, ends)


def found_to_all(rows: pl.DataFrame) -> list[int]:
    directions = rows.select("flow", direction=pl.lit("tx")).unique()
    several = rows.filter(pl.len().over("flow") > 1)
    found = alike_to_all(rows, several, directions, bursts_of(rows))
    assert found["use"].unique().to_list() in ([], ["alltoall"])
    return sorted(found["flow"].to_list())


def found_channels(rows: pl.DataFrame) -> list[int]:
    directions = rows.select("flow", direction=pl.lit("tx")).unique()
    found = channels(rows, directions)
    assert set(found["comm_id"]) <= {RING}
    return sorted(found.filter("channel")["flow"].to_list())


def test_an_all_to_all_is_as_large_to_a_peer_as_to_all_others_though_a_ring_is_nearly_so() -> None:
    rows = scored(to_all([1_000_000]), 4, 2_002_000, [1_001_000, 1_001_000])
    assert found_to_all(rows) == [4]


def test_of_flows_that_are_all_as_large_as_to_other_peers_none_is_told() -> None:
    rows = scored(to_all([1_000_000]), 4, 2_000_000, [1_000_000, 1_000_000])
    assert found_to_all(rows) == []


def test_as_many_peers_as_a_tree_has_do_not_show_that_all_get_as_much() -> None:
    rows = scored(to_all([1_000_000], 3), 3, 2_002_000, [1_001_000, 1_001_000])
    assert found_to_all(rows) == []


def test_where_other_peers_do_not_get_as_much_as_each_other_nothing_is_told() -> None:
    rows = scored(to_all([1_000_000]) | {2: [1_100_000]}, 4, 2_002_000, [1_001_000, 1_001_000])
    assert found_to_all(rows) == []


def test_each_of_several_queue_pairs_to_a_peer_has_its_like() -> None:
    rows = scored(to_all([600_000, 500_000, 500_000]), 4, 1_202_000, [601_000, 601_000])
    assert found_to_all(rows) == [10, 11, 12]


def test_channels_that_carry_exactly_their_part_are_the_rings_beside_others_nearly_as_large() -> None:
    rows = scored({1: [980_000] * 2, 3: [980_000] * 2}, 3, 2_000_000, [1_000_000, 1_000_000])
    assert found_channels(rows) == [5, 6]


def test_channels_are_told_by_about_their_part_where_none_is_exact() -> None:
    rows = scored({1: [700_000] * 2, 3: [700_000] * 2}, 3, 2_050_000, [1_000_000, 1_000_000])
    assert found_channels(rows) == [5, 6]


def test_channels_are_told_by_all_together_where_calls_were_not_seen() -> None:
    rows = scored({1: [400_000] * 2, 3: [400_000] * 2}, 3, 1_750_000, [1_000_000, 1_000_000])
    assert found_channels(rows) == [5, 6]
