"""The shortest duration names the late rank: the rule for PyTorch's flight recorder in NVIDIA's resiliency extension.

Published (its design): a collective ends for all at once, so the rank that came last has the shortest duration; it is
flagged where that is below a tenth of the operator's median, and flags are counted over a window, since with a pipeline
they differ from phase to phase. Nothing is said about the cause.
Our reading: the window is the recording, and the rank or machine with most of at least three flags is named.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.baselines.calls import OPERATOR, accuse, collectives, culprit, timed, verdict, window
from pulse_bpf.analysis.findings import Evidence
from pulse_bpf.analysis.load import Recording

SHORT, MIN_FLAGS = 0.10, 3


def locate(calls: pl.LazyFrame | None, recording: Recording) -> dict[str, Any]:
    window_ns = window(timed(calls))
    flags = (
        collectives(calls)
        .drop_nulls("duration_ns")
        .with_columns(median_ns=pl.col("duration_ns").median().over(OPERATOR))
        .filter(pl.col("duration_ns") < SHORT * pl.col("median_ns"))
        .with_columns(weight=1.0)
        .collect()
    )
    who = culprit(flags)
    if who is None or flags.height < MIN_FLAGS:
        return verdict([], window_ns)
    ratio = flags.select((pl.col("duration_ns") / pl.col("median_ns")).median()).item()
    text = f"The shortest duration by far was its own in most of {flags.height} operators that had one."
    return verdict(
        [accuse(who, window_ns, Evidence("duration_ratio", ratio, 1.0, flags.height, text))], window_ns
    )
