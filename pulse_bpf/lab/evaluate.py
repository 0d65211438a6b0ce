"""`pulse lab evaluate`: how often each method finds what is wrong, over many random episodes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pulse_bpf.errors import OK, PARTIAL, HostError, UsageError
from pulse_bpf.output import write

if TYPE_CHECKING:
    from pulse_bpf.lab.episodes import Episode, Outcome
    from pulse_bpf.lab.tables import Table

Item = TypeVar("Item")
Result = TypeVar("Result")

FORMAT, VERSION = "pulse-evaluation", 1
_stderr = Console(stderr=True)


def add_commands(commands: Any) -> None:
    """Adds `evaluate` to the subparsers `commands` of `pulse lab`."""
    evaluate = commands.add_parser("evaluate", help="accuracy of methods over random simulated episodes")
    evaluate.add_argument("--episodes", type=int, default=100, metavar="N", help="how many (default: 100)")
    evaluate.add_argument("--scenarios", nargs="+", metavar="SCENARIO", help="only these (default: all)")
    evaluate.add_argument(
        "--method", nargs="+", default=["pulse"], metavar="METHOD", help="pulse (default), baselines, or all"
    )
    evaluate.add_argument("--seed", type=int, default=1, help="decides all chance (default: 1)")
    evaluate.add_argument("--nodes", type=int, default=8)
    evaluate.add_argument("--gpus", type=int, default=8, help="of each node (default: 8)")
    evaluate.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="episodes at a time")
    evaluate.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the recordings, each in a folder here"
    )
    evaluate.add_argument("--json", action="store_true", help="every episode, and the sums")
    evaluate.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables there")
    evaluate.set_defaults(func=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    from pulse_bpf.analysis.baselines import BASELINES
    from pulse_bpf.lab.episodes import METHODS, carry_out, plan
    from pulse_bpf.lab.sim.scenarios import SCENARIOS
    from pulse_bpf.lab.tables import tables

    several = {"all": METHODS, "baselines": tuple(BASELINES)}
    methods = list(dict.fromkeys(each for name in arguments.method for each in several.get(name, (name,))))
    names = arguments.scenarios or list(SCENARIOS)
    _check_names("method", methods, METHODS)
    _check_names("scenario", names, list(SCENARIOS))
    for option, value, least in (
        ("--episodes", arguments.episodes, 1),
        ("--jobs", arguments.jobs, 1),
        ("--seed", arguments.seed, 0),
        ("--nodes", arguments.nodes, 2),
        ("--gpus", arguments.gpus, 1),
    ):
        if value < least:
            raise UsageError(f"{option} must be at least {least}")
    if arguments.keep is not None and arguments.keep.is_file():
        raise UsageError(f"{arguments.keep} is not a directory", "", "Choose a new directory with --keep")
    if arguments.keep is not None and arguments.keep.exists() and any(arguments.keep.iterdir()):
        raise UsageError(f"{arguments.keep} is not empty", "", "Choose a new directory with --keep")
    if arguments.markdown and not os.access(arguments.markdown.parent, os.W_OK):
        raise HostError(f"cannot write to {arguments.markdown}", "", "Choose another file with --markdown")
    episodes = plan(arguments.episodes, names, arguments.seed, arguments.nodes, arguments.gpus)
    outcomes = _carried_out(
        partial(carry_out, methods=methods, keep=arguments.keep), episodes, arguments.jobs
    )
    made = tables(outcomes, methods)
    command = shlex.join(["pulse", "lab", "evaluate", *_again(arguments)])
    if arguments.json:
        write(json.dumps(_report(outcomes, methods, command), indent=1))
    else:
        for table in made:
            write(table.rich(), "")
    if arguments.markdown:
        _write(arguments.markdown, _document(made, command))
    return PARTIAL if len(outcomes) < len(episodes) or any(each.error for each in outcomes) else OK


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise HostError(f"cannot write {path}", error.strerror or str(error)) from error


def _check_names(what: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    for name in wanted:
        if name not in known:
            raise UsageError(f"there is no {what} {name}", f"there are {', '.join(known)}")


def _again(arguments: argparse.Namespace) -> list[str]:
    """The arguments that give the same results."""
    again = ["--episodes", arguments.episodes, "--seed", arguments.seed, "--method", *arguments.method]
    again += ["--nodes", arguments.nodes, "--gpus", arguments.gpus]
    return [*map(str, again), *(["--scenarios", *arguments.scenarios] if arguments.scenarios else [])]


def _carried_out(
    carry_out: Callable[[Episode], Outcome], episodes: Sequence[Episode], jobs: int
) -> list[Outcome]:
    """What `carry_out` makes of the episodes, in their order; of those that were done, when interrupted."""
    from pulse_bpf.lab.episodes import Outcome

    # Read by polars when a worker imports it: one worker for each core leaves no more to each.
    os.environ["POLARS_MAX_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    outcomes = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_stderr) as progress:
        task = progress.add_task("episodes", total=len(episodes))
        try:
            for episode, outcome in in_processes(carry_out, episodes, jobs):
                outcomes.append(outcome or Outcome(episode, [], [], 0.0, "its process died or took too long"))
                progress.advance(task)
        except KeyboardInterrupt:
            _stderr.print(f"interrupted after {len(outcomes)} of {len(episodes)} episodes")
    return sorted(outcomes, key=lambda outcome: outcome.episode.number)


def in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[tuple[Item, Result | None]]:
    """`function` of each of `items` in one of `jobs` processes, in the order in which they are done.

    The result is None where the process died. What else it took along is done again, each in a process of its own.
    """
    left, running = list(items), dict[Future[Result], Item]()
    while left:
        with _pool(jobs) as pool:
            try:
                while left or running:
                    while left and len(running) < jobs:
                        running[pool.submit(function, left[0])] = left[0]
                        del left[0]
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        result = future.result()
                        yield running.pop(future), result
            except BrokenProcessPool:
                pass
        for item in running.values():
            with _pool(1) as pool:
                try:
                    yield item, pool.submit(function, item).result()
                except BrokenProcessPool:
                    yield item, None
        running.clear()


def _pool(jobs: int) -> ProcessPoolExecutor:
    # Not fork: polars and the engine may have threads. Ctrl-C is for the parent, which then lets them finish.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    return ProcessPoolExecutor(jobs, get_context("spawn"), initializer=signal.signal, initargs=ignore)


def _report(outcomes: Sequence[Outcome], methods: Sequence[str], command: str) -> dict[str, Any]:
    import polars as pl

    from pulse_bpf.lab.scoreboard import answers, faults, total

    frames = faults(outcomes), answers(outcomes)
    sums = {}
    for method in methods:
        mine = [frame.filter(pl.col("method") == method) for frame in frames]
        scenarios = {
            str(name): total(*(frame.filter(pl.col("scenario") == name) for frame in mine))
            for name in mine[1]["scenario"].unique(maintain_order=True)
        }
        sums[method] = total(*mine) | {"scenarios": scenarios}
    episodes = [asdict(outcome) | {"command": outcome.episode.command} for outcome in outcomes]
    return {"format": FORMAT, "version": VERSION, "command": command, "methods": sums, "episodes": episodes}


def _document(made: Sequence[Table], command: str) -> str:
    """The tables as a page that says how to make it again."""
    return "\n\n".join([_HEAD.format(command=command), *(table.markdown() for table in made)]) + "\n"


_HEAD = """\
# Evaluation

Simulated jobs with and without faults, recorded as the collectors would have, and what each method says of them.
This page is written by

    {command} --markdown docs/evaluation.md

| a fault is | when the method names |
| --- | --- |
| located exactly | the faulty component; or the link or group of exactly those that nothing in the recording tells \
apart; for congestion and shared paths, the network and the flows that share it |
| located to the machine | the machine it is in, or another part of it |
| located to a group | suspects that hold it but are not all machines; the network without the right flows |
| wrong | something healthy, first |
| missed | nothing |

Precision: of everything said to be broken, what is about a fault and names no healthy part. Recall: of the faults that
count, those located to any level. A healthy machine is named where a finding accuses machines and none of
them is at fault. The baselines are given the true times of every operator on every GPU, more than such a tool has.
A method that fails on an episode has found nothing there."""
