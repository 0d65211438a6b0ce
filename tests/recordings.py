"""Small synthetic recordings of a training job, by simulating its messages one by one.

The job: N nodes of one rank each, one queue pair at each end of every ordered pair of nodes (data go one way on it,
clear-to-send the other), and in each step a pause for computing, then ReduceScatter, AllGather and AllReduce over
the ring 0 -> 1 -> ... -> 0 and one group of Send/Recv between all pairs. Data move as 16 KiB slices under 8 credits
per connection: a slice of a later round leaves only when the slice it depends on has come in, and a receiver grants
nothing before it entered the operator. A host's egress serves its ready connections in turn by 4 KiB, its ingress
is a queue; so a fault spreads over the ring the way it does in NCCL. One packet carries 1 KiB.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from pulse_bpf import schema

SLICE = 16384
CREDITS = 8
QUANTUM = 4096
PACKET = 1024
LATENCY_NS = 20_000
EPOCH_NS = 1_700_000_000_000_000_000
CHUNK = 4 * SLICE
RING_KINDS = ("ReduceScatter", "AllGather", "AllReduce")


@dataclass(frozen=True)
class Options:
    """What `make` simulates; node numbers are ranks, times are counted from the start of the job.

    `*_factor` scale the rate of a node's port (0.5: half as fast), `extra_compute_ns` adds a pause before every step,
    `extra_slice_ns` a delay before every slice a node handles (GPU or CPU taken away inside operators), `loss` gives
    a link (sender, receiver) the chance that a slice is cut off and repeated after `rto_ns`. These begin at `from_ns`.
    `stop_ns` stops a node for good; with `gone` its process ends. The recording begins at `record_from_ns` and,
    after a stop, ends `hang_ns` later. `run_ahead`: all calls of a step are made at its beginning. `lost_parts` drops
    this share of the sample rows at random, `clock_offset_ns` shifts everything a node wrote.
    """

    nodes: int = 4
    steps: int = 20
    rate_bytes_s: float = 4e6
    bin_ns: int = 1_000_000
    compute_ns: int = 20_000_000
    seed: int = 1
    ring_only: bool = False
    run_ahead: bool = False
    noise: float = 0.0
    from_ns: int = 0
    egress_factor: Mapping[int, float] = field(default_factory=dict)
    ingress_factor: Mapping[int, float] = field(default_factory=dict)
    extra_compute_ns: Mapping[int, int] = field(default_factory=dict)
    extra_slice_ns: Mapping[int, int] = field(default_factory=dict)
    loss: Mapping[tuple[int, int], float] = field(default_factory=dict)
    rto_ns: int = 8_000_000
    stop_ns: Mapping[int, int] = field(default_factory=dict)
    gone: bool = False
    hang_ns: int = 2_000_000_000
    record_from_ns: int = 0
    lost_parts: float = 0.0
    clock_offset_ns: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """What really happened: `operators` has a row per (operator, pair, direction) that moved bytes.

    Columns: op (position in the job, from 0), kind ("Group" for Send/Recv), node, rank, peer_rank, direction,
    call_ns, start_ns (first packet), end_ns (last packet), bytes (without repeats), retx_bytes, complete (all its
    bytes moved); on the clocks of the recording, operators before its beginning included.
    """

    operators: pl.DataFrame
    comm_id: str
    first_ns: int
    last_ns: int


class _Connection:
    """One operator's traffic from one rank to another: counts of slices by how far they got."""

    __slots__ = (
        "busy",
        "consumed",
        "delivered",
        "held",
        "left",
        "lost_at",
        "processed",
        "round_",
        "sent",
        "total",
    )

    def __init__(self, total: int, round_: int) -> None:
        self.total, self.round_ = total, round_
        self.processed = self.sent = self.delivered = self.consumed = 0
        self.busy = self.held = False
        self.left = 0  # bytes of the slice being sent
        self.lost_at = -1  # packets of it that arrived before the loss; -1: nothing is lost


class _Job:
    def __init__(self, options: Options) -> None:
        self.o = options
        self.random = random.Random(options.seed)
        self.now = 0
        self.events: list[tuple[int, int, tuple[object, ...]]] = []
        self.order = 0
        n = options.nodes
        kinds = RING_KINDS if options.ring_only else (*RING_KINDS, "Group")
        self.program = list(kinds) * options.steps
        self.per_step = len(kinds)
        self.position = [-1] * n
        self.entered = [-1] * n
        self.calls: list[list[int]] = [[] for _ in range(n)]
        self.sending = [False] * n
        self.turn = [0] * n
        self.ingress_free = [0] * n
        self.connections: dict[tuple[int, int, int], _Connection] = {}
        self.quanta: list[tuple[int, int, int, int, int, int, int, int, bool, bool]] = []
        self.grants: list[tuple[int, int, int]] = []  # time, receiver, sender

    def peers_of(self, op: int, rank: int) -> list[int]:
        n = self.o.nodes
        if self.program[op] != "Group":
            return [(rank + 1) % n]
        return [(rank + k) % n for k in range(1, n)]

    def sources_of(self, op: int, rank: int) -> list[int]:
        n = self.o.nodes
        if self.program[op] != "Group":
            return [(rank - 1) % n]
        return [(rank - k) % n for k in range(1, n)]

    def connection(self, op: int, source: int, target: int) -> _Connection:
        key = (op, source, target)
        if key not in self.connections:
            kind, slices = self.program[op], CHUNK // SLICE
            rounds = (1 if kind == "Group" else self.o.nodes - 1) * (2 if kind == "AllReduce" else 1)
            self.connections[key] = _Connection(slices * rounds, slices)
        return self.connections[key]

    def at(self, delay_ns: float, *event: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + int(delay_ns), self.order, event))

    def stopped(self, rank: int) -> bool:
        return self.now >= self.o.stop_ns.get(rank, 1 << 62)

    def faulty(self, table: Mapping[int, float], rank: int, default: float) -> float:
        return table.get(rank, default) if self.now >= self.o.from_ns else default

    def run(self) -> None:
        for rank in range(self.o.nodes):
            self.finish_operator(rank)
        end = min(self.o.stop_ns.values(), default=1 << 61) + self.o.hang_ns
        while self.events and self.events[0][0] <= end:
            self.now, _, event = heapq.heappop(self.events)
            name, *arguments = event
            getattr(self, str(name))(*arguments)
        self.end_ns = end if self.o.stop_ns else self.now + 10_000_000

    def finish_operator(self, rank: int) -> None:
        self.position[rank] += 1
        op = self.position[rank]
        if op == len(self.program):
            return
        pause = self.random.uniform(100_000, 300_000)
        if op % self.per_step == 0:
            pause += self.o.compute_ns * self.random.uniform(0.95, 1.05)
            pause += self.faulty(self.o.extra_compute_ns, rank, 0)
        self.at(pause, "enter", rank)

    def enter(self, rank: int) -> None:
        if self.stopped(rank):
            return
        op = self.position[rank]
        self.entered[rank] = op
        if not self.o.run_ahead:
            self.calls[rank].append(self.now)
        elif op % self.per_step == 0:
            self.calls[rank] += [self.now + 20_000 * k for k in range(self.per_step)]
        for peer in self.peers_of(op, rank):
            self.process(op, rank, peer)
        for source in self.sources_of(op, rank):
            slots = min(CREDITS, self.connection(op, source, rank).total)
            self.grants += [(self.now, rank, source)] * slots
            self.serve(source)

    def process(self, op: int, rank: int, peer: int) -> None:
        c = self.connection(op, rank, peer)
        if c.busy or c.processed == c.total or c.processed - c.sent >= CREDITS or self.entered[rank] != op:
            return
        if c.processed >= c.round_:
            source = self.sources_of(op, rank)[0]
            if self.connection(op, source, rank).delivered <= c.processed - c.round_:
                return
        c.busy = True
        delay = self.random.uniform(20_000, 40_000) + self.faulty(self.o.extra_slice_ns, rank, 0)
        if self.o.noise:
            delay += self.random.expovariate(1 / (self.o.noise * 1e6))
        self.at(delay, "processed", op, rank, peer)

    def processed(self, op: int, rank: int, peer: int) -> None:
        if self.stopped(rank):
            return
        c = self.connection(op, rank, peer)
        c.busy = False
        c.processed += 1
        if c.processed > c.round_:
            self.consume(op, self.sources_of(op, rank)[0], rank)
        self.serve(rank)
        self.process(op, rank, peer)

    def consume(self, op: int, source: int, rank: int) -> None:
        c = self.connection(op, source, rank)
        c.consumed += 1
        if c.consumed + CREDITS <= c.total:
            self.grants.append((self.now, rank, source))
        self.serve(source)

    def serve(self, rank: int) -> None:
        """Put the next quantum of a ready connection of `rank` on the wire."""
        op, n = self.entered[rank], self.o.nodes
        if self.sending[rank] or op < 0:
            return
        peers = self.peers_of(op, rank)
        for peer in sorted(peers, key=lambda p: (p - self.turn[rank] - 1) % n):
            c = self.connection(op, rank, peer)
            ready = c.sent < c.processed and c.sent - c.consumed < CREDITS and self.entered[peer] >= op
            if c.held or not (c.left or (ready and not self.stopped(rank))):
                continue
            repeat = c.lost_at >= 0
            if not c.left:
                c.left = SLICE
                chance = self.o.loss.get((rank, peer), 0.0) if self.now >= self.o.from_ns else 0.0
                c.lost_at = self.random.randrange(SLICE // QUANTUM) if self.random.random() < chance else -1
                repeat = False
            self.turn[rank], self.sending[rank] = peer, True
            wire = QUANTUM / (self.o.rate_bytes_s * self.faulty(self.o.egress_factor, rank, 1.0)) * 1e9
            lost = (
                c.lost_at >= 0 and not c.held and (SLICE - c.left) // QUANTUM >= c.lost_at and c.lost_at < 99
            )
            self.at(wire, "quantum_sent", op, rank, peer, self.now, lost, repeat and c.lost_at >= 99)
            return

    def quantum_sent(self, op: int, rank: int, peer: int, began: int, lost: bool, repeat: bool) -> None:
        c = self.connection(op, rank, peer)
        self.sending[rank] = False
        c.left -= QUANTUM
        arrives = leaves = 0
        if not lost:
            wire = QUANTUM / (self.o.rate_bytes_s * self.faulty(self.o.ingress_factor, peer, 1.0)) * 1e9
            arrives = max(began + LATENCY_NS, self.ingress_free[peer])
            leaves = max(arrives + int(wire), self.now + LATENCY_NS)
            self.ingress_free[peer] = leaves
        self.quanta.append((op, rank, peer, began, self.now, arrives, leaves, QUANTUM, repeat, lost))
        if c.left == 0 and c.lost_at >= 0 and c.lost_at < 99:
            c.left = SLICE - c.lost_at * QUANTUM
            c.lost_at, c.held = 99, True  # from here on this slice is a repeat
            self.at(self.o.rto_ns, "release", op, rank, peer)
        elif c.left == 0:
            c.lost_at = -1
            c.sent += 1
            self.at(max(leaves - self.now, 0), "delivered", op, rank, peer)
            self.process(op, rank, peer)
            self.leave(op, rank)
        self.serve(rank)

    def release(self, op: int, rank: int, peer: int) -> None:
        self.connection(op, rank, peer).held = False
        self.serve(rank)

    def delivered(self, op: int, source: int, rank: int) -> None:
        c = self.connection(op, source, rank)
        c.delivered += 1
        if self.stopped(rank):
            return
        if c.delivered > c.total - c.round_:
            self.consume(op, source, rank)
        if self.program[op] != "Group":
            self.process(op, rank, self.peers_of(op, rank)[0])
        self.leave(op, rank)

    def leave(self, op: int, rank: int) -> None:
        out = [self.connection(op, rank, peer) for peer in self.peers_of(op, rank)]
        into = [self.connection(op, source, rank) for source in self.sources_of(op, rank)]
        done = all(c.sent == c.total for c in out) and all(c.delivered == c.total for c in into)
        if done and self.position[rank] == op:
            self.finish_operator(rank)


def _packets(job: _Job) -> pl.DataFrame:
    """One row per packet: op, source, target, tx_ns, rx_ns, repeat, lost; times from the start of the job."""
    q = np.array(job.quanta, dtype=np.int64).reshape(-1, 10)
    count = QUANTUM // PACKET
    share = np.tile(np.arange(1, count + 1) / count, len(q))
    q = np.repeat(q, count, axis=0)
    return pl.DataFrame(
        {
            "op": q[:, 0],
            "source": q[:, 1],
            "target": q[:, 2],
            "tx_ns": q[:, 3] + ((q[:, 4] - q[:, 3]) * share).astype(np.int64),
            "rx_ns": q[:, 5] + ((q[:, 6] - q[:, 5]) * share).astype(np.int64),
            "repeat": q[:, 8] == 1,
            "lost": q[:, 9] == 1,
        }
    )


def _ends(job: _Job) -> pl.DataFrame:
    """Every packet as each end saw it: op, rank, peer, direction, qpn, t_ns (that node's clock), retx."""
    packets = _packets(job)
    tx = packets.select(
        "op",
        rank="source",
        peer="target",
        direction=pl.lit("tx"),
        qpn=100 + pl.col("target"),
        t_ns="tx_ns",
        retx="repeat",
    )
    rx = packets.filter(~pl.col("lost")).select(
        "op",
        rank="target",
        peer="source",
        direction=pl.lit("rx"),
        qpn=200 + pl.col("source"),
        t_ns="rx_ns",
        retx=pl.lit(False),
    )
    both = pl.concat([tx, rx])
    return both.with_columns(t_ns=pl.col("t_ns") + _clock(job, pl.col("rank")))


def _clock(job: _Job, rank: pl.Expr) -> pl.Expr:
    offsets = {r: EPOCH_NS + job.o.clock_offset_ns.get(r, 0) for r in range(job.o.nodes)}
    return rank.replace_strict(list(offsets), list(offsets.values()), return_dtype=pl.Int64)


def _node(rank: int) -> str:
    return f"n{rank}"


def _node_expr(column: str) -> pl.Expr:
    return pl.format("n{}", pl.col(column))


def _ops(job: _Job, comm: str) -> pl.DataFrame:
    n, rows = job.o.nodes, []
    for rank, calls in enumerate(job.calls):
        clock = EPOCH_NS + job.o.clock_offset_ns.get(rank, 0)
        base = {
            "node": _node(rank),
            "pid": 1000 + rank,
            "tid": 1000 + rank,
            "gpu": 0,
            "comm_id": comm,
            "comm_ptr": 0x7F00 + rank,
            "rank": rank,
            "nranks": n,
            "dtype": "float32",
            "stream": 1,
            "status": 0,
            "origin": "call",
        }
        for op, call in enumerate(calls):
            if call < job.o.record_from_ns:
                continue
            kind = job.program[op]
            both = {"call_ns": clock + call, "return_ns": clock + call + 5000}
            if kind != "Group":
                size = CHUNK * n
                count = size // 4 if kind == "AllReduce" else size // 4 // n
                rows.append({**base, **both, "kind": kind, "bytes": size, "count": count})
                continue
            for k in range(1, n):
                pair = (("Send", (rank + k) % n), ("Recv", (rank - k) % n))
                for part, peer in pair:
                    more = {"kind": part, "bytes": CHUNK, "count": CHUNK // 4, "peer": peer, "group": op + 1}
                    rows.append({**base, **both, **more})
    frame = schema.conform(pl.DataFrame(rows, infer_schema_length=None), "ops")
    seq = pl.int_range(pl.len(), dtype=pl.UInt64).over("node", "pid", "comm_id")
    return frame.with_columns(seq=seq, launch_ns="return_ns")


def _samples(job: _Job, ends: pl.DataFrame) -> pl.DataFrame:
    bin_ns = job.o.bin_ns
    grants = pl.DataFrame(job.grants, schema=["t_ns", "rank", "peer"], orient="row").select(
        rank="rank",
        direction=pl.lit("tx"),
        qpn=200 + pl.col("peer"),
        t_ns=pl.col("t_ns") + _clock(job, pl.col("rank")),
        bytes=pl.lit(0),
        retx_bytes=pl.lit(0),
        packets=pl.lit(0),
        ctl_packets=pl.lit(1),
    )
    data = ends.select(
        "rank",
        "direction",
        "qpn",
        "t_ns",
        bytes=pl.lit(PACKET),
        retx_bytes=pl.col("retx").cast(pl.Int32) * PACKET,
        packets=pl.lit(1),
        ctl_packets=pl.lit(0),
    )
    rows = (
        pl.concat([data, grants], how="vertical_relaxed")
        .filter(pl.col("t_ns") - _clock(job, pl.col("rank")) >= job.o.record_from_ns)
        .with_columns(t_ns=pl.col("t_ns") // bin_ns * bin_ns)
        .group_by("rank", "direction", "qpn", "t_ns")
        .agg(pl.col("bytes", "retx_bytes", "packets", "ctl_packets").sum())
        .sort("rank", "qpn", "direction", "t_ns")
    )
    if job.o.lost_parts:
        rows = rows.sample(fraction=1 - job.o.lost_parts, seed=job.o.seed).sort(
            "rank", "qpn", "direction", "t_ns"
        )
    flows = {
        (r, q + p): schema.flow_id(_node(r), "mlx5_0", 1, q + p, 0)
        for r in range(job.o.nodes)
        for p in range(job.o.nodes)
        for q in (100, 200)
    }
    keys = pl.DataFrame(
        [(r, q, flow) for (r, q), flow in flows.items()],
        schema={"rank": pl.Int64, "qpn": pl.Int64, "flow": pl.UInt64},
        orient="row",
    )
    rows = rows.with_columns(pl.col("rank", "qpn").cast(pl.Int64)).join(keys, on=["rank", "qpn"], how="left")
    rows = rows.sort("rank", "qpn", "direction", "t_ns").with_columns(
        node=_node_expr("rank"),
        nic=pl.lit("mlx5_0"),
        port=pl.lit(1),
        source=pl.lit("packets"),
        bin_ns=pl.lit(bin_ns),
    )
    return schema.conform(rows, "samples")


def _small_tables(job: _Job, comm: str) -> dict[str, pl.DataFrame]:
    n = job.o.nodes
    gid = [f"::ffff:10.0.0.{r + 1}" for r in range(n)]
    start = EPOCH_NS - 5_000_000_000
    gone = {r: EPOCH_NS + t for r, t in job.o.stop_ns.items()} if job.o.gone else {}
    qps, coverage = [], []
    for r in range(n):
        clock = EPOCH_NS + job.o.clock_offset_ns.get(r, 0)
        for direction in ("tx", "rx"):
            coverage.append(
                {
                    "node": _node(r),
                    "source": "packets",
                    "nic": "mlx5_0",
                    "port": 1,
                    "direction": direction,
                    "first_ns": clock + job.o.record_from_ns,
                    "last_ns": clock + job.end_ns,
                    "lost": 0,
                }
            )
        for p in range(n):
            for mine, theirs in () if p == r else ((100 + p, 200 + r), (200 + p, 100 + r)):
                qps.append(
                    {
                        "node": _node(r),
                        "nic": "mlx5_0",
                        "port": 1,
                        "qpn": mine,
                        "flow": schema.flow_id(_node(r), "mlx5_0", 1, mine, 0),
                        "peer_qpn": theirs,
                        "local_gid": gid[r],
                        "peer_gid": gid[p],
                        "pid": 1000 + r,
                        "gone_ns": gone.get(r),
                        "path_mtu": PACKET,
                        "origin": "netlink",
                    }
                )
    ranks = range(n)
    tables = {
        "nodes": [{"node": _node(r), "clock_source": "ptp", "clock_error_ns": 1000} for r in ranks],
        "nics": [
            {
                "node": _node(r),
                "nic": "mlx5_0",
                "port": 1,
                "link_gbps": 0.032,
                "gids": [gid[r]],
                "netdev": "e0",
            }
            for r in ranks
        ],
        "processes": [
            {"node": _node(r), "pid": 1000 + r, "start_ns": start, "gone_ns": gone.get(r), "exe": "train"}
            for r in ranks
        ],
        "comms": [
            {
                "node": _node(r),
                "pid": 1000 + r,
                "comm_ptr": 0x7F00 + r,
                "comm_id": comm,
                "rank": r,
                "nranks": n,
                "gpu": 0,
                "first_seen_ns": start,
            }
            for r in ranks
        ],
        "qps": qps,
        "coverage": coverage,
    }
    return {
        name: schema.conform(pl.DataFrame(rows, infer_schema_length=None), name)
        for name, rows in tables.items()
    }


def _truth(job: _Job, ends: pl.DataFrame, comm: str) -> Truth:
    totals = [(op, s, t, c.total * SLICE) for (op, s, t), c in job.connections.items()]
    keys = ["op", "source", "target"]
    expected = pl.DataFrame(totals, schema=[*keys, "expected"], orient="row")
    calls = pl.DataFrame(
        [(op, rank, call) for rank, calls in enumerate(job.calls) for op, call in enumerate(calls)],
        schema=["op", "rank", "call_ns"],
        orient="row",
    ).with_columns(call_ns=pl.col("call_ns") + _clock(job, pl.col("rank")))
    tx = pl.col("direction") == "tx"
    operators = (
        ends.group_by("op", "rank", "peer", "direction")
        .agg(
            start_ns=pl.col("t_ns").min(),
            end_ns=pl.col("t_ns").max(),
            bytes=(~pl.col("retx")).sum() * PACKET,
            retx_bytes=pl.col("retx").sum() * PACKET,
        )
        .with_columns(
            source=pl.when(tx).then("rank").otherwise("peer"),
            target=pl.when(tx).then("peer").otherwise("rank"),
            node=_node_expr("rank"),
            kind=pl.col("op").replace_strict(range(len(job.program)), job.program, return_dtype=pl.String),
        )
        .join(expected, on=keys, how="left")
        .join(calls, on=["op", "rank"], how="left")
        .with_columns(complete=pl.col("bytes") >= pl.col("expected"), peer_rank="peer")
        .select(
            *("op", "kind", "node", "rank", "peer_rank", "direction", "call_ns", "start_ns", "end_ns"),
            *("bytes", "retx_bytes", "complete"),
        )
        .sort("rank", "peer_rank", "direction", "op")
    )
    return Truth(operators, comm, EPOCH_NS + job.o.record_from_ns, EPOCH_NS + job.end_ns)


def make(path: Path, **options: object) -> Truth:
    """Write the recording of a simulated job into the new directory `path`; `options` are the fields of Options.

    Deterministic in its options. Returns what really happened.
    """
    job = _Job(Options(**options))  # type: ignore[arg-type]
    job.run()
    comm = schema.comm_id(0xFEED0000 + job.o.seed, job.o.nodes)
    ends = _ends(job)
    tables = _small_tables(job, comm)
    tables["ops"] = _ops(job, comm)
    tables["samples"] = _samples(job, ends)
    path.mkdir(parents=True)
    for name, frame in tables.items():
        frame.write_parquet(path / f"{name}.parquet")
    manifest = {
        "format": schema.FORMAT,
        "version": schema.FORMAT_VERSION,
        "created_ns": EPOCH_NS,
        "duration_ns": job.end_ns - job.o.record_from_ns,
        "tool": {"name": "tests", "version": "0"},
        "bin_ns": job.o.bin_ns,
        "bytes_are": "payload",
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return _truth(job, ends, comm)
