"""Published methods of finding the slow machine, to be measured on the same recordings as Pulse's own."""

from __future__ import annotations

from typing import Any, Protocol

import polars as pl

from pulse_bpf.analysis.baselines import aegis, greyhound, heat_map, holmes, inversion, llmprism
from pulse_bpf.analysis.load import Recording

__all__ = ["BASELINES", "Baseline"]


class Baseline(Protocol):
    """A method; its docstring says what is published of it and what is our reading."""

    def locate(self, calls: pl.LazyFrame | None, recording: Recording) -> dict[str, Any]:
        """What the method finds, in the form of `pulse analyze --json`.

        `calls`: the columns of calls.CALLS, the true times of all calls of all ranks. Methods at the level of
        operators judge by these and raise DataError without them; those at the level of flows by `recording`.
        """


BASELINES: dict[str, Baseline] = {
    "heat-map": heat_map,
    "inversion": inversion,
    "aegis": aegis,
    "greyhound": greyhound,
    "holmes": holmes,
    "llmprism": llmprism,
}
