"""Claims about what a scenario looks like, and what they are measured by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import polars as pl
from scenario_signatures import Run, Signature, operators

# What a NIC of 400 Gbit/s carries of payload, at 4096 bytes and 82 of headers and gaps a packet.
LINE_GBPS = 400 * 4096 / (4096 + 82)


@dataclass(frozen=True)
class Measured:
    """A scenario's run. `flows` are signatures by role, `healthy` those of the same flows without the fault.
    `operators` are rows of scenario_signatures.compared, `stopped` of after_stop."""

    run: Run
    flows: Mapping[str, Signature]
    healthy: Mapping[str, Signature]
    operators: pl.DataFrame
    events: Mapping[str, int]
    stopped: pl.DataFrame
    together: float

    def median(self, column: str) -> float:
        value = self.operators[column].median()
        return float(value) if isinstance(value, (int, float)) else float("nan")

    def most(self, column: str) -> float:
        value = self.operators[column].max()
        return float(value) if isinstance(value, (int, float)) else float("nan")


@dataclass(frozen=True)
class Claim:
    """`text` holds where what `value` measures is within `low` to `high`."""

    text: str
    value: Callable[[Measured], float]
    low: float
    high: float


def of(role: str, name: str) -> Callable[[Measured], float]:
    return lambda measured: float(getattr(measured.flows[role], name))


def over_line(role: str, name: str) -> Callable[[Measured], float]:
    return lambda measured: float(getattr(measured.flows[role], name)) / LINE_GBPS


def stretched(low: float, high: float) -> Claim:
    return Claim("D long on all members, times", lambda m: m.median("stretch"), low, high)


def agreeing() -> Claim:
    return Claim("D alike on all members: longest over shortest", lambda m: m.median("spread"), 1.0, 1.05)


def unfinished(measured: Measured) -> int:
    frame = operators(measured.run)
    return int(frame.filter(pl.col("start_ns").is_not_null() & pl.col("end_ns").is_null())["seq"].n_unique())


def varies(measured: Measured) -> float:
    return measured.flows[OUT].variation / measured.healthy[OUT].variation


def fewest(measured: Measured) -> float:
    arg = measured.stopped["mib"].arg_min()
    return float("nan") if arg is None else float(arg)


def step(measured: Measured, hop: int) -> float:
    return float(measured.stopped["mib"][hop] - measured.stopped["mib"][0])


INFINITE = float("inf")
OUT, IN, NEXT, FAR, BESIDE = "x→y", "w→x", "y→z", "far", "x→y beside"
FULL_RATE = 0.97 * LINE_GBPS, 1.01 * LINE_GBPS
