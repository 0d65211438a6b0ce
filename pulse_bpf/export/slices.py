"""Operators as slices of a timeline: on queue pairs, GPUs and communicators, in lanes without overlap, bounded."""

from __future__ import annotations

import polars as pl

from pulse_bpf.schema import I64

# What is said by a slice's track, or has no meaning in a timeline.
_BY_TRACK = (
    "node",
    "nic",
    "port",
    "direction",
    "peer_node",
    "peer_nic",
    "pid",
    "peer_pid",
    "gpu",
    "flows",
    "level",
)
# What tells tracks apart. A flow group is known by the least of its flows.
QUEUE_PAIRS, GPUS, COMMUNICATORS = ["flow", "direction"], ["node", "pid", "gpu"], ["comm_id"]


def on_queue_pairs(operators: pl.DataFrame) -> pl.DataFrame:
    """One slice per operator, flow group and direction, from its first to its last byte seen.

    `operators` is metrics.OPERATORS, with align.align's `step`. Columns: first_ns, last_ns, error_ns, name, the track
    (QUEUE_PAIRS and what names it), and all metrics. An operator whose end was not seen lasts until its last byte.
    """
    rows = operators.filter(pl.col("level") == "flow", pl.col("bytes") > 0, pl.col("start_ns") > 0)
    arguments = [name for name in rows.columns if name not in (*_BY_TRACK, "reason", "step")]
    return rows.select(
        pl.col("node", "nic", "port", "peer_node", "peer_nic", "flows"),
        *_lasting(pl.col("start_ns"), pl.coalesce("end_ns", "last_byte_ns"), pl.col("start_err_ns")),
        flow=pl.col("flows").list.min(),
        direction="direction",
        name=_named(pl.col("end_ns").is_null()),
        arguments=pl.struct(arguments),
    )


def on_gpus(operators: pl.DataFrame) -> pl.DataFrame:
    """One slice per operator of a process, over all its flows; `step` is the same for that operator on all ranks."""
    rows = operators.filter(pl.col("level") == "flow", pl.col("bytes") > 0, pl.col("start_ns") > 0)
    unfinished = pl.col("end_ns").is_null().any()
    sent = pl.col("direction") == "tx"
    return (
        rows.group_by(*GPUS, "program_pos", maintain_order=True)
        .agg(
            *_lasting(
                pl.col("start_ns").min(),
                pl.coalesce("end_ns", "last_byte_ns").max(),
                pl.col("start_err_ns").max(),
            ),
            pl.col("comm_id", "step").first(),
            name=_named(unfinished).first(),
            arguments=pl.struct(
                pl.col(
                    "kind", "comm_id", "rank", "nranks", "op_seq", "nccl_seq", "op_bytes", "origin"
                ).first(),
                pl.col("call_ns", "prev_end_ns").first(),
                pl.col("start_lag_ns").min(),
                sent_bytes=pl.col("bytes").filter(sent).sum(),
                received_bytes=pl.col("bytes").filter(~sent).sum(),
                completion=pl.col("completion").min(),
                confidence=pl.col("confidence").min(),
            ),
        )
        .drop("program_pos")
    )


def on_communicators(operators: pl.DataFrame) -> pl.DataFrame:
    """One slice per operator of a communicator, from the first rank's first byte to the last rank's last one."""
    rows = operators.filter(
        pl.col("level") == "flow", pl.col("bytes") > 0, pl.col("start_ns") > 0, pl.col("step").is_not_null()
    ).with_columns(until_ns=pl.coalesce("end_ns", "last_byte_ns"))
    return rows.group_by("comm_id", "step", maintain_order=True).agg(
        *_lasting(pl.col("start_ns").min(), pl.col("until_ns").max(), pl.col("start_err_ns").max()),
        name=_named(pl.col("end_ns").is_null().any()).first(),
        arguments=pl.struct(
            pl.col("kind", "nranks", "nccl_seq", "op_bytes").first(),
            ranks_seen=pl.col("rank").n_unique(),
            last_rank_to_start=pl.col("rank").sort_by("start_ns").last(),
            last_rank_to_end=pl.col("rank").sort_by("until_ns").last(),
            starts_apart_ns=pl.col("start_ns").max() - pl.col("start_ns").min(),
            bytes=pl.col("bytes").filter(pl.col("direction") == "tx").sum(),
        ),
    )


def silent_calls(operators: pl.DataFrame) -> pl.DataFrame:
    """One row (t_ns, name, GPUS, arguments) per call of which no byte was seen."""
    rows = operators.filter(pl.col("level") == "call", pl.col("call_ns") > 0)
    return rows.select(
        *GPUS,
        t_ns="call_ns",
        name="kind",
        arguments=pl.struct("comm_id", "rank", "nranks", "op_seq", "nccl_seq", "op_bytes", "origin"),
    )


def in_lanes(slices: pl.DataFrame, track: list[str]) -> pl.DataFrame:
    """`slices` with `lane`, in the order of lanes and time: those of one track that overlap are in different lanes.

    Bins leave open when within them an operator began (`error_ns`): one that seems to begin by no more than this
    before another of its lane ended begins there.
    """
    slices = slices.sort(*track, "first_ns", "last_ns", maintain_order=True)
    number = slices.select(pl.struct(track).rle_id())[track[0]].to_list()
    lanes, firsts = [], []
    ends: list[int] = []
    before = -1
    for of, first_ns, last_ns, error_ns in zip(
        number, *(slices[name].to_list() for name in ("first_ns", "last_ns", "error_ns")), strict=True
    ):
        if of != before:
            ends, before = [], of
        for lane, end_ns in enumerate(ends):
            if end_ns <= first_ns or (end_ns - first_ns <= error_ns and end_ns < last_ns):
                first_ns = max(first_ns, end_ns)
                ends[lane] = last_ns
                break
        else:
            lane = len(ends)
            ends.append(last_ns)
        lanes.append(lane)
        firsts.append(first_ns)
    placed = slices.with_columns(
        lane=pl.Series(lanes, dtype=I64),
        first_ns=pl.Series(firsts, dtype=I64),
        track=pl.Series(number, dtype=I64),
    )
    return placed.sort("track", "lane", "first_ns", maintain_order=True)


def bounded(slices: pl.DataFrame, most: int) -> tuple[pl.DataFrame, int]:
    """`slices` (of in_lanes) with `merged`, how many each stands for; at most about `most` where lanes allow it.

    Where there are more, those shorter than some time, and no farther apart, become one: the name tells how many. Also
    that time in ns, 0 where nothing was merged. The arguments of a merged slice are those of its longest.
    """
    slices = slices.with_columns(merged=pl.lit(1, pl.UInt32))
    short_ns, kept = 0, slices
    while kept.height > most and short_ns < 10**12:
        short_ns = 2 * short_ns or 1000
        brief = pl.col("last_ns") - pl.col("first_ns") < short_ns
        near = pl.col("first_ns") - pl.col("last_ns").shift() < short_ns
        joins = (brief & brief.shift() & near).over("track", "lane").fill_null(False)
        longest = (pl.col("last_ns") - pl.col("first_ns")).arg_max()
        others = [name for name in slices.columns if name not in ("first_ns", "last_ns", "merged")]
        kept = (
            slices.group_by((~joins).cum_sum().alias("run"), maintain_order=True)
            .agg(
                pl.col("first_ns").min(),
                pl.col("last_ns").max(),
                pl.col("merged").sum(),
                pl.col(others).get(longest),
            )
            .with_columns(
                name=pl.when(pl.col("merged") > 1).then(pl.format("{} operators", "merged")).otherwise("name")
            )
            .select(slices.columns)
        )
    return kept, short_ns


def _lasting(first_ns: pl.Expr, last_ns: pl.Expr, error_ns: pl.Expr) -> list[pl.Expr]:
    return [
        first_ns.alias("first_ns"),
        pl.max_horizontal(first_ns, last_ns).alias("last_ns"),
        error_ns.fill_null(0).alias("error_ns"),
    ]


def _named(unfinished: pl.Expr) -> pl.Expr:
    """The kind of an operator, with a word where its end was not seen."""
    return pl.when(unfinished).then(pl.format("{}, end not seen", "kind")).otherwise("kind")
