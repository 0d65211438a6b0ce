"""What must be seen of a job for it to be called healthy, and how what was not is told."""

from __future__ import annotations

import polars as pl
import pytest

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.seen import coverage_of, missing_in
from pulse_bpf.schema import empty

TABLES = {"nodes": empty("nodes"), "coverage": empty("coverage")}
NICS = pl.concat(
    [
        empty("nics"),
        pl.DataFrame({"node": ["node0", "node1"], "nic": "nic0", "link_gbps": [400.0, 400.0]}).cast(
            {"link_gbps": empty("nics").schema["link_gbps"]}
        ),
    ],
    how="diagonal",
)


def _rows(
    comm: str = "c", ranks: int = 2, steps: int = 12, nranks: int = 2, size: int = 1_000_000
) -> pl.DataFrame:
    """A ring of one rank for each node that ends `steps` operators in each of which `size` bytes move."""
    rows = [
        {
            "level": "flow",
            "kind": "AllReduce",
            "comm_id": comm,
            "nranks": nranks,
            "rank": rank,
            "node": f"node{rank}",
            "nic": "nic0",
            "peer_node": f"node{(rank + 1) % nranks}",
            "peer_nic": "nic0",
            "pid": rank,
            "direction": "tx",
            "op_seq": step,
            "program_pos": step,
            "bytes": size,
            "expected_bytes": size,
            "start_ns": step,
            "end_ns": step + 1,
            "burst_gbps": 100.0,
        }
        for rank in range(ranks)
        for step in range(steps)
    ]
    frame = pl.DataFrame(rows, schema_overrides={name: OPERATORS[name] for name in rows[0]})
    rest = [pl.lit(None, dtype).alias(name) for name, dtype in OPERATORS.items() if name not in frame.columns]
    return (
        frame.select(pl.all(), *rest)
        .select(OPERATORS.names())
        .with_columns(step=pl.col("op_seq").cast(pl.Int64))
    )


def _missing(aligned: pl.DataFrame) -> tuple[list[str], list[str]]:
    flows = pl.DataFrame(schema={"flow": pl.UInt64, "reason": pl.String})
    coverage = coverage_of(aligned, flows, TABLES, [])
    return missing_in(aligned, NICS, coverage), coverage["not_judged"]


def test_a_job_that_was_seen_lacks_nothing() -> None:
    assert _missing(_rows()) == ([], [])


def test_a_small_communicator_beside_large_ones_is_no_obstacle_but_told() -> None:
    small = _rows("loss", size=8).with_columns(burst_gbps=pl.lit(None, pl.Float64))
    missing, not_judged = _missing(pl.concat([_rows(), small]))
    assert missing == []
    assert not_judged == [
        "communicator loss of 2 ranks: its operators are too small for the bins, or unfinished"
    ]
    missing, _ = _missing(small)
    assert missing[0] == "0% of the bytes in operators could be judged"


def test_alike_communicators_are_one_line() -> None:
    several = pl.concat([_rows(f"c{number}", steps=number) for number in (1, 2)])
    missing, not_judged = _missing(pl.concat([several, _rows("d", steps=1, size=8)]))
    assert not_judged == ["3 communicators of 2 ranks: 1 to 2 finished operators with traffic, 3 are needed"]
    assert "node0, node1: 4 finished operators with traffic, 10 are needed" in missing
    partly = pl.concat([_rows(f"c{number}", nranks=4) for number in range(3)])
    assert "3 communicators of 4 ranks: 2 of its ranks were recorded" in _missing(partly)[0]


def test_operators_that_do_not_match_are_not_judged_unless_point_to_point() -> None:
    apart = _rows().with_columns(step=pl.lit(None, pl.Int64))
    assert (
        "communicator c of 2 ranks: the operators of its ranks do not match each other" in _missing(apart)[0]
    )
    assert _missing(apart.with_columns(kind=pl.lit("Send")))[0] == []


def test_the_rate_of_all_peers_together_is_a_rate() -> None:
    parts = _rows().with_columns(burst_gbps=pl.lit(None, pl.Float64))
    sums = _rows().with_columns(level=pl.lit("nic"), peer_node=pl.lit(None, pl.String))
    assert _missing(pl.concat([parts, sums]))[0] == []


def test_a_port_whose_peers_alone_were_seen_is_missing() -> None:
    blind = _rows().with_columns(
        peer_nic=pl.when(pl.col("node") == "node0").then(pl.lit("nic1")).otherwise("peer_nic")
    )
    assert _missing(blind)[0] == ["no traffic of nic1 of node1 was seen, but of its peers with it"]


def test_nothing_called_is_nothing_seen() -> None:
    assert _missing(_rows().clear())[0] == ["no operator of a known communicator was seen"]


@pytest.mark.parametrize(
    ("gbps", "told"),
    [
        ({}, ["no port came near its speed (25% at most): channels may be few, or all wait for one machine"]),
        (
            {"node0": 390.0},
            ["no port came near its speed (25% at most): channels may be few, or all wait for one machine"],
        ),
        ({"node0": 390.0, "node1": 300.0}, []),
    ],
)
def test_a_job_no_port_of_which_came_near_its_speed_is_not_called_healthy(
    gbps: dict[str, float], told: list[str]
) -> None:
    """In a ring, one slow machine makes all as slow; its successor alone may burst."""
    rows = _rows(size=20_000_000)
    rate = pl.col("node").replace_strict(gbps, default=100.0, return_dtype=pl.Float64)
    assert _missing(rows.with_columns(burst_gbps=rate)) == (told, [])


def test_operators_too_small_to_reach_a_port_s_speed_say_nothing_of_it() -> None:
    assert _missing(_rows(size=100_000)) == ([], [])
