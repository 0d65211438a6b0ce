"""`pulse lab`: the arguments of its verbs."""

from __future__ import annotations

import argparse
import errno
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pulse_bpf.errors import OK, PARTIAL, HostError, UsageError
from pulse_bpf.lab import evaluate, simulate
from pulse_bpf.output import write
from pulse_bpf.start import start_at


def add_commands(verbs: Any) -> None:
    """Adds `lab` and its verbs to the subparsers `verbs` of the command line."""
    lab = verbs.add_parser("lab", help="a testbed: several hosts on one kernel, a job, faults")
    commands = lab.add_subparsers(metavar="COMMAND", required=True)

    up = commands.add_parser("up", help="make the hosts and start the job")
    up.add_argument("--hosts", type=_count, default=4, metavar="N")
    up.set_defaults(func=_as_root(_up))

    fault = commands.add_parser("fault", help="break something, or mend it again")
    fault.add_argument("name", help="slow-nic, loss, slow-loop, cpu-hog, stop or kill")
    fault.add_argument("--host", type=int, required=True, metavar="I", help="from 1")
    fault.add_argument("--clear", action="store_true", help="take it back")
    fault.set_defaults(func=_as_root(_fault))

    status = commands.add_parser("status", help="what is up, and how many steps the job has made")
    status.set_defaults(func=_status)

    down = commands.add_parser("down", help="end the job and remove the hosts")
    down.set_defaults(func=_as_root(_down))

    run = commands.add_parser("run", help="the whole cycle, in a virtual machine where it must be")
    run.add_argument("scenarios", nargs="+", metavar="SCENARIO", help="healthy or the name of a fault")
    run.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    run.add_argument("--hosts", type=_count, default=4, metavar="N")
    run.add_argument("--host", type=int, metavar="I", help="where the fault is (default: random)")
    run.add_argument("-d", "--seconds", type=float, default=12.0, help="length of a recording (default: 12)")
    run.add_argument("--bin-us", type=int, default=1000, help="width of a traffic bin (default: 1000)")
    run.add_argument("--seed", type=int, default=None)
    run.set_defaults(func=_run)

    replay = commands.add_parser("replay", help="a recording's samples as RoCEv2 packets, at their times")
    replay.add_argument("recording", type=Path, metavar="DIR")
    where = replay.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--dev", metavar="VETH", help="send out of this end of a veth pair; measure at the other"
    )
    where.add_argument("--pcap", type=Path, metavar="FILE", help="write a capture instead")
    replay.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="times that of the recording"
    )
    replay.add_argument("--seconds", type=_positive, metavar="S", help="only the first S seconds of it")
    replay.set_defaults(func=_as_root(_replay))

    play = commands.add_parser("play", help="what one node recorded, recorded again now, for a rehearsal")
    play.add_argument("recording", type=Path, metavar="DIR")
    play.add_argument("--node", metavar="NODE", help="whose (default: that of this host's name)")
    play.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    play.add_argument(
        "--start-at", type=start_at, required=True, metavar="NS", help="as `pulse record` takes it"
    )
    play.add_argument("-d", "--seconds", type=_positive, help="how long (default: all of it)")
    play.set_defaults(func=_play)

    simulate.add_commands(commands)
    evaluate.add_commands(commands)


def _as_root(verb: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`verb` with a HostError in place of the kernel's refusal to let an ordinary user do it."""

    def run(arguments: argparse.Namespace) -> int:
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            return verb(arguments)
        except (PermissionError, NetlinkError) as error:
            if isinstance(error, NetlinkError) and error.code != errno.EPERM:
                raise
            raise HostError("the lab needs root", str(error), "Run it again with sudo") from error

    return run


def _count(text: str) -> int:
    if not 2 <= int(text) <= 16:
        raise argparse.ArgumentTypeError("from 2 to 16")
    return int(text)


def _positive(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError("more than 0")
    return float(text)


def _up(arguments: argparse.Namespace) -> int:
    from pulse_bpf.lab import job, network

    if not network.has_soft_roce():
        raise HostError(
            "this kernel has no soft-RoCE",
            "",
            "Use `pulse lab run`, which brings a virtual machine for that",
        )
    job.up(arguments.hosts)
    write(f"{arguments.hosts} hosts are up; record them with: pulse record --hosts {job.HOSTS_FILE} -o DIR")
    return OK


def _fault(arguments: argparse.Namespace) -> int:
    from pulse_bpf.lab import job
    from pulse_bpf.lab.faults import FAULTS

    lab = job.load()
    if arguments.name not in FAULTS:
        raise UsageError(f"there is no fault {arguments.name}", f"there are {', '.join(FAULTS)}")
    if not 1 <= arguments.host <= lab.hosts:
        raise UsageError(f"there is no host {arguments.host}", f"the lab has hosts 1 to {lab.hosts}")
    fault = FAULTS[arguments.name]
    (fault.clear if arguments.clear else fault.inject)(lab, arguments.host)
    return OK


def _status(_arguments: argparse.Namespace) -> int:
    from pulse_bpf.lab import job

    lab = job.load()
    for host, (pid, step) in enumerate(zip(lab.pids, job.steps(lab), strict=True), start=1):
        write(f"{job.node_name(host)}  pid {pid}  {step} steps")
    return OK


def _down(_arguments: argparse.Namespace) -> int:
    from pulse_bpf.lab import job

    job.down()
    return OK


def _run(arguments: argparse.Namespace) -> int:
    from pulse_bpf.lab.scenario import SCENARIOS, Plan, run

    for name in arguments.scenarios:
        if name not in SCENARIOS:
            raise UsageError(f"there is no scenario {name}", f"there are {', '.join(SCENARIOS)}")
    if arguments.host is not None and not 1 <= arguments.host <= arguments.hosts:
        raise UsageError(f"there is no host {arguments.host}")
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**31)
    output = arguments.output.resolve()
    plan = Plan(
        arguments.scenarios,
        output,
        arguments.hosts,
        arguments.host,
        arguments.seconds,
        arguments.bin_us,
        seed,
    )
    again = [*arguments.scenarios, "-o", str(output), "--hosts", str(arguments.hosts), "--seed", str(seed)]
    again += ["-d", str(arguments.seconds), "--bin-us", str(arguments.bin_us)]
    again += [] if arguments.host is None else ["--host", str(arguments.host)]
    return run(plan, again)


def _replay(arguments: argparse.Namespace) -> int:
    from pulse_bpf.lab import replay

    speed, seconds = arguments.speed, arguments.seconds
    if arguments.pcap is not None:
        replayed = replay.to_pcap(arguments.recording, arguments.pcap, speed=speed, seconds=seconds)
    else:
        replayed = replay.to_device(arguments.recording, arguments.dev, speed=speed, seconds=seconds)
    write("\n".join(replay.told(replayed)))
    return PARTIAL if replayed.left_out or replayed.dropped_packets else OK


def _play(arguments: argparse.Namespace) -> int:
    from pulse_bpf.lab.play import play

    node = arguments.node or socket.gethostname()
    return play(arguments.recording, node, arguments.output, arguments.start_at, arguments.seconds)
