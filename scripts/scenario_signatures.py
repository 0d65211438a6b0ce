"""What a scenario looks like on the wire, measured on a simulation of it beside its healthy twin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import polars as pl

from pulse_bpf.lab.sim import engine, nccl, workloads
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.faults import Fault
from pulse_bpf.lab.sim.model import CLOCK, NONE, Cluster, Floats, Result, Seen, Settings
from pulse_bpf.lab.sim.scenarios import SCENARIOS, prepare
from pulse_bpf.lab.sim.situation import Prepared
from pulse_bpf.lab.sim.tuning import NcclOptions
from pulse_bpf.lab.sim.victims import flow_bytes
from pulse_bpf.lab.sim.workloads.configurations import Size

SEED = 1
BIN_NS = 32_000
RECORD_NS = 0.15e9
SECONDS = 0.5
# Operators that move less are over before a curve shows anything.
LEAST_BYTES = 1 << 20
NAN = float("nan")


@dataclass(frozen=True)
class Run:
    """One simulation: what was prepared, and what came out."""

    prepared: Prepared
    settings: Settings
    cluster: Cluster
    result: Result


@dataclass(frozen=True)
class Signature:
    """One flow's sender while its operators run, over bins that lie wholly inside one. Rates are of payload;
    `active` and `empty` are shares of the bins: with at least a fifth of the peak, and with nothing. Gaps are runs
    of empty bins. Totals (the last five) are of the whole recording."""

    peak_gbps: float
    mean_gbps: float
    variation: float
    active: float
    empty: float
    longest_gap_ms: float
    sent_over_needed: float
    received_over_sent: float
    cnps: int
    naks: int
    timeouts: int


@cache
def simulate(name: str, workload: str, severity: float) -> Run:
    """The scenario on 8 nodes of 8 GPUs. Job, fabric and chance are the same for each scenario, clocks perfect."""
    scenario, cluster = SCENARIOS[name], Cluster()
    fabric, end_ns = Fabric(cluster), RECORD_NS + SECONDS * 1e9
    rng = np.random.default_rng(SEED)
    job = workloads.build(workload, cluster, size=Size(), seconds=end_ns / 1e9, rng=rng)
    tuning = NcclOptions(algorithm=workloads.WORKLOADS[workload].algorithm)
    network, calls = nccl.build(cluster, fabric, job, rng, tuning)
    prepared = prepare(
        scenario,
        cluster,
        fabric,
        network,
        job,
        calls,
        rng,
        severity=severity,
        onset=scenario.onsets[0],
        record_ns=RECORD_NS,
        end_ns=end_ns,
    )
    settings = Settings(SEED, end_ns, RECORD_NS, BIN_NS, np.zeros(cluster.nodes, CLOCK))
    result = engine.run(prepared.network, prepared.job, prepared.calls, prepared.incident, settings, cluster)
    return Run(prepared, settings, cluster, result)


def curve(run: Run, flow: int, rx: bool = False) -> Floats:
    """Bytes per bin, f8[bins], from the first whole bin of the recording on."""
    first, last = -(-int(RECORD_NS) // BIN_NS), int(run.settings.end_ns) // BIN_NS
    samples = run.result.samples
    mine = samples[(samples["flow"] == flow) & (samples["rx"] == rx)]
    mine = mine[(mine["bin"] >= first) & (mine["bin"] < last)]
    return np.bincount(mine["bin"] - first, mine["bytes"], minlength=last - first).astype(np.float64)


def inside(run: Run, flow: int) -> np.ndarray:
    """Which bins of the curve lie wholly inside one of the flow's operators, bool[bins]."""
    connection = run.prepared.network.flows["connection"][flow]
    moved = run.result.moved[run.result.moved["connection"] == connection]
    moved = moved[(moved["bytes"] >= LEAST_BYTES) & (moved["last_tx_ns"] > moved["first_tx_ns"])]
    first, bins = -(-int(RECORD_NS) // BIN_NS), len(curve(run, flow))
    starts = np.clip(moved["first_tx_ns"] // BIN_NS + 1 - first, 0, bins).astype(int)
    ends = np.clip(moved["last_tx_ns"] // BIN_NS - first, 0, bins).astype(int)
    change = np.zeros(bins + 1, int)
    np.add.at(change, starts[ends > starts], 1)
    np.add.at(change, ends[ends > starts], -1)
    return np.cumsum(change)[:-1] > 0


def signature(run: Run, flow: int) -> Signature:
    sent, received = curve(run, flow), curve(run, flow, rx=True)
    bins = sent[inside(run, flow)]
    if not bins.any():
        return Signature(NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0, 0, 0)
    peak = float(np.percentile(bins[bins > 0], 95))
    gaps = np.diff(np.flatnonzero(np.concatenate([[True], bins > 0, [True]]))) - 1
    samples = run.result.samples
    mine = samples[(samples["flow"] == flow) & (samples["rx"] == 0)]
    total, repeats = int(mine["bytes"].sum()), int(mine["retx_bytes"].sum())
    events = run.result.events[run.result.events["flow"] == flow]["kind"]
    cnps, naks, timeouts = (int((events == kind).sum()) for kind in (Seen.CNP, Seen.NAK, Seen.TIMEOUT))
    return Signature(
        peak * 8 / BIN_NS,
        float(bins.mean()) * 8 / BIN_NS,
        float(bins.std() / bins.mean()),
        float((bins >= 0.2 * peak).mean()),
        float((bins == 0).mean()),
        float(gaps.max()) * BIN_NS / 1e6,
        total / max(total - repeats, 1),
        float(received.sum() / max(sent.sum(), 1)),
        cnps,
        naks,
        timeouts,
    )


def operators(run: Run) -> pl.DataFrame:
    """Calls of LEAST_BYTES or more on communicators that span nodes: comm, seq, gpu, call_ns, start_ns, end_ns (null:
    never)."""
    job, calls, times = run.prepared.job, run.prepared.calls, run.result.call_times
    spans = [len({gpu // run.cluster.gpus for gpu in members}) > 1 for members in job.comm_members]
    width = max(len(members) for members in job.comm_members)
    gpus = np.array([[*members, *[NONE] * (width - len(members))] for members in job.comm_members])
    columns = {name: times[name] for name in ("call_ns", "start_ns", "end_ns")}
    gpu = gpus[calls["comm"], calls["rank"]]
    frame = pl.DataFrame({"comm": calls["comm"], "gpu": gpu, "bytes": calls["bytes"], **columns})
    return (
        frame.with_columns(pl.col("start_ns", "end_ns").fill_nan(None))
        .with_columns(seq=pl.int_range(pl.len()).over("comm", "gpu"))
        .filter(pl.Series(np.array(spans)[calls["comm"]]) & (pl.col("bytes") >= LEAST_BYTES))
    )


def compared(run: Run, twin: Run, gpu: int | None) -> pl.DataFrame:
    """One row per operator that ended in both runs: `stretch` of its median duration, `wall` of the time from the
    first rank's entering to the last one's leaving; `spread`, the longest over the shortest duration; and of
    `gpu`: lag_ms behind the median rank's start, `late`, that over D, and `share`, its own D over the median one."""
    took, mine = pl.col("end_ns") - pl.col("start_ns"), pl.col("gpu") == (NONE if gpu is None else gpu)
    rows = []
    for each in (run, twin):
        rows.append(
            operators(each)
            .group_by("comm", "seq")
            .agg(
                took=took.median(),
                wall=pl.col("end_ns").max() - pl.col("start_ns").min(),
                spread=took.max() / took.min(),
                lag_ms=(pl.col("start_ns").filter(mine).first() - pl.col("start_ns").median()) / 1e6,
                share=took.filter(mine).first() / took.median(),
                late=(pl.col("start_ns").filter(mine).first() - pl.col("start_ns").median()) / took.median(),
                ended=pl.col("end_ns").is_not_null().all(),
            )
            .filter("ended")
        )
    both = rows[0].join(rows[1], on=["comm", "seq"], suffix="_twin")
    return both.with_columns(
        stretch=pl.col("took") / pl.col("took_twin"), wall=pl.col("wall") / pl.col("wall_twin")
    )


def main_flow(run: Run, chosen: np.ndarray) -> int:
    """Of the flows for which `chosen` holds the one that carries most."""
    carried = flow_bytes(run.prepared.network, run.prepared.calls)
    return int(np.where(chosen, carried, -1.0).argmax())


def flow_of(run: Run, fault: Fault, by_caller: bool) -> int:
    """The flow to look at: over the faulty port, of the victim's NIC, or, `by_caller`, of its calls."""
    flows = run.prepared.network.flows
    callers = run.prepared.network.connections["src"][flows["connection"]]
    if fault.flows:
        return fault.flows[0]
    if fault.link != NONE:
        return main_flow(run, (flows["path"] == fault.link).any(1))
    if fault.nic is None and fault.gpu is None:
        return main_flow(run, flows["src_nic"] // run.cluster.gpus == fault.node)
    if by_caller and fault.gpu is not None:
        return main_flow(run, callers == fault.gpu)
    return main_flow(run, flows["src_nic"] == (fault.gpu if fault.nic is None else fault.nic))


def around(run: Run, flow: int) -> dict[str, int]:
    """The flow's neighbours in its channel's ring over nodes: the one into its sender's node, the one out of its
    receiver's, the one half the ring away; and one between the same nodes in another channel."""
    network, per_node = run.prepared.network, run.cluster.gpus
    connections = network.connections[network.flows["connection"]]
    mine = connections[flow]
    src, dst = network.flows["src_nic"] // per_node, network.flows["dst_nic"] // per_node
    same = (connections["comm"] == mine["comm"]) & (connections["channel"] == mine["channel"])
    other = (connections["comm"] == mine["comm"]) & (connections["channel"] != mine["channel"])
    found = {"x→y": flow, "w→x": main_flow(run, same & (dst == src[flow]))}
    at = found["y→z"] = main_flow(run, same & (src == dst[flow]))
    for _ in range(run.cluster.nodes // 2 - 1):
        at = main_flow(run, same & (src == dst[at]))
    found["far"] = at
    found["x→y beside"] = main_flow(run, other & (src == src[flow]) & (dst == dst[flow]))
    return found


def after_stop(run: Run, flow: int, stop_ns: float) -> pl.DataFrame:
    """What each node still sends in the flow's channel: hop (0: the flow itself), node, mib, last_us after the
    stop."""
    at, rows = flow, []
    first = -(-int(RECORD_NS) // BIN_NS)
    nodes = run.prepared.network.flows["src_nic"] // run.cluster.gpus
    for hop in range(run.cluster.nodes):
        sent = curve(run, at)
        later = int(stop_ns // BIN_NS) + 1 - first
        last = np.flatnonzero(sent)[-1] + first + 1
        rows.append((hop, int(nodes[at]), sent[later:].sum() / (1 << 20), (last * BIN_NS - stop_ns) / 1e3))
        at = around(run, at)["y→z"]
    return pl.DataFrame(rows, schema=["hop", "node", "mib", "last_us"], orient="row")
