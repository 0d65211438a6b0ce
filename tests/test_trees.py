"""Who stopped a tree: on operators made by hand, in steps of a channel's buffer."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.trees import STEP_BYTES, holding_back

MS = 1_000_000
# The root has a single child, c, below which are b and d with two leaves and one.
ABOVE = {"c": "root", "b": "c", "d": "c", "x": "b", "y": "b", "z": "d"}
VOLUME = 60


def tree(up: dict[str, int], down: dict[str, int]) -> pl.DataFrame:
    """An operator of one buffer step less than all, that ended, and one in which so many went up from each node, and
    down to it; what goes up begins first."""
    made: list[dict[str, Any]] = []
    for child, parent in ABOVE.items():
        for node, peer, sent, delay_ns in ((child, parent, up[child], 0), (parent, child, down[child], MS)):
            common = {
                "node": node,
                "peer_node": peer,
                "nic": "n0",
                "direction": "tx",
                "level": "flow",
                "pid": 1,
            }
            made += [
                common | {"step": 1, "bytes": VOLUME * STEP_BYTES, "start_ns": MS + delay_ns},
                common | {"step": 2, "bytes": sent * STEP_BYTES},
            ]
    return pl.DataFrame(made, schema={**OPERATORS, "step": pl.Int64}).with_columns(
        expected_bytes=VOLUME * STEP_BYTES
    )


@pytest.mark.parametrize(
    ("up", "down", "stopped"),
    [
        # A process of an inner node: what it got it holds back both ways, and beside it buffers are full.
        ([36, 36, 44, 48, 48, 60], [36, 31, 36, 23, 23, 36], "b"),
        # A leaf of which nothing came.
        ([0, 8, 0, 24, 24, 0], [0, 0, 0, 0, 0, 0], "z"),
        # The root, which got all that buffers hold.
        ([18, 26, 26, 34, 34, 34], [10, 10, 10, 10, 10, 10], "root"),
    ],
)
def test_who_holds_back_what_it_got_stopped_unless_its_receiver_is_full(
    up: list[int], down: list[int], stopped: str
) -> None:
    operators = tree(dict(zip(ABOVE, up, strict=True)), dict(zip(ABOVE, down, strict=True)))
    assert holding_back(operators, 2, ["n0"]) == [stopped]


@pytest.mark.parametrize(
    ("up", "down"),
    [
        # Both b and z hold back.
        ([20, 20, 20, 40, 40, 28], [20, 16, 20, 8, 8, 20]),
        # d waits for c, of which its buffer is half full.
        ([36, 36, 40, 48, 48, 60], [36, 31, 36, 23, 23, 36]),
        # d sent more than it got.
        ([36, 36, 44, 48, 48, 40], [36, 31, 36, 23, 23, 36]),
        # All ended.
        ([60] * 6, [60] * 6),
    ],
)
def test_where_more_than_one_hold_back_or_cuts_are_wrong_nobody_is_named(
    up: list[int], down: list[int]
) -> None:
    operators = tree(dict(zip(ABOVE, up, strict=True)), dict(zip(ABOVE, down, strict=True)))
    assert holding_back(operators, 2, ["n0"]) == []


def test_without_knowing_what_is_above_nobody_is_named() -> None:
    up, down = dict(zip(ABOVE, [0, 8, 0, 24, 24, 0], strict=True)), dict.fromkeys(ABOVE, 0)
    operators = tree(up, down)
    assert holding_back(operators.with_columns(start_ns=pl.lit(None, pl.Int64)), 2, ["n0"]) == []
    circle = operators.with_columns(peer_node=pl.col("peer_node").replace({"root": "x"}))
    assert holding_back(circle, 2, ["n0"]) == []
