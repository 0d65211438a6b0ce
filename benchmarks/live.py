"""How long a collector takes from the first operator that a fault touched to the open finding, and what it costs.

    live.py latency [--scenario NAME ...] [--seconds S] [--seed N] [--keep DIR]
    live.py healthy [--seconds S] [--runs N] [--seed N]
    live.py load [--agents N] [--collectors N] [--seconds S]

`latency`: each scenario on 64 simulated GPUs, with a fault that sets in while the job runs. Agents are fed from the
recording as a session would feed them, with its own clock; a collector judges ten times a second what arrived.
`s` is from the first moment of the first operator of the machine at fault that ended after the fault set in until the
finding was open, by that clock; what computing adds to it is beside it: the CPU seconds of the slowest agent's step and
of the verdict, which in a cluster are spent by machines of their own. `as analyzed`: whether `pulse analyze` names the
same of the whole recording.
`healthy`: recordings without a fault, one seed and job after the other; how many findings opened.
`load`: collectors as processes of their own, and so many agents, each with a certificate and connection of its own,
that send twice a second what the agents of a simulated job said, in jobs of `--nodes`; when it is confirmed, and CPU
time and memory of receiving and storing, and of judging, which other processes do.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import trustme

from pulse_bpf import analysis
from pulse_bpf.lab.sim.scenarios import SCENARIOS
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.live import wire
from pulse_bpf.live.client import FlightLink
from pulse_bpf.live.cutting import STEP_NS
from pulse_bpf.live.memory import resident_bytes

sys.path.insert(0, str(Path(__file__).parent / "analysis"))
from live_replay import MOMENTS, Replay

TWELVE = (
    *("gpu-slow", "gpu-contended", "host-cpu", "pcie-slow", "host-pause", "nic-slow"),
    *("nic-flap", "lossy-link", "congestion", "path-collision", "pause-storm", "hang-inside"),
)
# Threads that speak for agents.
SENDERS = 8
HEALTHY = ("dp", "fsdp", "megatron", "dp-checkpoint", "megatron-last-stage", "moe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("latency", "healthy", "load"))
    parser.add_argument("--scenario", nargs="*", default=TWELVE)
    parser.add_argument("--workload", nargs="*", default=HEALTHY)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--bin-us", type=int, default=32)
    parser.add_argument("--agents", type=int, default=48, help="a multiple of --nodes")
    parser.add_argument("--collectors", type=int, default=1, help="each of some of the jobs")
    parser.add_argument("--keep", type=Path, help="where scratch files go (default: a temporary directory)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.keep) as scratch:
        {"latency": latencies, "healthy": healthy, "load": load}[chosen.what](chosen, Path(scratch))


def latencies(chosen: argparse.Namespace, scratch: Path) -> None:
    """Prints a row for each scenario, and the median and the longest."""
    print(
        "| scenario | s | + computing s | named | at fault | as analyzed |\n| --- | ---: | ---: | --- | --- | --- |"
    )
    took = []
    for number, name in enumerate(chosen.scenario):
        directory = scratch / name
        simulate(
            name,
            directory / "recording",
            seed=chosen.seed + number,
            nodes=chosen.nodes,
            seconds=chosen.seconds,
            bin_us=chosen.bin_us,
            onset="late",
        )
        replay = Replay(directory / "recording", directory)
        truth = json.loads((directory / "recording" / "truth.json").read_text())
        fault = truth["faults"][0]
        since_ns = touched_ns(directory / "recording", fault)
        opened = None
        while replay.now_ns < replay.last_ns and opened is None:
            opened = next((event for event in replay.tick() if event["state"] == "opened"), None)
        row = ["-", "-", "nothing"]
        if opened is not None:
            seconds = (opened["at_ns"] - since_ns) / 1e9
            took.append(seconds)
            computing = max(player.cpu_s[-1] for player in replay.players.values()) + replay.judging_s[-1]
            row = [f"{seconds:.1f}", f"{computing:.2f}", told(opened["finding"])]
        found = analysis.analyze([directory / "recording"]).to_dict()["findings"]
        same = told(found[0]) if found else "nothing"
        print(
            f"| {name} | {' | '.join(row)} | {told(fault)} | {'yes' if same == row[2] else same} |",
            flush=True,
        )
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    if took:
        print(f"\nmedian {statistics.median(took):.1f} s, longest {max(took):.1f} s, of {len(took)}")


def touched_ns(recording: Path, fault: dict[str, Any]) -> int:
    """When the first operator that the fault touched began, or the fault where it was under way."""
    operators = pl.read_parquet(recording / "truth_operators.parquet")
    if fault.get("node"):
        operators = operators.filter(pl.col("node") == fault["node"])
    ended = pl.col("end_ns").is_null() | (pl.col("end_ns") > fault["start_ns"])
    begun = operators.filter(ended)["start_ns"].min()
    return max(int(begun), fault["start_ns"]) if isinstance(begun, int) else int(fault["start_ns"])


def healthy(chosen: argparse.Namespace, scratch: Path) -> None:
    """Prints what was found in how much healthy time."""
    total_s, began = 0.0, time.process_time()
    for run in range(chosen.runs):
        for number, workload in enumerate(chosen.workload):
            seed = chosen.seed + run * len(chosen.workload) + number
            directory = scratch / f"{run}-{workload}"
            name = next(
                (each.name for each in SCENARIOS.values() if each.workloads == (workload,)), "healthy"
            )
            simulate(
                name,
                directory / "recording",
                seed=seed,
                nodes=chosen.nodes,
                seconds=chosen.seconds,
                bin_us=chosen.bin_us,
                workload=workload,
            )
            replay = Replay(directory / "recording", directory)
            events = replay.run()
            total_s += (replay.now_ns - replay.first_ns) / 1e9
            for event in events:
                print(f"{workload}, seed {seed}: {told(event['finding'])}", flush=True)
            print(
                f"{total_s:.0f} s healthy, {time.process_time() - began:.0f} CPU s",
                file=sys.stderr,
                flush=True,
            )
            for path in sorted(directory.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    print(f"{total_s:.0f} s of healthy time judged")


def load(chosen: argparse.Namespace, scratch: Path) -> None:
    """Prints what collectors of so many agents needed, each of which has some of the jobs."""
    directory = scratch / "recording"
    simulate("healthy", directory, seed=chosen.seed, nodes=chosen.nodes, seconds=chosen.seconds, bin_us=200)
    said = _said(Replay(directory, scratch))
    names = [f"job{job}-{node}" for job in range(chosen.agents // chosen.nodes) for node in said]
    authority = trustme.CA()
    (scratch / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (scratch / "allow").write_text("".join(f"{name} agent\n" for name in names))
    own = authority.issue_cert("localhost")
    (scratch / "own.pem").write_bytes(_pem(own))
    (scratch / "own.key").write_bytes(own.private_key_pem.bytes())
    with ExitStack() as ends:
        sites = [
            ends.enter_context(_collecting(scratch, f"state{each}")) for each in range(chosen.collectors)
        ]
        links = {}
        for number, name in enumerate(names):
            shown = authority.issue_cert(name)
            site = sites[number // chosen.nodes % len(sites)]
            links[name] = FlightLink(
                "localhost", site.port, authority.cert_pem.bytes(), _pem(shown), shown.private_key_pem.bytes()
            )
        rounds = min(len(steps) for steps in said.values())
        # What is said is made beforehand, with the moments at which it is going to be sent.
        begins_s = time.time() + 5.0 + 0.01 * rounds * len(names)
        ahead_ns = round(begins_s * 1e9) - said[next(iter(said))][0].until_ns
        turns: list[list[_Turn]] = [[] for _ in range(SENDERS)]
        for number in range(rounds):
            for place, name in enumerate(names):
                job, _, node = name.partition("-")
                due_s = begins_s + (number + place / len(names)) * STEP_NS / 1e9
                step = _renamed(said[node][number], job, ahead_ns)
                turns[place % SENDERS].append(_Turn(due_s, links[name], *step))
        if time.time() > begins_s:
            raise SystemExit("this machine is too busy: it took too long to make what agents say")
        rows = sum(turn.rows for each in turns for turn in each)
        size = sum(len(turn.content) for each in turns for turn in each)
        before = [site.cpu_s() for site in sites]
        with ThreadPoolExecutor(SENDERS) as senders:
            late_s = sorted(late for each in senders.map(_sent, turns) for late in each)
        seconds = rounds * STEP_NS / 1e9
        print(
            f"{len(names)} agents, {rows / seconds / len(names):.0f} operator rows a second and agent, "
            f"{size / seconds / len(names) / 1024:.0f} KB a second and agent, for {seconds:.0f} s; confirmed after "
            f"{statistics.median(late_s):.3f} s (median), {late_s[len(late_s) * 99 // 100]:.3f} s (99 %), "
            f"{late_s[-1]:.3f} s (most)"
        )
        for site, (taken, judged) in zip(sites, before, strict=True):
            taking, judging = (now - then for now, then in zip(site.cpu_s(), (taken, judged), strict=True))
            verdicts, lag_s = site.exported("verdict_seconds_count"), site.exported("lag_seconds")
            print(
                f"collector: {taking:.1f} CPU s to receive and store, {1e6 * taking * len(sites) / rows:.1f} us "
                f"a row; {judging:.1f} CPU s for {verdicts:.0f} verdicts, the last of them on operators that "
                f"were {lag_s:.1f} s old; {' + '.join(f'{held:.0f}' for held in site.held_mb())} MB"
            )


class _Turn(NamedTuple):
    """What an agent says, with so many final operators, and when."""

    due_s: float
    link: FlightLink
    content: bytes
    rows: int


def _sent(turns: Sequence[_Turn]) -> list[float]:
    """How long after its turn each was confirmed; one agent's steps come in their order."""
    late_s = []
    for turn in turns:
        time.sleep(max(0.0, turn.due_s - time.time()))
        turn.link.send(turn.content, 0, time.time_ns())
        late_s.append(time.time() - turn.due_s)
    return late_s


@dataclass(frozen=True)
class _Site:
    """A running collector, and the processes in which it judges."""

    pid: int
    port: int
    metrics: int

    def processes(self) -> list[int]:
        """Its own, and then those that judge."""
        children = Path(f"/proc/{self.pid}/task").glob("*/children")
        below = sorted({int(pid) for path in children for pid in path.read_text().split()})
        return [self.pid, *(pid for pid in below if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())]

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of its own, and of those that judge."""
        own, *others = map(_cpu_s, self.processes())
        return own, sum(others)

    def held_mb(self) -> list[float]:
        """Memory of each process."""
        return [resident_bytes(Path(f"/proc/{pid}/statm")) / 2**20 for pid in self.processes()]

    def exported(self, name: str) -> float:
        """A value of its metrics."""
        with urllib.request.urlopen(f"http://localhost:{self.metrics}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"pulse_collector_{name} "))


@contextmanager
def _collecting(scratch: Path, state: str) -> Iterator[_Site]:
    port, metrics = _free_port(), _free_port()
    command = [
        sys.executable,
        "-m",
        "pulse_bpf",
        "collect",
        "--listen",
        f"localhost:{port}",
        "--ca",
        "ca.pem",
    ]
    command += ["--cert", "own.pem", "--key", "own.key", "--allow", "allow", "--state", state]
    command += ["--metrics", f"localhost:{metrics}"]
    with subprocess.Popen(command, cwd=scratch, stderr=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stderr is not None
            collector.stderr.readline()
            yield _Site(collector.pid, port, metrics)
        finally:
            collector.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def _said(replay: Replay) -> dict[str, list[wire.Step]]:
    """What the agents of a replayed job say, step by step."""
    said: dict[str, list[wire.Step]] = {node: [] for node in replay.players}
    for node, link in replay.links.items():
        send = link.send

        def noted(content: bytes, oldest: int, sent_ns: int, send: Any = send, node: str = node) -> Any:
            said[node].append(wire.decode(wire.unpacked(content)))
            return send(content, oldest, sent_ns)

        link.send = noted  # type: ignore[method-assign]
    replay.run()
    return said


def _renamed(step: wire.Step, job: str, ahead_ns: int) -> tuple[bytes, int]:
    """`step` as the agent of another job says it now, and how many operators in it are final."""
    tables = {}
    for table, frame in step.tables.items():
        names = [name for name in ("node", "peer_node", "comm_id") if name in frame.columns]
        moments = [name for name in frame.columns if name in MOMENTS]
        tables[table] = frame.with_columns(
            *(pl.concat_str(pl.lit(f"{job}-"), name).alias(name) for name in names),
            *(pl.col(name) + ahead_ns for name in moments),
        )
    final = int(tables["operators"]["final"].sum()) if "operators" in tables else 0
    there = wire.Step(job, step.sequence, step.until_ns + ahead_ns, tables)
    return wire.packed(wire.encode(there)), final


def _pem(certificate: trustme.LeafCert) -> bytes:
    return b"".join(blob.bytes() for blob in certificate.cert_chain_pems)


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def told(finding: dict[str, Any]) -> str:
    """A finding, or a fault, in a few words: what, and where."""
    places = (finding.get(name) for name in ("node", "nic", "peer_node"))
    return " ".join(
        [finding["kind"], finding["scope"], *(str(place) for place in places if place is not None)]
    )


if __name__ == "__main__":
    main()
