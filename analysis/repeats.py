"""How processes repeat themselves: after how many calls the same ones follow, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from pulse_bpf.schema import F64, I64, U32

# A collective of at most so many bytes is bookkeeping (a loss, a norm, a barrier), no part of the model's traffic.
SMALL_BYTES = 64 << 10
# In so many of its recurrences, at least, an operator that ends each iteration is equally many calls after the last.
REGULAR = 0.6
# How well the calls must match those a period later, and by how much a longer period must do better to be preferred.
LEAST_MATCH, BETTER = 0.6, 0.8
# Two periods that differ by less are one; so many recurrences make one certain.
SAME, CERTAIN = 0.1, 4
# A shorter period, found without rare small operators, must also be this regular in time.
STEADY, STEADY_SHARE, EXACT = 0.3, 0.7, 0.99
# What is seen less often tells no distance; a period repeated all along covers most of the time, but for pauses.
LEAST_COUNT, LEAST_COVER = 3, 0.3
# Distances that are tried, of each process.
MOST_TRIED = 8

LAGS = pl.Schema({"process": U32, "lag": I64, "match": F64, "lasts_ns": F64, "steady": F64, "count": F64})


@dataclass(frozen=True)
class Repeated:
    """What `repeats` finds: nothing where `period_ns` is None.

    `shared` is the symbol that ends the iterations of all processes, if there is one; `starts` has process,
    program_pos, call_ns and row of the first call of each iteration of each process.
    """

    period_ns: int | None = None
    confidence: float = 0.0
    shared: int | None = None
    starts: pl.DataFrame = field(default_factory=pl.DataFrame)


def repeats(calls: pl.DataFrame) -> Repeated:
    """How the processes in `calls` repeat themselves, and the first call of each iteration of each.

    `calls` has process, program_pos, symbol, op_bytes, call_ns and row as iteration.CALLS does, in program order.
    """
    calls = _numbered(calls)
    spacings = _spacings(calls)
    lags = _lags(calls, spacings)
    if lags.is_empty():
        return _roughly(calls, spacings)
    # Small operators that recur once in a period: perhaps that is a log of every tenth step.
    once = spacings.join(lags, on=["process", "lag"], how="semi")
    rare = calls.filter(pl.col("op_bytes") <= SMALL_BYTES).join(once, on=["process", "symbol"], how="semi")
    if not rare.is_empty():
        rest = _numbered(calls.filter(~pl.col("index").is_in(rare["index"].implode())))
        lags = _prefer(lags, _lags(rest, _spacings(rest)))
    period_ns, chosen = _common(lags)
    count, match = chosen.select(pl.col("count", "match").median()).row(0)
    seen = min(1.0, (count + 1) / (CERTAIN + 1))
    shared, starts = _starts(calls, spacings, chosen)
    agreeing = 1.0 if shared is not None else chosen.height / calls["process"].n_unique()
    return Repeated(period_ns, match * seen * agreeing, shared, starts)


def _roughly(calls: pl.DataFrame, spacings: pl.DataFrame) -> Repeated:
    """Where lost calls break up every repetition: the rarest call that all make at similar distances, and steadily."""
    shared = (
        spacings.filter(pl.col("form") == "symbol", pl.col("lag") > 1, pl.col("count") >= LEAST_COUNT)
        .group_by("symbol")
        .agg(pl.len(), pl.col("lag").median())
        .filter(pl.col("len") >= (1 - SAME) * calls["process"].n_unique())
        .sort("lag", "symbol", descending=True)
    )
    if shared.is_empty():
        return Repeated()
    symbol = int(shared["symbol"][0])
    starts = after(calls, pl.col("symbol") == symbol)
    took = starts["call_ns"].diff().filter(starts["process"].diff() == 0).to_numpy()
    usual = float(np.median(took)) if len(took) else 0.0
    steady = float(np.mean(np.abs(took - usual) <= STEADY * usual)) if usual else 0.0
    if steady < STEADY_SHARE:
        return Repeated()
    return Repeated(int(usual), 0.5 * steady, symbol, starts)


def _numbered(calls: pl.DataFrame) -> pl.DataFrame:
    """`calls` with their `index`, the `pause_ns` until the next one, and the `triple` of symbols that they begin."""
    symbol, process = pl.col("symbol"), pl.col("process")
    following = symbol.shift(-1) * 3 + symbol.shift(-2) * 7
    return calls.with_columns(
        index=pl.int_range(pl.len()),
        pause_ns=pl.when(process.shift(-1) == process).then(pl.col("call_ns").shift(-1) - pl.col("call_ns")),
        triple=pl.when(process.shift(-2) == process).then(symbol + following),
    )


def _spacings(calls: pl.DataFrame) -> pl.DataFrame:
    """Symbols, and triples, that recur in a process at similar distances: `lag` calls; `pause_ns` follows them.

    `equal` says whether most of the distances are exactly that.
    """
    lag = pl.col("index").diff().drop_nulls()
    usual = lag.quantile(0.5, "lower")
    return pl.concat(
        calls.drop_nulls(form)
        .group_by("process", symbol=form)
        .agg(
            lag=usual.cast(I64),
            equal=(lag == usual).mean() >= REGULAR,
            share=((lag - usual).abs() <= SAME * usual).mean(),
            count=pl.len(),
            pause_ns=pl.col("pause_ns").median(),
            form=pl.lit(form),
        )
        .filter((pl.col("count") > 1) & (pl.col("share") >= REGULAR))
        for form in ("symbol", "triple")
    )


def _lags(calls: pl.DataFrame, spacings: pl.DataFrame) -> pl.DataFrame:
    """Of each process whose calls repeat: `lag` calls later, after `lasts_ns` (LAGS).

    `match` is the share of calls that are found again a lag later, with the same two calls after them: the mean over
    different such triples, times the share of calls in triples that recur at all. `steady` is the share of calls whose
    time to there is near the median, `count` how many lags were seen.
    """
    candidates = (
        spacings.filter(pl.col("lag") > 1, "equal")
        .group_by("process", "lag")
        .agg(pl.len(), times=pl.col("count").max())
        .sort("process", "len", "lag", descending=[False, True, False])
        .with_columns(turn=pl.int_range(pl.len()).over("process"))
        .filter(pl.col("turn") < MOST_TRIED)
        .drop("len")
    )
    tried = [_tried(calls, lags) for lags in candidates.partition_by("turn", include_key=False)]
    if not tried:
        return pl.DataFrame(schema=LAGS)
    best = pl.col("match").max().over("process")
    return (
        pl.concat(tried)
        .filter((pl.col("match") >= LEAST_MATCH) & (pl.col("match") >= BETTER * best))
        .sort("process", "lag")
        .unique("process", keep="first", maintain_order=True)
        # What is seen less often may beat a shorter one, as a sign that the recording is too short, but tells nothing.
        .filter((pl.col("times") >= LEAST_COUNT) & (pl.col("covers") >= LEAST_COVER))
        .select(LAGS.names())
        .cast(LAGS)
    )


def _tried(calls: pl.DataFrame, lags: pl.DataFrame) -> pl.DataFrame:
    """How well each process repeats after its lag in `lags`, as _lags has it."""
    here = (
        calls.join(lags, on="process", maintain_order="left")
        .with_columns(span_ns=(pl.col("call_ns").max() - pl.col("call_ns").min()).over("process"))
        .drop_nulls("triple")
    )
    process, lag = here["process"].to_numpy(), here["lag"].to_numpy()
    symbol, call_ns = here["triple"].to_numpy(), here["call_ns"].to_numpy()
    later = np.minimum(np.arange(len(lag)) + lag, len(lag) - 1)
    inside = (np.arange(len(lag)) + lag < len(lag)) & (process[later] == process)
    pairs = here.select("process", "triple", "lag", "times", "span_ns").with_columns(
        same=pl.Series(symbol[later] == symbol), took_ns=pl.Series(call_ns[later] - call_ns)
    )
    pairs = pairs.filter(pl.Series(inside))
    often = pl.col("len") >= LEAST_COUNT - 1
    match = (
        pairs.group_by("process", "triple")
        .agg(pl.col("same").mean(), pl.len())
        .group_by("process")
        .agg(
            match=pl.col("same").filter(often).mean()
            * pl.col("len").filter(often).sum()
            / pl.col("len").sum()
        )
    )
    took = pl.col("took_ns")
    return (
        pairs.group_by("process")
        .agg(
            pl.col("lag").first(),
            lasts_ns=took.median(),
            steady=((took - took.median()).abs() <= STEADY * took.median()).mean(),
            count=pl.len() / pl.col("lag").first(),
            times=pl.col("times").first(),
            covers=(pl.len() / pl.col("lag").first() + 1) * took.median() / pl.col("span_ns").first(),
        )
        .filter(pl.col("lasts_ns") > 0)
        .join(match, on="process")
    )


def _prefer(lags: pl.DataFrame, shorter: pl.DataFrame) -> pl.DataFrame:
    """`lags`, but where a period without rare operators is a fraction of it and as regular, that one."""
    both = lags.join(shorter, on="process", how="left", suffix="_shorter")
    taken = (
        (pl.col("lasts_ns_shorter") < (1 - 3 * SAME) * pl.col("lasts_ns"))
        & (pl.col("match_shorter") >= EXACT)
        & (pl.col("steady_shorter") > STEADY_SHARE)
    ).fill_null(False)
    names = [name for name in LAGS.names() if name != "process"]
    return both.select(
        "process", *(pl.when(taken).then(f"{name}_shorter").otherwise(name).alias(name) for name in names)
    )


def _common(lags: pl.DataFrame) -> tuple[int, pl.DataFrame]:
    """The period that most processes have, and the rows of those."""
    lasts = np.sort(lags["lasts_ns"].to_numpy())
    near = np.searchsorted(lasts, lasts * (1 + SAME), "right") - np.searchsorted(lasts, lasts * (1 - SAME))
    middle = lasts[int(near.argmax())]
    chosen = lags.filter((pl.col("lasts_ns") / middle - 1).abs() <= SAME)
    return int(chosen["lasts_ns"].median()), chosen  # type: ignore[arg-type]


def _starts(
    calls: pl.DataFrame, spacings: pl.DataFrame, lags: pl.DataFrame
) -> tuple[int | None, pl.DataFrame]:
    """First calls of iterations: each follows a call, or beginning of a triple, that is made once in an iteration.

    Of several such, one that nearly all processes have, or else the one with the longest pause after it, which is the
    host's, when it reads the loss or loads data. The first result is the symbol of the call that all have.
    """
    once = spacings.join(lags.select("process", of_process="lag"), on="process")
    once = once.filter(
        pl.col("count") >= LEAST_COUNT,
        (pl.col("lag") - pl.col("of_process")).abs() <= SAME * pl.col("of_process"),
    )
    best = (
        once.group_by("symbol", "form")
        .agg((pl.len() >= (1 - SAME) * lags.height).alias("shared"), pl.col("pause_ns").median())
        .sort("shared", "pause_ns", "symbol", descending=True)
        .with_row_index("place")
    )
    last = (
        once.join(best.select("symbol", "place"), on="symbol")
        .sort("process", "place")
        .unique("process", keep="first", maintain_order=True)
    )
    first = best.filter(pl.col("place") == 0, "shared", pl.col("form") == "symbol")["symbol"]
    key = pl.col("symbol").is_in(last["symbol"].implode()) | pl.col("triple").is_in(last["symbol"].implode())
    if len(first):
        return int(first[0]), after(calls, pl.col("symbol") == first[0])
    ends = [
        calls.filter(key).join(last, left_on=["process", form], right_on=["process", "symbol"], how="semi")
        for form in ("symbol", "triple")
    ]
    return None, after(calls, pl.col("index").is_in(pl.concat(ends)["index"].implode()))


def after(calls: pl.DataFrame, ends: pl.Expr) -> pl.DataFrame:
    """Of `calls` (iteration.CALLS) those that follow the ones of which `ends` is true, in the same process."""
    follows = ends.shift(1).fill_null(False) & (pl.col("process") == pl.col("process").shift(1))
    return calls.filter(follows).select("process", "program_pos", "call_ns", "row")
