"""What a fault did, by runs of the same job without it or with it somewhere else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.lab.sim.faults import Fault
from pulse_bpf.lab.sim.model import NONE, Cluster, Result, Seen
from pulse_bpf.lab.sim.situation import Prepared

# Of what is indistinguishable no sample differs by more.
_ALIKE = 0.02
# After these a job stands still, whatever it would have done.
STOPS = ("hang", "crash", "mismatch")
# Of a run, for so much at its end a job does nothing that stands still.
_STANDS_STILL = 0.2
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_COUNTERS = ("tx_pause_ns", "rx_pause_ns", "cnp_sent", "cnp_handled", "naks_sent", "timeouts", "rx_errors")


def compared(
    faults: Sequence[Fault], faulty: Result, prepared: Prepared, cluster: Cluster
) -> NDArray[np.bool_]:
    """The calls whose ends in the healthy run `effect` needs, to be told before that run has ended."""
    if _idle_ns(faulty) > _STANDS_STILL * faulty.ended_ns:
        # Whether the job stands still is told by how the healthy one ends.
        return np.ones(len(prepared.calls), bool)
    touched = [comm for fault in faults for comm in _touched(fault, prepared, cluster)]
    started = pl.Series(faulty.call_times["start_ns"]).is_not_nan()
    calls = pl.DataFrame({"comm": prepared.calls["comm"], "rank": prepared.calls["rank"], "started": started})
    seq = pl.int_range(pl.len()).over("comm", "rank")
    begun = pl.col("started").any().over("comm", seq)
    return np.asarray(calls.select(pl.col("comm").is_in(touched) & begun).to_series())


def effect(
    fault: Fault, faulty: Result, healthy: Result, prepared: Prepared, cluster: Cluster
) -> float | None:
    """How many times as long operators of the victim were under way because of the fault; None: the job stands still.

    An operator is under way from the first member's entering to the last one's leaving, or the run's end if that
    comes first. Taken are those that were under way while the fault was there (from `start_ns` to `end_ns`), and
    ended in the healthy run, in communicators that the victim, a GPU, a node or the flows over a NIC or port,
    belongs to; the sums of both runs are compared. Of two faults each has the effect of both.
    """
    frame = pl.DataFrame(
        {
            "comm": prepared.calls["comm"],
            "rank": prepared.calls["rank"],
            "faulty_start": faulty.call_times["start_ns"],
            "faulty_end": faulty.call_times["end_ns"],
            "healthy_start": healthy.call_times["start_ns"],
            "healthy_end": healthy.call_times["end_ns"],
        }
    )
    seq = pl.int_range(pl.len()).over("comm", "rank")
    gathered = (
        frame.with_columns(seq=seq, until=pl.col("faulty_end").fill_nan(faulty.ended_ns))
        .filter(pl.col("comm").is_in(_touched(fault, prepared, cluster)))
        .group_by("comm", "seq", maintain_order=True)
        .agg(
            faulty=pl.col("until").max() - pl.col("faulty_start").min(),
            healthy=pl.col("healthy_end").max() - pl.col("healthy_start").min(),
            started=pl.col("faulty_start").min(),
            until=pl.col("until").max(),
            compared=pl.col("healthy_end").is_not_nan().all(),
        )
    )
    end_ns = np.inf if fault.end_ns is None else fault.end_ns
    during = gathered.filter("compared", pl.col("started") <= end_ns, pl.col("until") >= fault.start_ns)
    if fault.end_ns is None and _has_stopped(faulty, healthy):
        return None
    if during.is_empty():
        return 1.0
    return float(during["faulty"].to_numpy().sum() / during["healthy"].to_numpy().sum())


def _has_stopped(faulty: Result, healthy: Result) -> bool:
    """The job's progress ended long before the run did, and would not have."""
    return _idle_ns(faulty) > _STANDS_STILL * faulty.ended_ns > 2 * _idle_ns(healthy)


def _idle_ns(result: Result) -> float:
    return result.ended_ns - float(np.nanmax(result.task_times["end_ns"], initial=0.0))


def _touched(fault: Fault, prepared: Prepared, cluster: Cluster) -> list[int]:
    flows = prepared.network.flows
    if fault.nic is not None:
        flows = flows[(flows["src_nic"] == fault.nic) | (flows["dst_nic"] == fault.nic)]
    elif fault.flows:
        flows = flows[list(fault.flows)]
    if fault.nic is not None or fault.flows:
        comms = prepared.network.connections["comm"][flows["connection"]]
        return [int(comm) for comm in np.unique(comms[comms != NONE])]
    members = prepared.job.comm_members
    if fault.node is None:
        return list(range(len(members)))
    of_node = range(fault.node * cluster.gpus, (fault.node + 1) * cluster.gpus)
    victims = set(of_node) if fault.gpu is None else {fault.gpu}
    return [number for number, gpus in enumerate(members) if victims & set(gpus)]


def alike(one: Result, other: Result) -> bool:
    """Whether nothing that a recording holds tells the runs apart: each queue pair's curves at both ends by
    their quantiles, each port's counters, and which queue pairs had which events."""
    for name in _COUNTERS:
        if _differ(_last(one, name), _last(other, name)):
            return False
    for kind in Seen:
        counts = (
            np.bincount(each.events["flow"][each.events["kind"] == kind] + 1, minlength=1)
            for each in (one, other)
        )
        mine, others = next(counts), next(counts)
        size = max(len(mine), len(others))
        if _differ(np.pad(mine, (0, size - len(mine))), np.pad(others, (0, size - len(others)))):
            return False
    curves = _curves(one).join(_curves(other), on=["flow", "rx"], how="full", suffix="_other")
    values = [name for name in curves.columns if name.startswith("q") and not name.endswith("_other")]
    differ = [
        (pl.col(name).fill_null(0) - pl.col(f"{name}_other").fill_null(0)).abs()
        > _ALIKE * pl.col("peak").fill_null(0)
        for name in values
    ]
    return not bool(curves.select(pl.any_horizontal(differ).any()).item())


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    most = max(one.max(initial=0), other.max(initial=0))
    return bool(most > 0 and np.abs(one.astype(float) - other.astype(float)).max() > _ALIKE * most)


def _last(result: Result, name: str) -> np.ndarray:
    counters = result.counters
    return np.asarray(counters[name][counters["t_ns"] == counters["t_ns"].max()])


def _curves(result: Result) -> pl.DataFrame:
    samples = pl.DataFrame({name: result.samples[name] for name in ("flow", "rx", "bytes")})
    quantiles = [pl.col("bytes").quantile(q).alias(f"q{q}") for q in _QUANTILES]
    return samples.group_by("flow", "rx").agg(
        *quantiles,
        (pl.col("bytes").sum() / pl.len()).alias("q_mean"),
        pl.col("bytes").quantile(0.99).alias("peak"),
    )
