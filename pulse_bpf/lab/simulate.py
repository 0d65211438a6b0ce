"""`pulse lab simulate` and `pulse lab scenarios`: a testbed in this computer's memory."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from pulse_bpf.errors import OK, HostError, UsageError
from pulse_bpf.output import write

_WIDEST_BIN_US = 1_000_000
# NCCL_IB_MAX_QPS: no connection of NCCL has more.
_MOST_QPS = 128
_LARGEST_SEED = 2**63 - 1


def add_commands(commands: Any) -> None:
    """Adds both to the subparsers `commands` of `pulse lab`."""
    simulate = commands.add_parser("simulate", help="a recording of a scenario on simulated machines")
    simulate.add_argument("scenario", metavar="SCENARIO", help="see: pulse lab scenarios")
    simulate.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    simulate.add_argument("--seed", type=int, help="decides all chance (default: random)")
    simulate.add_argument(
        "--nodes", default="8", help="how many (default: 8), or which, as a node set: gpu[001-008]"
    )
    simulate.add_argument("--gpus", type=int, default=8, help="of each node, each with a NIC (default: 8)")
    simulate.add_argument("--workload", metavar="W", help="default: the scenario's first")
    simulate.add_argument("--severity", type=float, metavar="X", help="default: the scenario's own")
    simulate.add_argument("--onset", choices=("continuous", "intermittent", "late"))
    simulate.add_argument("--bin-us", type=int, default=32, help="width of a traffic bin (default: 32)")
    simulate.add_argument("--seconds", type=float, default=1.0, metavar="S", help="recorded (default: 1)")
    simulate.add_argument(
        "--source", default="packets", help="what sees the traffic: packets (default), pcc or diag+netlink"
    )
    simulate.add_argument(
        "--condition",
        action="append",
        default=[],
        metavar="NAME",
        help="what collectors are kept from seeing",
    )
    simulate.add_argument(
        "--scale",
        type=float,
        metavar="X",
        help="of the model's size; 1 is the published one, default about 70 ms",
    )
    simulate.add_argument("--qps", type=int, default=1, help="queue pairs per connection (default: 1)")
    simulate.add_argument("--no-pxn", action="store_true", help="each GPU sends through its own NIC")
    simulate.set_defaults(func=_simulate)

    scenarios = commands.add_parser(
        "scenarios", help="what `pulse lab simulate` can break, and in which jobs"
    )
    scenarios.add_argument("--json", action="store_true")
    scenarios.set_defaults(func=_scenarios)


def _simulate(arguments: argparse.Namespace) -> int:
    from pulse_bpf.fleet.nodes import node_set
    from pulse_bpf.lab.sim.identity import MOST_GPUS, MOST_NODES
    from pulse_bpf.lab.sim.simulate import simulate

    names = [] if arguments.nodes.isdecimal() else node_set(arguments.nodes)
    nodes = len(names) or int(arguments.nodes)
    for option, value, least, most in (
        ("--nodes", nodes, 1, MOST_NODES),
        ("--gpus", arguments.gpus, 1, MOST_GPUS),
        ("--seed", arguments.seed, 0, _LARGEST_SEED),
        ("--qps", arguments.qps, 1, _MOST_QPS),
        ("--bin-us", arguments.bin_us, 1, _WIDEST_BIN_US),
    ):
        if value is not None and not least <= value <= most:
            raise UsageError(f"{option} must be from {least} to {most}")
    if not 0 < arguments.seconds < 3600:
        raise UsageError("--seconds must be more than 0 and less than 3600")
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    try:
        simulate(
            arguments.scenario,
            arguments.output,
            seed=seed,
            nodes=nodes,
            gpus=arguments.gpus,
            workload=arguments.workload,
            severity=arguments.severity,
            onset=arguments.onset,
            bin_us=arguments.bin_us,
            seconds=arguments.seconds,
            source=arguments.source,
            conditions=arguments.condition,
            scale=arguments.scale,
            qps_per_connection=arguments.qps,
            pxn=not arguments.no_pxn,
            names=names,
        )
    except (MemoryError, OverflowError) as error:
        raise HostError(
            "that is too much to simulate here",
            str(error),
            "Choose fewer GPUs, less time or a smaller --scale",
        ) from error
    write(
        f"{arguments.output}: {arguments.scenario}, seed {seed}; look at it with: pulse analyze {arguments.output}"
    )
    return OK


def _scenarios(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from pulse_bpf.lab.sim.options import CONDITIONS
    from pulse_bpf.lab.sim.scenarios import ALWAYS, ANY, SCENARIOS
    from pulse_bpf.lab.sim.workloads import WORKLOADS

    if arguments.json:
        write(
            json.dumps(
                {
                    "scenarios": [
                        {name: value for name, value in vars(each).items() if name != "build"}
                        for each in SCENARIOS.values()
                    ],
                    "workloads": {name: each.title for name, each in WORKLOADS.items()},
                    "conditions": {name: dict(changes) for name, changes in CONDITIONS.items()},
                },
                indent=1,
            )
        )
        return OK
    table = Table(
        "scenario", "row", "what is wrong", "severity", "onset", "workloads", box=None, pad_edge=False
    )
    table.columns[0].no_wrap = True
    for each in SCENARIOS.values():
        low, high = each.severities
        severity = f"{each.severity:g} ({low:g} to {high:g})" if low < high else "-"
        onsets = "any" if each.onsets == ALWAYS else ", ".join(each.onsets)
        jobs = "any" if each.workloads == ANY else ", ".join(each.workloads)
        table.add_row(each.name, each.row, each.title, severity, onsets, jobs)
    lists = {"any onset": ALWAYS, "any workload": ANY, "workloads": WORKLOADS, "conditions": CONDITIONS}
    write(table, *(f"\n{what}: {', '.join(names)}" for what, names in lists.items()))
    return OK
