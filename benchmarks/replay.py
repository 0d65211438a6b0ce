"""How late the replayer sends its packets, and how many it sends a second on one core.

    sudo .venv/bin/python benchmarks/replay.py [--rounds 5]

Sends made-up recordings of 10 flows over a veth pair: at 10,000 and 100,000 packets a second, and as fast as it can.
Lateness is the median over the rounds of each quantile; on a machine with other work it is that work's as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
from pyroute2 import IPRoute

from pulse_bpf.lab import replay
from pulse_bpf.schema import flow_id
from pulse_bpf.store import RecordingWriter

FLOWS, BIN_NS, T0_NS = 10, 100_000, 1_700_000_000_000_000_000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    device = f"rb{os.getpid()}"
    with IPRoute() as ip, tempfile.TemporaryDirectory() as directory:
        ip.link("add", ifname=device, kind="veth", peer={"ifname": f"rc{os.getpid()}"})
        try:
            for name in (device, f"rc{os.getpid()}"):
                ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up", mtu=9000)
            for mtu in (1024, 4096):
                for rate in (10_000, 100_000):
                    root = Path(directory, f"{mtu}-{rate}")
                    _record(root, rate, mtu, seconds=2)
                    _show(
                        f"{rate:,} packets/s of {mtu} bytes",
                        [replay.to_device(root, device) for _ in range(rounds)],
                    )
                # All of it is due within a hundredth of a second.
                root = Path(directory, f"{mtu}-100000")
                sent = [replay.to_device(root, device, speed=200) for _ in range(rounds)]
                rates = [one.packets / (one.end_ns - one.start_ns) * 1e9 for one in sent]
                print(f"as fast as it can, {mtu} bytes: {statistics.median(rates):,.0f} packets/s")
        finally:
            ip.link("del", ifname=device)
    return 0


def _show(what: str, sent: list[replay.Replayed]) -> None:
    p50, p99, most = (
        statistics.median(getattr(one, name) for one in sent) / 1e3
        for name in ("late_p50_ns", "late_p99_ns", "late_max_ns")
    )
    print(f"{what}: late by {p50:,.1f} us (median), {p99:,.1f} us (p99), {most:,.1f} us (max)")


def _record(root: Path, rate: int, mtu: int, seconds: int) -> None:
    """A recording of FLOWS flows from one host to another, in random bins."""
    random = np.random.default_rng(0)
    gids = ["::ffff:10.1.0.1", "::ffff:10.1.0.2"]
    end = {"node": "a", "nic": "mlx5_0", "port": 1}
    writer = RecordingWriter(root)
    writer.replace("nics", pl.DataFrame([{**end, "gids": gids[:1]}]))
    qps = [
        {**end, "qpn": qpn, "flow": flow_id("a", "mlx5_0", 1, qpn, 0), "peer_qpn": qpn, "path_mtu": mtu}
        for qpn in range(1, FLOWS + 1)
    ]
    qps_frame = pl.DataFrame(qps, schema_overrides={"flow": pl.UInt64})
    ends = {"local_gid": gids[0], "peer_gid": gids[1], "origin": "uprobe"}
    writer.replace("qps", qps_frame.with_columns(pl.lit(value).alias(name) for name, value in ends.items()))
    bins = seconds * 10**9 // BIN_NS
    packets = random.poisson(rate * BIN_NS / 1e9 / FLOWS, (bins, FLOWS))
    bin_, flow = np.nonzero(packets)
    frame = pl.DataFrame({"t_ns": T0_NS + bin_ * BIN_NS, "qpn": flow + 1, "packets": packets[bin_, flow]})
    frame = frame.join(qps_frame.select("qpn", "flow", "node", "nic", "port"), on="qpn")
    writer.append(
        "samples",
        frame.with_columns(bytes=pl.col("packets") * mtu, direction=pl.lit("tx"), bin_ns=BIN_NS).sort("t_ns"),
    )
    writer.manifest([], {})
    writer.close()


if __name__ == "__main__":
    raise SystemExit(main())
