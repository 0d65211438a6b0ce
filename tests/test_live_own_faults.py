"""Faults of our own, with real processes, connections and disks: nothing is lost, and nothing is stored twice."""

from __future__ import annotations

import datetime
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import polars as pl
import pytest
from live import running
from live_replay import AMPLE
from live_server import served
from live_site import NOW_NS, Site, calling_nccl, known, step, wait_for, waiting, watching
from prometheus_client import CollectorRegistry

from pulse_bpf.live import client
from pulse_bpf.live.agent import Agent
from pulse_bpf.live.recorder import FlightRecorder
from pulse_bpf.live.security import LinkError
from pulse_bpf.live.spool import Spool

# What tells an operator from another on a node without cards.
OPERATOR = ["spool", "node", "pid", "comm_id", "op_seq"]


class Way:
    """A way to a port of this machine that can be cut: what is sent is then taken, and never arrives."""

    def __init__(self, to: int) -> None:
        self._to, self._flows = to, threading.Event()
        self._flows.set()
        self._cut: set[int] = set()
        self._lost: set[int] = set()
        self._open: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._listener = socket.create_server(("localhost", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._cut |= set(self._open)
        self._flows.clear()

    def mend(self, as_before: bool) -> None:
        """New connections pass; those of before only if `as_before`: what is between may have forgotten them."""
        if not as_before:
            self._lost |= self._cut
        self._flows.set()

    def close(self) -> None:
        self._listener.close()
        for pair in self._open.values():
            for each in pair:
                each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("localhost", self._to))
                number = len(self._open)
                self._open[number] = near, far
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(number, source, sink), daemon=True).start()

    def _pump(self, number: int, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                if number not in self._lost:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("as_before", [True, False])
@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_a_cut_network_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, as_before: bool
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 2.0)
    site = Site(tmp_path, "node0")
    spool = Spool(tmp_path / "spool", 10**8, 10**6)
    recorder = FlightRecorder(tmp_path / "raw", 3.0, 10**6)
    with site.collecting():
        way = Way(site.port)
        agent = Agent(
            site.link(way.port), spool, recorder, AMPLE, time.time_ns, CollectorRegistry(), lambda text: None
        )
        put = 0

        def say() -> bool:
            nonlocal put
            spool.put(step("node0", put, spool.name))
            put += 1
            return agent.send()

        def deliver() -> None:
            # What the collector confirmed is known with the next step.
            deadline = time.monotonic() + 60
            while len(spool) > 1:
                assert time.monotonic() < deadline
                say()
                time.sleep(0.3)

        for _ in range(4):
            say()
        deliver()
        way.cut()
        began = time.monotonic()
        failed = 0
        while time.monotonic() - began < seconds:
            failed += not say()
            time.sleep(0.1)
        assert failed > 0
        way.mend(as_before)
        deliver()
        way.close()
    rows = stored(site.state)
    assert rows["op_seq"].sort().to_list()[: put - 1] == list(range(put - 1))
    assert rows.select(OPERATOR).is_duplicated().sum() == 0


def test_a_certificate_that_expires_lasts_as_long_as_its_connection(tmp_path: Path) -> None:
    """TLS checks it as a connection begins; to shut somebody out there is the list of clients."""
    with served(tmp_path, "node0 agent\n") as there:
        ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=5)
        certificate = there.authority.issue_cert("node0", not_after=ends)
        link = there.shown(certificate)
        link.send(step("node0", 0), 0, NOW_NS)
        time.sleep(max(0.0, ends.timestamp() - time.time()) + 1.5)
        assert link.send(step("node0", 1), 0, NOW_NS)["again"] is False
        with pytest.raises(LinkError, match="one that is expired"):
            there.shown(certificate).send(step("node0", 2), 0, NOW_NS)
        there.allow.write_text("admin viewer\n")
        with pytest.raises(LinkError, match="does not let this client in"):
            link.send(step("node0", 2), 0, NOW_NS)


def on_disk(directory: Path, size: str) -> list[str]:
    """What to run before a process that is to have a disk of its own at `directory`, as nobody else sees it."""
    directory.mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    return ["unshare", "-m", "--propagation", "private", "sh", "-c", script, str(directory)]


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """A disk without room for a byte."""
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    yield
    (disk / "filler").unlink()


@pytest.mark.root
def test_a_collector_whose_disk_is_full_confirms_nothing_until_there_is_room(tmp_path: Path) -> None:
    site = Site(tmp_path, "node0")
    with site.collecting(*on_disk(site.state, "4m")) as process:
        link, disk = site.link(), Path(f"/proc/{process.pid}/root{site.state}")

        def acked(number: int) -> int:
            answer = link.send(step("node0", number), 0, NOW_NS)
            return int(answer["acked"].get("spool", -1))

        wait_for(lambda: acked(0) == 0, process)
        with filled(disk):
            for number in range(1, 5):
                assert acked(number) == 0
            assert process.stderr is not None
            assert "No space left" in process.stderr.readline()
            assert acked(4) == 0
        wait_for(lambda: acked(4) == 4, process)
        assert stored(disk)["op_seq"].sort().to_list() == [0, 1, 2, 3, 4]


def test_a_killed_collector_leaves_no_process_that_judges(tmp_path: Path) -> None:
    with Site(tmp_path, "node0").collecting() as process:
        wait_for(lambda: children(process.pid), process)
        judging = children(process.pid)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/exe").exists() for pid in judging):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in lists for child in text.split()]


@pytest.mark.bcc
def test_an_agent_whose_disk_is_full_goes_on_from_memory(tmp_path: Path) -> None:
    site, state = Site(tmp_path, "node0"), tmp_path / "agent"
    with running(calling_nccl(tmp_path)) as target:
        target.begin("0 200")
        with watching(site, [target.pid], *on_disk(state, "16m")) as agent:
            with site.collecting():
                wait_for(lambda: known(site) == {target.pid}, agent)
                disk = Path(f"/proc/{agent.pid}/root{state}")
                with filled(disk):
                    (before,) = confirmed(site).values()
                    wait_for(lambda: max(confirmed(site).values()) > before + 4, agent)
            # It is on disk again, and none was lost.
            wait_for(lambda: len(left_on(disk)) >= 3, agent)
            (spool, first), *_ = left_on(disk)
            assert first <= confirmed(site)[spool] + 1
            with site.collecting():
                wait_for(lambda: confirmed(site)[spool] > first, agent)
                agent.terminate()
                assert agent.stderr is not None
                said = agent.stderr.read()
        assert "No space left" in said
        assert "the spool works again" in said


@pytest.mark.bcc
def test_what_a_killed_agent_left_on_its_disk_is_delivered_by_the_next(tmp_path: Path) -> None:
    site, state = Site(tmp_path, "node0"), tmp_path / "agent"
    with running(calling_nccl(tmp_path)) as target:
        target.begin("0 200")
        with watching(site, [target.pid]) as agent:
            with site.collecting():
                wait_for(lambda: known(site) == {target.pid}, agent)
            wait_for(lambda: waiting(site) >= 4, agent)
            agent.kill()
            agent.wait()
        left = left_on(state)
        (spool, first), (_, last) = left[0], left[-1]
        assert left == [(spool, number) for number in range(first, last + 1)]
        assert first <= confirmed(site)[spool] + 1
        with site.collecting(), watching(site, [target.pid]) as agent:
            wait_for(lambda: confirmed(site)[spool] == last and len(confirmed(site)) == 2, agent)
            wait_for(lambda: not {spool} & {name for name, _ in left_on(state)}, agent)


def left_on(disk: Path) -> list[tuple[str, int]]:
    """Spool and number of the steps that wait there to be sent."""
    names = sorted(path.stem for path in (disk / "spool").glob("*.step"))
    return [(name.partition("-")[0], int(name.partition("-")[2])) for name in names]


def confirmed(site: Site) -> dict[str, int]:
    """Up to which number the collector has all of each of the agent's spools on its disk: it takes none out of turn."""
    marks: dict[str, int] = json.loads((site.state / "marks.json").read_text())["marks"].get("node0", {})
    return marks


def stored(state: Path) -> pl.DataFrame:
    """All that a collector has on its disk."""
    parts = [pl.read_parquet(part).select(OPERATOR) for part in state.glob("jobs/*/*/*.parquet")]
    return pl.concat([pl.DataFrame(schema=dict.fromkeys(OPERATOR, pl.Null)), *parts], how="vertical_relaxed")
