"""How far starts, ends and volumes of operators that an analysis derives are from the true ones."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from pulse_bpf.analysis.load import Recording

# One operator in one direction between two ranks; its channels count as one.
KEY = ["node", "nic", "direction", "pid", "comm_id", "op_seq", "peer_rank"]


@dataclass(frozen=True)
class Boundaries:
    """Counts of operators: `true` ones, those of them `found` with start and end, and how far off these are.

    An operator of a communicator counts once per direction and peer. Distances are in bins of the recording.
    `invented` are derived ones with start and end that are no true ones.
    """

    true: int
    found: int
    starts_within_1: int
    starts_within_3: int
    ends_within_1: int
    ends_within_3: int
    invented: int = 0


def visible(truth: pl.DataFrame, recording: Recording) -> pl.DataFrame:
    """The rows of `truth` (truth_operators.parquet) of which the source of the `recording`'s samples sees the bytes.

    A source that sees only what is sent knows nothing of what its NIC receives. All rows where no coverage of that
    source is stated.
    """
    source = pl.col("source").is_in(recording.samples.sources["source"].unique().implode())
    seen = recording["coverage"].filter(source, pl.col("direction").is_not_null())
    if seen.is_empty():
        return truth
    return truth.join(seen, on=["node", "nic", "direction"], how="semi")


def compare(operators: pl.DataFrame, truth: pl.DataFrame) -> Boundaries:
    """The derived `operators` (schema.OPERATORS) beside `truth` (truth_operators.parquet).

    Only operators that ended and whose call was recorded are true ones. Both number the calls seen of each process
    on a communicator (op_seq) alike, with all point-to-point calls of a group as one.
    """
    both = distances(operators, truth)
    within = both.select(
        ((pl.col(f"{side}_off_ns").abs() / pl.col("bin_ns")) <= bins).sum().alias(f"{side}s_within_{bins}")
        for side in ("start", "end")
        for bins in (1, 3)
    ).row(0, named=True)
    real = _true(truth)
    invented = _derived(operators).drop_nulls(KEY).join(real, on=KEY, how="anti").height
    return Boundaries(true=_complete(real).height, found=both.height, invented=invented, **within)


def distances(operators: pl.DataFrame, truth: pl.DataFrame) -> pl.DataFrame:
    """Each true operator that was found, arguments as of `compare`: KEY, start_off_ns, end_off_ns, bin_ns.

    An offset is positive where the derived moment is late.
    """
    return (
        _complete(_true(truth))
        .join(_derived(operators), on=KEY)
        .select(
            *KEY,
            start_off_ns=pl.col("start_ns") - pl.col("true_start_ns"),
            end_off_ns=pl.col("end_ns") - pl.col("true_end_ns"),
            bin_ns="bin_ns",
        )
    )


def brief(truth: pl.DataFrame, bin_ns: int) -> int:
    """How many of the true operators, as of `compare`, take less than a bin."""
    return _complete(_true(truth)).filter(pl.col("true_end_ns") - pl.col("true_start_ns") < bin_ns).height


def alone(truth: pl.DataFrame, samples: pl.DataFrame) -> pl.DataFrame:
    """The rows of `truth` whose port moves nothing else in the bins from their start to their end.

    Of what is in one bin of `samples` (node, t_ns, bin_ns of all), a source may tell only what moved together. The
    bins of a node are taken for the widest it has, and for equally far apart.
    """
    bins = samples.group_by("node").agg(
        pl.col("bin_ns").max().cast(pl.Int64),
        (pl.col("t_ns") % pl.col("bin_ns").max()).first().alias("phase_ns"),
    )
    group = ["node", "nic", "direction"]
    first, last = ((pl.col(side) - pl.col("phase_ns")) // pl.col("bin_ns") for side in ("start_ns", "end_ns"))
    ordered = (
        truth.join(bins, on="node")
        .with_columns(first=first, last=last.fill_null(2**62))
        .sort(*group, "start_ns")
        .with_columns(
            before=pl.col("last").cum_max().shift().over(group), after=pl.col("first").shift(-1).over(group)
        )
    )
    free = (pl.col("before") < pl.col("first")).fill_null(True) & (
        pl.col("after") > pl.col("last")
    ).fill_null(True)
    return truth.join(ordered.filter(~free), on=KEY, how="anti", nulls_equal=True)


def volumes(operators: pl.DataFrame, flows: pl.DataFrame, truth: pl.DataFrame) -> pl.DataFrame:
    """Each true operator that was found: KEY, `true_bytes`, and `off`, its derived bytes' share above or below these.

    Derived bytes are those without repeats, and without headers where the source counts them, of full packets, as
    `flows` (attribute.FLOWS) has it. So operators of few packets look too large by what is on the wire.
    """
    factors = flows.select(pl.col("flow").alias("flows"), "wire_factor")
    net = (
        operators.with_columns(
            pl.col("flows").list.first(), net=pl.col("bytes") - pl.col("retx_bytes").fill_null(0)
        )
        .join(factors, on="flows", how="left")
        .group_by(KEY)
        .agg((pl.col("net") / pl.col("wire_factor").fill_null(1.0)).sum())
    )
    true_bytes = truth.group_by(KEY).agg(pl.col("bytes").sum().alias("true_bytes"))
    return (
        distances(operators, truth)
        .select(KEY)
        .join(true_bytes, on=KEY)
        .join(net, on=KEY)
        .select(*KEY, "true_bytes", off=pl.col("net") / pl.col("true_bytes") - 1)
    )


def _true(truth: pl.DataFrame) -> pl.DataFrame:
    return (
        truth.filter(pl.col("bytes") > 0)
        .group_by(KEY)
        .agg(
            pl.col("start_ns").min().alias("true_start_ns"),
            pl.when(pl.col("end_ns").null_count() == 0).then(pl.col("end_ns").max()).alias("true_end_ns"),
        )
    )


def _complete(real: pl.DataFrame) -> pl.DataFrame:
    return real.drop_nulls(["op_seq", "true_start_ns", "true_end_ns"])


def _derived(operators: pl.DataFrame) -> pl.DataFrame:
    return (
        operators.drop_nulls(["start_ns", "end_ns"])
        .group_by(KEY)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), pl.col("bin_ns").max())
    )
