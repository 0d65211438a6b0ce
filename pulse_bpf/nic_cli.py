"""`pulse nic`: the arguments of its verbs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pulse_bpf.errors import UsageError


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


def _import(arguments: argparse.Namespace) -> int:
    if not 10 <= arguments.bin_us <= 10_000:
        raise UsageError("--bin-us must be from 10 to 10000")
    from rich.console import Console

    from pulse_bpf.nic_import import import_captures

    bin_ns = arguments.bin_us * 1000
    return import_captures(arguments.files, arguments.output, bin_ns, arguments.nics, Console(stderr=True))
