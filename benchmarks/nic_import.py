"""Packets a second that a capture is imported at, against dpkt, scapy and tshark reading the same in one run.

    .venv/bin/python benchmarks/nic_import.py [--packets 2000000] [--rounds 3] [--json]

The capture is pcap with RoCEv2 frames cut to 96 bytes: writes of 4 KiB in 64 queue pairs, and an acknowledge after
each seven of them. Everyone must find the same packets and payload bytes. Each reader is a process on one CPU, all in
turn in every round; what counts is its CPU time, start included. The others only read packets and sum them up, where
Pulse also finds repeats and senders, bins, and writes a recording; being slower they get a part of the capture. They
are no dependencies: pip install dpkt scapy, apt install tshark. Only the ratios carry over to another machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from pulse_bpf.errors import PulseError

# Which part of the packets each one gets.
PARTS = {"pulse": 1, "dpkt": 10, "tshark": 10, "scapy": 100}
PAYLOAD_BYTES = 4096
QUEUE_PAIRS = 64
GROUP = 8  # seven writes and an acknowledge
CUT_BYTES = 96
_BATCH_GROUPS = 16384

_PULSE = """
import sys
from pathlib import Path
from rich.console import Console
from pulse_bpf.nic_import import import_captures
import_captures([Path(sys.argv[1])], Path(sys.argv[2]), 100_000, None, Console(quiet=True))
"""
_SUM_UP = """
import sys
packets = payload_bytes = 0
def add(udp_length, opcode):
    global packets, payload_bytes
    packets += 1
    if opcode == 7:
        payload_bytes += udp_length - 24
{read}
print(packets, payload_bytes)
"""
_READ_WITH = {
    "dpkt": """
import dpkt
for _, frame in dpkt.pcap.Reader(open(sys.argv[1], "rb")):
    udp = dpkt.ethernet.Ethernet(frame).data.data
    if isinstance(udp, dpkt.udp.UDP) and udp.dport == 4791:
        add(udp.ulen, udp.data[0])
""",
    "scapy": """
from scapy.contrib.roce import BTH
from scapy.layers.inet import UDP
from scapy.utils import PcapReader
for packet in PcapReader(sys.argv[1]):
    if BTH in packet:
        add(packet[UDP].len, packet[BTH].opcode)
""",
}
_TSHARK = ["-Y", "udp.dstport==4791", "-T", "fields", "-e", "udp.length", "-e", "infiniband.bth.opcode"]


def write_capture(path: Path, packets: int) -> None:
    """A capture of about so many packets, 100 ns apart."""
    groups = packets // GROUP
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, CUT_BYTES, 1))
        for first in range(0, groups, _BATCH_GROUPS):
            file.write(_records(np.arange(first, min(first + _BATCH_GROUPS, groups))))


def _records(group: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bytes:
    """The records of these groups; group g is of queue pair g modulo QUEUE_PAIRS, and of its next seven numbers."""
    write, acknowledge = _frame(7, PAYLOAD_BYTES), _frame(17, 4)
    sizes = [CUT_BYTES] * (GROUP - 1) + [len(acknowledge)]
    offsets = np.cumsum([0, *(16 + size for size in sizes)])
    rows = np.zeros((len(group), offsets[-1]), np.uint8)
    pair = group % QUEUE_PAIRS
    for number in range(GROUP):
        at, frame = int(offsets[number]), write if number < GROUP - 1 else acknowledge
        t_ns = 1_700_000_000 * 10**9 + (group * GROUP + number) * 100
        head = np.zeros((len(group), 4), "<u4")
        head[:, 0], head[:, 1], head[:, 2], head[:, 3] = (
            t_ns // 10**9,
            t_ns % 10**9,
            sizes[number],
            len(frame),
        )
        rows[:, at : at + 16] = head.view(np.uint8)
        rows[:, at + 16 : at + 16 + sizes[number]] = np.frombuffer(frame[: sizes[number]], np.uint8)
        psn = group // QUEUE_PAIRS * (GROUP - 1) + min(number, GROUP - 2)
        words = np.stack([pair + 256 * (1 + (number == GROUP - 1)), psn & 0xFFFFFF], axis=1).astype(">u4")
        rows[:, at + 16 + 46 : at + 16 + 54] = words.view(np.uint8)
    return rows.tobytes()


def _frame(opcode: int, body_bytes: int) -> bytes:
    """An Ethernet frame from 10.0.0.1 to 10.0.0.2, or back when it is an acknowledge."""
    hosts = [bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])]
    source, target = hosts if opcode != 17 else hosts[::-1]
    body = struct.pack(">BBHII", opcode, 0, 0xFFFF, 0, 0) + bytes(body_bytes + 4)
    udp = struct.pack(">HHHH", 50000, 4791, 8 + len(body), 0) + body
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, source, target)
    return bytes(12) + b"\x08\x00" + ip + udp


class Readers:
    """The readers that are installed, each with a capture of its own."""

    def __init__(self, directory: Path, packets: int) -> None:
        self._directory = directory
        self._cpu = str(min(os.sched_getaffinity(0)))
        self.packets: dict[str, int] = {}
        for name in PARTS:
            if name in _READ_WITH and not importlib.util.find_spec(name):
                print(f"without {name}: pip install {name}", file=sys.stderr)
            elif name == "tshark" and not shutil.which(name):
                print("without tshark: apt install tshark", file=sys.stderr)
            else:
                self.packets[name] = packets // PARTS[name] // GROUP * GROUP
                write_capture(self._capture(name), self.packets[name])

    def cpu_ns(self, name: str) -> float:
        """The CPU time a packet takes; PulseError when not every packet and byte was found."""
        recording, output = self._directory / "recording", self._directory / "output"
        capture = str(self._capture(name))
        if name == "pulse":
            command = [sys.executable, "-c", _PULSE, capture, str(recording)]
        elif name == "tshark":
            command = [name, "-n", "-r", capture, *_TSHARK]
        else:
            command = [sys.executable, "-c", _SUM_UP.format(read=_READ_WITH[name]), capture]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with output.open("w") as file:
            subprocess.run(
                ["taskset", "-c", self._cpu, *command],
                check=True,
                stdout=file,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "POLARS_MAX_THREADS": "1"},
            )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if name == "pulse":
            rows = pl.read_parquet(recording / "samples/*.parquet").filter(direction="rx")
            found = int(rows["packets"].sum()), int(rows["bytes"].sum())
            shutil.rmtree(recording)
        elif name == "tshark":
            fields = [tuple(map(int, line.split())) for line in output.read_text().splitlines()]
            found = len(fields), sum(length - 24 for length, opcode in fields if opcode == 7)
        else:
            packets, payload_bytes = output.read_text().split()
            found = int(packets), int(payload_bytes)
        packets_sent = self.packets[name]
        if found != (packets_sent, packets_sent // GROUP * (GROUP - 1) * PAYLOAD_BYTES):
            raise PulseError(f"{name} found other packets than were sent", f"{found} of {packets_sent}")
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return used_s * 1e9 / packets_sent

    def _capture(self, name: str) -> Path:
        return self._directory / f"{name}.pcap"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packets", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as directory:
            readers = Readers(Path(directory), arguments.packets)
            costs: dict[str, list[float]] = {name: [] for name in readers.packets}
            for _ in range(arguments.rounds):
                for name, taken in costs.items():
                    taken.append(readers.cpu_ns(name))
    except PulseError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    ratios = {
        name: statistics.median(other / own for other, own in zip(taken, costs["pulse"], strict=True))
        for name, taken in costs.items()
    }
    rates = {name: 1e9 / statistics.median(taken) for name, taken in costs.items()}
    if arguments.json:
        print(
            json.dumps({name: {"packets_per_s": round(rates[name]), "ratio": ratios[name]} for name in rates})
        )
        return 0
    table = Table(title="captures read, per second of CPU time")
    for heading in ("reader", "packets read", "packets a second", "CPU time of a packet : Pulse's"):
        table.add_column(heading)
    for name, rate in rates.items():
        table.add_row(name, f"{readers.packets[name]:,}", f"{rate:,.0f}", f"{ratios[name]:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
