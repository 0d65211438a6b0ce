"""Moves known bytes between two soft-RoCE devices beside the live meter, and writes down what each of them says.

usage: soft_roce.py DIRECTORY, as root on a kernel with soft-RoCE. test_meter_on_soft_roce.py compares what this leaves
in DIRECTORY: phases.json (what was sent, from when to when), samples.parquet and counters.parquet (the meter's and the
devices' own account), coverage.parquet, and what `pulse nic list` and `pulse nic qps` said meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf import clock
from pulse_bpf.attach import Program
from pulse_bpf.lab import network
from pulse_bpf.nic import Tap
from pulse_bpf.nic.counters import CounterReader
from pulse_bpf.nic.identity import read_nics
from pulse_bpf.nic.nldev import Nldev
from pulse_bpf.nic.packets import PacketReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.probes import BPF_DIRECTORY

TARGET = Path(__file__).with_name("targets") / "verbs_write.py"
BIN_NS = 1_000_000
MTU = 1024
# Of a soft-RoCE device: 0 is its interface's link-local address, 1 its IPv4 address.
GID_INDEXES = {"IPv4": 1, "IPv6": 0}
# What NCCL's clear-to-send may be at most, and what is one byte more, among the sizes that fill packets or do not.
SIZES = [1, 511, 512, 513, MTU - 1, MTU, MTU + 1, 2 * MTU - 1, 2 * MTU, 2 * MTU + 1, 64 * MTU, 99 * MTU + 3]
MESSAGES = [[size, immediate] for size in SIZES for immediate in (False, True)] + [[0, True]]
BULK = [[16 * MTU, False]] * 40
LOSS_PERCENT = 5.0
CAP_BYTES_PER_S = 2_000_000
SATURATION = [[64 * MTU, False]] * 200

Message = list[Any]


class Peers:
    """The two queue pairs of one process, host 1's first."""

    def __init__(self, family: str, cleanup: ExitStack) -> None:
        devices = [network.rdma_device(host) for host in (1, 2)]
        command = [sys.executable, str(TARGET), str(GID_INDEXES[family]), str(MTU), *devices]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cleanup.callback(self._process.communicate)
        cleanup.callback(self._process.kill)
        self.pid = self._process.pid
        self.qpns: list[int] = json.loads(self._read())

    def transfer(self, sender: int, messages: list[Message], window: int = 1) -> None:
        assert self._process.stdin is not None
        order = {"sender": sender, "window": window, "messages": messages}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        if self._read() != "done\n":
            raise SystemExit("the transfer failed")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class Job:
    """What is written down, phase by phase."""

    def __init__(self, cleanup: ExitStack) -> None:
        self.offset_ns = clock.anchor().offset_ns
        self.nics = read_nics("here")
        self.taps = [
            Tap("here", row["nic"], row["port"], row["netdev"], "device", tuple(row["gids"]))
            for row in self.nics.iter_rows(named=True)
        ]
        self.qps = QpTable(self.nics)
        # The queue pairs are older than the meter, as those of a job mostly are.
        with closing(Nldev()) as nldev:
            self.qps.observe_netlink(nldev.queue_pairs(), time.time_ns())
        self.program = Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": BIN_NS})
        cleanup.callback(self.program.close)
        self.phases: list[dict[str, Any]] = []
        self.samples: list[pl.DataFrame] = []
        self.counters: list[pl.DataFrame] = []

    def reader(self, cleanup: ExitStack, xdp: bool) -> PacketReader:
        reader = PacketReader(self.taps, self.program, self.qps, BIN_NS, self.offset_ns, xdp)
        cleanup.callback(reader.stop)
        reader.start()
        return reader

    def phase(
        self, name: str, peers: Peers, sent: tuple[list[Message], list[Message]], run: Callable[[], None]
    ) -> None:
        """Notes what `run` lets host 1 and host 2 send, and what the devices' counters say of it."""
        counters = CounterReader(self.nics, self.offset_ns)
        first_ns = time.monotonic_ns() + self.offset_ns
        counters.start()
        run()
        _wait_until_quiet()
        self.counters.append(counters.stop()["port_counters"].with_columns(phase=pl.lit(name)))
        last_ns = time.monotonic_ns() + self.offset_ns
        self.phases.append(
            {"name": name, "qpns": peers.qpns, "sent": sent, "first_ns": first_ns, "last_ns": last_ns}
        )

    def exchange(self, name: str, peers: Peers) -> None:
        def run() -> None:
            peers.transfer(0, MESSAGES)
            peers.transfer(1, list(reversed(MESSAGES)))

        self.phase(name, peers, (MESSAGES, MESSAGES), run)


def main(directory: Path) -> None:
    with ExitStack() as cleanup:
        cleanup.callback(network.down, network.up(2))
        _turn_on_ipv6()
        peers = {family: Peers(family, cleanup) for family in GID_INDEXES}
        ipv4 = peers["IPv4"]
        job = Job(cleanup)
        meter = job.reader(cleanup, xdp=False)
        for family, pair in peers.items():
            job.exchange(family, pair)
        network.lose(1, LOSS_PERCENT)
        job.phase("loss", ipv4, (BULK, []), lambda: ipv4.transfer(0, BULK, 4))
        network.lose(1, None)
        network.shape(1, CAP_BYTES_PER_S)
        job.phase("cap", ipv4, (SATURATION, []), lambda: ipv4.transfer(0, SATURATION, 8))
        network.shape(1, network.TOTAL_RATE_BYTES // 2)
        job.samples.append(meter.stop()["samples"])
        meter.coverage().write_parquet(directory / "coverage.parquet")

        meter = job.reader(cleanup, xdp=True)
        job.exchange("XDP", ipv4)
        # What the meter before left open in the same maps comes again.
        started_ns = job.phases[-1]["first_ns"]
        job.samples.append(meter.stop()["samples"].filter(pl.col("t_ns") + BIN_NS > started_ns))

        pl.concat(job.samples).write_parquet(directory / "samples.parquet")
        pl.concat(job.counters).write_parquet(directory / "counters.parquet")
        (directory / "phases.json").write_text(json.dumps(job.phases))
        told = {"vantage": meter.source.vantage, "pids": {name: pair.pid for name, pair in peers.items()}}
        (directory / "told.json").write_text(json.dumps(told))
        for verb in ("list", "qps"):
            command = [sys.executable, "-m", "pulse_bpf", "nic", verb, "--json"]
            answer = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            (directory / f"{verb}.json").write_bytes(answer)


def _turn_on_ipv6() -> None:
    """Until both addresses are usable: the kernel first looks whether anybody else has them."""
    for host in (1, 2):
        Path(f"/proc/sys/net/ipv6/conf/{network.host_interface(host)}/disable_ipv6").write_text("0")
    deadline_s = time.monotonic() + 30
    while _addresses("tentative") or len(_addresses("permanent")) < 2:
        if time.monotonic() > deadline_s:
            raise SystemExit("the interfaces got no link-local addresses")
        time.sleep(0.1)


def _addresses(state: str) -> list[str]:
    command = ["ip", "-6", "-br", "address", "show", "scope", "link", state]
    listed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith("plh") and "fe80::" in line]


def _wait_until_quiet() -> None:
    """Until no device has sent or received anything for 0.2 s."""
    files = sorted(Path("/sys/class/infiniband").glob("plr*/ports/1/hw_counters/*_pkts"))
    before: list[str] = []
    while (now := [file.read_text() for file in files]) != before:
        before = now
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
