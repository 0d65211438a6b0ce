"""NCCL's calls: what to probe in a library, and what the recorded calls mean as operators and communicators."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.probes.events import CALLS, COMM_GONE, EVENT_VERSION
from pulse_bpf.schema import NCCL_DTYPES, PER_RANK_KINDS, comm_id, conform

# Exported function of the library -> function of nccl.c. The ...Config calls of 2.32 take the same arguments
# and one more behind them.
PROBES: dict[str, str] = {
    **{f"nccl{call}": f"nccl{call}" for call in CALLS},
    **{f"nccl{call}Config": f"nccl{call}" for call in CALLS if call not in ("Send", "Recv")},
    "ncclGroupStart": "ncclGroupStart",
    "ncclGroupEnd": "ncclGroupEnd",
    "ncclCommFinalize": "comm_gone",
    "ncclCommDestroy": "comm_gone",
    "ncclCommAbort": "comm_gone",
}

# nccl.h: the calls whose fifth or sixth argument is a root or a peer.
_WITH_PEER = ("Broadcast", "Reduce", "Gather", "Scatter", "Send", "Recv")
_MOST_RANKS = 1 << 20
_MOST_GPUS = 64
# More elements than any buffer holds: a count that was misread. Also keeps nranks x count x size within 64 bits.
_MOST_ELEMENTS = 1 << 40

_IN_RODATA = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_PER_RANK = [CALLS.index(call) for call in PER_RANK_KINDS]
_PEERED = [CALLS.index(call) for call in _WITH_PEER]
_COMM = ("pid", "comm_ptr")
_IDENTITY = ("comm_hash", "rank", "nranks", "gpu")
# The kind of a row that carries a communicator over from earlier batches.
_CARRIED = COMM_GONE + 1
# One communicator from its first call to its end; `life` counts those that had one address, `calls` its operators.
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
        "first_seen_ns": pl.Int64,
        "gone_ns": pl.Int64,
        "calls": pl.UInt64,
    }
)


def version(rodata: bytes) -> str | None:
    """The version an NCCL library states about itself, from its read-only data."""
    found = _IN_RODATA.search(rodata)
    return found[1].decode() if found else None


class NcclDecoder:
    """Turns batches of NCCL_EVENT records, each batch in time order per thread, into `ops` and `comms`.

    `nodes` names the node of each process; events of others are dropped. Keeps of each communicator (process and
    address) who it is, how many calls it has had, and when it was first seen and gone: a call after its end, or
    with another identity at the same address, begins a new communicator.
    """

    def __init__(self, nodes: Mapping[int, str], wall_offset_ns: int) -> None:
        self._nodes = nodes
        self._wall_offset_ns = wall_offset_ns
        self._lives = pl.DataFrame(schema=_LIVES)
        self.malformed = 0

    def ops(self, events: NDArray[np.void]) -> pl.DataFrame:
        """The operators of one batch in the schema OPS; records of another version or kind count as malformed.

        Assumes the 24 bytes beside the rank are a communicator's when they look like one (0 <= rank < nranks <=
        2^20, 0 <= gpu < 64, hash not 0). Otherwise the operator has no comm_id, rank, nranks or gpu.
        """
        good = (events["version"] == EVENT_VERSION) & (events["kind"] <= COMM_GONE)
        self.malformed += int((~good).sum())
        calls = self._calls(events[good])
        if calls.is_empty():
            return conform(calls, "ops")
        calls = self._number(calls)
        self._remember(calls)
        return conform(_operators(calls.filter(pl.col("kind") != COMM_GONE)), "ops")

    def comms(self) -> pl.DataFrame:
        """Every communicator known so far in the schema COMMS, those whose identity could not be read left out."""
        known = self._lives.filter(pl.col("comm_hash").is_not_null())
        alive = pl.col("gone_ns").is_null().cast(pl.UInt32)
        # Two living communicators claim one rank: their hashes collide, here and so perhaps on any other rank.
        collides = (alive.sum().over("comm_hash", "nranks", "rank") > 1).any().over("comm_hash", "nranks")
        known = _with_comm_id(known).with_columns(collides.alias("ambiguous"))
        return conform(known, "comms").sort("first_seen_ns", maintain_order=True)

    def _calls(self, events: NDArray[np.void]) -> pl.DataFrame:
        names = ("kind", "tgid", "tid", "mono_ns", "comm_ptr", "count", "stream", "group", "dtype", "peer")
        frame = pl.DataFrame({name: np.ascontiguousarray(events[name]) for name in (*names, *_IDENTITY)})
        known = (
            (pl.col("rank") >= 0)
            & (pl.col("rank") < pl.col("nranks"))
            & (pl.col("nranks") <= _MOST_RANKS)
            & pl.col("gpu").is_between(0, _MOST_GPUS - 1)
            & (pl.col("comm_hash") != 0)
        )
        nodes = pl.DataFrame(
            {"pid": list(self._nodes), "node": list(self._nodes.values())},
            schema={"pid": pl.Int64, "node": pl.String},
        )
        return frame.with_columns(
            pl.col("tgid").cast(pl.Int64).alias("pid"),
            pl.col("mono_ns").cast(pl.Int64).alias("call_ns") + self._wall_offset_ns,
            *(pl.when(known).then(name).alias(name) for name in _IDENTITY),
        ).join(nodes, on="pid", how="inner", maintain_order="left")

    def _number(self, calls: pl.DataFrame) -> pl.DataFrame:
        """`calls` with `life`, which communicator of those that had this address, and `seq`, its call in that life."""
        latest = self._lives.group_by(_COMM, maintain_order=True).last()
        ended = pl.when(pl.col("gone_ns").is_not_null()).then(COMM_GONE).otherwise(_CARRIED).cast(pl.UInt16)
        carried = latest.select(*_COMM, *_IDENTITY, "life", "calls", ended.alias("kind"))
        is_carried = pl.col("calls").is_not_null()
        is_end = pl.col("kind") == COMM_GONE
        identity = pl.when(pl.col("comm_hash").is_not_null()).then(pl.struct(_IDENTITY).hash())
        reused = (~is_end & (pl.col("previous") == COMM_GONE)).fill_null(False)
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
        is_end = pl.col("kind") == COMM_GONE
        seen = calls.select(
            "node",
            *_COMM,
            "life",
            *_IDENTITY,
            pl.col("call_ns").alias("first_seen_ns"),
            pl.when(is_end).then("call_ns").alias("gone_ns"),
            (~is_end).cast(pl.UInt64).alias("calls"),
        )
        self._lives = (
            pl.concat([self._lives, seen])
            .group_by(*_COMM, "life", maintain_order=True)
            .agg(
                pl.col("node").first(),
                *(pl.col(name).drop_nulls().first() for name in _IDENTITY),
                pl.col("first_seen_ns", "gone_ns").min(),
                pl.col("calls").sum(),
            )
            .select(_LIVES.names())
        )

    def end_process(self, pid: int, gone_ns: int) -> None:
        """Ends the communicators of process `pid`, which ended at `gone_ns` without destroying them."""
        ends = (pl.col("pid") == pid) & pl.col("gone_ns").is_null()
        self._lives = self._lives.with_columns(
            pl.when(ends).then(gone_ns).otherwise("gone_ns").alias("gone_ns")
        )


def _operators(calls: pl.DataFrame) -> pl.DataFrame:
    sizes = pl.lit(pl.Series([size for _, size in NCCL_DTYPES], dtype=pl.UInt64))
    names = pl.lit(pl.Series([name for name, _ in NCCL_DTYPES]))
    is_named = pl.col("dtype") < len(NCCL_DTYPES)
    index = pl.when(is_named).then("dtype").otherwise(0)
    ranks = pl.when(pl.col("kind").is_in(_PER_RANK)).then("nranks").otherwise(1).cast(pl.UInt64)
    is_sized = is_named & (pl.col("count") < _MOST_ELEMENTS)
    return _with_comm_id(calls).with_columns(
        pl.lit(pl.Series(CALLS)).gather(pl.col("kind")).alias("kind"),
        pl.when(is_named)
        .then(names.gather(index))
        .otherwise(pl.format("unknown:{}", "dtype"))
        .alias("dtype"),
        pl.when(is_sized).then(pl.col("count") * sizes.gather(index) * ranks).alias("bytes"),
        pl.when(pl.col("kind").is_in(_PEERED)).then("peer").alias("peer"),
        pl.when(pl.col("group") != 0).then("group").alias("group"),
        pl.lit("call").alias("origin"),
    )


def _with_comm_id(frame: pl.DataFrame) -> pl.DataFrame:
    key = ("comm_hash", "nranks")
    known = frame.select(key).unique().drop_nulls()
    names = pl.Series("comm_id", [comm_id(*pair) for pair in known.iter_rows()], dtype=pl.String)
    return frame.join(known.with_columns(names), on=key, how="left", maintain_order="left")
