"""A slow port holds others up: it is busy while they wait."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.attribute import FLOWS
from pulse_bpf.analysis.slow import find_slow

NODES = ("a", "b", "c", "d", "e", "f")
MS = 1_000_000
BYTES, FAST_GBPS, SLOW_GBPS = 10**8, 390.0, 130.0
STEP = pl.Schema({**metrics.OPERATORS, "step": pl.Int64})


def ring(others_ns: int, slow_gbps: float = SLOW_GBPS) -> pl.DataFrame:
    """Operators in a ring of which c sends its part slowly; those of the others last `others_ns`."""
    rows = []
    for step in range(20):
        for rank, node in enumerate(NODES):
            gbps = slow_gbps if node == "c" else FAST_GBPS
            span_ns = round(BYTES * 8 / slow_gbps / 0.95) if node == "c" else others_ns
            row = {
                "node": node,
                "nic": "m",
                "pid": rank,
                "level": "flow",
                "direction": "tx",
                "comm_id": "00-6",
            }
            row |= {"peer_node": NODES[(rank + 1) % len(NODES)], "peer_nic": "m", "kind": "AllReduce"}
            row |= {"op_bytes": BYTES, "bytes": BYTES, "op_seq": step, "step": step, "bin_ns": 32_000}
            row |= {"start_ns": 20 * step * MS, "last_byte_ns": 20 * step * MS + span_ns}
            rows.append(row | dict.fromkeys(("burst_gbps", "wmed_gbps", "p95_gbps", "max_gbps"), gbps))
    frame = pl.DataFrame(rows, schema_overrides={name: STEP[name] for name in rows[0]})
    return pl.concat([pl.DataFrame(schema=STEP), frame], how="diagonal")


def test_a_port_that_is_busy_while_the_others_wait_is_slow() -> None:
    found, why, _ = find_slow(ring(others_ns=round(BYTES * 8 / SLOW_GBPS)), pl.DataFrame(schema=FLOWS), None)
    assert [(item.node, item.scope) for item in found] == [("c", "link")]
    assert why == []


def test_what_is_slow_hardly_and_seldom_may_be_chance() -> None:
    slow_gbps = 0.7 * FAST_GBPS
    rows = ring(round(BYTES * 8 / slow_gbps), slow_gbps)
    assert find_slow(rows, pl.DataFrame(schema=FLOWS), None)[0][0].confidence > 0.7
    found, why, _ = find_slow(rows.filter(pl.col("step") < 5), pl.DataFrame(schema=FLOWS), None)
    assert (found, why) == ([], [])


def test_a_port_that_others_are_as_busy_as_is_not() -> None:
    """They end when they have sent at full speed: none of them waits for it, so its times are not right."""
    found, why, _ = find_slow(ring(others_ns=round(BYTES * 8 / FAST_GBPS)), pl.DataFrame(schema=FLOWS), None)
    assert found == []
    assert why == ["a slow flow from c was no busier than others of its operators"]


def tree(leaf_gbps: float) -> pl.DataFrame:
    """Operators in a tree in which b and c send twice as much as the leaves, and twice as fast as these usually can."""
    rows = ring(round(2 * BYTES * 8 / FAST_GBPS))
    inner = pl.col("node").is_in(["b", "c"])
    rate = (
        pl.when(inner)
        .then(FAST_GBPS)
        .otherwise(pl.when(pl.col("node") == "e").then(leaf_gbps).otherwise(195.0))
    )
    return rows.with_columns(
        bytes=pl.when(inner).then(2 * BYTES).otherwise(BYTES),
        last_byte_ns=pl.col("start_ns") + round(BYTES * 8 / min(leaf_gbps, 195.0) / 0.95),
        **dict.fromkeys(("burst_gbps", "wmed_gbps", "p95_gbps", "max_gbps"), rate),
    )


def test_the_leaves_of_a_tree_are_not_slow_that_take_no_longer_than_others() -> None:
    assert find_slow(tree(leaf_gbps=195.0), pl.DataFrame(schema=FLOWS), None) == ([], [], 0)


def test_a_leaf_that_takes_longer_than_others_is_slow() -> None:
    (item,), why, _ = find_slow(tree(leaf_gbps=65.0), pl.DataFrame(schema=FLOWS), None)
    assert (item.node, why) == ("e", [])
