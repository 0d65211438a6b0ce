"""What each metric and each step of the localization contributes: the evaluation again without it.

    pulse lab evaluate --episodes 300 --seed 2026 --keep DIR
    benchmarks/analysis/ablation.py DIR --markdown docs/ablation.md

Each recording is cut into operators once. Then one column of the operators is made null, one table or direction left
out, or one detector silenced, and the verdict scored as the evaluation does.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polars as pl

from pulse_bpf.analysis import causes, measure
from pulse_bpf.analysis.load import load
from pulse_bpf.analysis.stops import Stop
from pulse_bpf.lab.evaluate import in_processes
from pulse_bpf.lab.scoreboard import MIN_EFFECT, MIN_SEVERITY, share
from pulse_bpf.lab.scoring import LOCATED, Json, faults_of, score

# Not the function of that name, by which the package hides its module.
LOCALIZE = import_module("pulse_bpf.analysis.localize")
# Where detectors are called from.
CALLERS = (LOCALIZE, causes)

Tables = dict[str, pl.DataFrame]
Rows = tuple[pl.DataFrame, Tables]

# Columns of the operators that are one metric.
METRICS = {
    "rate while bursting (burst_gbps)": ["burst_gbps"],
    "rate of the median byte (wmed_gbps)": ["wmed_gbps"],
    "highest rates (peak_gbps, max_gbps, p95_gbps)": ["peak_gbps", "max_gbps", "p95_gbps"],
    "busy time (active_ns)": ["active_ns"],
    "variation of bins (bin_cv)": ["bin_cv"],
    "silences (stall and gap columns)": [
        *(
            "stalls",
            "stall_ns",
            "stall_trickle_ns",
            "first_stall_ns",
            "first_stall_len_ns",
            "first_stall_bytes",
        ),
        *("first_gap_ns", "gap_unknown_ns"),
    ],
    "clear-to-sends (credit columns)": ["credits_before", "credits_during", "credit_mean_ns"],
    "repeated bytes (retx_bytes)": ["retx_bytes"],
    "NCCL's own numbers (nccl_seq)": ["nccl_seq"],
    "call times (call_ns)": ["call_ns"],
}
TABLES = ("port_counters", "events", "channels", "processes")
# What a detector returns that finds nothing, where that is not an empty list.
SILENT: dict[str, Any] = {"find_stops": Stop([], []), "find_slow": ([], [], 0)}
# Not needed to name a culprit.
JOB = {"find_groups": [], "find_iteration": None}
# What only asks the others.
ASKS = "find_causes"


@dataclass(frozen=True)
class Episode:
    """A recording cut into `operators`, the owners of its queue pairs, its small `tables`, and the truth."""

    operators: pl.DataFrame
    flows: pl.DataFrame
    tables: Tables
    truth: Json


def episode(directory: Path) -> Episode:
    """The recording in `directory`, as `pulse lab evaluate --keep` leaves it."""
    recording = load([directory])
    operators, flows = measure(recording)
    small = {name: frame for name, frame in recording.tables.items() if name != "ops"}
    return Episode(operators, flows, small, json.loads((directory / "truth.json").read_text()))


def variants() -> dict[str, tuple[Callable[[pl.DataFrame, Tables], Rows], str | None]]:
    """By name what is done to the rows, and which detector is silenced."""
    made: dict[str, tuple[Callable[[pl.DataFrame, Tables], Rows], str | None]] = {
        "nothing": (_as_it_is, None)
    }
    made |= {name: (partial(_without_columns, columns), None) for name, columns in METRICS.items()}
    made["what is received"] = (_sent_only, None)
    made |= {f"table {name}": (partial(_without_table, name), None) for name in TABLES}
    called = dict.fromkeys(name for caller in CALLERS for name in vars(caller))
    detectors = [name for name in called if name.startswith("find_") and name not in (*JOB, ASKS)]
    made |= {f"step {name.removeprefix('find_')}": (_as_it_is, name) for name in detectors}
    return made


def _as_it_is(operators: pl.DataFrame, tables: Tables) -> Rows:
    return operators, tables


def _without_columns(names: Sequence[str], operators: pl.DataFrame, tables: Tables) -> Rows:
    return operators.with_columns(pl.lit(None, operators.schema[name]).alias(name) for name in names), tables


def _sent_only(operators: pl.DataFrame, tables: Tables) -> Rows:
    return operators.filter(pl.col("direction").fill_null("tx") == "tx"), tables


def _without_table(name: str, operators: pl.DataFrame, tables: Tables) -> Rows:
    return operators, {**tables, name: tables[name].clear()}


def counts(given: Episode, names: Sequence[str] | None = None) -> dict[str, Counter[str]]:
    """By variant (all, or those of `names`): faults that recall is promised of, located, claims, false ones, ..."""
    known = variants()
    return {name: _counts(given, *known[name]) for name in names or known}


def _counts(given: Episode, change: Callable[..., Rows], detector: str | None) -> Counter[str]:
    operators, tables = change(given.operators, given.tables)
    failed = 0
    silent = JOB if detector is None else {**JOB, detector: SILENT.get(detector, [])}
    try:
        with ExitStack() as stack:
            for caller in CALLERS:
                for name in silent.keys() & vars(caller).keys():
                    stack.enter_context(patch.object(caller, name, _returns(silent[name])))
            findings = LOCALIZE.localize(operators, given.flows, tables, []).to_dict()
    except Exception:
        # A detector that cannot do without has found nothing.
        findings, failed = {"findings": []}, 1
    nodes = max(given.tables["nodes"].height, given.tables["comms"]["node"].n_unique())
    result = score(findings, given.truth, nodes)
    promised = [
        outcome in LOCATED
        for outcome, fault in zip(result.outcomes, faults_of(given.truth), strict=True)
        if fault.get("effect") is None
        or (fault["effect"] >= MIN_EFFECT and (fault.get("severity") or 0) >= MIN_SEVERITY)
    ]
    return Counter(
        faults=len(promised),
        located=sum(promised),
        claims=result.claims,
        false=result.false_claims,
        machines=result.healthy_machines,
        failed=failed,
    )


def _returns(nothing: Any) -> Callable[..., Any]:
    return lambda *_, **__: nothing


def summed(each: Iterable[dict[str, Counter[str]]]) -> dict[str, Counter[str]]:
    sums: dict[str, Counter[str]] = {}
    for counted in each:
        for name, counter in counted.items():
            sums.setdefault(name, Counter()).update(counter)
    return sums


def page(sums: dict[str, Counter[str]], episodes: int, command: str) -> str:
    """The table, the metrics first, each group with what hurts most first."""
    whole = sums["nothing"]

    def row(name: str) -> str:
        found = sums[name]
        recall, precision = (
            share(found["located"], found["faults"]),
            share(found["claims"] - found["false"], found["claims"]),
        )
        cells = [
            name,
            f"{found['located']}/{found['faults']}",
            _percent(recall),
            f"{found['located'] - whole['located']:+d}",
            _percent(precision),
            f"{found['false'] - whole['false']:+d}",
            str(found["machines"]),
            str(found["failed"]),
        ]
        return f"| {' | '.join(cells)} |"

    ordered = sorted(
        sums, key=lambda name: (name != "nothing", name.startswith("step "), sums[name]["located"])
    )
    return _HEAD.format(episodes=episodes, command=command) + "\n".join(map(row, ordered)) + "\n"


_HEAD = """\
# Ablation

What the verdict on {episodes} simulated episodes would be without one metric, one table, or one step of the
localization; scored as in [evaluation.md](evaluation.md). This page is written by

    {command}

Where a variant loses nothing, another metric or step finds the same. A step that a port's own counters make needless
in an episode is not asked there.

| without | located | recall | located more | precision | false claims more | healthy machines named | failed |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _of_directory(directory: Path) -> dict[str, Counter[str]]:
    return counts(episode(directory))


def _results(directories: Sequence[Path], jobs: int) -> Iterator[dict[str, Counter[str]]]:
    for directory, counted in in_processes(_of_directory, directories, jobs):
        if counted is None:
            print(f"{directory}: its process died")
        else:
            yield counted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("episodes", type=Path, metavar="DIR", help="of pulse lab evaluate --keep")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page there")
    arguments = parser.parse_args()
    directories = sorted(path.parent for path in arguments.episodes.glob("*/truth.json"))
    if not directories:
        parser.error(f"{arguments.episodes} holds no episode")
    sums = summed(_results(directories, arguments.jobs))
    text = page(sums, len(directories), "benchmarks/analysis/ablation.py DIR --markdown docs/ablation.md")
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
