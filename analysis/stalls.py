"""Silences inside operators: where each begins, when all flows are as fast as ever between them."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.twins import TWO_SIDED

# An operator counts when so many of its flows are silent for this share of their time: in long silences, or in all.
MIN_SILENT = 3
SILENT = (("first_stall_ns", "stall_ns", 0.1), ("first_gap_ns", "gap_unknown_ns", 0.05))
# In so many operators at least, and in this share of them, silence begins at the flow that is named.
MIN_OPERATORS, FIRST = 12, 0.62
# Smaller operators are over before a silence spreads.
LEAST_BYTES = 1_000_000
KEY = ["comm_id", "step"]


def find_stalls(aligned: pl.DataFrame) -> list[Finding]:
    """The two machines between which silence begins in nearly all operators that have any, by clocks as good as one.

    Who stops in a ring stops its neighbours: upstream when the slots are full, downstream when there is nothing to send
    on. So silence begins at a flow of the one that stops, and which of its two ends that is the flow alone
    does not tell.
    """
    flows = aligned.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("step").is_not_null(),
        pl.col("end_ns").is_not_null(),
        pl.col("op_bytes") > LEAST_BYTES,
        ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
    ).with_columns(span_ns=pl.col("last_byte_ns") - pl.col("start_ns"))
    edge = ["node", "nic", "peer_node", "peer_nic"]
    for first, silence, share in SILENT:
        silent = flows.filter((pl.col(silence) > share * pl.col("span_ns")).sum().over(KEY) >= MIN_SILENT)
        operators = silent.select(KEY).n_unique()
        if operators < MIN_OPERATORS:
            continue
        begins = silent.drop_nulls(first).filter(pl.col(first) == pl.col(first).min().over(KEY))
        # Where it begins on several flows at once, each may be the one.
        shares = begins.with_columns(part=1 / pl.len().over(KEY))
        votes = shares.group_by(edge).agg(pl.len().alias("times"), pl.col("part").sum())
        worst = votes.sort("part", *edge, descending=[True] + [False] * 4).row(0, named=True)
        of_span = pl.col(silence) / pl.col("span_ns")
        usual = float(silent.filter(pl.col(silence) > 0).select(of_span.median()).item())
        # Where there are long silences, they tell, and the short ones between them do not.
        found = worst["part"] >= FIRST * operators and usual > share
        return [_finding(worst, operators, usual, silent, silence)] if found else []
    return []


def _finding(
    worst: dict[str, object], operators: int, share: float, silent: pl.DataFrame, silence: str
) -> Finding:
    ends = [str(worst["node"]), str(worst["peer_node"])]
    times = int(str(worst["times"]))
    text = (
        f"In {times} of {operators} operators with silences the first one is on {worst['nic']} from {ends[0]} to "
        f"{ends[1]}, and spreads from there; flows are silent for {share:.0%} of the time, and fast in between."
    )
    return Finding(
        kind="gpu-contended" if silence == "gap_unknown_ns" else "host-cpu",
        cause="compute" if silence == "gap_unknown_ns" else "host",
        scope="group",
        confidence=round(min(0.9, times / operators), 3),
        slowdown=round(1 / max(0.1, 1 - share), 3),
        first_ns=int(silent["start_ns"].min()),  # type: ignore[arg-type]
        last_ns=int(silent["last_byte_ns"].max()),  # type: ignore[arg-type]
        evidence=[Evidence("first_silent", float(times), float(operators), operators, text)],
        nodes=ends,
        victims=[node for node in silent["node"].unique().sort() if node not in ends],
        next_check=f"on {ends[0]} and {ends[1]}: nvidia-smi pmon -c 5; top -H; cat /proc/pressure/cpu",
    )
