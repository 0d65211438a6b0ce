"""Communicators as their calls show them: which of those that had one address, and how many calls each has had."""

from __future__ import annotations

import polars as pl

from pulse_bpf.probes.events import NcclCall
from pulse_bpf.schema import comm_id

# What the library says of itself in each call (events.h: struct comm_identity).
IDENTITY = ("comm_hash", "rank", "nranks", "gpu")
_COMM = ("pid", "comm_ptr")
_MOST_RANKS = 1 << 20
_MOST_GPUS = 64
# The kind of a row that carries a communicator over from earlier batches.
_CARRIED = len(NcclCall)
# One communicator from its creation or first call to its end; `life` counts those that had one address, `calls` its
# operators, `file` is the library it is of.
_LIVES = pl.Schema(
    {
        "node": pl.String,
        "pid": pl.Int64,
        "comm_ptr": pl.UInt64,
        "life": pl.Int64,
        "comm_hash": pl.UInt64,
        "rank": pl.Int32,
        "nranks": pl.Int32,
        "gpu": pl.Int32,
        "file": pl.UInt32,
        "first_seen_ns": pl.Int64,
        "gone_ns": pl.Int64,
        "parent_comm_id": pl.String,
        "calls": pl.UInt64,
    }
)


def is_identity() -> pl.Expr:
    """Whether what was read where a communicator has its identity can be one.

    Assumes that 0 <= rank < nranks <= 2^20, 0 <= gpu < 64 and a hash other than 0 do not occur by chance.
    """
    return (
        (pl.col("rank") >= 0)
        & (pl.col("rank") < pl.col("nranks"))
        & (pl.col("nranks") <= _MOST_RANKS)
        & pl.col("gpu").is_between(0, _MOST_GPUS - 1)
        & (pl.col("comm_hash") != 0)
    )


def with_comm_id(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with `comm_id` from its comm_hash and nranks, null where either is."""
    key = ("comm_hash", "nranks")
    known = frame.select(key).unique().drop_nulls()
    names = pl.Series("comm_id", [comm_id(*pair) for pair in known.iter_rows()], dtype=pl.String)
    return frame.join(known.with_columns(names), on=key, how="left", maintain_order="left")


class Communicators:
    """All communicators seen, by process and address.

    A call after the end of the one at its address, or with another identity, begins a new communicator.
    """

    def __init__(self) -> None:
        self._lives = pl.DataFrame(schema=_LIVES)

    def number(self, calls: pl.DataFrame) -> pl.DataFrame:
        """`calls`, in order of time, with `life` and `seq`, the call's position in that life; remembers them all.

        Columns needed: node, pid, comm_ptr, kind (NcclCall: an operator's or COMM_GONE), call_ns, file, the identity.
        """
        numbered = self._numbered(calls)
        self._remember(numbered)
        return numbered

    def learn(self, created: pl.DataFrame) -> None:
        """Takes up communicators read in the memory of their process after the call that made them.

        Columns: node, pid, comm_ptr, the identity, file, first_seen_ns (of that call), parent_comm_id. Assumes that one
        which was alive at the same address before that call is another: its row is left out, as the caller's variable
        may by now hold something else.
        """
        latest = self._lives.group_by(_COMM, maintain_order=True).last()
        known = (
            created.cast({name: _LIVES[name] for name in created.columns})
            .join(
                latest.select(*_COMM, "life", "gone_ns", pl.col("first_seen_ns").alias("known_ns")),
                on=_COMM,
                how="left",
                maintain_order="left",
            )
            .filter(
                pl.col("known_ns").is_null()
                | (pl.col("known_ns") >= pl.col("first_seen_ns"))
                | (pl.col("gone_ns") < pl.col("first_seen_ns")).fill_null(False)
            )
        )
        is_new = (pl.col("gone_ns") < pl.col("first_seen_ns")).fill_null(False)
        rows = known.with_columns(
            pl.when(is_new).then(pl.col("life") + 1).otherwise(pl.col("life").fill_null(0)).alias("life"),
            pl.lit(None, pl.Int64).alias("gone_ns"),
            pl.lit(0, pl.UInt64).alias("calls"),
        )
        self._merge(rows)

    def end_process(self, pid: int, gone_ns: int) -> None:
        """Ends the communicators of process `pid`, which ended at `gone_ns` without destroying them."""
        ends = (pl.col("pid") == pid) & pl.col("gone_ns").is_null()
        self._lives = self._lives.with_columns(
            pl.when(ends).then(gone_ns).otherwise("gone_ns").alias("gone_ns")
        )

    def frame(self) -> pl.DataFrame:
        """Every communicator known so far: the columns of COMMS that calls tell, with comm_hash and `file`.

        Those of unknown identity are left out.
        """
        known = self._lives.filter(pl.col("comm_hash").is_not_null())
        alive = pl.col("gone_ns").is_null().cast(pl.UInt32)
        # Two living communicators claim one rank: their hashes collide, here and so perhaps on any other rank.
        collides = (alive.sum().over("comm_hash", "nranks", "rank") > 1).any().over("comm_hash", "nranks")
        return (
            with_comm_id(known)
            .with_columns(collides.alias("ambiguous"))
            .sort("first_seen_ns", maintain_order=True)
        )

    def _numbered(self, calls: pl.DataFrame) -> pl.DataFrame:
        latest = self._lives.group_by(_COMM, maintain_order=True).last()
        ended = (
            pl.when(pl.col("gone_ns").is_not_null())
            .then(NcclCall.COMM_GONE)
            .otherwise(_CARRIED)
            .cast(pl.UInt16)
        )
        carried = latest.select(*_COMM, *IDENTITY, "life", "calls", ended.alias("kind"))
        is_carried = pl.col("calls").is_not_null()
        is_end = pl.col("kind") == NcclCall.COMM_GONE
        identity = pl.when(pl.col("comm_hash").is_not_null()).then(pl.struct(IDENTITY).hash())
        reused = (~is_end & (pl.col("previous") == NcclCall.COMM_GONE)).fill_null(False)
        begins = (
            (pl.col("previous").is_null() & ~is_carried)
            | pl.col("reused")
            | (pl.col("identity") != pl.col("previous_identity")).fill_null(False)
        )
        earlier_lives = (pl.col("life").first().over(_COMM) + 1).fill_null(0)
        life = pl.col("begins").cum_sum().over(_COMM).cast(pl.Int64) + earlier_lives - 1
        earlier_calls = pl.col("calls").first().over(*_COMM, "life").fill_null(0)
        is_call = (~is_carried & ~is_end).cast(pl.UInt64)
        return (
            pl.concat([carried, calls], how="diagonal")
            .with_columns(identity.alias("identity"), pl.col("kind").shift(1).over(_COMM).alias("previous"))
            .with_columns(reused.alias("reused"))
            .with_columns(pl.col("reused").cum_sum().over(_COMM).alias("use"))
            .with_columns(
                pl.col("identity").forward_fill().shift(1).over(*_COMM, "use").alias("previous_identity")
            )
            .with_columns(begins.alias("begins"))
            .with_columns(life.alias("life"))
            .with_columns((is_call.cum_sum().over(*_COMM, "life") + earlier_calls).alias("number"))
            .filter(~is_carried)
            .with_columns((pl.col("number") - 1).alias("seq"))
        )

    def _remember(self, calls: pl.DataFrame) -> None:
        is_end = pl.col("kind") == NcclCall.COMM_GONE
        seen = calls.with_columns(
            pl.col("call_ns").alias("first_seen_ns"),
            pl.when(is_end).then("call_ns").alias("gone_ns"),
            pl.lit(None, pl.String).alias("parent_comm_id"),
            (~is_end).cast(pl.UInt64).alias("calls"),
        )
        self._merge(seen)

    def _merge(self, seen: pl.DataFrame) -> None:
        self._lives = (
            pl.concat([self._lives, seen.select(_LIVES.names())])
            .group_by(*_COMM, "life", maintain_order=True)
            .agg(
                pl.col("node").first(),
                *(pl.col(name).drop_nulls().first() for name in (*IDENTITY, "file", "parent_comm_id")),
                pl.col("first_seen_ns", "gone_ns").min(),
                pl.col("calls").sum(),
            )
            .select(_LIVES.names())
        )
