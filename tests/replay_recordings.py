"""Recordings for the replayer: random counts of flows between hosts that have nothing but addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pulse_bpf.schema import SAMPLES, conform, flow_id
from pulse_bpf.store import RecordingWriter

T0_NS = 1_700_000_000_000_000_000
MTU = 1024
COUNTS = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]


def gid(host: int, version: int) -> str:
    return f"::ffff:10.77.0.{host}" if version == 4 else f"fd00::77:{host:x}"


def nic(host: int, version: int = 4) -> dict[str, Any]:
    return {
        "node": f"n{host}",
        "nic": f"mlx5_{host}",
        "port": 1,
        "link_gbps": 100.0,
        "gids": [gid(host, version)],
    }


def queue_pair(host: int, peer: int, qpn: int, peer_qpn: int, version: int = 4) -> dict[str, Any]:
    return {
        "node": f"n{host}",
        "nic": f"mlx5_{host}",
        "port": 1,
        "qpn": qpn,
        "flow": flow_id(f"n{host}", f"mlx5_{host}", 1, qpn, 0),
        "peer_qpn": peer_qpn,
        "local_gid": gid(host, version),
        "peer_gid": gid(peer, version),
        "path_mtu": MTU,
        "origin": "uprobe",
    }


def counts(
    qp: dict[str, Any], direction: str, bin_ns: int, bins: int, seed: int, rate: float
) -> pl.DataFrame:
    """`bins` bins of one flow, most of them empty or of about `rate` packets, as a meter would count them."""
    random = np.random.default_rng(seed)
    data = random.poisson(rate, bins) * (random.random(bins) < 0.6)
    # The last packet of a bin is short; the first ones of the flow are no repeats.
    size = np.maximum(data * MTU - random.integers(0, MTU, bins), 0)
    again = np.where(random.random(bins) < 0.1, np.minimum(data // 2, 3), 0) * (np.cumsum(data) > 8)
    frame = pl.DataFrame(
        {
            "t_ns": T0_NS + np.arange(bins) * bin_ns,
            "bytes": size,
            "retx_bytes": again * MTU,
            "ctl_packets": random.poisson(rate / 8, bins) * (data > 0),
            "ack_packets": random.poisson(rate / 8, bins) * (data > 0),
            "data": data,
        }
    ).with_columns(packets=pl.sum_horizontal("data", "ctl_packets", "ack_packets"))
    end = {name: qp[name] for name in ("node", "nic", "port", "qpn", "flow")}
    end |= {"source": "packets", "direction": direction, "bin_ns": bin_ns}
    frame = frame.with_columns(pl.lit(value).alias(name) for name, value in end.items() if name != "flow")
    frame = frame.with_columns(pl.lit(end["flow"], dtype=pl.UInt64).alias("flow"))
    return conform(frame.filter(pl.col("packets") > 0), "samples")


def write(
    root: Path, nics: list[dict[str, Any]], qps: list[dict[str, Any]], parts: list[pl.DataFrame]
) -> Path:
    writer = RecordingWriter(root)
    writer.replace("nics", pl.DataFrame(nics))
    writer.replace("qps", pl.DataFrame(qps))
    for part in parts:
        writer.append("samples", part)
    writer.manifest([], {})
    writer.close()
    return root


def job(
    root: Path, bin_ns: int, bins: int, flows: int, version: int, rate: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], pl.DataFrame]:
    """A recording of host 1 that sends `flows` flows to host 2, and of host 3 that receives as many from host 4.

    Its recorded hosts are 1, 2 and 3. Host 2's rows are those of host 1 seen at the other end. Returns the nics,
    the queue pairs and all rows but host 2's: what must go over the wire.
    """
    nics = [nic(host, version) for host in (1, 2, 3)]
    sending = [queue_pair(1, 2, 100 + flow, 500 + flow, version) for flow in range(flows)]
    receiving = [queue_pair(2, 1, 500 + flow, 100 + flow, version) for flow in range(flows)]
    alone = [queue_pair(3, 4, 900 + flow, 700 + flow, version) for flow in range(flows)]
    sent = [counts(qp, "tx", bin_ns, bins, seed, rate) for seed, qp in enumerate(sending)]
    received = [counts(qp, "rx", bin_ns, bins, seed, rate) for seed, qp in enumerate(receiving)]
    only_received = [counts(qp, "rx", bin_ns, bins, 1000 + seed, rate) for seed, qp in enumerate(alone)]
    wired = pl.concat([*sent, *only_received]) if flows else pl.DataFrame(schema=SAMPLES)
    middle = T0_NS + bins // 2 * bin_ns
    halves = [pl.col("t_ns") < middle, pl.col("t_ns") >= middle]
    parts = [
        pl.concat(rows).filter(half) for rows in ([*sent], [*received], [*only_received]) for half in halves
    ]
    write(root, nics, [*sending, *receiving, *alone], parts)
    return nics, [*sending, *receiving, *alone], wired
