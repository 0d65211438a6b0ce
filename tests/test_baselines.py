"""Each published method finds what it was published for, and nothing in a healthy job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pytest
import recordings
from recordings import Fault

from pulse_bpf.analysis.baselines import BASELINES
from pulse_bpf.analysis.baselines.calls import OPERATOR, collectives
from pulse_bpf.analysis.load import Recording
from pulse_bpf.errors import DataError
from pulse_bpf.schema import TABLES, comm_id, conform, empty

MS = 1_000_000
NODES, GPUS, STEPS = 4, 4, 20
RANKS = NODES * GPUS
# Node-local groups, and groups over two nodes of the GPUs with the same number: tensor and data parallel.
TENSOR = [[node * GPUS + gpu for gpu in range(GPUS)] for node in range(NODES)]
DATA = [[(node + other) * GPUS + gpu for other in range(2)] for node in (0, 2) for gpu in range(GPUS)]


def job(
    compute: dict[int, float] | None = None,
    transfer: dict[tuple[bool, int], float] | None = None,
    seed: int = 0,
    steps: Sequence[int] = range(STEPS),
    stop: tuple[int, int] | None = None,
) -> pl.LazyFrame:
    """The calls of STEPS steps: compute 2 ms, all-reduce in the node, compute 2 ms, all-reduce over the nodes (5 ms).

    `compute`: factors of ranks, in `steps`; `transfer`: factors of groups by (over nodes, number). An operator starts
    on a rank when that is ready and ends on all when the last was ready and the data has moved. From `stop`,
    (rank, step), on the rank calls nothing, and the others call one more operator of each group and wait. Clocks
    differ.
    """
    dice = np.random.default_rng(seed)
    ready = np.zeros(RANKS)
    rows: list[tuple[Any, ...]] = []
    hung: set[int] = set()
    for step in range(STEPS):
        for phase, groups in enumerate((TENSOR, DATA)):
            factor = np.ones(RANKS)
            for rank, value in (compute or {}).items():
                factor[rank] = value if step in steps else 1.0
            ready += 2 * MS * factor * dice.normal(1, 0.01, RANKS)
            for number, members in enumerate(groups):
                called = [
                    rank
                    for rank in members
                    if rank not in hung and not (stop and stop[0] == rank and step >= stop[1])
                ]
                slow = (transfer or {}).get((bool(phase), number), 1.0)
                took = (5 if phase else 1) * MS * slow * dice.normal(1, 0.01)
                end = ready[members].max() + took if len(called) == len(members) else None
                comm = comm_id(0xA0 + 0x10 * phase + number, len(members))
                rows += [
                    (
                        rank // GPUS,
                        100 + rank,
                        rank % GPUS,
                        members.index(rank),
                        comm,
                        step,
                        1 << 20 << phase * 6,
                        ready[rank] - MS,
                        ready[rank],
                        end,
                    )
                    for rank in called
                ]
                if end is None:
                    hung.update(members)
                else:
                    ready[members] = end
    names = ("node", "pid", "gpu", "rank", "comm_id", "seq", "bytes", "call_ns", "start_ns", "end_ns")
    frame = pl.DataFrame(rows, schema=names, orient="row").with_columns(
        (pl.col(name) + 1e9 * pl.col("node")).cast(pl.Int64) for name in ("call_ns", "start_ns", "end_ns")
    )
    return frame.with_columns(pl.format("node{}", "node").alias("node"), kind=pl.lit("AllReduce")).lazy()


def recording(seconds: float = 60.0) -> Recording:
    """A recording that watched every node for `seconds`, with nothing else in it."""
    tables = {table: empty(table) for table in TABLES}
    begin = [node * 10**9 for node in range(NODES)]
    tables["coverage"] = conform(
        pl.DataFrame(
            {
                "node": [f"node{node}" for node in range(NODES)],
                "source": "packets",
                "first_ns": begin,
                "last_ns": [first + int(seconds * 1e9) for first in begin],
                "lost": 0,
            }
        ),
        "coverage",
    )
    return Recording(tables)


def located(method: str, calls: pl.LazyFrame) -> list[tuple[Any, ...]]:
    """(scope, node, gpu) of each finding of `method`; a `nodes` list for node where there is one."""
    findings = BASELINES[method].locate(calls, recording(STEPS * 11e-3 * 2))
    assert findings["format"] == "pulse-findings"
    assert (findings["verdict"] == "healthy") == (not findings["findings"])
    return [
        (found["scope"], found.get("nodes") or found.get("node"), found.get("gpu"))
        for found in findings["findings"]
    ]


OPERATOR_LEVEL = sorted(set(BASELINES) - {"llmprism"})


@pytest.mark.parametrize("method", OPERATOR_LEVEL)
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_job_is_healthy(method: str, seed: int) -> None:
    assert located(method, job(seed=seed)) == []


@pytest.mark.parametrize("method", OPERATOR_LEVEL)
def test_a_real_job_has_no_times_for_them(method: str) -> None:
    with pytest.raises(DataError):
        BASELINES[method].locate(None, recording())


@pytest.mark.parametrize("method", sorted(BASELINES))
def test_nothing_seen_is_nothing_found(method: str) -> None:
    empty_recording = Recording({table: empty(table) for table in TABLES})
    assert BASELINES[method].locate(job().head(0), empty_recording)["verdict"] == "healthy"


@pytest.mark.parametrize("rank", [0, 6, 15])
@pytest.mark.parametrize("method", ["heat-map", "greyhound"])
def test_a_gpu_or_a_machine_that_computes_slowly_stands_out(method: str, rank: int) -> None:
    node = rank // GPUS
    assert located(method, job({rank: 1.3})) == [("gpu", f"node{node}", rank % GPUS)]
    whole = dict.fromkeys(TENSOR[node], 1.3)
    assert located(method, job(whole)) == [("node", f"node{node}", None)]


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_a_rank_whose_group_waits_long_for_it_is_the_one_with_short_durations(rank: int) -> None:
    where = [("gpu", f"node{rank // GPUS}", rank % GPUS)]
    group = pl.col("comm_id") == comm_id(0xA0 + rank // GPUS, GPUS)
    assert located("inversion", job({rank: 20.0}).filter(group)) == where
    assert located("inversion", job({rank: 3.0}).filter(group)) == []  # a quarter of the median is no tenth
    # Its peer on the other machine waits for it, and is late in its own machine's next operator.
    assert located("inversion", job({rank: 20.0})) == []
    assert located("aegis", job({rank: 1.5})) == where
    assert located("aegis", job({rank: 1.03})) == []  # above 0.8 of the mean


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_holmes_follows_irregular_iterations_to_the_rank_that_began_them(rank: int) -> None:
    calls = job({rank: 3.0}, steps=range(7, 9))
    assert located("holmes", calls) == [("gpu", f"node{rank // GPUS}", rank % GPUS)]
    assert located("holmes", job({rank: 1.3}, steps=range(7, 9))) == []  # less than 4 % of the time


def test_holmes_finds_the_rank_that_was_waited_for_though_it_is_slow_inside_operators_too() -> None:
    calls = job({6: 3.0}, steps=range(7, 9))
    slow = (pl.col("pid") == 106) & pl.col("seq").is_between(7, 8)
    earlier = pl.col("start_ns") - pl.when(slow).then(MS).otherwise(0)
    assert located("holmes", calls.with_columns(earlier)) == [("gpu", "node1", 2)]


def test_calls_between_two_ranks_do_not_shift_the_numbers_of_collectives() -> None:
    calls, own = job(), pl.col("pid") == 106
    sends = calls.filter(own, pl.col("seq") < 3).with_columns(kind=pl.lit("Send"))
    later = calls.with_columns(pl.col("seq") + pl.when(own).then(3).otherwise(0))
    true_end_ns = pl.col("end_ns") - 10**9 * pl.col("node").str.slice(4).cast(pl.Int64)
    rows = collectives(pl.concat([later, sends], how="vertical_relaxed")).with_columns(true_end_ns)
    ends = rows.group_by(OPERATOR).agg(pl.col("end_ns").n_unique()).collect()["end_ns"]
    assert ends.unique().to_list() == [1]


@pytest.mark.parametrize("method", ["greyhound", "holmes"])
@pytest.mark.parametrize("number", range(0, len(DATA), 3))
def test_a_slow_link_is_narrowed_to_its_group(method: str, number: int) -> None:
    nodes = sorted({f"node{rank // GPUS}" for rank in DATA[number]})
    assert located(method, job(transfer={(True, number): 2.0})) == [("group", nodes, None)]


def test_greyhound_narrows_slow_groups_to_the_machine_that_they_share() -> None:
    assert located("greyhound", job(transfer={(False, 1): 3.0})) == [("node", "node1", None)]


def test_greyhound_compares_operators_of_equal_size_only() -> None:
    larger = pl.when(pl.col("comm_id") == comm_id(0xB3, 2)).then(2).otherwise(1)
    calls = job(transfer={(True, 3): 2.0}).filter(pl.col("comm_id").str.ends_with("-2"))
    assert located("greyhound", calls) == [("group", ["node0", "node1"], None)]
    assert located("greyhound", calls.with_columns(pl.col("bytes") * larger)) == []


def test_greyhound_looks_at_the_gpus_of_a_group_that_nothing_compares_to() -> None:
    alone = pl.col("comm_id") == comm_id(0xA1, GPUS)
    assert located("greyhound", job({6: 1.3}).filter(alone)) == [("gpu", "node1", 2)]
    assert located("greyhound", job().filter(alone)) == []


def test_suspects_that_are_all_machines_name_nobody() -> None:
    everywhere = {(True, 0): 2.0, (True, GPUS): 2.0}
    assert located("greyhound", job(transfer=everywhere)) == []


def test_greyhound_times_only_what_comes_after_the_alarm() -> None:
    assert located("greyhound", job({6: 1.5}, steps=range(STEPS // 2, STEPS))) == [("gpu", "node1", 2)]
    assert located("greyhound", job({6: 1.5}, steps=range(STEPS // 2 - 2))) == []


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_aegis_names_the_rank_that_launched_less(rank: int) -> None:
    assert located("aegis", job(stop=(rank, STEPS // 2))) == [("gpu", f"node{rank // GPUS}", rank % GPUS)]


def test_calls_under_way_when_the_recording_ends_are_no_stop() -> None:
    calls = job(stop=(6, STEPS // 2))
    ended = calls.select(
        pl.col("end_ns").max().over("node") - 10**9 * pl.col("node").str.slice(4).cast(pl.Int64)
    )
    findings = BASELINES["aegis"].locate(calls, recording(ended.collect()["end_ns"].max() / 1e9))  # type: ignore[operator]
    assert findings["verdict"] == "healthy"


def test_without_coverage_nothing_is_said_of_a_stop() -> None:
    calls = job(stop=(6, STEPS // 2))
    findings = BASELINES["aegis"].locate(calls, Recording({table: empty(table) for table in TABLES}))
    assert findings["verdict"] == "healthy"


@cache
def traffic(fault: Fault | None = None) -> Recording:
    """A recording of five hosts that exchange with each other all the time, of equal capacity but for `fault`."""
    return Recording(recordings.tables(recordings.run(hosts=5, kinds=("Group",), fault=fault)))


@pytest.mark.parametrize("host", range(5))
def test_aegis_names_the_nic_whose_requests_take_long(host: int) -> None:
    findings = BASELINES["aegis"].locate(job(), traffic(Fault("egress", host, 1.0)))["findings"]
    assert [(found["scope"], found["node"], found["nic"]) for found in findings] == [
        ("nic", f"node{host}", "rxe0")
    ]
    assert BASELINES["aegis"].locate(job(), traffic())["findings"] == []
    assert BASELINES["aegis"].locate(job(), traffic(Fault("egress", host, 3.0)))["findings"] == []  # of 4.0


def test_aegis_takes_the_narrowest_bins_of_a_port() -> None:
    narrow = traffic(Fault("egress", 2, 1.0))
    ports = narrow["samples"].with_columns(source=pl.lit("diag"))
    wide = traffic()["samples"].with_columns(bin_ns=pl.lit(10**7, pl.UInt32))
    both = Recording(narrow.tables | {"samples": wide, "port_samples": conform(ports, "port_samples")})
    (found,) = BASELINES["aegis"].locate(job(), both)["findings"]
    assert (found["node"], found["nic"]) == ("node2", "rxe0")


def exchange(
    nodes: int, slow: dict[tuple[int, int], float], small: tuple[tuple[int, int], ...], spread: float
) -> Recording:
    """Ten steps in which each of `nodes` sends 8 MB to each other at 10 Gbit/s, give or take `spread`, in 100 us bins.

    `slow`: by what factor some pairs are slower; `small`: pairs that have less to send, 1 MB.
    """
    dice, bin_ns = np.random.default_rng(nodes), 100_000
    pairs = [(src, dst) for src in range(nodes) for dst in range(nodes) if src != dst]
    rows = []
    for step in range(10):
        for src, dst in pairs:
            size = 10 / slow.get((src, dst), 1.0) * dice.uniform(1 - spread, 1 + spread) * bin_ns / 8
            volume = 1e6 if (src, dst) in small else 8e6
            count = int(-(-volume // size))
            rows += [
                (src, dst, step * 10**9 + k * bin_ns, min(size, volume - k * size)) for k in range(count)
            ]
    where = {
        "node": pl.format("node{}", "src"),
        "nic": pl.lit("mlx5_0"),
        "port": pl.lit(1),
        "qpn": pl.col("dst"),
        "peer_gid": pl.format("::{}", "dst"),
        "source": pl.lit("packets"),
        "direction": pl.lit("tx"),
        "bin_ns": pl.lit(bin_ns),
    }
    samples = pl.DataFrame(rows, schema=["src", "dst", "t_ns", "bytes"], orient="row")
    qps = pl.DataFrame(pairs, schema=["src", "dst"], orient="row")
    nics = pl.DataFrame({"node": [f"node{node}" for node in range(nodes)], "nic": "mlx5_0", "port": 1})
    tables = {table: empty(table) for table in TABLES}
    tables["nics"] = conform(
        nics.with_columns(gids=pl.Series([[f"::{node}"] for node in range(nodes)])), "nics"
    )
    tables["qps"] = conform(qps.with_columns(**where), "qps")
    tables["samples"] = conform(samples.with_columns(pl.col("bytes").cast(pl.UInt64), **where), "samples")
    return Recording(tables)


def recognized(
    nodes: int, slow: dict[tuple[int, int], float], *small: tuple[int, int], spread: float = 0.1
) -> list[dict[str, Any]]:
    return list(BASELINES["llmprism"].locate(None, exchange(nodes, slow, small, spread))["findings"])


def test_llmprism_names_the_nic_or_link_that_slow_flow_records_share() -> None:
    assert recognized(8, {}) == []
    assert recognized(8, {(3, 5): 2.0}, (3, 5)) == []  # nothing else is of its size
    assert recognized(8, {(3, 5): 2.0}, spread=0.0)[0]["scope"] == "link"
    assert recognized(8, {(3, 5): 1.02}, spread=0.0) == []
    (link,) = recognized(8, {(3, 5): 2.0})
    assert (link["scope"], link["node"], link["peer_node"]) == ("link", "node3", "node5")
    (egress,) = recognized(16, {(3, other): 2.0 for other in range(16)})
    assert (egress["scope"], egress["node"], egress["nic"]) == ("nic", "node3", "mlx5_0")
    (ingress,) = recognized(16, {(other, 5): 2.0 for other in range(16)})
    assert (ingress["scope"], ingress["node"]) == ("nic", "node5")
    (path,) = recognized(16, {(1, 2): 2.0, (3, 4): 2.0, (5, 6): 2.0})
    assert path["scope"] == "network"
    assert {(flow["node"], flow["peer_node"]) for flow in path["flows"]} == {
        ("node1", "node2"),
        ("node3", "node4"),
        ("node5", "node6"),
    }


def test_where_a_tenth_of_all_flows_is_slow_none_is_three_deviations_from_the_mean() -> None:
    assert recognized(8, {(3, other): 2.0 for other in range(8)}) == []
