"""A collector and an agent as processes, with certificates as files, and what they have on their disks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import trustme
from live import compiled, real_nccl
from live_server import pem

from pulse_bpf.elf import Elf
from pulse_bpf.errors import PulseError
from pulse_bpf.live import wire
from pulse_bpf.live.client import FlightLink
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.schema import NODES

PULSE = [sys.executable, "-m", "pulse_bpf"]
NOW_NS = 1_800_000_000_000_000_000


class Site:
    """Certificates of a collector, an agent and `others`, as files, and a port that was free."""

    def __init__(
        self, root: Path, node: str, *others: str, collector: Sequence[str] = ("localhost",)
    ) -> None:
        self.root, self.node = root, node
        self.authority = trustme.CA()
        self.state = root / "collector"
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        (root / "ca.pem").write_bytes(self.authority.cert_pem.bytes())
        (root / "allow").write_text(f"{node} agent\n")
        for name, *more in (collector, (node,), *((other,) for other in others)):
            certificate = self.authority.issue_cert(name, *more)
            (root / f"{name}.pem").write_bytes(pem(certificate))
            (root / f"{name}.key").write_bytes(certificate.private_key_pem.bytes())

    def tls(self, name: str) -> list[str | Path]:
        return [
            *(
                "--ca",
                self.root / "ca.pem",
                "--cert",
                self.root / f"{name}.pem",
                "--key",
                self.root / f"{name}.key",
            )
        ]

    @contextmanager
    def collecting(self, *before: str) -> Iterator[subprocess.Popen[str]]:
        """A running `pulse collect`, with what is to run `before` it in front."""
        command = [
            *before,
            *PULSE,
            "collect",
            "--listen",
            f"localhost:{self.port}",
            "--allow",
            self.root / "allow",
        ]
        command += ["--state", self.state, *self.tls("localhost")]
        with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert "listening" in process.stderr.readline()
                yield process
            finally:
                process.kill()

    def link(self, port: int | None = None, name: str | None = None) -> FlightLink:
        """The way of the agent, or of another `name`, to the collector, or to another `port` of this machine."""
        name = name or self.node
        files = (self.root / file for file in ("ca.pem", f"{name}.pem", f"{name}.key"))
        return FlightLink("localhost", port or self.port, *(path.read_bytes() for path in files))


def step(node: str, sequence: int, spool: str = "spool") -> bytes:
    """Number `sequence` of what an agent says: one operator."""
    known = {
        "node": node,
        "pid": 7,
        "comm_id": "c-2",
        "op_seq": sequence,
        "call_ns": NOW_NS + sequence,
        "final": True,
    }
    operators = pl.DataFrame(
        {name: pl.Series([known.get(name)], dtype=dtype) for name, dtype in wire.SENT_OPERATORS.items()}
    )
    nodes = pl.DataFrame([(node, "ptp", 0, "", "")], schema=NODES, orient="row")
    tables = {"operators": operators, "nodes": nodes}
    return wire.packed(wire.encode(wire.Step(spool, sequence, NOW_NS, tables)))


def calling_nccl(tmp_path: Path) -> list[str | Path]:
    """The command of a program that calls ncclAllReduce of the real NCCL at the pace it is told."""
    library = real_nccl()
    with Elf(library) as elf:
        code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
        rank_at = rank_offset(code, elf.machine)
    return [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]


@contextmanager
def watching(site: Site, pids: list[int], *before: str) -> Iterator[subprocess.Popen[str]]:
    """A running `pulse agent` that watches these processes, with what is to run `before` it in front."""
    hosts = site.root / "hosts.json"
    hosts.write_text(json.dumps([{"node": site.node, "pids": pids, "devices": []}]))
    command = [*before, *PULSE, "agent", "--hosts", hosts, "--collector", f"localhost:{site.port}"]
    command += ["--state", site.root / "agent", *site.tls(site.node)]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as agent:
        try:
            yield agent
            agent.terminate()
            agent.wait(60)
        finally:
            agent.kill()


def waiting(site: Site) -> int:
    """How many steps wait on the agent's disk."""
    return len(list((site.root / "agent" / "spool").glob("*.step")))


def known(site: Site) -> set[int]:
    """The processes that the collector has on its disk."""
    try:
        state = wire.decode(wire.unpacked((site.state / "agents" / "node0.step").read_bytes()))
    except (OSError, PulseError):
        return set()
    return set(state.tables["processes"]["pid"])


def wait_for(what: object, agent: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not what():  # type: ignore[operator]
        assert agent.poll() is None, agent.stderr and agent.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
