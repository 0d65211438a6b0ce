"""Writes what collectors on the nodes would have recorded of a simulated run, and the truth beside it.

Samples come from the engine's meters, which count on the wire at both ends of every queue pair; what a source
cannot see is taken away here. Nothing is added that a run did not show, but for names and small host times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from pulse_bpf.lab.sim import calls as program
from pulse_bpf.lab.sim import counters, loss, tables, traffic
from pulse_bpf.lab.sim import truth as true
from pulse_bpf.lab.sim.clocks import EPOCH_NS, wall_ns
from pulse_bpf.lab.sim.identity import Identity, generator, identify
from pulse_bpf.lab.sim.model import Array, Cluster, Incident, Job, Network, Result, Settings
from pulse_bpf.lab.sim.options import Options
from pulse_bpf.store import RecordingWriter, write_file


def write(
    writer: RecordingWriter,
    result: Result,
    network: Network,
    job: Job,
    calls: Array,
    cluster: Cluster,
    settings: Settings,
    options: Options,
    truth: Mapping[str, Any],
    incident: Incident,
) -> None:
    """Writes the recording by `writer`, which has written nothing yet, and the truth files beside its tables.

    `calls` are those the engine ran; `truth` has scenario, seed, healthy and faults as truth.content takes them.
    HostError when it cannot be written.
    """
    identity = identify(cluster, network, options, settings.seed)
    whole = program.program(result, network, job, calls, cluster, settings, identity)
    missed = loss.windows(settings, options.lost_calls, generator(settings.seed, "lost calls"))
    ops, lost_calls = program.ops(whole, job, identity, settings, options, missed)
    for part in _seconds(ops.drop("call"), "call_ns"):
        writer.append("ops", part)

    missed = loss.windows(settings, options.lost_samples, generator(settings.seed, "lost samples"))
    counted = traffic.count(result, identity, settings, options, missed)
    for parts in counted.parts:
        for table, part in parts.items():
            writer.append(table, part)
    readings = counters.read(result, identity, cluster, settings)
    for table in ("port_counters", "port_samples"):
        writer.append(table, readings[table])
    packets = traffic.events(result, identity, cluster, settings, options)
    writer.append("events", pl.concat([packets.drop("end"), readings["events"]], how="diagonal_relaxed"))

    small = {
        "nodes": tables.nodes(identity, options),
        "nics": tables.nics(identity, cluster),
        **tables.processes(identity, cluster, settings, incident),
        "comms": tables.comms(identity, network, cluster, settings, options, ops),
        "channels": tables.channels(identity, network, cluster, options),
        "qps": tables.qps(identity, cluster, settings, options),
        "coverage": pl.concat(
            [
                traffic.coverage(identity, cluster, settings, options, counted.lost),
                _called(identity, settings, lost_calls),
            ],
            how="diagonal_relaxed",
        ),
    }
    for table, frame in small.items():
        writer.replace(table, frame)
    writer.append("clocks", tables.clocks(identity, settings))
    writer.manifest(
        traffic.manifest(settings, options),
        {
            "created_ns": EPOCH_NS,
            "duration_ns": int(settings.end_ns - settings.record_ns),
            "lost": int(counted.lost.sum() + lost_calls.sum()),
        },
    )
    writer.close()

    merged = program.operators(whole, ops)
    happened = true.operators(merged, result, network, cluster, settings, identity)
    write_file(writer.root / "truth_operators.parquet", happened.write_parquet)
    write_file(writer.root / "truth_calls.parquet", true.calls_table(whole, cluster).write_parquet)
    content = true.content(truth, result, network, cluster, identity)
    unseen = [name for name, has in zip(identity.nodes, identity.recorded, strict=True) if not has]
    content |= {"collected": asdict(options), "missing_nodes": unseen}
    text = json.dumps(content, indent=1)
    write_file(writer.root / "truth.json", lambda path: path.write_text(text))


def _seconds(frame: pl.DataFrame, time: str) -> list[pl.DataFrame]:
    """`frame` by time, in parts of a second."""
    part = pl.col(time) // traffic.PART_NS
    rows = frame.with_columns(part=part).sort("part", "node", "pid", time, maintain_order=True)
    return [rows.drop("part") for rows in rows.partition_by("part", maintain_order=True)]


def _called(identity: Identity, settings: Settings, lost: np.ndarray) -> pl.DataFrame:
    """Rows of `coverage` of the calls."""
    node = np.flatnonzero(identity.recorded)
    return pl.DataFrame(
        {
            "node": pl.Series(identity.nodes).gather(node),
            "source": "uprobe",
            "first_ns": wall_ns(settings, node, settings.record_ns),
            "last_ns": wall_ns(settings, node, settings.end_ns),
            "lost": lost[node],
        }
    )
