"""`pulse watch`: its arguments, and whether it is a screen, lines for scripts, or one look."""

from __future__ import annotations

import argparse
import json
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pulse_bpf.arguments import address, seconds
from pulse_bpf.errors import OK, AttachError, PulseError, UsageError
from pulse_bpf.live.memory import keep_tables_in_memory
from pulse_bpf.output import PIPED_COLUMNS, write

if TYPE_CHECKING:
    from pulse_bpf.live.findings_log import Event

_notices = Console(stderr=True)

# A verdict takes four seconds of traffic, and some more until the first probes and queue pairs are known.
FIRST_LOOK_S = 8.0

Ask = Callable[[], Mapping[str, Any]]


def add_commands(verbs: Any) -> None:
    """Adds `watch` to the subparsers `verbs` of the command line."""
    watch = verbs.add_parser(
        "watch", help="what is wrong with running jobs: here, or as a collector knows it"
    )
    watch.add_argument(
        "--json", action="store_true", help="a line for each finding that opens, changes or closes"
    )
    watch.add_argument("--once", action="store_true", help="say what is known now, and end")
    watch.add_argument(
        "--every", type=seconds, default=1.0, metavar="SECONDS", help="how often to ask (default: 1)"
    )
    target = watch.add_argument_group(
        "this node (as root), without a collector"
    ).add_mutually_exclusive_group()
    target.add_argument(
        "-p", "--pid", type=int, action="append", help="a process, with its children (repeatable)"
    )
    target.add_argument("--all", action="store_true", help="every process that maps an NCCL (default)")
    target.add_argument("--job", metavar="ID", help="those of a Slurm job, or of a Kubernetes pod by its uid")
    target.add_argument("--container", metavar="ID", help="those in a container; the first 12 digits do")
    target.add_argument("--hosts", type=Path, metavar="FILE", help="several lab hosts on this kernel (JSON)")
    target.add_argument(
        "--collector", type=address, metavar="HOST:PORT", help="not this node: ask a collector"
    )
    tls = watch.add_argument_group("with a collector, always over TLS")
    tls.add_argument(
        "--ca", type=Path, metavar="FILE", help="the authority that signed its certificate (PEM)"
    )
    tls.add_argument("--cert", type=Path, metavar="FILE", help="the certificate to show it (PEM)")
    tls.add_argument("--key", type=Path, metavar="FILE", help="the key of that certificate (PEM)")
    tls.add_argument("--token-file", type=Path, metavar="FILE", help="the token to show it instead")
    watch.set_defaults(func=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    if not (arguments.json or arguments.once or sys.stdout.isatty()):
        raise UsageError("a screen needs a terminal", "", "Use --once or --json")
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # ends as by Ctrl-C: what was attached is taken off
    tls = (arguments.ca, arguments.cert, arguments.key, arguments.token_file)
    if arguments.collector is None:
        if any(tls):
            raise UsageError("certificates and tokens are for a collector", "", "Give it with --collector")
        with _this_node(arguments) as ask:
            if arguments.once:
                with _notices.status(f"looking for {FIRST_LOOK_S:.0f} s"):
                    time.sleep(FIRST_LOOK_S)
            _show(ask, "this node", arguments)
    else:
        from pulse_bpf.live.asking import collector

        host, port = arguments.collector
        _show(collector(host, port, *tls), f"{host}:{port}", arguments)
    return OK


@contextmanager
def _this_node(arguments: argparse.Namespace) -> Iterator[Ask]:
    """What answers for this node, which is recorded meanwhile."""
    keep_tables_in_memory()
    from pulse_bpf.hosts import read_hosts, this_host
    from pulse_bpf.live.local import watching
    from pulse_bpf.watch import Selection

    if arguments.hosts:
        hosts = read_hosts(arguments.hosts)
    else:
        pids = tuple(dict.fromkeys(arguments.pid or ()))
        _check_alive(pids)
        everything = not (pids or arguments.job or arguments.container)
        hosts = [this_host(Selection(pids, everything, arguments.job, arguments.container), [])]
    with watching(hosts, _notices) as ask:
        yield ask


def _check_alive(pids: Collection[int]) -> None:
    """AttachError when none of `pids` runs; whoever runs may still open an NCCL."""
    from pulse_bpf.targets import read_process

    failures = []
    for pid in pids:
        try:
            read_process(pid)
        except AttachError as error:
            failures.append(error)
    if failures and len(failures) == len(pids):
        raise failures[0]


def _show(ask: Ask, source: str, arguments: argparse.Namespace) -> None:
    """One look, lines, or a screen that stays until q is pressed."""
    if arguments.once:
        lines = [*(_lines(Changes().of(ask())) if arguments.json else _page(ask()))]
        # Each finding is a line: nothing is none.
        if lines:
            write(*lines)
    elif arguments.json:
        _follow(ask, arguments.every)
    else:
        from pulse_bpf.live.screen import Screen

        Screen(ask, source, arguments.every).run()


class Changes:
    """Turns one status document after the other into the events between them."""

    def __init__(self) -> None:
        self._open: dict[str, Event] = {}

    def of(self, status: Mapping[str, Any]) -> list[Event]:
        """What opened, changed and closed since the document before; at first all that is open.

        What opened and closed between two documents is in neither.
        """
        now = {event["id"]: event for job in status["jobs"] for event in job["open"]}
        events = [event for name, event in now.items() if event != self._open.get(name)]
        for name, event in self._open.items():
            if name not in now:
                events.append({**event, "state": "closed", "at_ns": status["now_ns"]})
        self._open = now
        return events


def _follow(ask: Ask, every_s: float) -> None:
    """Writes events until Ctrl-C, or until nobody reads them; tells once when the collector does not answer."""
    changes, trouble = Changes(), ""
    reader = select.poll()
    reader.register(sys.stdout, select.POLLERR)
    try:
        while not reader.poll(0):
            before, trouble = trouble, ""
            try:
                lines = list(_lines(changes.of(ask())))
            except PulseError as error:
                trouble = str(error)
            else:
                if lines:
                    write(*lines)
            if trouble and trouble != before:
                _notices.print(
                    f"pulse: {trouble}", style="yellow", markup=False, highlight=False, soft_wrap=True
                )
            time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _lines(events: list[Event]) -> Iterator[str]:
    return (json.dumps(event) for event in events)


def _page(status: Mapping[str, Any]) -> Iterator[Table | str]:
    """All jobs in a table, and then each in full."""
    from pulse_bpf.live.status_text import COLUMNS, job_row, job_text

    if not status["jobs"]:
        yield "No job reports here"
        return
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for job in status["jobs"]:
        table.add_row(*job_row(job))
    yield table
    columns = Console().width if sys.stdout.isatty() else PIPED_COLUMNS
    for job in status["jobs"]:
        yield "\n" + job_text(job, status["now_ns"], columns).plain
