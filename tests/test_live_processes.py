"""`pulse collect` and `pulse agent` as processes: killed, restarted, and on a program that really calls NCCL."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pytest
import trustme
from live import compiled, real_nccl, running
from live_server import pem

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.elf import Elf
from pulse_bpf.errors import PulseError
from pulse_bpf.live import wire
from pulse_bpf.live.agent import resident_bytes
from pulse_bpf.live.client import TIMEOUT_S, FlightLink
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
    def collecting(self) -> Iterator[subprocess.Popen[str]]:
        """A running `pulse collect`."""
        command = [*PULSE, "collect", "--listen", f"localhost:{self.port}", "--allow", self.root / "allow"]
        command += ["--state", self.state, *self.tls("localhost")]
        with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert "listening" in process.stderr.readline()
                yield process
            finally:
                process.kill()

    def link(self, name: str | None = None) -> FlightLink:
        name = name or self.node
        files = (self.root / file for file in ("ca.pem", f"{name}.pem", f"{name}.key"))
        return FlightLink("localhost", self.port, *(path.read_bytes() for path in files))


def step(node: str, sequence: int) -> bytes:
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
    return wire.packed(wire.encode(wire.Step("spool", sequence, NOW_NS, tables)))


def test_a_collector_that_is_killed_stores_each_batch_once(tmp_path: Path) -> None:
    site = Site(tmp_path, "node0")
    acked = sent = -1
    for _ in range(3):
        with site.collecting() as process:
            link = site.link()
            for _ in range(4):
                # As the agent does: all that is not known to be stored is sent again, then something new.
                sent += 1
                number = acked + 1
                while number <= sent:
                    answer = link.send(step("node0", number), acked + 1, NOW_NS)
                    acked = answer["acked"].get("spool", -1)
                    number = acked + 1 if answer["again"] else number + 1
            process.kill()
    with site.collecting() as process:
        link, deadline = site.link(), time.monotonic() + 30
        while acked < sent:
            assert time.monotonic() < deadline
            for number in range(acked + 1, sent + 1):
                acked = link.send(step("node0", number), acked + 1, NOW_NS)["acked"].get("spool", -1)
            time.sleep(0.1)
        process.terminate()
        assert process.wait(30) == 0
    rows = pl.concat([pl.read_parquet(part) for part in site.state.glob("jobs/*/*/*.parquet")])
    assert rows["op_seq"].sort().to_list() == list(range(sent + 1))
    assert rows.select(OPERATORS.names()).height == sent + 1


def test_a_collector_ends_though_a_client_stands_still_in_the_middle_of_a_call(tmp_path: Path) -> None:
    site = Site(tmp_path, "node0")
    with site.collecting() as process:
        link = site.link()
        link.send(step("node0", 0), 0, NOW_NS)
        writer, _ = link._client.do_put(
            flight.FlightDescriptor.for_path("step"), wire.unpacked(step("node0", 1)).schema, link._options
        )
        began = time.monotonic()
        process.terminate()
        assert process.wait(60) == 0
        # It would be told after TIMEOUT_S at the earliest.
        assert time.monotonic() - began < TIMEOUT_S
        with pytest.raises(pa.ArrowException):
            writer.close()
    parts = [pl.read_parquet(part) for part in site.state.glob("jobs/*/*/*.parquet")]
    assert pl.concat(parts)["op_seq"].to_list() == [0]


@pytest.fixture
def program(tmp_path: Path) -> list[str | Path]:
    """The command of a program that calls ncclAllReduce of the real NCCL at the pace it is told."""
    library = real_nccl()
    with Elf(library) as elf:
        code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
        rank_at = rank_offset(code, elf.machine)
    return [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]


@contextmanager
def watching(site: Site, pids: list[int]) -> Iterator[subprocess.Popen[str]]:
    """A running `pulse agent` that watches these processes."""
    hosts = site.root / "hosts.json"
    hosts.write_text(json.dumps([{"node": site.node, "pids": pids, "devices": []}]))
    command = [*PULSE, "agent", "--hosts", hosts, "--collector", f"localhost:{site.port}"]
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


@pytest.mark.bcc
def test_an_agent_watches_a_program_and_outlives_its_collector(
    program: list[str | Path], tmp_path: Path
) -> None:
    site = Site(tmp_path, "node0")
    with running(program) as target:
        target.begin("0 500")
        with watching(site, [target.pid]) as agent:
            # There is no collector yet: what it has to say waits on its disk.
            wait_for(lambda: waiting(site) >= 3, agent)
            with site.collecting():
                wait_for(lambda: known(site) == {target.pid}, agent)
                wait_for(lambda: waiting(site) < 3, agent)
            wait_for(lambda: waiting(site) >= 3, agent)
        assert target.act().split()[-1] == "0"
        assert target.end() == 0
    ops = pl.concat(
        [pl.read_parquet(part) for part in (tmp_path / "agent" / "raw" / "ops").glob("*.parquet")]
    )
    assert ops["kind"].unique().to_list() == ["AllReduce"]


@pytest.mark.bcc
@pytest.mark.long
def test_an_agent_of_eight_busy_processes_stays_within_its_budgets(
    program: list[str | Path], tmp_path: Path
) -> None:
    site, seconds = Site(tmp_path, "node0"), 30.0
    with ExitStack() as stack:
        targets = [stack.enter_context(running(program)) for _ in range(8)]
        for target in targets:
            target.begin("0 200")
        stack.enter_context(site.collecting())
        agent = stack.enter_context(watching(site, [target.pid for target in targets]))
        wait_for(lambda: known(site) == {target.pid for target in targets}, agent)
        before, began = cpu_s(agent.pid), time.monotonic()
        time.sleep(seconds)
        cores = (cpu_s(agent.pid) - before) / (time.monotonic() - began)
        held_mb = resident_bytes(Path(f"/proc/{agent.pid}/statm")) / 2**20
        status = Path(f"/proc/{agent.pid}/status").read_text()
    print(f"{cores:.3f} cores, {held_mb:.0f} MB", *(line for line in status.splitlines() if "Rss" in line))
    # Its own budgets, unless others are asked for.
    assert cores < 0.5
    assert held_mb < 1024


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
