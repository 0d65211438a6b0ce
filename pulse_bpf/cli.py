"""The command line: arguments in, exit status out. The work is done in the modules it calls."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pulse_bpf import __version__
from pulse_bpf.arguments import at_least_one, place, seconds, window
from pulse_bpf.errors import ANOMALY, HOST, NO_DATA, OK, PARTIAL, USAGE, PulseError, UsageError
from pulse_bpf.output import write
from pulse_bpf.start import start_at

if TYPE_CHECKING:
    from pulse_bpf.check import Check
    from pulse_bpf.watch import Selection

_EPILOG = f"""examples:
  pulse check                        can this host record?
  pulse record --all -d 10 -o rec    every process that maps an NCCL, 10 s
  pulse record -p 4711 -o rec        one process and its children, until Ctrl-C
  pulse analyze rec                  who is at fault, and why
  pulse report rec -o report.html    the same as a page with plots
  pulse export rec --format perfetto -o rec.pftrace    a timeline for ui.perfetto.dev

exit status:
  {OK}   done, whatever was found
  {PARTIAL}   done in part
  {USAGE}   wrong usage
  {HOST}   this host lacks something
  {NO_DATA}   no usable data
  {ANOMALY}  analyze --exit-code: an anomaly
"""

_notices = Console(stderr=True)


def main(argv: list[str] | None = None) -> int:
    """Runs one verb and returns its exit status; a PulseError or Ctrl-C becomes one line on stderr."""
    debug = False
    try:
        arguments = parser().parse_args(argv)
        debug = arguments.debug
        return int(arguments.func(arguments))
    except PulseError as error:
        if debug:
            raise
        _notices.print(f"pulse: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return error.exit_status
    except (KeyboardInterrupt, Exception) as error:
        if not _interrupted(error) or (debug and not isinstance(error, KeyboardInterrupt)):
            raise
        _notices.print("pulse: interrupted", style="red", highlight=False)
        return PARTIAL


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind `error`: libraries that it interrupts may fail in their own way while they clean up."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def parser() -> argparse.ArgumentParser:
    """The whole command line; from it come also the manual page and the completions of shells."""
    pulse = argparse.ArgumentParser(
        prog="pulse",
        description="Finds the machine, part or network that makes a running training job slow.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pulse.add_argument("--version", action="version", version=f"pulse {__version__}")
    pulse.add_argument("--debug", action="store_true", help="show tracebacks")
    verbs = pulse.add_subparsers(title="verbs", metavar="VERB", required=True)

    check = verbs.add_parser("check", help="can this host record, and if not what to do")
    check.add_argument("--json", action="store_true", help="for scripts and bug reports")
    check.set_defaults(func=_check)

    record = verbs.add_parser("record", help="record running processes and their queue pairs")
    target = record.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "-p", "--pid", type=int, action="append", help="a process, with its children (repeatable)"
    )
    target.add_argument("--all", action="store_true", help="every process that maps an NCCL")
    target.add_argument("--job", metavar="ID", help="those of a Slurm job, or of a Kubernetes pod by its uid")
    target.add_argument("--container", metavar="ID", help="those in a container; the first 12 digits do")
    target.add_argument("--hosts", type=Path, metavar="FILE", help="several lab hosts on this kernel (JSON)")
    record.add_argument("--wait", action="store_true", help="start also when nothing uses NCCL yet")
    record.add_argument(
        "--detail", action="store_true", help="also channels, algorithm and protocol of each operator"
    )
    record.add_argument("-d", "--seconds", type=seconds, help="how long (default: until Ctrl-C)")
    record.add_argument(
        "--start-at",
        type=start_at,
        metavar="NS",
        help="drop what happens before, in ns since the Unix epoch, so that hosts begin together; '-': read from stdin",
    )
    record.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new directory")
    record.add_argument("--bin-us", type=int, default=1000, help="width of a traffic bin (default: 1000)")
    record.add_argument(
        "--tap",
        action="append",
        default=[],
        metavar="NIC=NETDEV[:switch]",
        help="record only this RDMA device, seen at NETDEV (repeatable); ':switch' for the far end of its cable",
    )
    cards = record.add_argument_group("more of the cards, each at a price")
    cards.add_argument(
        "--bind-counters", action="store_true", help="bytes per queue pair as the device counts them"
    )
    cards.add_argument(
        "--xdp", action="store_true", help="count incoming packets at XDP; some drivers pause for it"
    )
    cards.add_argument("--diag", action="store_true", help="the card's own samples; taints the kernel")
    cards.add_argument("--diag-ids", type=Path, metavar="FILE", help="which counters to sample (JSON)")
    cards.add_argument("--diag-period-us", type=int, default=100, help="how often (default: 100)")
    cards.add_argument("--diag-force", action="store_true", help="take them from another user")
    cards.add_argument(
        "--pcc",
        action="append",
        default=[],
        metavar="NIC=FILE",
        help="what the observer on a BlueField-3 counts, as its relay writes it (repeatable)",
    )
    record.set_defaults(func=_record)

    analyze = verbs.add_parser("analyze", help="name what is at fault, with evidence")
    analyze.add_argument(
        "recordings",
        type=place,
        nargs="+",
        metavar="DIR",
        help="recordings, read as one; or URLs, as s3://...",
    )
    shape = analyze.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="the findings as JSON")
    shape.add_argument("--explain", metavar="FINDING", help="all that a finding rests on, for example F1")
    analyze.add_argument("--top", type=at_least_one, metavar="N", help="only the N most probable findings")
    analyze.add_argument(
        "--window",
        type=window,
        metavar="A..B",
        help="only that time: from the start, as 2s..5s or 500ms.., or in ns since the Unix epoch",
    )
    analyze.add_argument("--exit-code", action="store_true", help=f"exit {ANOMALY} on an anomaly")
    analyze.add_argument("--operators", type=Path, metavar="FILE", help="also write the operators as Parquet")
    analyze.add_argument(
        "--engine",
        choices=("local", "dask"),
        default="local",
        help="where it runs: in this process, or as tasks on Dask, by default on all CPUs here",
    )
    analyze.add_argument("--scheduler", metavar="ADDRESS", help="a Dask cluster that runs already")
    analyze.set_defaults(func=_analyze)

    from pulse_bpf import nic_cli
    from pulse_bpf.export import cli as export_cli
    from pulse_bpf.fleet import cli as fleet_cli
    from pulse_bpf.lab import cli as lab_cli
    from pulse_bpf.live import cli as live_cli
    from pulse_bpf.live import watch_cli
    from pulse_bpf.report import cli as report_cli

    fleet_cli.add_commands(verbs)
    report_cli.add_commands(verbs)
    export_cli.add_commands(verbs)
    watch_cli.add_commands(verbs)
    nic_cli.add_commands(verbs)
    live_cli.add_commands(verbs)
    lab_cli.add_commands(verbs)
    return pulse


def _check(arguments: argparse.Namespace) -> int:
    from pulse_bpf.check import check_host

    checks = check_host()
    if arguments.json:
        write(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        write(_check_table(checks))
    return HOST if any(check.state == "fail" for check in checks) else OK


def _check_table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        state = Text(check.state, styles[check.state])
        table.add_row(check.name, state, Text(check.found), Text(check.advice))
    return table


def _record(arguments: argparse.Namespace) -> int:
    from pulse_bpf.hosts import read_hosts, this_host

    if not 10 <= arguments.bin_us <= 10_000:
        raise UsageError("--bin-us must be from 10 to 10000")
    if arguments.hosts:
        if arguments.tap:
            raise UsageError("--tap does not go with --hosts", "the file names the taps")
        hosts = read_hosts(arguments.hosts)
    else:
        hosts = [this_host(_selection(arguments), arguments.tap)]

    from pulse_bpf.pace import summary
    from pulse_bpf.session import record
    from pulse_bpf.sources import Wanted

    if not arguments.diag and (arguments.diag_ids or arguments.diag_force):
        raise UsageError("--diag-ids and --diag-force go with --diag")
    if arguments.diag_period_us < 1:
        raise UsageError("--diag-period-us must be at least 1")
    wanted = Wanted(
        bin_ns=arguments.bin_us * 1000,
        xdp=arguments.xdp,
        bind_counters=arguments.bind_counters,
        diag=arguments.diag,
        diag_ids=arguments.diag_ids,
        diag_period_ns=arguments.diag_period_us * 1000,
        diag_force=arguments.diag_force,
        pcc=dict(map(_pcc, arguments.pcc)),
    )
    outcome = record(
        hosts,
        arguments.seconds,
        arguments.output,
        wanted,
        arguments.wait,
        arguments.detail,
        _notices,
        arguments.start_at,
    )
    for line in summary(outcome.seconds, outcome.rows, outcome.lost, arguments.output):
        _notices.print(line, highlight=False, soft_wrap=True)
    return outcome.exit_status


def _pcc(text: str) -> tuple[str, Path]:
    nic, separator, path = text.partition("=")
    if not (nic and separator and path):
        raise UsageError(f"--pcc {text} is not NIC=FILE")
    return nic, Path(path)


def _selection(arguments: argparse.Namespace) -> Selection:
    from pulse_bpf.watch import Selection

    pids = tuple(dict.fromkeys(arguments.pid or ()))
    return Selection(pids, arguments.all, arguments.job, arguments.container)


def _analyze(arguments: argparse.Namespace) -> int:
    from pulse_bpf.analysis.text import explain, render
    from pulse_bpf.judge import findings_of
    from pulse_bpf.store import write_file

    if arguments.scheduler and arguments.engine != "dask":
        raise UsageError("--scheduler goes with --engine dask")
    with TemporaryDirectory(prefix="pulse-") as scratch:
        rows = Path(scratch) / "operators.parquet"
        if arguments.engine == "local" and all(isinstance(each, Path) for each in arguments.recordings):
            findings = findings_of(arguments.recordings, arguments.window, _notices, rows)
        else:
            from pulse_bpf.fleet.engine import Dask, Local, judge_elsewhere

            with Dask(arguments.scheduler) if arguments.engine == "dask" else Local() as engine:
                findings, operators = judge_elsewhere(
                    arguments.recordings, arguments.window, engine, _notices, bool(arguments.operators)
                )
            write_file(rows, operators.write_parquet)
        if arguments.explain:
            write(explain(findings, arguments.explain))
        else:
            write(findings.to_json() if arguments.json else render(findings, arguments.top))
        if arguments.operators:
            write_file(arguments.operators, lambda path: shutil.copyfile(rows, path))
    if arguments.exit_code and findings.verdict == "anomaly":
        return ANOMALY
    return PARTIAL if findings.coverage["damaged_parts"] else OK
