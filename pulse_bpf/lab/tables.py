"""The tables of an evaluation, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import polars as pl
from rich.table import Table as RichTable

from pulse_bpf.lab.episodes import Outcome
from pulse_bpf.lab.scoreboard import (
    MIN_EFFECT,
    MIN_SEVERITY,
    MOSTLY,
    answers,
    claims,
    faults,
    level,
    located,
    share,
    total,
)
from pulse_bpf.lab.scoring import LOCATED, OUTCOMES
from pulse_bpf.lab.sim.scenarios import SCENARIOS

SEVERITIES = (1.1, 1.2, 1.3, 1.45, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)
# A claim that says it is at least so sure, and less than the next says.
CONFIDENCES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.01)
# Scenarios in which somebody else's traffic crosses the job's.
TENANTS = ("healthy-tenant", "congestion")


@dataclass(frozen=True)
class Table:
    """All cells are text already. `note` explains what the title does not.

    `bars` and `line`: shares by row, which a page draws below the table.
    """

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    bars: list[float] = field(default_factory=list)
    line: list[float] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [f"## {self.title}", *([self.note] if self.note else []), "", _line(self.columns)]
        return "\n".join([*lines, _line(["---"] * len(self.columns)), *map(_line, self.rows), *self._chart()])

    def _chart(self) -> list[str]:
        """The shares as a chart in Mermaid's language, which pages of repositories draw."""
        if not self.bars:
            return []
        names = ", ".join(f'"{row[0]}"' for row in self.rows)
        chart = ["", "```mermaid", "xychart-beta", f'    title "{self.title}"', f"    x-axis [{names}]"]
        chart.append('    y-axis "%" 0 --> 100')
        shares = (("bar", self.bars), ("line", self.line))
        chart += [f"    {kind} {[round(100 * one, 1) for one in drawn]}" for kind, drawn in shares if drawn]
        return [*chart, "```"]

    def rich(self) -> RichTable:
        table = RichTable(
            title=self.title,
            caption=self.note or None,
            title_justify="left",
            caption_justify="left",
            box=None,
            pad_edge=False,
        )
        for column in self.columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(outcomes: Sequence[Outcome], methods: Sequence[str]) -> list[Table]:
    """All tables of `outcomes`, in which each of `methods` was asked; those with nothing to say left out."""
    fault_rows, answer_rows, claim_rows = faults(outcomes), answers(outcomes), claims(outcomes)
    made = [
        _by_scenario(fault_rows, answer_rows, methods),
        _in_all(fault_rows, answer_rows, methods),
        *(_outcomes(fault_rows.filter(pl.col("method") == method), method) for method in methods[:1]),
        _by_severity(fault_rows, methods),
        *(_conditions(fault_rows, answer_rows, method) for method in methods[:1]),
        _by_view(fault_rows, methods),
        *(_calibration(claim_rows, method) for method in methods[:1]),
        _boundaries(answer_rows, methods),
        _failures(outcomes),
    ]
    return [table for table in made if table.rows]


def _by_scenario(fault_rows: pl.DataFrame, answer_rows: pl.DataFrame, methods: Sequence[str]) -> Table:
    rows = []
    for name in _in_order(answer_rows):
        scenario = SCENARIOS[name]
        cells = []
        for method in methods:
            mine = (pl.col("scenario") == name) & (pl.col("method") == method)
            here = fault_rows.filter(mine, "promised")
            healthy = answer_rows.filter(mine, pl.col("faults") == 0)
            if here.height:
                cells.append(f"{level(here)} {_located(here)}/{here.height}")
            elif healthy.height:
                quiet = healthy.filter(pl.col("claims") == 0).height
                cells.append(f"{'quiet' if quiet == healthy.height else 'alarm'} {quiet}/{healthy.height}")
            else:
                cells.append("-")
        rows.append([scenario.row, scenario.title, *cells])
    note = (
        f"The level that at least {MOSTLY:.0%} of the faults are located to, or what happens instead, and how many of "
        f"them are located to any; without a fault, how many runs raised no alarm. Faults from {MIN_SEVERITY} times "
        f"up that lengthened the operators they touched by at least {MIN_EFFECT - 1:.0%}, and those that stopped them."
    )
    return Table("Scenarios", note, ["", "scenario", *methods], rows)


def _in_all(fault_rows: pl.DataFrame, answer_rows: pl.DataFrame, methods: Sequence[str]) -> Table:
    sums = [
        total(*(frame.filter(pl.col("method") == method) for frame in (fault_rows, answer_rows)))
        for method in methods
    ]
    rows = [[f"S1 to S12 {_NAMES[best]}", *(_of_levels(each, best) for each in sums)] for best in LOCATED]
    rows += [["S1 to S12 answered wrongly", *(_of_levels(each, "wrong") for each in sums)]]
    for name in ("faults", *OUTCOMES, "kind_right"):
        rows.append([_NAMES.get(name, name), *(str(each[name]) for each in sums)])
    rows += [[name, *(_percent(each[name]) for each in sums)] for name in ("recall", "precision")]
    for name in (
        "healthy_machines",
        "false_alarms",
        "called_healthy",
        "healthy_episodes",
        "undecided",
        "failed",
    ):
        rows.append([_NAMES.get(name, name), *(str(each[name]) for each in sums)])
    rows += [
        [f"CPU seconds to the answer, {name}", *(_seconds(each["computing_s"][name]) for each in sums)]
        for name in ("median", "p99")
    ]
    rows.append(
        ["CPU seconds per second recorded", *(_seconds(each["computing_s_per_recorded_s"]) for each in sums)]
    )
    return Table("All episodes", "", ["", *methods], rows)


_NAMES = {
    "faults": "faults that count",
    "exact": "located exactly",
    "machine": "located to the machine",
    "group": "located to a group",
    "kind_right": "located, and the right kind",
    "healthy_machines": "healthy machines named",
    "false_alarms": "healthy runs with an alarm",
    "called_healthy": "healthy runs called healthy",
    "healthy_episodes": "healthy runs",
    "undecided": "runs undecided",
    "failed": "runs in which the method failed",
}


def _of_levels(sums: dict[str, Any], best: str) -> str:
    levels = list(sums["levels"].values())
    return f"{levels.count(best)} of {len(levels)}"


def _outcomes(fault_rows: pl.DataFrame, method: str) -> Table:
    rows = []
    for name in _in_order(fault_rows):
        here = fault_rows.filter(pl.col("scenario") == name)
        counts = located(here.filter("counts"))
        small = here.height - counts["faults"]
        rows.append([name, *(str(counts[outcome]) for outcome in (*OUTCOMES, "kind_right")), str(small)])
    columns = ["scenario", *OUTCOMES, "right kind", "too small"]
    return Table(f"Faults by what {method} made of them", "", columns, rows)


def _by_severity(fault_rows: pl.DataFrame, methods: Sequence[str]) -> Table:
    counted = fault_rows.filter("counts", pl.col("effect").is_not_null())
    bands = [
        (f"{low} to {high}", (pl.col("severity") >= low) & (pl.col("severity") < high))
        for low, high in pairwise(SEVERITIES)
    ]
    note = f"Faults located to any level, of those that slowed what they touched. Bars: {methods[0]}."
    made = _shares("Recall by severity", note, counted, bands, methods)
    mine = counted.filter(pl.col("method") == methods[0])
    of_bands = [mine.filter(band) for _, band in bands]
    return replace(made, bars=[_located(part) / part.height for part in of_bands if part.height])


def _by_view(fault_rows: pl.DataFrame, methods: Sequence[str]) -> Table:
    promised = fault_rows.filter("promised")
    bands = [
        (str(value), pl.col(column) == value)
        for column in ("source", "bin_us", "condition", "onset", "workload")
        for value in promised[column].unique().sort()
    ]
    note = (
        "By source, width of the bins in us, what the collectors missed, when the fault came, and what ran."
    )
    return _shares("Recall by circumstances", note, promised, bands, methods)


def _conditions(fault_rows: pl.DataFrame, answer_rows: pl.DataFrame, method: str) -> Table:
    mine = [frame.filter(pl.col("method") == method) for frame in (fault_rows, answer_rows)]
    circumstances = [
        (named.format(value), pl.col(column) == value)
        for named, column in (("bins of {} us", "bin_us"), ("{}", "source"), ("{}", "condition"))
        for value in mine[1][column].unique().sort()
    ]
    circumstances.append(("a second tenant", pl.col("scenario").is_in(TENANTS)))
    rows = []
    for name, condition in circumstances:
        here = [frame.filter(condition) for frame in mine]
        if here[1].is_empty():
            continue
        sums = total(*here)
        rows.append(
            [
                name,
                str(sums["episodes"]),
                str(sums["healthy_machines"]),
                f"{sums['claims'] - sums['false_claims']}/{sums['claims']}",
                _percent(sums["precision"]),
                _percent(sums["recall"]),
                f"{sums['called_healthy']}/{sums['healthy_episodes']}",
            ]
        )
    columns = ["", "runs", "healthy machines named", "right", "precision", "recall", "called healthy"]
    note = (
        "By width of the bins, source, what the collectors missed (none: nothing), and where somebody else's traffic "
        "crosses the job's. Right: of what was said to be broken. Called healthy: of the runs without a fault."
    )
    return Table(f"What {method} says under each condition", note, columns, rows)


def _calibration(claim_rows: pl.DataFrame, method: str) -> Table:
    mine = claim_rows.filter(pl.col("method") == method)
    rows, right_shares, stated = [], [], []
    for low, high in pairwise(CONFIDENCES):
        here = mine.filter(pl.col("confidence") >= low, pl.col("confidence") < high)
        if here.is_empty():
            continue
        right = int(here["right"].sum())
        right_shares.append(right / here.height)
        stated.append(float(here.select(pl.col("confidence").mean()).item()))
        rows.append(
            [
                f"{low:.0%} to {min(high, 1.0):.0%}",
                str(here.height),
                _percent(stated[-1]),
                _percent(share(right, here.height)),
                " to ".join(f"{bound:.0%}" for bound in wilson(right, here.height)),
            ]
        )
    columns = ["stated confidence", "claims", "stated on average", "right", "right, 95 % interval"]
    note = (
        "How often what is said to be broken is, and names no healthy part, beside how sure the answer says it is. "
        "Bars: how often it is right; line: how sure it says it is."
    )
    return Table(f"How sure {method} may be", note, columns, rows, right_shares, stated)


def wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share of which `right` of so many were seen (E. B. Wilson, 1927)."""
    z2 = 1.96**2
    middle = (right + z2 / 2) / (of + z2)
    half = (z2 * (right * (of - right) / of + z2 / 4)) ** 0.5 / (of + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def _shares(
    title: str,
    note: str,
    fault_rows: pl.DataFrame,
    bands: Sequence[tuple[str, pl.Expr]],
    methods: Sequence[str],
) -> Table:
    rows = []
    for name, condition in bands:
        band = fault_rows.filter(condition)
        parts = [band.filter(pl.col("method") == method) for method in methods]
        if not band.is_empty():
            rows.append([name, *(f"{_located(part)}/{part.height}" for part in parts)])
    return Table(title, note, ["", *methods], rows)


def _boundaries(answer_rows: pl.DataFrame, methods: Sequence[str]) -> Table:
    rows = []
    for method in methods:
        mine = answer_rows.filter(pl.col("method") == method, pl.col("true") > 0)
        for source in mine["source"].unique().sort():
            part = mine.filter(pl.col("source") == source)
            sums = part.select(pl.col("true", "found", "^(starts|ends)_within.*$").sum()).row(0, named=True)
            within = [
                _percent(sums[f"{side}_within_{bins}"] / sums["found"] if sums["found"] else None)
                for side in ("starts", "ends")
                for bins in (1, 3)
            ]
            found = _percent(sums["found"] / sums["true"])
            rows.append([method, source, str(sums["true"]), found, *within])
    columns = ["method", "source", "operators", "found"]
    columns += [f"{side} within {bins}" for side in ("starts", "ends") for bins in ("1 bin", "3 bins")]
    note = (
        "Operators that moved bytes between nodes and ended, one for each peer and direction that the source sees. "
        "Bins are those that operators are told by: of queue pairs read every 10 ms these, where no port times them."
    )
    return Table("Operator boundaries", note, columns, rows)


def _failures(outcomes: Sequence[Outcome]) -> Table:
    told: dict[tuple[str, str], list[int]] = {}
    for outcome in outcomes:
        if outcome.error:
            told.setdefault(("simulation", outcome.error), []).append(outcome.episode.number)
        for answer in outcome.answers:
            if answer.error:
                told.setdefault((answer.method, answer.error), []).append(outcome.episode.number)
    rows = [
        [who, error.replace("|", "/"), str(len(numbers)), ", ".join(map(str, numbers[:5]))]
        for (who, error), numbers in sorted(told.items(), key=lambda item: -len(item[1]))
    ]
    return Table("Failures", "", ["of", "error", "episodes", "for example"], rows)


def _in_order(rows: pl.DataFrame) -> list[str]:
    """The scenarios in `rows`, in the order in which they are defined."""
    there = set(rows["scenario"])
    return [name for name in SCENARIOS if name in there]


def _located(fault_rows: pl.DataFrame) -> int:
    return fault_rows.filter(pl.col("outcome").is_in(LOCATED)).height


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
