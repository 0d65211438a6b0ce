"""What an investigation costs the machine that it is started on, beside what nodes do: for each node, and in memory.

Many stand-ins for agents (fleet_agent.c), each behind a stand-in for ssh, answer at once, directly and through
ClusterShell's trees, whose gateways are real. `--megabytes` is what each of two steps brings from a node.

    .venv/bin/python benchmarks/fleet_tree.py --nodes 64 512 --gateways 0 16
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pulse_bpf import __version__
from pulse_bpf.fleet.parts import FILES
from pulse_bpf.fleet.sessions import Sessions
from pulse_bpf.fleet.workers import Connections, Way

_WITHIN_S = 60.0
# What is said to a node about its own flows: 16 of a node with 8 GPUs took so much.
FLOWS_BYTES = 10_000
# The command is the last argument, and the node the one before it.
_SSH = """#!/bin/sh
for argument; do node=$command; command=$argument; done
export NODE=$node
exec sh -c "$command"
"""


def measure(nodes: int, gateways: int, archive_bytes: int, scratch: Path) -> dict[str, float | str]:
    """One run in this process: seconds, CPU seconds (user and system) of this process, and its memory at most."""
    names = [f"n{number:05d}" for number in range(nodes)]
    topology = None
    if gateways:
        topology = scratch / "topology.conf"
        share = -(-nodes // gateways)
        lines = ["[routes]", f"{os.uname().nodename}: gw[0-{gateways - 1}]"]
        for gateway in range(gateways):
            mine = names[gateway * share : (gateway + 1) * share]
            lines.append(f"gw{gateway}: {','.join(mine)}")
        topology.write_text("\n".join(lines) + "\n")
    way = Way("ssh", (str(scratch / "agent"),), 30.0, topology=topology)
    out = scratch / "out"
    out.mkdir()
    before = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.monotonic()
    connections = Connections(names, way)
    sessions = Sessions(
        connections,
        names,
        out,
        FILES,
        lambda path, host: None,
        lambda path, host: out / path.stem / f"{host}.parquet",
        lambda: None,
    )
    sessions.wait("hello", "connecting", _WITHIN_S)
    connected_s = time.monotonic() - begun
    sessions.ask_clocks(_WITHIN_S)
    errors_ns = sorted(node.error_ns or 0 for node in sessions.live)
    sessions.ask(sessions.live, "check")
    sessions.wait("check", "checking", _WITHIN_S)
    sessions.ask(sessions.live, "record", command=[])
    sessions.wait("ready", "attaching", _WITHIN_S)
    sessions.ask(sessions.live, "begin", starts_ns={node.agent: 0 for node in sessions.live})
    sessions.wait("record", "recording", _WITHIN_S)
    sessions.ask(sessions.live, "tables")
    sessions.wait("tables", "sending", _WITHIN_S)
    for node in sessions.live:
        sessions.hand(node, "operators", bytes(FLOWS_BYTES))
    sessions.wait("operators", "sending", _WITHIN_S)
    live = len(sessions.live)
    sessions.ask(sessions.live, "end")
    sessions.wait("bye", "ending", _WITHIN_S)
    sessions.finish(_WITHIN_S)
    sessions.close()
    connections.close()
    took_s = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_SELF)
    arrived = sum(path.stat().st_size == archive_bytes for path in out.rglob("*.parquet"))
    return {
        "nodes": nodes,
        "gateways": gateways,
        "answered": live,
        "failed": next((node.reason for node in sessions.nodes.values() if node.reason), ""),
        "files": arrived,
        "s": took_s,
        "connected_s": connected_s,
        "cpu_s": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "clock_error_ms": errors_ns[len(errors_ns) // 2] / 1e6 if errors_ns else float("nan"),
        "before_mb": before.ru_maxrss / 1e3,
        "most_mb": after.ru_maxrss / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--gateways", type=int, nargs="+", default=[0, 16], help="0: without a tree")
    parser.add_argument("--megabytes", type=float, default=0.25)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    archive_bytes = round(chosen.megabytes * 1e6)
    if chosen.one:
        with tempfile.TemporaryDirectory() as scratch:
            prepare(Path(scratch), archive_bytes)
            print(json.dumps(measure(chosen.nodes[0], chosen.gateways[0], archive_bytes, Path(scratch))))
        return
    print(
        "| nodes | gateways | answered | s | connected after s | CPU ms a node | clock error ms | MB before | most MB |"
    )
    print("| ---: " * 9 + "|")
    for nodes in chosen.nodes:
        for gateways in chosen.gateways:
            # Each in a process of its own, whose memory at most is its own.
            command = [sys.executable, __file__, "--one", "--nodes", str(nodes), "--gateways", str(gateways)]
            command += ["--megabytes", str(chosen.megabytes)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            assert found["answered"] == nodes, found
            assert found["files"] == 2 * nodes, found
            print(
                f"| {nodes} | {gateways or '-'} | {found['answered']} | {found['s']:.1f} | "
                f"{found['connected_s']:.1f} | {1e3 * found['cpu_s'] / nodes:.1f} | "
                f"{found['clock_error_ms']:.1f} | {found['before_mb']:.0f} | {found['most_mb']:.0f} |"
            )


def prepare(scratch: Path, archive_bytes: int) -> None:
    """Makes the stand-ins in `scratch`, and this process and its children find them."""
    compiler = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror"]
    stub = scratch / "fleet_agent"
    subprocess.run([*compiler, "-o", stub, Path(__file__).with_name("fleet_agent.c")], check=True)
    for name, text in (
        ("ssh", _SSH),
        ("agent", f'#!/bin/sh\nexec {stub} "$NODE" {archive_bytes}\n'),
    ):
        (scratch / name).write_text(text)
        (scratch / name).chmod(0o755)
    os.environ["PATH"] = f"{scratch}:{os.environ['PATH']}"
    os.environ["PULSE_VERSION"] = __version__
    os.environ["CLUSTERSHELL_GW_PYTHON_EXECUTABLE"] = sys.executable
    os.environ["CLUSTERSHELL_GW_LOG_DIR"] = str(scratch)


if __name__ == "__main__":
    main()
