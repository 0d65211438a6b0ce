"""What the live packet meter costs each packet, against the same path without it.

    .venv/bin/python benchmarks/nic_live.py [--rounds 15] [--json]

As root. A C program sends RoCE frames over a veth pair, pinned to the CPU that then also receives them, so the time a
packet takes is that of its whole path. In each round every variant is attached, measured and taken off again, in an
order that changes, so a drift of the machine hits all alike. Every packet must be found again in the counts, or in
those of what was lost. Then the program alone is run on one hot frame, against an empty program. Only the ratios carry
over to another machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import if_nametoindex
from typing import IO

import numpy as np
from pyroute2 import IPRoute
from rich.console import Console
from rich.table import Table

from pulse_bpf.attach import Program
from pulse_bpf.errors import HostError, PulseError
from pulse_bpf.links import system_call
from pulse_bpf.nic.packets import BIN, COUNTED, LOST_PACKETS, SET
from pulse_bpf.nic.tc import EGRESS, INGRESS, TcFilters
from pulse_bpf.nic.xdp import MODES
from pulse_bpf.probes import BPF_DIRECTORY

SENDER = Path(__file__).with_name("send_frames.c")
EMPTY = """#include <linux/types.h>
int nothing(struct __sk_buff *skb) { return -1; }
int nothing_xdp(struct xdp_md *xdp) { return 2; }
"""
FLOWS = (10, 100, 1_000, 10_000)
VARIANTS = (
    "none",
    "empty tc ingress",
    "tc ingress",
    "tc egress",
    "empty generic XDP",
    "generic XDP",
    "empty native XDP",
    "native XDP",
)
PAYLOAD_BYTES = 256
WINDOWS, WINDOW_PACKETS = 5, 20_000
TEST_RUN, TEST_RUNS = 10, 1_000_000  # linux/bpf.h


class Bench:
    """A veth pair, what can be attached to it, and the compiled sender."""

    def __init__(self, directory: Path, bin_us: int) -> None:
        if shutil.which("gcc") is None:
            raise HostError("the benchmark's sender cannot be compiled", "there is no gcc", "apt install gcc")
        self._sender = directory / "send_frames"
        subprocess.run(["gcc", "-O2", "-Wall", "-o", self._sender, SENDER], check=True)
        (directory / "empty.c").write_text(EMPTY)
        self._empty = Program(directory / "empty.c", {})
        self.meter = Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": bin_us * 1000})
        self._ring = self.meter.ring("closed_bins", BIN)
        self._found_packets = 0
        self._near, self._far = f"pb{os.getpid()}", f"pc{os.getpid()}"
        with IPRoute() as ipr:
            ipr.link("add", ifname=self._near, kind="veth", peer={"ifname": self._far})
            for name in (self._near, self._far):
                Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
                ipr.link("set", index=if_nametoindex(name), state="up")

    def close(self) -> None:
        self.meter.close()
        self._empty.close()
        with IPRoute() as ipr:
            ipr.link("del", ifname=self._near)

    def packet_ns(self, flows: int, rounds: int) -> dict[str, list[float]]:
        """For each variant, what a packet took in the least disturbed window of each round, in ns."""
        costs: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        with self._sending(flows) as window_ns:
            for number in range(rounds):
                for position in range(len(VARIANTS)):
                    variant = VARIANTS[(number + position) % len(VARIANTS)]
                    with self._attached(variant):
                        windows = []
                        for _ in range(WINDOWS):
                            windows.append(window_ns(WINDOW_PACKETS) / WINDOW_PACKETS)
                            self._found_packets += int(self._ring.read()["counts"]["packets"].sum())
                    # What else the machine does only ever adds.
                    costs[variant].append(min(windows))
        return costs

    def unaccounted(self) -> tuple[int, int, int]:
        """Packets that went past the meter, those lost and counted as such, and those that are nowhere."""
        _, sets = self.meter.read_percpu("open_bins", np.dtype("<u4"), SET)
        found = self._found_packets + int(sets["bins"]["counts"]["packets"].sum())
        passed, lost = (self.meter.percpu_sum("totals", total) for total in (COUNTED, LOST_PACKETS))
        return passed, lost, passed - lost - found

    def program_ns(self) -> dict[str, float]:
        """What one run of each program takes on the same frame again and again, in ns."""
        programs = {
            "empty tc": self._empty.load_tc("nothing"),
            "tc": self.meter.load_tc("roce_ingress"),
            "empty XDP": self._empty.load_xdp("nothing_xdp"),
            "XDP": self.meter.load_xdp("roce_xdp"),
        }
        return {name: _run_ns(program) for name, program in programs.items()}

    @contextmanager
    def _sending(self, flows: int) -> Iterator[Callable[[int], int]]:
        frames = [_frame(qpn) for qpn in range(flows)]
        # The last CPU: the first one serves most interrupts.
        cpu = max(os.sched_getaffinity(0))
        command = [self._sender, self._far, str(cpu), str(len(frames[0])), str(flows)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None
            try:
                stdin.write(b"".join(frames))
                yield lambda packets: _ask(stdin, stdout, packets)
            finally:
                process.kill()

    @contextmanager
    def _attached(self, variant: str) -> Iterator[None]:
        """The program of `variant` where the sender's packets come by."""
        if variant == "none":
            yield
            return
        owner = self._empty if variant.startswith("empty") else self.meter
        filters = TcFilters()
        try:
            if variant.endswith("XDP"):
                function = "nothing_xdp" if owner is self._empty else "roce_xdp"
                owner.attach_xdp(function, if_nametoindex(self._near), MODES[variant.split()[-2]])
            else:
                is_egress = variant == "tc egress"
                netdev = self._far if is_egress else self._near
                function = (
                    "nothing" if owner is self._empty else "roce_egress" if is_egress else "roce_ingress"
                )
                hook = EGRESS if is_egress else INGRESS
                filters.attach({netdev: if_nametoindex(netdev)}, {netdev: {hook: owner.load_tc(function)}})
            yield
        finally:
            owner.detach_all()
            filters.detach()


def _frame(qpn: int) -> bytes:
    """An RDMA write's middle packet from 10.0.0.1 to 10.0.0.2."""
    bth = struct.pack(">BBHII", 7, 0, 0xFFFF, qpn, 0)
    body = bth + bytes(PAYLOAD_BYTES + 4)
    udp = struct.pack(">HHHH", 49152 + qpn % 16384, 4791, 8 + len(body), 0)
    addresses = bytes([10, 0, 0, 1, 10, 0, 0, 2])
    ip = struct.pack(">BBHHHBBH8s", 0x45, 0, 28 + len(body), 1, 0, 64, 17, 0, addresses)
    return bytes.fromhex("020000000002020000000001 0800") + ip + udp + body


def _ask(stdin: IO[bytes], stdout: IO[bytes], packets: int) -> int:
    stdin.write(b"%d\n" % packets)
    stdin.flush()
    answer = stdout.readline()
    if not answer:
        raise HostError("the benchmark's sender stopped")
    return int(answer)


def _run_ns(program_fd: int) -> float:
    frame = _frame(1)
    data = ctypes.create_string_buffer(frame, len(frame))
    # struct bpf_attr.test: program, returned, sizes in and out, data in and out, repeat, mean duration.
    attributes = bytearray(
        struct.pack(
            "<4I2Q2I5Q", program_fd, 0, len(frame), 0, ctypes.addressof(data), 0, TEST_RUNS, 0, *[0] * 5
        )
    )
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    system_call("bpf", TEST_RUN, buffer, len(attributes))
    return float(struct.unpack_from("<I", attributes, 36)[0])


def _summary(costs: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    result = {}
    for variant, values in costs.items():
        added = [cost - none for cost, none in zip(values, costs["none"], strict=True)]
        ratios = [cost / none for cost, none in zip(values, costs["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[variant] = {
            "packet_ns": round(statistics.median(values)),
            "added_ns": round(statistics.median(added)),
            "ratio": round(middle, 2),
            "ratio_low": round(low, 2),
            "ratio_high": round(high, 2),
        }
    return result


def _print(costs: dict[int, dict[str, dict[str, float]]]) -> None:
    table = Table(title="ns a packet takes, those added, and the ratio to none with its middle half")
    for heading in ("", *(f"{flows} flows" for flows in costs)):
        table.add_column(heading)
    for variant in VARIANTS:
        cells = [cost[variant] for cost in costs.values()]
        table.add_row(
            variant,
            *(
                f"{c['packet_ns']}, +{c['added_ns']}, {c['ratio']} ({c['ratio_low']}-{c['ratio_high']})"
                for c in cells
            ),
        )
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    parser.add_argument("--bin-us", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(Path(directory), arguments.bin_us)
            try:
                costs = {flows: _summary(bench.packet_ns(flows, arguments.rounds)) for flows in FLOWS}
                passed, lost, missing = bench.unaccounted()
                alone = bench.program_ns()
            finally:
                bench.close()
    except PulseError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    if arguments.json:
        print(
            json.dumps(
                {"path": costs, "program_ns": alone, "passed": passed, "lost": lost, "missing": missing}
            )
        )
    else:
        _print(costs)
        print("one run of the program alone, ns:", alone)
        print(f"{passed} packets went past the meter, {lost} were lost, {missing} are unaccounted for")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
