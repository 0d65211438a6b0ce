"""Small synthetic recordings of a job, from a mechanistic model of rings, all-to-alls, credits and shared NICs.

Time moves in ticks of one bin, data in packets. A host sends what its egress rate allows, shared packet by packet by
its flows; a flow may send what its data dependency (a ring forwards what it received, slice by slice) and its credits
(SLOTS slices beyond what the receiver has consumed) allow. Faults change rates or the process, nothing else: what
the curves look like then comes out of the model.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from pulse_bpf.schema import TABLES, comm_id, conform, empty

PACKET, SLICE, SLOTS = 1024, 16, 8
T0_NS, BIN_NS = 1_700_000_000_000_000_000, 1_000_000
COMM = comm_id(0xFEED, 4)


@dataclass(frozen=True)
class Fault:
    """`kind`: egress, ingress, link (their rate falls to `rate`), loss (probability `rate` on all that host
    sends, or to `peer` only), late (computes `rate` times as long), pause (every 4th step by `rate` ticks), hang, stop,
    kill (at operator `at`: before the call, inside it, inside it and the process is gone)."""

    kind: str
    host: int
    rate: float = 1.0
    peer: int | None = None
    at: int = 20


@dataclass
class Op:
    """One operator of one host: `sent` and `received` packets by peer."""

    kind: str
    volume: dict[int, int]  # packets to each peer
    call: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)


@dataclass
class Job:
    """What happened: `calls` (tick, host, op index, kind), `samples` by (host, peer, direction, tick), and the truth
    of each operator and flow: (host, peer, direction, op index) -> [first tick, last tick, packets]."""

    hosts: int
    kinds: tuple[str, ...]
    elements: int
    ticks: int = 0
    calls: list[tuple[int, int, int, str]] = field(default_factory=list)
    samples: dict[tuple[int, int, str, int], list[int]] = field(default_factory=dict)
    naks: list[tuple[int, int, int]] = field(default_factory=list)
    truth: dict[tuple[int, int, str, int], list[int]] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)


def run(
    hosts: int = 4,
    kinds: tuple[str, ...] = ("AllReduce", "Group"),
    steps: int = 14,
    seed: int = 0,
    fault: Fault | None = None,
    rate: float = 4.0,
    noise: float = 0.15,
    chunk: int = 64,
    compute: int = 20,
    buffer: int = 1000,
    after_stop: int = 3000,
) -> Job:
    """Plays `steps` times one operator of each of `kinds` and a pause of `compute` ticks, on `hosts` hosts.

    `chunk` packets are a ring's chunk and a peer's part of a Group; `buffer` packets fit into the switch per host.
    """
    dice = random.Random(seed)
    job = Job(hosts, kinds, chunk * PACKET // 4)
    total = steps * len(kinds)
    everyone = range(hosts)
    current: list[Op | None] = [None] * hosts
    index = [-1] * hosts
    wake = [dice.randrange(3) for _ in everyone]
    stalled = [0] * hosts
    tokens = [0.0] * hosts
    drained = [0.0] * hosts
    queue: list[deque[tuple[int, int]]] = [deque() for _ in everyone]
    resend: dict[tuple[int, int], int] = {}
    ops = [
        [_op(kinds[number % len(kinds)], host, hosts, chunk) for number in range(total)] for host in everyone
    ]
    link_tokens = 0.0
    dead: set[int] = set()
    quiet = 0
    tick = 0
    while (any(number < total for number in index) or any(current)) and quiet < after_stop:
        moved = False
        for host in everyone:
            if host in dead:
                continue
            if dice.random() < noise / 50:
                stalled[host] = tick + dice.randrange(2, 8)
            op = current[host]
            if op is not None and _finished(op):
                current[host] = op = None
                wake[host] = tick + _pause(index[host] + 1, host, len(kinds), compute, fault, dice)
            if op is None and tick >= wake[host] and index[host] < total:
                index[host] += 1
                if fault and fault.host == host and fault.kind == "hang" and index[host] == fault.at:
                    dead.add(host)
                elif index[host] < total:
                    current[host] = ops[host][index[host]]
                    current[host].call = tick
                    job.calls.append((tick, host, index[host], current[host].kind))
                    moved = True
            stops = (
                fault and fault.kind in ("stop", "kill") and fault.host == host and index[host] == fault.at
            )
            if (
                stops
                and current[host]
                and sum(current[host].sent.values()) > sum(current[host].volume.values()) // 3
            ):
                dead.add(host)
                if fault.kind == "kill":
                    job.gone[host] = tick
        for host in everyone:
            op = current[host]
            speed = fault.rate if fault and fault.kind == "egress" and fault.host == host else rate
            tokens[host] = min(8.0, tokens[host] + speed * (1 + noise * (dice.random() - 0.5)))
            if op is None or host in dead or stalled[host] > tick:
                continue
            if fault and fault.kind == "link" and fault.host == host:
                link_tokens = min(8.0, link_tokens + fault.rate)
            room = {peer: _allowed(op, host, peer, ops, index, hosts, chunk, dead) for peer in op.volume}
            peers = [peer for peer in sorted(room) if room[peer] > 0]
            dice.shuffle(peers)
            while tokens[host] >= 1 and peers:
                peer = peers.pop(0)
                limited = fault and fault.kind == "link" and fault.host == host and fault.peer == peer
                if (limited and link_tokens < 1) or len(queue[peer]) >= buffer:
                    continue
                link_tokens -= bool(limited)
                tokens[host] -= 1
                moved = True
                repeat = resend.get((host, peer), 0) > 0
                _count(job, host, peer, "tx", tick, index[host], repeat)
                if repeat:
                    resend[host, peer] -= 1
                else:
                    op.sent[peer] = op.sent.get(peer, 0) + 1
                    room[peer] -= 1
                    queue[peer].append((host, index[host]))
                    lossy = (
                        fault and fault.kind == "loss" and fault.host == host and fault.peer in (None, peer)
                    )
                    if lossy and dice.random() < fault.rate:
                        resend[host, peer] = dice.randrange(2, 8)
                        job.naks.append((tick, host, peer))
                if room[peer] > 0:
                    peers.append(peer)
        for host in everyone:
            slow = fault and fault.kind == "ingress" and fault.host == host
            drained[host] = min(8.0, drained[host] + fault.rate) if slow else 1e9
            while queue[host] and drained[host] >= 1:
                drained[host] -= 1
                sender, number = queue[host].popleft()
                received = ops[host][number].received
                received[sender] = received.get(sender, 0) + 1
                _count(job, host, sender, "rx", tick, number, False)
                if received[sender] % SLICE == 0:  # the slot is free again: a clear-to-send goes back
                    job.samples.setdefault((host, sender, "tx", tick), [0, 0, 0, 0])[3] += 1
                moved = True
        quiet = 0 if moved else quiet + 1
        tick += 1
    job.ticks = tick
    return job


def _op(kind: str, host: int, hosts: int, chunk: int) -> Op:
    if kind == "Group":
        return Op(kind, {peer: chunk for peer in range(hosts) if peer != host})
    return Op(kind, {(host + 1) % hosts: 2 * (hosts - 1) * chunk})


def _finished(op: Op) -> bool:
    wanted = sum(op.volume.values())
    return sum(op.sent.values()) == wanted and sum(op.received.values()) == wanted


def _pause(number: int, host: int, kinds: int, compute: int, fault: Fault | None, dice: random.Random) -> int:
    if number % kinds:
        return 2
    if fault and fault.host == host and fault.kind == "pause" and number // kinds % 4 == 3:
        return int(fault.rate)
    late = fault.rate if fault and fault.host == host and fault.kind == "late" else 1.0
    return int(compute * late) + dice.randrange(3)


def _allowed(
    op: Op,
    host: int,
    peer: int,
    ops: list[list[Op]],
    index: list[int],
    hosts: int,
    chunk: int,
    dead: set[int],
) -> int:
    """Packets that `host` may send to `peer` now."""
    number = index[host]
    if index[peer] < number:
        return 0
    theirs = ops[peer][number]
    consumed = theirs.received.get(host, 0)
    available = op.volume[peer]
    if op.kind == "AllReduce":
        received = op.received.get((host - 1) % hosts, 0)
        complete = received if received == op.volume[peer] else received // SLICE * SLICE
        available = min(available, chunk + complete)
        # A slot is free when its data went on to the peer's own send buffer, SLOTS deep too.
        consumed = min(consumed, sum(theirs.sent.values()) + SLOTS * SLICE)
    if peer in dead:  # nobody grants credits any more
        consumed = min(consumed, getattr(theirs, "frozen", consumed))
        theirs.frozen = consumed  # type: ignore[attr-defined]
    return min(available, consumed + SLOTS * SLICE) - op.sent.get(peer, 0)


def _count(job: Job, host: int, peer: int, direction: str, tick: int, number: int, repeat: bool) -> None:
    sample = job.samples.setdefault((host, peer, direction, tick), [0, 0, 0, 0])
    sample[0] += PACKET
    sample[1] += PACKET * repeat
    sample[2] += 1
    if not repeat:
        truth = job.truth.setdefault((host, peer, direction, number), [tick, tick, 0])
        truth[1], truth[2] = tick, truth[2] + 1


def qpn(host: int, peer: int) -> int:
    """Identical hosts number their QPs alike."""
    return 17 + (peer if peer < host else peer - 1)


def tables(job: Job, begin: int = 0) -> dict[str, pl.DataFrame]:
    """The tables of a recording of `job` that began at tick `begin`."""
    hosts = range(job.hosts)
    at = [T0_NS + BIN_NS * tick for tick in range(job.ticks + 1)]
    comm = comm_id(0xFEED, job.hosts)
    nodes = [f"node{host}" for host in hosts]
    result = {table: empty(table) for table in TABLES}
    result["nodes"] = conform(pl.DataFrame({"node": nodes}), "nodes")
    result["nics"] = conform(
        pl.DataFrame(
            {
                "node": nodes,
                "nic": "rxe0",
                "port": 1,
                "gids": [[f"::ffff:10.0.0.{host + 1}"] for host in hosts],
            }
        ),
        "nics",
    )
    result["processes"] = conform(
        pl.DataFrame(
            {
                "node": nodes,
                "pid": [100 + host for host in hosts],
                "start_ns": 0,
                "gone_ns": pl.Series(
                    [at[job.gone[h]] if h in job.gone else None for h in hosts], dtype=pl.Int64
                ),
                "exe": "python",
            }
        ),
        "processes",
    )
    result["comms"] = conform(
        pl.DataFrame(
            {
                "node": nodes,
                "pid": [100 + host for host in hosts],
                "comm_ptr": 4096,
                "comm_id": comm,
                "rank": list(hosts),
                "nranks": job.hosts,
                "first_seen_ns": at[begin],
            }
        ),
        "comms",
    )
    pairs = [(host, peer) for host in hosts for peer in hosts if host != peer]
    result["qps"] = conform(
        pl.DataFrame(
            {
                "node": [f"node{host}" for host, _ in pairs],
                "nic": "rxe0",
                "port": 1,
                "qpn": [qpn(host, peer) for host, peer in pairs],
                "peer_qpn": [qpn(peer, host) for host, peer in pairs],
                "peer_gid": [f"::ffff:10.0.0.{peer + 1}" for _, peer in pairs],
                "pid": [100 + host for host, _ in pairs],
                "origin": "netlink",
            }
        ),
        "qps",
    )
    kept = [(key, value) for key, value in sorted(job.samples.items()) if key[3] >= begin]
    result["samples"] = conform(
        pl.DataFrame(
            {
                "node": [f"node{key[0]}" for key, _ in kept],
                "nic": "rxe0",
                "port": 1,
                "qpn": [qpn(key[0], key[1]) for key, _ in kept],
                "source": "packets",
                "direction": [key[2] for key, _ in kept],
                "t_ns": [at[key[3]] for key, _ in kept],
                "bin_ns": BIN_NS,
                "bytes": [value[0] for _, value in kept],
                "retx_bytes": [value[1] for _, value in kept],
                "packets": [value[2] for _, value in kept],
                "ctl_packets": [value[3] for _, value in kept],
            }
        ),
        "samples",
    )
    result["events"] = conform(
        pl.DataFrame(
            {
                "node": [f"node{host}" for _, host, _ in job.naks],
                "nic": "rxe0",
                "port": 1,
                "qpn": [qpn(host, peer) for _, host, peer in job.naks],
                "t_ns": [at[tick] for tick, _, _ in job.naks],
                "kind": "nak",
                "value": 1,
            }
        ),
        "events",
    )
    covered = [(node, direction) for node in nodes for direction in ("tx", "rx")]
    result["coverage"] = conform(
        pl.DataFrame(
            {
                "node": [node for node, _ in covered],
                "source": "packets",
                "nic": "rxe0",
                "port": 1,
                "direction": [direction for _, direction in covered],
                "first_ns": at[begin],
                "last_ns": at[job.ticks],
                "lost": 0,
            }
        ),
        "coverage",
    )
    result["ops"] = conform(_calls(job, begin, at, comm), "ops")
    return result


def _calls(job: Job, begin: int, at: list[int], comm: str) -> pl.DataFrame:
    rows = []
    seq = dict.fromkeys(range(job.hosts), 0)
    for tick, host, number, kind in job.calls:
        if tick < begin:
            continue
        parts: list[tuple[str, int | None, int, int | None]]
        if kind == "Group":
            peers = [peer for peer in range(job.hosts) if peer != host]
            parts = [(call, peer, job.elements, number) for call in ("Send", "Recv") for peer in peers]
        else:
            parts = [(kind, None, job.elements * job.hosts, None)]
        for offset, (call, peer, count, group) in enumerate(parts):
            rows.append(
                {
                    "node": f"node{host}",
                    "pid": 100 + host,
                    "tid": 100 + host,
                    "comm_id": comm,
                    "comm_ptr": 4096,
                    "rank": host,
                    "nranks": job.hosts,
                    "seq": seq[host],
                    "kind": call,
                    "count": count,
                    "dtype": "float32",
                    "bytes": 4 * count,
                    "peer": peer,
                    "stream": 0,
                    "group": group,
                    "call_ns": at[tick] + 100_000 + 1000 * offset,
                }
            )
            seq[host] += 1
    return pl.DataFrame(rows, infer_schema_length=None) if rows else empty("ops")


def write(directory: Path, frames: dict[str, pl.DataFrame]) -> Path:
    """Writes `frames` as a recording, growing tables in two parts."""
    directory.mkdir(parents=True)
    for table, frame in frames.items():
        if table in ("samples", "ops"):
            (directory / table).mkdir()
            half = frame.height // 2
            frame[:half].write_parquet(directory / table / "000000.parquet")
            frame[half:].write_parquet(directory / table / "000001.parquet")
        else:
            frame.write_parquet(directory / f"{table}.parquet")
    manifest = {"format": "pulse-recording", "version": 1, "bin_ns": BIN_NS, "bytes_are": "payload"}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def followed(first: Job, second: Job) -> tuple[dict[str, pl.DataFrame], int]:
    """The tables of both runs, one after the other, and by how many ns the second is later."""
    shift = (first.ticks + 10) * BIN_NS
    frames, later = tables(first), tables(second)
    for table, columns in (
        ("samples", ["t_ns"]),
        ("ops", ["call_ns"]),
        ("coverage", ["first_ns", "last_ns"]),
    ):
        moved = later[table].with_columns(pl.col(columns) + shift)
        if table == "ops":
            moved = moved.with_columns(pl.col("seq") + frames["ops"]["seq"].max() + 1, pl.col("group") + 1000)
        frames[table] = pl.concat([frames[table], moved])
    return frames, shift
