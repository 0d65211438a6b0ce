"""Operators of a fleet: one replica of a small simulated job copied, and all of it stretched in time.

A simulated Megatron job of 8 GPUs a node is cut into operators once; node d + replicas * p holds stage p of replica d.
Its last replica, which waits for a fault in another one as all healthy replicas do, is copied into the rings of the
data parallel groups between itself and the first. So each copy has nodes, processes, queue pairs and communicators of
its own, and rings are longer. Then times and bytes grow by one factor: rates stay, and an iteration lasts seconds, as
that of a model so many times larger.

What that leaves out: the copies compute as evenly as the replica that they are of, but for some JITTER_NS; the longer
rings' volumes are those of the small ones; copies move nothing for the loss that is averaged over all GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from simulated_recordings import simulated

from pulse_bpf import analysis
from pulse_bpf.analysis.clock_offsets import TIMES
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.metrics import together
from pulse_bpf.schema import comm_id

GPUS, STAGES = 8, 4
# Replicas that are simulated: of four, one is no neighbour of the slow one.
REPLICAS = 4
# By how much copies come later to a collective than the replica that they are of, and their rates differ, at most.
JITTER_NS, JITTER_RATE = 50_000, 0.01
# Keeps the names of copies apart (Knuth's multiplier).
SPREAD = 0x9E3779B97F4A7C15
# What grows with the time.
MOMENTS = {"byte_mean_ns", "credit_mean_ns", *(column for of_table in TIMES.values() for column in of_table)}
AMOUNTS = {
    *(
        "bytes",
        "expected_bytes",
        "op_bytes",
        "retx_bytes",
        "ctl_packets",
        "active_ns",
        "start_lag_ns",
        "tail_ns",
    ),
    *("gap_sender_ns", "gap_receiver_ns", "gap_network_ns", "gap_unknown_ns", "stall_ns", "stall_trickle_ns"),
    *("first_stall_len_ns", "first_stall_bytes", "credits_before", "credits_during", "value"),
}
RATES = ("active_gbps", "peak_gbps", "max_gbps", "p95_gbps", "wmed_gbps", "burst_gbps")
# What is known of a call whose traffic was not seen.
OF_CALL = (
    *(
        "node",
        "pid",
        "gpu",
        "comm_id",
        "kind",
        "op_seq",
        "program_pos",
        "rank",
        "nranks",
        "op_bytes",
        "nccl_seq",
    ),
    *("call_ns", "prev_end_ns", "origin", "covered", "confidence"),
)
# The tables that are the same size however many calls there are, beside the operators.
TABLES = ("nodes", "nics", "processes", "comms", "channels", "coverage", "events", "port_counters")


@dataclass(frozen=True)
class Fleet:
    """What the analysis concludes from, as analysis.measure and load give it, and the fault (as truth.json has it)."""

    operators: pl.DataFrame
    flows: pl.DataFrame
    tables: dict[str, pl.DataFrame]
    fault: dict[str, Any] | None

    @classmethod
    def read(cls, directory: Path) -> Fleet:
        """What `write` left."""
        files = {path.stem: path for path in directory.glob("*.parquet")}
        frames = {table: pl.read_parquet(path) for table, path in files.items()}
        fault = json.loads((directory / "fault.json").read_text())
        return cls(frames.pop("operators"), frames.pop("flows"), frames, fault)

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        for table, frame in ({"operators": self.operators, "flows": self.flows} | self.tables).items():
            frame.write_parquet(directory / f"{table}.parquet")
        (directory / "fault.json").write_text(json.dumps(self.fault))

    def conclude(self) -> analysis.Findings:
        """As `pulse analyze` does once it has the operators."""
        return analysis.conclude(Recording(self.tables), self.operators, self.flows)


def fleet(
    keep: Path, scenario: str, gpus: int, seconds: float, factor: float, *, tensor: bool, seed: int
) -> Fleet:
    """`seconds` of a job of so many GPUs, from a small recording `factor` times shorter, made in `keep` if need be.

    `gpus`: a multiple of GPUS * STAGES, two replicas of that or at least REPLICAS. `tensor`: the sums inside nodes are
    NCCL's calls; else they by-pass it.
    """
    replicas = gpus // (GPUS * STAGES)
    base = min(REPLICAS, replicas)
    directory = simulated(keep, scenario, "megatron", f"{base * STAGES}x{GPUS}", seconds / factor, 32, seed)
    small = _small(directory, tensor=tensor)
    copier = _Copier(small, base, replicas, seed)
    begin_ns = small.tables["coverage"]["first_ns"].min()

    def grown(frame: pl.DataFrame) -> pl.DataFrame:
        moments = [name for name in MOMENTS if name in frame.columns]
        amounts = [name for name in AMOUNTS if name in frame.columns]
        return frame.with_columns(
            *(
                ((pl.col(name) - begin_ns) * factor).round().cast(frame.schema[name]) + begin_ns
                for name in moments
            ),
            *((pl.col(name) * factor).round().cast(frame.schema[name]) for name in amounts),
        )

    parts = [
        {name: grown(frame) for name, frame in copier.node(stage, replica).items()}
        for stage in range(STAGES)
        for replica in range(replicas)
    ]
    tables = {name: frame.clear() for name, frame in small.tables.items()}
    tables |= {name: pl.concat([part[name] for part in parts]) for name in TABLES}
    operators = together([part["operators"] for part in parts])
    flows = pl.concat([part["flows"] for part in parts])
    return Fleet(operators, flows, tables, copier.fault(small.fault))


def _small(directory: Path, *, tensor: bool) -> Fleet:
    """The simulated recording in `directory`, cut into operators."""
    recording = load([directory])
    operators, flows = analysis.measure(recording)
    faults = json.loads((directory / "truth.json").read_text())["faults"]
    if not tensor:
        comms = recording["comms"]
        local = comms.group_by("comm_id").agg(pl.col("node").n_unique()).filter(pl.col("node") == 1)
        position = pl.col("program_pos").rank("dense").over("node", "pid") - 1
        operators = operators.join(local, on="comm_id", how="anti", maintain_order="left").with_columns(
            position.cast(pl.UInt64)
        )
    tables = dict(recording.tables)
    return Fleet(operators, flows, tables, faults[0] if faults else None)


def name(number: int) -> str:
    return f"gpu{number + 1:04d}"


class _Copier:
    """The nodes of the fleet, each from that of the small job that it is, or is a copy of."""

    def __init__(self, small: Fleet, base: int, replicas: int, seed: int) -> None:
        self.base, self.replicas = base, replicas
        self.rng = np.random.default_rng(seed)
        self.place = {f"node{d + base * p}": (p, d) for p in range(STAGES) for d in range(base)}
        comms = small.tables["comms"]
        self.kind: dict[str, str] = {}
        for (comm,), members in comms.group_by("comm_id"):
            stages = {self.place[node][0] for node in members["node"]}
            several = {self.place[node][1] for node in members["node"]}
            self.kind[str(comm)] = (
                ("world" if len(several) > 1 else "pipeline")
                if len(stages) > 1
                else ("data" if len(several) > 1 else "tensor")
            )
        named = comms.select("comm_id", "rank", "node").unique(["comm_id", "rank"])
        channels = small.tables["channels"].join(named, on=["comm_id", "rank"])
        channels = channels.filter(~pl.col("comm_id").is_in(self._comms("world")))
        frames = {"operators": small.operators, "flows": small.flows, **small.tables, "channels": channels}
        self.parts = {
            table: frames[table].partition_by("node", as_dict=True)
            for table in ("operators", "flows", *TABLES)
        }
        self.columns = {table: frames[table].columns for table in self.parts}
        self.empty = {table: frames[table].clear() for table in self.parts}

    def node(self, stage: int, replica: int) -> dict[str, pl.DataFrame]:
        """All that is recorded on the node with that stage of that replica."""
        original = min(replica, self.base - 1)
        copy = replica - original
        node = f"node{original + self.base * stage}"
        made = {}
        for table, parts in self.parts.items():
            frame = self._renamed(parts.get((node,), self.empty[table]), stage, original, copy)
            if copy:
                frame = self._copied(frame, copy)
            made[table] = frame.drop("node") if table == "channels" else frame
        return made

    def fault(self, fault: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """`fault` with its machines' names in the fleet."""
        if fault is None:
            return None
        places = {key: self.place[fault[key]] for key in ("node", "peer_node") if key in fault}
        assert places["node"][1] < self.base - 1 or not self._copies(), "the replica with the fault is copied"
        return {**fault, **{key: name(d + self.replicas * p) for key, (p, d) in places.items()}}

    def _copies(self) -> int:
        return self.replicas - self.base

    def _comms(self, *kinds: str) -> list[str]:
        return [comm for comm, kind in self.kind.items() if kind in kinds]

    def _peer(self, replica: int, original: int, copy: int) -> int:
        """Which replica of the fleet a `replica` of the small job is to one that is a `copy` of the `original`."""
        last = self.base - 1
        if original < last:
            # The ring comes back to the first replica from the last copy.
            return (
                replica + self._copies() if replica == last and original == 0 and self.base > 2 else replica
            )
        if replica == last:
            return last + copy
        if replica == 0 and self.base > 2:
            return last + copy + 1 if copy < self._copies() else 0
        return last + copy - 1 if copy and replica == last - 1 else replica

    def _renamed(self, frame: pl.DataFrame, stage: int, original: int, copy: int) -> pl.DataFrame:
        """`frame`, of one node, with its names and those of its peers in the fleet, and all ranks."""
        columns = frame.columns
        here = original + copy + self.replicas * stage
        peers = {
            node: self._peer(d, original, copy) + self.replicas * p for node, (p, d) in self.place.items()
        }
        if "nranks" in columns:
            nranks = pl.col("nranks")
            frame = frame.with_columns(
                pl.when(self._is("data"))
                .then(nranks // self.base * self.replicas)
                .when(self._is("world"))
                .then(nranks // self.base * self.replicas)
                .otherwise(nranks)
                .cast(frame.schema["nranks"])
            )
        if "rank" in columns:
            further = GPUS * (here - original - self.base * stage)
            frame = frame.with_columns(
                pl.when(self._is("data"))
                .then(original + copy)
                .when(self._is("world"))
                .then(pl.col("rank") + further)
                .otherwise("rank")
                .cast(pl.Int32)
                .alias("rank")
            )
        ranks = {d: self._peer(d, original, copy) for d in range(self.base)}
        for column in ("ring_prev", "ring_next"):
            if column in columns:
                frame = frame.with_columns(self._of_data(column, ranks))
        if "peer_rank" in columns:
            further = pl.col("peer_node").replace_strict(
                {node: GPUS * (number - self._number(node)) for node, number in peers.items()}, default=0
            )
            frame = frame.with_columns(
                pl.when(self._is("world"))
                .then(pl.col("peer_rank") + further)
                .otherwise(self._of_data("peer_rank", ranks))
                .cast(pl.Int32)
            )
        if "peer_node" in columns:
            named = {node: name(number) for node, number in peers.items()}
            frame = frame.with_columns(
                pl.col("peer_node").replace_strict(named, default=None, return_dtype=pl.String)
            )
        if "comm_id" in columns:
            frame = frame.with_columns(pl.col("comm_id").replace(self._names(copy)))
        return frame.with_columns(node=pl.lit(name(here))).select(columns)

    def _is(self, kind: str) -> pl.Expr:
        return pl.col("comm_id").is_in(self._comms(kind)).fill_null(False)

    def _of_data(self, column: str, ranks: Mapping[int, int]) -> pl.Expr:
        renumbered = pl.col(column).replace_strict(ranks, default=None, return_dtype=pl.Int32)
        return pl.when(self._is("data")).then(renumbered).otherwise(pl.col(column)).alias(column)

    def _number(self, node: str) -> int:
        stage, replica = self.place[node]
        return replica + self.base * stage

    def _names(self, copy: int) -> dict[str, str]:
        """The communicators' names: those inside a replica are the copy's own, the others have more ranks."""
        names = {}
        for comm, kind in self.kind.items():
            number, ranks = (int(part, 16) for part in comm.split("-"))
            if kind in ("data", "world"):
                names[comm] = comm_id(number, ranks // self.base * self.replicas)
            else:
                names[comm] = comm_id((number + copy * SPREAD) % 2**64, ranks)
        return names

    def _copied(self, frame: pl.DataFrame, copy: int) -> pl.DataFrame:
        """`frame` of a copy, with queue pairs of its own, a little later and at slightly other rates."""
        names = self._names(copy)
        world = pl.col("comm_id").is_in([names[comm] for comm in self._comms("world")]).fill_null(False)
        apart = pl.lit(copy * SPREAD % 2**64, pl.UInt64)
        if "level" in frame.columns:
            frame = _without_traffic(frame, world).with_columns(
                pl.col("flows").list.eval(pl.element() + apart)
            )
            later_ns = pl.Series(self.rng.uniform(0, JITTER_NS, frame.height)).cast(pl.Int64)
            slower = pl.Series(1 - self.rng.uniform(0, JITTER_RATE, frame.height))
            return frame.with_columns(
                pl.col("start_ns") + pl.when(pl.col("kind") == "AllReduce").then(later_ns).otherwise(0),
                *(pl.col(each) * slower for each in RATES),
            )
        if {"qpn", "flow"} <= set(frame.columns):
            return frame.filter(~world).with_columns(pl.col("flow") + apart)
        return frame


def _without_traffic(operators: pl.DataFrame, which: pl.Expr) -> pl.DataFrame:
    """`operators`, but of those of `which` only that they were called."""
    called = operators.filter(which, pl.col("program_pos").is_not_null()).unique(["pid", "program_pos"])
    silent = called.select(OF_CALL).with_columns(
        level=pl.lit("call"), direction=pl.lit("tx"), bytes=pl.lit(0, pl.Int64)
    )
    rows = pl.concat([operators.filter(~which), silent], how="diagonal")
    return rows.sort("nic", "direction", "pid", "program_pos", "level", "peer_rank", maintain_order=True)
