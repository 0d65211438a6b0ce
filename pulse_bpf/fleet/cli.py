"""`pulse investigate` and `pulse node`: their arguments."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from pulse_bpf.arguments import seconds
from pulse_bpf.errors import HOST, NO_DATA, OK, PARTIAL, USAGE, UsageError
from pulse_bpf.output import write

_EPILOG = f"""examples:
  pulse investigate -w gpu[001-064] -o case              all that use NCCL there, for 10 s
  pulse investigate --job 4711 --worker slurm -o case    this job, on its nodes, through srun
  pulse investigate -w gpu[001-064] --bootstrap -o case  nodes that do not have Pulse

exit status:
  {OK}   all nodes took part, whatever was found
  {PARTIAL}   some did not, and are named; or it was interrupted
  {USAGE}   wrong usage, or DIR holds something already
  {HOST}   this host lacks something
  {NO_DATA}   no node can be used
"""

_notices = Console(stderr=True)
_PROGRAM = re.compile(r"[A-Za-z0-9/._+][A-Za-z0-9/._+-]{0,250}")


def add_commands(verbs: Any) -> None:
    """Adds both to the subparsers `verbs` of the command line."""
    ask = verbs.add_parser(
        "investigate",
        help="record on all nodes of a job at once, and name who is at fault",
        description="Records on all nodes of a job at one moment, has each cut its own part, and judges all together.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask.add_argument("-w", "--nodes", metavar="NODES", help="a node set: gpu[001-064], @group")
    ask.add_argument(
        "--job", metavar="ID", help="only processes of this Slurm job; also its nodes, without -w"
    )
    ask.add_argument("--label", metavar="K=V", help="k8s: the pods that have Pulse, by their label")
    ask.add_argument("--namespace", default="default", help="k8s: theirs (default: default)")
    ask.add_argument("-d", "--seconds", type=seconds, default=10.0, help="how long (default: 10)")
    ask.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new directory")
    ask.add_argument("--json", action="store_true", help="the findings as JSON")
    ask.add_argument("--dry-run", action="store_true", help="only say what would be run where")
    ask.add_argument(
        "--raw", action="store_true", help="bring the samples of all nodes, not of suspects only"
    )
    ask.add_argument("--bin-us", type=int, default=1000, help="width of a traffic bin (default: 1000)")
    reach = ask.add_argument_group("how nodes are reached")
    reach.add_argument("--worker", choices=("ssh", "slurm", "k8s"), default="ssh", help="default: ssh")
    reach.add_argument("--pulse", default="pulse", metavar="PATH", help="the program there (default: pulse)")
    reach.add_argument(
        "--bootstrap",
        nargs="?",
        const="",
        metavar="DIR",
        help="send Pulse to nodes that do not have it, into a new directory below DIR there (default: $TMPDIR"
        " or /tmp), which is removed at the end",
    )
    reach.add_argument(
        "--sudo", action="store_true", help="run it there by sudo, which must ask for no password"
    )
    reach.add_argument("--ssh-config", type=Path, metavar="FILE", help="in place of your own (ssh -F)")
    reach.add_argument(
        "--topology", type=Path, metavar="FILE", help="ssh through gateways: ClusterShell's topology"
    )
    reach.add_argument(
        "--patience", type=seconds, default=60.0, metavar="S", help="for each step of a node (default: 60)"
    )
    ask.add_argument(
        "--rehearse",
        metavar="DIR",
        help="each node plays its part of this recording, which it has at that path: no job is needed",
    )
    ask.set_defaults(func=_investigate)

    node = verbs.add_parser("node", help="what `pulse investigate` runs on each node; for no one else")
    node.set_defaults(func=_node)


def _node(_arguments: argparse.Namespace) -> int:
    from pulse_bpf.fleet.agent import serve

    return serve()


def _investigate(arguments: argparse.Namespace) -> int:
    from pulse_bpf.fleet import bootstrap, nodes
    from pulse_bpf.fleet.investigate import Plan, investigate
    from pulse_bpf.fleet.workers import Way
    from pulse_bpf.store import RecordingWriter
    from pulse_bpf.watch import Selection

    if not 10 <= arguments.bin_us <= 10_000:
        raise UsageError("--bin-us must be from 10 to 10000")
    if not _PROGRAM.fullmatch(arguments.pulse):
        raise UsageError(f"--pulse {arguments.pulse[:60]!r} is no path of a program")
    program: tuple[str, ...] = (arguments.pulse, "node")
    if arguments.bootstrap is not None:
        _check_bootstrap(arguments)
        program = bootstrap.COMMAND
    if (arguments.worker == "k8s") != (arguments.label is not None):
        raise UsageError("--worker k8s and --label go together")
    if arguments.worker != "ssh" and (arguments.ssh_config or arguments.topology):
        raise UsageError("--ssh-config and --topology go with --worker ssh")
    if arguments.rehearse is not None and not arguments.rehearse.startswith("/"):
        raise UsageError(
            f"--rehearse {arguments.rehearse[:60]!r} does not begin with /",
            "each node looks for it at that path",
        )
    Selection(job=arguments.job)
    pods = None if arguments.label is None else nodes.pods_of_label(arguments.label, arguments.namespace)
    if arguments.nodes:
        names = nodes.node_set(arguments.nodes)
        if pods is not None and (strange := [name for name in names if name not in pods]):
            raise UsageError(f"no pod with {arguments.label} runs on {nodes.folded(strange)}")
    elif pods is not None:
        names = sorted(pods)
    elif arguments.job:
        names = nodes.nodes_of_job(arguments.job)
    else:
        raise UsageError("no nodes are given", "", "Give them with -w NODES, --job ID or --label K=V")
    of = ["--job", arguments.job] if arguments.job else ["--all"]
    record = ["record", *of, "--bin-us", str(arguments.bin_us)]
    if arguments.rehearse is not None:
        record = ["lab", "play", arguments.rehearse]
    plan = Plan(
        nodes=tuple(names),
        way=Way(
            worker=arguments.worker,
            command=(*(["sudo", "-n"] if arguments.sudo else []), *program),
            connect_s=10.0,
            ssh_config=arguments.ssh_config,
            job=arguments.job,
            pods=pods,
            namespace=arguments.namespace,
            topology=arguments.topology,
        ),
        record=(*record, "-d", f"{arguments.seconds:g}"),
        seconds=arguments.seconds,
        output=arguments.output,
        patience_s=arguments.patience,
        raw=arguments.raw,
        checks=arguments.rehearse is None,
        bootstrap=arguments.bootstrap,
    )
    if arguments.dry_run:
        RecordingWriter(plan.output)
        write("\n".join(plan.told()))
        return OK
    return investigate(plan, _notices, arguments.json)


def _check_bootstrap(arguments: argparse.Namespace) -> None:
    """UsageError for what it does not go with, and for a directory that is none."""
    if arguments.topology:
        raise UsageError(
            "--bootstrap and --topology do not go together",
            "a gateway hands all it gets to all its nodes, so that each would get the archives of all of them",
            "Leave --topology out, or install Pulse on the nodes",
        )
    if arguments.pulse != "pulse":
        raise UsageError("--bootstrap and --pulse do not go together", "Pulse is there, or it is sent there")
    if arguments.bootstrap and not (
        arguments.bootstrap.startswith("/") and _PROGRAM.fullmatch(arguments.bootstrap)
    ):
        raise UsageError(
            f"--bootstrap {arguments.bootstrap[:60]!r} is no path of a directory",
            "",
            "Give one that begins with /",
        )
