"""`pulse nic`: the arguments of its verbs."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from pulse_bpf.errors import HOST, OK, UsageError
from pulse_bpf.output import write


def add_commands(verbs: Any) -> None:
    """Adds `nic` and its verbs to the subparsers `verbs` of the command line."""
    nic = verbs.add_parser("nic", help="what the network cards and their packets tell")
    commands = nic.add_subparsers(metavar="COMMAND", required=True)

    read = commands.add_parser("import", help="make a recording of packet captures (pcap, pcapng)")
    read.add_argument("files", type=Path, nargs="+", metavar="FILE", help="captures")
    read.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new directory")
    read.add_argument("--bin-us", type=int, default=1000, help="width of a traffic bin (default: 1000)")
    read.add_argument(
        "--nics", type=Path, metavar="FILE", help="whose GIDs these are: a recording's nics.parquet, or JSON"
    )
    read.set_defaults(func=_import)

    ports = commands.add_parser("list", help="RDMA ports, their rails, and what each source can tell of them")
    ports.add_argument("--json", action="store_true", help="for scripts")
    ports.set_defaults(func=_list)

    pairs = commands.add_parser(
        "qps", help="queue pairs with process and peer, as they are now or were recorded"
    )
    pairs.add_argument("recordings", type=Path, nargs="*", metavar="DIR", help="recordings, read as one")
    pairs.add_argument("--json", action="store_true", help="for scripts")
    pairs.set_defaults(func=_qps)


def _import(arguments: argparse.Namespace) -> int:
    if not 10 <= arguments.bin_us <= 10_000:
        raise UsageError("--bin-us must be from 10 to 10000")
    from pulse_bpf.nic_import import import_captures

    bin_ns = arguments.bin_us * 1000
    return import_captures(arguments.files, arguments.output, bin_ns, arguments.nics, Console(stderr=True))


def _list(arguments: argparse.Namespace) -> int:
    from pulse_bpf import nic_list

    listed = nic_list.list_ports(socket.gethostname())
    if arguments.json:
        write(json.dumps(listed, indent=1))
    else:
        write(*nic_list.render(listed))
    return OK if listed["ports"] else HOST


def _qps(arguments: argparse.Namespace) -> int:
    from pulse_bpf import nic_qps

    missing = ""
    if arguments.recordings:
        frame = nic_qps.recorded(arguments.recordings)
    else:
        frame, missing = nic_qps.live(socket.gethostname())
    if arguments.json:
        write(json.dumps(frame.to_dicts(), indent=1))
    else:
        none = (
            "No queue pair is recorded."
            if arguments.recordings
            else "There is no queue pair of a user process."
        )
        write(nic_qps.render(frame) if frame.height else none)
    if missing:
        print(f"pulse: {missing}", file=sys.stderr)
    return OK
