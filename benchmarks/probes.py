"""What a call of NCCL costs with Pulse attached: against no probe, and against an empty probe at the same places.

    .venv/bin/python benchmarks/probes.py [--rounds 15] [--json]

As root. A small C program calls the real library, without a GPU, so that the call itself takes under 0.1 us and hides
nothing. In each round every variant is attached, measured and taken off again, in an order that changes, so a drift of
the machine hits all alike. Then a caller at a pace, and one at full speed, are recorded: no event of the first may
be lost, and every one that is lost must be counted. Only the ratios carry over to another machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import IO

from rich.console import Console
from rich.table import Table

from pulse_bpf.attach import Program
from pulse_bpf.elf import Elf
from pulse_bpf.errors import HostError, PulseError
from pulse_bpf.lab.nccl import library_path
from pulse_bpf.probe_set import ProbeSet
from pulse_bpf.probes import nccl
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.session import POLL_S

CALLER = Path(__file__).parents[1] / "tests/targets/nccl_loop.c"
EMPTY = "#include <uapi/linux/ptrace.h>\nint on_entry(struct pt_regs *ctx) { return 0; }\n"
# In this release ncclSend calls ncclGroupStart and ncclGroupEnd, as a user would: three probes, and the return of one.
OPERATORS = ("ncclAllReduce", "ncclSend")
VARIANTS = ("none", "empty", "pulse")
WINDOWS = 5
# Fewer than the ring holds.
WINDOW_CALLS = 20_000
PACED_CALLS_PER_S = 100_000
PACED_S = 5
FULL_SPEED_CALLS = 3_000_000
TOO_LATE_S = 60.0


class Caller:
    """A running tests/targets/nccl_loop.c."""

    def __init__(self, process: subprocess.Popen[str], stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = process.pid
        self._stdin, self._stdout = stdin, stdout
        if stdout.readline() != "ready\n":
            raise HostError("the benchmark's caller did not start")

    def begin(self, calls: int, per_second: int) -> None:
        self._stdin.write(f"{calls} {per_second}\n")
        self._stdin.flush()

    def is_done(self, within_s: float) -> bool:
        return bool(select([self._stdout], [], [], within_s)[0])

    def result(self) -> tuple[int, int]:
        """How many calls it has made, in how many ns."""
        called, elapsed_ns, _ = self._stdout.readline().split()
        return int(called), int(elapsed_ns)


class Bench:
    """The library, the caller's program, and what can be attached to them."""

    def __init__(self, directory: Path) -> None:
        self._library = library_path()
        with Elf(self._library) as elf:
            functions = elf.functions([*nccl.PROBES, *ACCESSORS])
            self._rank_at = rank_offset({name: elf.code(functions[name]) for name in ACCESSORS}, elf.machine)
        self._places = {functions[name].offset: 0 for name in nccl.PROBES if name in functions}
        self._program = directory / "nccl_loop"
        self._empty = directory / "empty.c"
        self._empty.write_text(EMPTY)
        if shutil.which("gcc") is None:
            raise HostError("the benchmark's caller cannot be compiled", "there is no gcc", "apt install gcc")
        subprocess.run(["gcc", "-O2", "-o", self._program, CALLER, "-ldl"], check=True)

    @contextmanager
    def calling(self, operator: str) -> Iterator[Caller]:
        command = [self._program, self._library, str(self._rank_at), operator]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                yield Caller(process, process.stdin, process.stdout)
            finally:
                process.kill()

    @contextmanager
    def attached(self, variant: str, pid: int) -> Iterator[ProbeSet | None]:
        """The probes of `variant` on the library."""
        if variant == "pulse":
            probes = ProbeSet(0)
            try:
                probes.add(pid, "here")
                yield probes
            finally:
                probes.close()
        elif variant == "empty":
            program = Program(self._empty, {})
            try:
                for error in program.attach_uprobes(self._library, self._places, "on_entry").refused.values():
                    raise error
                yield None
            finally:
                program.close()
        else:
            yield None

    def call_ns(self, operator: str, rounds: int) -> dict[str, list[float]]:
        """For each variant, what a call took in the least disturbed window of each round, in ns."""
        costs: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        with self.calling(operator) as caller:
            for number in range(rounds):
                for position in range(len(VARIANTS)):
                    variant = VARIANTS[(number + position) % len(VARIANTS)]
                    with self.attached(variant, caller.pid) as probes:
                        windows = [_window_ns(caller, probes) for _ in range(WINDOWS)]
                        if probes and probes.lost:
                            raise PulseError(
                                "the probes lost events", f"a window of {WINDOW_CALLS} overran the ring"
                            )
                    # What else the machine does only ever adds.
                    costs[variant].append(min(windows))
        return costs

    def recorded(self, calls: int, per_second: int, drain_s: float = POLL_S) -> dict[str, int | float]:
        """What a caller did, and what came of it in a recording, drained as often as `pulse record` does by itself."""
        with self.calling(OPERATORS[0]) as caller, self.attached("pulse", caller.pid) as probes:
            assert probes
            caller.begin(calls, per_second)
            while not caller.is_done(within_s=drain_s):
                probes.drain()
            called, elapsed_ns = caller.result()
            operators = probes.read()["ops"].height
            return {
                "calls_per_s": round(called / (elapsed_ns / 1e9)),
                "called": called,
                "recorded": operators,
                "lost": probes.lost,
                "unaccounted": called - operators - probes.lost,
            }


def _window_ns(caller: Caller, probes: ProbeSet | None) -> float:
    caller.begin(WINDOW_CALLS, 0)
    called, elapsed_ns = caller.result()
    if probes:
        probes.read()
    return elapsed_ns / called


def _summary(costs: dict[str, list[float]]) -> dict[str, float]:
    added = {
        variant: [cost - none for cost, none in zip(costs[variant], costs["none"], strict=True)]
        for variant in ("empty", "pulse")
    }
    ratios = [pulse / empty for pulse, empty in zip(added["pulse"], added["empty"], strict=True)]
    result = {}
    for name, values in {**costs, "empty_added": added["empty"], "pulse_added": added["pulse"]}.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result |= {f"{name}_ns": round(middle, 1), f"{name}_spread_ns": round(high - low, 1)}
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {**result, "ratio": round(middle, 2), "ratio_low": round(low, 2), "ratio_high": round(high, 2)}


def _print(costs: dict[str, dict[str, float]], throughput: dict[str, dict[str, int | float]]) -> None:
    table = Table(title="ns per call: median (and spread of the middle half)")
    for heading in ("operator", "no probe", "empty probe", "Pulse", "Pulse's cost : empty probe's"):
        table.add_column(heading)
    for operator, cost in costs.items():
        cells = [f"{cost[f'{variant}_ns']} ({cost[f'{variant}_spread_ns']})" for variant in VARIANTS]
        table.add_row(operator, *cells, f"{cost['ratio']} ({cost['ratio_low']}-{cost['ratio_high']})")
    Console().print(table)
    table = Table(title="recorded while it calls")
    for heading in ("caller", "calls a second", "called", "recorded", "lost, as counted", "unaccounted for"):
        table.add_column(heading)
    for name, row in throughput.items():
        table.add_row(name, *(str(value) for value in row.values()))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(Path(directory))
            costs = {operator: _summary(bench.call_ns(operator, arguments.rounds)) for operator in OPERATORS}
            throughput = {
                "paced": bench.recorded(PACED_CALLS_PER_S * PACED_S, PACED_CALLS_PER_S),
                "full speed": bench.recorded(FULL_SPEED_CALLS, 0),
                "full speed, drained too late": bench.recorded(FULL_SPEED_CALLS, 0, TOO_LATE_S),
            }
    except PulseError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    if arguments.json:
        print(json.dumps({"cost": costs, "throughput": throughput}))
    else:
        _print(costs, throughput)
    return (
        0
        if throughput["paced"]["lost"] == 0 and not any(r["unaccounted"] for r in throughput.values())
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
