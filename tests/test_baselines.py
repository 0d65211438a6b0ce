"""Each published method finds what it was published for, and nothing in a healthy job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest

from pulse_bpf.analysis.baselines import BASELINES
from pulse_bpf.analysis.load import Recording
from pulse_bpf.errors import DataError
from pulse_bpf.schema import TABLES, comm_id, conform, empty

MS = 1_000_000
NODES, GPUS, STEPS = 4, 4, 20
RANKS = NODES * GPUS
# Node-local groups, and groups over nodes of the GPUs with the same number: tensor and data parallel.
TENSOR = [[node * GPUS + gpu for gpu in range(GPUS)] for node in range(NODES)]
DATA = [[node * GPUS + gpu for node in range(NODES)] for gpu in range(GPUS)]


def job(
    compute: dict[int, float] | None = None,
    transfer: dict[int, float] | None = None,
    seed: int = 0,
    steps: Sequence[int] = range(STEPS),
    stop: tuple[int, int] | None = None,
) -> pl.LazyFrame:
    """The calls of STEPS steps: compute 2 ms, all-reduce in the node, compute 2 ms, all-reduce over the nodes (5 ms).

    `compute`: factors of ranks, in `steps`; `transfer`: factors of groups over nodes. An operator starts on a
    rank when that is ready and ends on all when the last was ready and the data has moved. From `stop`, (rank,
    step), on the rank calls nothing, and the others call one more operator of each group and wait. Clocks differ.
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
                slow = (transfer or {}).get(number, 1.0) if phase else 1.0
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


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_the_heat_map_shows_the_slow_gpu_and_the_slow_machine(rank: int) -> None:
    node = rank // GPUS
    assert located("heat-map", job({rank: 1.3})) == [("gpu", f"node{node}", rank % GPUS)]
    whole = dict.fromkeys(TENSOR[node], 1.3)
    assert located("heat-map", job(whole)) == [("node", f"node{node}", None)]
