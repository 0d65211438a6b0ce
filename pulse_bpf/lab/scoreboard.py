"""What many episodes say about methods: counts and shares, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import polars as pl

from pulse_bpf.lab.episodes import Outcome
from pulse_bpf.lab.scoring import LOCATED, OUTCOMES
from pulse_bpf.lab.sim.scenarios import SCENARIOS

# A fault counts that made the operators that it touched so many times longer; one that stopped them always does.
MIN_EFFECT = 1.05
# Recall is promised of faults at least so bad.
MIN_SEVERITY = 1.3
# A scenario is located to a level when this share of its faults is, or better.
MOSTLY = 0.9

STR, I64, F64 = pl.String, pl.Int64, pl.Float64
_EPISODE: dict[str, Any] = {
    **dict.fromkeys(
        ("method", "verdict", "scenario", "row", "workload", "onset", "source", "condition"), STR
    ),
    **dict.fromkeys(("number", "bin_us"), I64),
    **dict.fromkeys(("severity", "seconds"), F64),
}
FAULTS = pl.Schema({**_EPISODE, "kind": STR, "effect": F64, "outcome": STR, "kind_right": pl.Boolean})
_BOUNDARIES = ("true", "found", "starts_within_1", "starts_within_3", "ends_within_1", "ends_within_3")
_COUNTS = ("faults", "claims", "false_claims", "healthy_machines", *_BOUNDARIES)
CLAIMS = pl.Schema({**_EPISODE, "kind": STR, "confidence": F64, "right": pl.Boolean})
ANSWERS = pl.Schema({**_EPISODE, **dict.fromkeys(_COUNTS, I64), "computing_s": F64})


def faults(outcomes: Sequence[Outcome]) -> pl.DataFrame:
    """FAULTS and `counts`, `promised`: a row for each fault and method; what counts, and what recall is promised of."""
    rows = [
        _episode(outcome, answer.method, answer.verdict)
        | {"kind": fault["kind"], "effect": fault.get("effect"), "outcome": result, "kind_right": kind}
        for outcome in outcomes
        for answer in outcome.answers
        for fault, result, kind in zip(
            outcome.faults, answer.score.outcomes, answer.score.kinds_right, strict=True
        )
    ]
    counts = pl.col("effect").is_null() | (pl.col("effect") >= MIN_EFFECT)
    severe = pl.col("effect").is_null() | (pl.col("severity") >= MIN_SEVERITY)
    return pl.DataFrame(rows, schema=FAULTS).with_columns(counts=counts, promised=counts & severe)


def answers(outcomes: Sequence[Outcome]) -> pl.DataFrame:
    """ANSWERS: a row for each episode and method. The counts of boundaries are null where none were derived."""
    rows = [
        _episode(outcome, answer.method, answer.verdict)
        | asdict(answer.score)
        | (asdict(answer.boundaries) if answer.boundaries else {})
        | {"faults": len(outcome.faults), "computing_s": answer.computing_s}
        for outcome in outcomes
        for answer in outcome.answers
    ]
    return pl.DataFrame(rows, schema=ANSWERS)


def claims(outcomes: Sequence[Outcome]) -> pl.DataFrame:
    """CLAIMS: a row for each thing that a method said to be broken."""
    rows = [
        _episode(outcome, answer.method, answer.verdict) | asdict(stated)
        for outcome in outcomes
        for answer in outcome.answers
        for stated in answer.score.stated
    ]
    return pl.DataFrame(rows, schema=CLAIMS)


def _episode(outcome: Outcome, method: str, verdict: str) -> dict[str, Any]:
    episode = outcome.episode
    also = {"row": SCENARIOS[episode.scenario].row, "condition": ", ".join(episode.conditions) or "none"}
    return {**asdict(episode), **also, "method": method, "verdict": verdict}


def located(rows: pl.DataFrame) -> dict[str, int]:
    """How many `faults` are in `rows` (of `faults`), how many have each outcome, and of how many the kind is right."""
    counted = dict(rows["outcome"].value_counts().iter_rows())
    of_each = {str(outcome): int(counted.get(outcome, 0)) for outcome in OUTCOMES}
    return {"faults": rows.height, **of_each, "kind_right": int(rows["kind_right"].sum())}


def level(rows: pl.DataFrame) -> str:
    """The best level to which MOSTLY all faults in `rows` are located, else what happens instead; "-" without any."""
    counts = located(rows)
    reached = 0
    for outcome in LOCATED:
        reached += counts[outcome]
        if reached and reached >= MOSTLY * counts["faults"]:
            return outcome
    if not counts["faults"]:
        return "-"
    return "wrong" if counts["wrong"] >= counts["missed"] else "missed"


def share(part: float, whole: float) -> float | None:
    """`part` of `whole`, None where there is nothing to have a share of."""
    return part / whole if whole else None


def total(fault_rows: pl.DataFrame, answer_rows: pl.DataFrame) -> dict[str, Any]:
    """What the rows of one method come to.

    `precision`: of all claims, those that are about a fault and name no healthy part; `recall`: of the faults
    that count, at MIN_SEVERITY and up, those located to any level. Shares are None where there was nothing.
    """
    counted, promised = fault_rows.filter("counts"), fault_rows.filter("promised")
    healthy = answer_rows.filter(pl.col("faults") == 0)
    sums = answer_rows.select(pl.col(*_COUNTS, "computing_s", "seconds").sum()).row(0, named=True)
    derived = answer_rows.filter(pl.col("true").is_not_null())
    return {
        "episodes": answer_rows.height,
        "failed": answer_rows.filter(pl.col("verdict") == "failed").height,
        "undecided": answer_rows.filter(pl.col("verdict") == "undecided").height,
        "healthy_episodes": healthy.height,
        "called_healthy": healthy.filter(pl.col("verdict") == "healthy").height,
        "false_alarms": healthy.filter(pl.col("claims") > 0).height,
        "too_small_faults": fault_rows.height - counted.height,
        **located(counted),
        "levels": levels(fault_rows),
        "recall": share(promised.filter(pl.col("outcome").is_in(LOCATED)).height, promised.height),
        "claims": sums["claims"],
        "false_claims": sums["false_claims"],
        "precision": share(sums["claims"] - sums["false_claims"], sums["claims"]),
        "healthy_machines": sums["healthy_machines"],
        "computing_s": _spread(answer_rows["computing_s"]),
        "computing_s_per_recorded_s": share(sums["computing_s"], sums["seconds"]),
        "boundaries": {name: sums[name] for name in _BOUNDARIES} if derived.height else None,
    }


def levels(fault_rows: pl.DataFrame) -> dict[str, str]:
    """The level of each of S1 to S12, sub-cases together, by the faults that recall is promised of."""
    promised = fault_rows.filter("promised").with_columns(row=pl.col("row").str.extract(r"^(S\d+)"))
    return {
        str(row): level(part)
        for (row,), part in promised.drop_nulls("row").group_by("row", maintain_order=True)
    }


def _spread(values: pl.Series) -> dict[str, float | None]:
    return {"median": values.quantile(0.5), "p99": values.quantile(0.99), "max": values.max()}  # type: ignore[dict-item]
