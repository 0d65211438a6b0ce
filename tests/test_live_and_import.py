"""One stream of frames through the live meter and through the import of a capture of it: the same, bin for bin."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from capture_files import Frame, pcap
from roce_frames import Packet, mutated
from run_frames import run_frames

from pulse_bpf.attach import Program
from pulse_bpf.nic import Tables, Tap
from pulse_bpf.nic.capture import Capture
from pulse_bpf.nic.importer import CaptureImporter
from pulse_bpf.nic.packets import BIN, KINDS, PacketReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.schema import NICS

pytestmark = pytest.mark.bcc

BIN_NS = 10_000_000
WALL_OFFSET_NS = 170_000_000_000 * BIN_NS
GIDS = {"a": ["::ffff:10.1.0.1", "2001:db8::1"], "b": ["::ffff:10.1.0.2", "fe80::2"]}
NIC = pl.DataFrame(
    [{"node": node, "nic": f"mlx5_{node}", "port": 1, "gids": gids} for node, gids in GIDS.items()],
    schema=NICS,
)
LOOPBACK = {"lo": 1}  # the interface that a frame without one is from


def frames() -> list[bytes]:
    """Two directions of connections with repeats and refusals, and among them frames that nobody should send."""
    strange = list(mutated(1, 2000, min_bytes=14))
    sent = []
    for number, frame in enumerate(strange):
        psn = number - (20 if number % 100 > 90 else 0)
        there, back = ("10.1.0.1", "10.1.0.2"), ("10.1.0.2", "10.1.0.1")
        six = ("fe80::2", "2001:db8::1")
        sent += [
            Packet("WRITE_MIDDLE", *there, qpn=5, psn=(0xFFFF00 + psn) % 2**24, payload=256, vlans=1).frame(),
            Packet("ACK", *back, qpn=6, psn=psn, syndrome=0x60 if number % 100 == 90 else 0x1F).frame(),
            Packet("READ_MIDDLE", *six, qpn=7, psn=psn, payload=100).frame(),
            frame,
        ]
    return sent


def run_at_known_times(program_fd: int, sent: list[bytes]) -> list[Frame]:
    """Has the program see each frame at a time known well enough to know its bin; what a capture would have held."""
    captured = []
    for frame in sent:
        while (t_ns := time.monotonic_ns()) % BIN_NS > BIN_NS // 2:
            pass
        run_frames(program_fd, [frame])
        if time.monotonic_ns() // BIN_NS != t_ns // BIN_NS:
            raise TimeoutError
        captured.append(Frame(t_ns + WALL_OFFSET_NS, frame))
    return captured


def live(sent: list[bytes]) -> tuple[list[Frame], list[Tables], dict[str, int]]:
    taps = [Tap(node, f"mlx5_{node}", 1, "lo", "device", tuple(gids)) for node, gids in GIDS.items()]
    for attempt in range(20):
        program = Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": BIN_NS})
        reader = PacketReader(taps, program, QpTable(NIC), BIN_NS, WALL_OFFSET_NS)
        reader._map_ports(LOOPBACK)
        ring = program.ring("closed_bins", BIN)
        try:
            captured = run_at_known_times(program.load_xdp("roce_xdp"), sent)
            bins = np.concatenate([ring.read(), reader._open_bins()])
            return captured, [reader._tables(bins, 2 * WALL_OFFSET_NS)], reader.counters()
        except TimeoutError:
            assert attempt < 19, "this process never ran for long enough"
        finally:
            program.close()
    raise AssertionError


def imported(path: Path) -> tuple[list[Tables], dict[str, int]]:
    importer = CaptureImporter(BIN_NS, NIC)
    with Capture(path) as capture:
        importer.begin(0)
        tables = [importer.add(block) for block in capture.blocks()]
    return [*tables, importer.end(0), importer.finish()], importer.counters()


def received(tables: list[Tables], name: str, key: list[str], values: list[str]) -> list[tuple[object, ...]]:
    """What the two machines received, summed by `key`. A number that several addresses send to is one or several lives
    by what else is known of it, so lives are left out."""
    rows = pl.concat([table[name] for table in tables if name in table])
    rows = rows.filter(pl.col("node").is_in(list(GIDS)) & (pl.col(key[-1]) != "tx"))
    return rows.group_by(key).agg(pl.col(values).sum()).sort(key).rows()


def test_a_capture_imports_to_what_the_live_meter_counted(tmp_path: Path) -> None:
    captured, live_tables, live_counters = live(frames())
    path = tmp_path / "capture.pcap"
    path.write_bytes(pcap(captured))
    tables, counters = imported(path)

    samples = ["node", "nic", "port", "qpn", "t_ns", "bin_ns", "direction"]
    counts = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]
    seen = received(live_tables, "samples", samples, counts)
    assert received(tables, "samples", samples, counts) == seen
    assert len({row[4] for row in seen}) > 3, "a few bins"
    assert sum(row[-4] for row in seen) > 50_000, "repeats"  # type: ignore[misc]
    events = ["node", "nic", "port", "qpn", "t_ns", "kind"]
    seen = received(live_tables, "events", events, ["value"])
    assert received(tables, "events", events, ["value"]) == seen
    assert {"nak", "cnp"} <= {row[5] for row in seen}
    assert counters["packets"] == live_counters["packets"] > 6000
    apart = {kind: live_counters[f"{kind}_packets"] for kind in KINDS if kind != "merged"}
    assert {kind: counters.get(f"{kind}_frames", 0) for kind in apart} == apart
    assert min(apart.values()) > 0
