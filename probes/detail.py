"""Exact detail of operators: channel, algorithm and protocol, from what NCCL gives its proxy to do.

Source: NCCL's public source, 2.18 to 2.30 (ncclProxySaveOp and its callers). A launch hands the proxy, channel by
channel, what the network is needed for: an operator that stays within its node has no detail. This happens on the
thread that launches: the one that called the operator, or that ended its group; or the one on which a CUDA graph calls
NCCL back, at every replay. A communicator that does not block launches on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.probes.events import EVENT_VERSION, NcclCall
from pulse_bpf.probes.layouts import FUNCTIONS, PROTOCOLS, Layout
from pulse_bpf.schema import PER_RANK_KINDS, conform

_MOST_CHANNELS = 64
_SIMPLE = PROTOCOLS.index("Simple")
# The operators that a `pattern` can be of, in the order of Layout.algorithms: the collectives, PAT, and the two of
# messages to single peers, for sending and for receiving, of which other operators are made too.
_OF_MESSAGES = ("AlltoAll", "Gather", "Scatter")
_KINDS = (
    *(("AllGather", "ReduceScatter"), ("AllReduce",), ("Broadcast",), ("Reduce",)),
    *(("Reduce",), ("Broadcast",), ("AllReduce",), ("AllReduce",)),
    *(("AllReduce", "AllGather", "ReduceScatter"),) * 2,
    *(("AllReduce",), ("ReduceScatter",), ("AllGather",)),
    *(("Send", *_OF_MESSAGES), ("Recv", *_OF_MESSAGES)),
)
_POSSIBLE = pl.DataFrame(
    [(pattern, kind) for pattern, kinds in enumerate(_KINDS) for kind in kinds],
    {"pattern": pl.UInt8, "kind": pl.String},
    orient="row",
)
_FIRST_PAT = 11
_PATS = 2
# Those whose `peer` is what an operation of the proxy has as `root`.
_ROOTED = ("Broadcast", "Reduce", "Send", "Recv")
_THREAD = ("pid", "tid", "comm_ptr")
# What a thread launched at once on a communicator: a group, or what it called outside one, by its time.
_LAUNCH = (*_THREAD, "group", "alone_ns")
_CALLS = pl.Schema(
    {
        "pid": pl.Int64,
        "tid": pl.Int64,
        "comm_ptr": pl.UInt64,
        "group": pl.UInt64,
        "alone_ns": pl.Int64,
        "call_ns": pl.Int64,
        "kind": pl.String,
        "root": pl.Int32,
        "node": pl.String,
        "comm_id": pl.String,
        "seq": pl.UInt64,
        "nranks": pl.Int32,
        "whole_bytes": pl.UInt64,
    }
)
_SAVES = pl.Schema(
    {
        "pid": pl.Int64,
        "tid": pl.Int64,
        "comm_ptr": pl.UInt64,
        "call_ns": pl.Int64,
        "pattern": pl.UInt8,
        "algorithm": pl.String,
        "protocol": pl.String,
        "function": pl.String,
        "channel": pl.Int32,
        "op_count": pl.UInt64,
        "proxy_root": pl.Int32,
        "message_bytes": pl.UInt64,
        "channel_bytes": pl.UInt64,
    }
)
_OPERATOR = ("node", "pid", "comm_id", "seq")


def cookie(file: int, layout: Layout) -> int:
    """What proxy.c is told of its place in file number `file`, as its head describes."""
    fields = layout.proxy_op.fields
    assert fields is not None
    return file << 8 | max(offset + dtype.itemsize for dtype, offset, *_ in fields.values()) << 16


class Details:
    """Turns batches of PROXY_EVENT records into rows of `op_details`.

    `layouts` has those of the probed files, by number, and may grow. `undecided` counts the records that could not be
    tied to one operator, `malformed` those that are no operation of the proxy.
    """

    def __init__(self, layouts: Mapping[int, Layout], wall_offset_ns: int) -> None:
        self.undecided = 0
        self.malformed = 0
        self._layouts = layouts
        self._wall_offset_ns = wall_offset_ns
        self._last = pl.DataFrame(schema=_CALLS)

    def rows(self, saves: NDArray[np.void], ops: pl.DataFrame, events: NDArray[np.void]) -> pl.DataFrame:
        """The detail that `saves` tell of the operators `ops`, rows of that table, and of those of earlier batches.

        `saves` are in time order per thread and not later than the calls known by `ops`; `events`, NCCL_EVENT, are
        those that `ops` came from. Several rows of an operator, channel, algorithm and protocol are parts of one.

        A record belongs to what its thread last called, or replayed, on that communicator. Assumes that no such call
        was lost: else it is taken for one of the call before, where function and root are the same. In a group it
        belongs to the one operator of its function, and of its root or peer; with more of them it is undecided, as NCCL
        sorts them by size. So are two operations that NCCL counts as two collectives, and yet only one call was seen.

        `bytes` is what of the operator's own bytes the channel carries: its share, from which the algorithm makes its
        traffic. Known for collectives since 2.24, and for Send and Recv since 2.20 where it is a single message of the
        protocol Simple; else null, as what NCCL then says is the size of a slot, or an upper bound.
        """
        records = self._records(saves).with_row_index("record")
        calls = pl.concat([self._last, _calls(ops, events, self._wall_offset_ns)])
        calls = calls.sort("call_ns", maintain_order=True)
        same = (pl.col(name) == pl.col(name).last().over(_THREAD) for name in ("group", "alone_ns"))
        self._last = calls.filter(*same)
        launches = calls.select(*_LAUNCH, "call_ns")
        possible = (
            records.sort("call_ns")
            .join_asof(launches, on="call_ns", by=_THREAD, strategy="backward", check_sortedness=False)
            .join(_POSSIBLE, on="pattern")
            .filter((pl.col("function") == pl.col("kind")).fill_null(True))
            .with_columns(_root_of("kind", "proxy_root").alias("root"))
        )
        found = (
            possible.join(calls.drop("call_ns").drop_nulls("comm_id"), on=(*_LAUNCH, "kind", "root"))
            .filter(pl.len().over("record") == 1)
            .filter(
                (pl.col("algorithm") == "P2P") | (pl.col("op_count").n_unique().over(*_LAUNCH, "seq") == 1)
            )
        )
        self.undecided += records.height - found.height
        return conform(_with_bytes(found.sort("record")), "op_details")

    def end_process(self, pid: int) -> None:
        """Forgets the operators of process `pid`."""
        self._last = self._last.filter(pl.col("pid") != pid)

    def _records(self, saves: NDArray[np.void]) -> pl.DataFrame:
        good = saves[saves["version"] == EVENT_VERSION]
        frames = [pl.DataFrame(schema=_SAVES)]
        for number, layout in self._layouts.items():
            frames.append(self._decoded(good[good["file"] == number], layout))
        understood = pl.concat(frames)
        self.malformed += len(saves) - understood.height
        # The pattern behind those that move data is for the profiler.
        return understood.drop_nulls("algorithm")

    def _decoded(self, events: NDArray[np.void], layout: Layout) -> pl.DataFrame:
        op = np.frombuffer(events["op"].tobytes(), layout.proxy_op)
        header = {name: events[name] for name in ("tgid", "tid", "comm_ptr", "mono_ns")}
        fields = header | {name: op[name] for name in op.dtype.names or ()}
        frame = pl.DataFrame({name: np.ascontiguousarray(field) for name, field in fields.items()})
        later = {"coll": pl.UInt8, "channel_bytes": pl.UInt64}
        absent = [pl.lit(None, dtype).alias(name) for name, dtype in later.items() if name not in fields]
        has_pat = "PAT" in layout.algorithms
        is_message = pl.col("algorithm") == "P2P"
        # `nbytes` of a message is its own, at most a step's, since 2.20; LL sends more and rounds it up.
        is_whole = is_message & (pl.col("nsteps") == 1) & (pl.col("protocol") == _SIMPLE)
        return (
            frame.with_columns(absent)
            .filter(
                (pl.col("channel") < _MOST_CHANNELS)
                & (pl.col("protocol") < len(PROTOCOLS))
                & (pl.col("pattern") <= len(layout.algorithms))
                & (pl.col("nbytes") >= 0)
            )
            .with_columns(_named([*layout.algorithms, None], pl.col("pattern")).alias("algorithm"))
            .select(
                pl.col("tgid").alias("pid"),
                "tid",
                "comm_ptr",
                pl.col("mono_ns").cast(pl.Int64).alias("call_ns") + self._wall_offset_ns,
                # As if every release had PAT.
                pl.col("pattern")
                + pl.when(pl.col("pattern") >= _FIRST_PAT).then(0 if has_pat else _PATS).otherwise(0),
                "algorithm",
                _named(PROTOCOLS, pl.col("protocol")).alias("protocol"),
                # That of messages is only to send or to receive, whatever operator they are of.
                pl.when(~is_message)
                .then(_named([*FUNCTIONS, ""], pl.col("coll").clip(0, len(FUNCTIONS))))
                .alias("function"),
                "channel",
                "op_count",
                pl.col("root").alias("proxy_root"),
                pl.when(is_whole & pl.col("coll").is_not_null()).then("nbytes").alias("message_bytes"),
                "channel_bytes",
            )
            .cast(_SAVES)
        )


def _named(names: Sequence[str | None], number: pl.Expr) -> pl.Expr:
    return pl.lit(pl.Series(names, dtype=pl.String)).gather(number)


def _calls(ops: pl.DataFrame, events: NDArray[np.void], wall_offset_ns: int) -> pl.DataFrame:
    """`ops` as _CALLS, and replays that are none of them, which have no operator."""
    replays = events[events["kind"] == NcclCall.REPLAY]
    unknown = pl.DataFrame(
        {
            "pid": replays["tgid"].astype(np.int64),
            "tid": replays["tid"].astype(np.int64),
            "comm_ptr": np.ascontiguousarray(replays["comm_ptr"]),
            "call_ns": replays["mono_ns"].astype(np.int64) + wall_offset_ns,
        }
    ).join(ops, on=(*_THREAD, "call_ns"), how="anti")
    calls = pl.concat([ops.rename({"bytes": "whole_bytes"}), unknown], how="diagonal").with_columns(
        pl.col("group").fill_null(0),
        pl.when(pl.col("group").is_null()).then("call_ns").otherwise(0).alias("alone_ns"),
        _root_of("kind", "peer").alias("root"),
    )
    return calls.select(_CALLS.names())


def _root_of(kind: str, root: str) -> pl.Expr:
    return pl.when(pl.col(kind).is_in(_ROOTED)).then(root).otherwise(-1)


def _with_bytes(found: pl.DataFrame) -> pl.DataFrame:
    ranks = pl.when(pl.col("kind").is_in(PER_RANK_KINDS)).then("nranks").otherwise(1).cast(pl.UInt64)
    # More than the whole is not what it was taken for; 0 is what NCCL leaves there of operators it does not divide.
    share = pl.col("channel_bytes").is_between(1, pl.col("whole_bytes") // ranks)
    is_message = pl.col("kind").is_in(("Send", "Recv")) & (pl.col("message_bytes") <= pl.col("whole_bytes"))
    part = (
        pl.when((pl.col("algorithm") != "P2P") & share)
        .then(pl.col("channel_bytes") * ranks)
        .when((pl.col("algorithm") == "P2P") & is_message)
        .then("message_bytes")
    )
    is_known = pl.col("bytes").null_count() == 0
    return (
        found.with_columns(part.alias("bytes"))
        .group_by(*_OPERATOR, "channel", "algorithm", "protocol", maintain_order=True)
        .agg(pl.when(is_known).then(pl.col("bytes").sum()).alias("bytes"))
    )
