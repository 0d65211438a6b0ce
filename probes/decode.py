"""NCCL's records as operators and communicators of the recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.probes.communicators import IDENTITY, Communicators, is_identity, with_comm_id
from pulse_bpf.probes.events import EVENT_VERSION, KINDS, NCCL_EVENT, NO_SEQ, NcclCall
from pulse_bpf.probes.graphs import Graphs
from pulse_bpf.schema import NCCL_DTYPES, PER_RANK_KINDS, conform

# nccl.h: the calls whose fifth or sixth argument is a root or a peer.
_PEERED = [KINDS.index(kind) for kind in ("Broadcast", "Reduce", "Gather", "Scatter", "Send", "Recv")]
_PER_RANK = [KINDS.index(kind) for kind in PER_RANK_KINDS]
# More elements than any buffer holds: a count that was misread. Also keeps nranks x count x size within 64 bits.
_MOST_ELEMENTS = 1 << 40
_PLAIN = (
    "kind",
    "tgid",
    "tid",
    "mono_ns",
    "comm_ptr",
    "count",
    "stream",
    "group",
    "nccl_seq",
    "dtype",
    "peer",
)
_NONE = np.empty(0, NCCL_EVENT)
_COUNTED_IN_GROUP = ("pid", "tid", "group", "comm_ptr", "kind")

# A call that makes communicators: where its caller gets them, of how many ranks they shall be if it says so, and from
# which communicator they are made.
CREATIONS = pl.Schema(
    {
        "node": pl.String,
        "pid": pl.Int64,
        "file": pl.UInt32,
        "address": pl.UInt64,
        "count": pl.UInt64,
        "parent_comm_id": pl.String,
        "nranks": pl.Int32,
        "parent_nranks": pl.Int32,
        "parent_gpu": pl.Int32,
        "t_ns": pl.Int64,
    }
)


class NcclDecoder:
    """Turns batches of NCCL_EVENT records, each batch in time order per thread, into rows of `ops`.

    `nodes` names the node of each process and may grow; events of others are dropped. `communicators` holds what the
    calls tell about them.
    """

    def __init__(self, nodes: Mapping[int, str], wall_offset_ns: int) -> None:
        self.communicators = Communicators()
        self.malformed = 0
        self.device_initiated: set[int] = set()
        self._nodes = nodes
        self._wall_offset_ns = wall_offset_ns
        self._graphs = Graphs()
        self._creations = pl.DataFrame(schema=CREATIONS)
        self._in_group: pl.DataFrame | None = None

    def ops(self, events: NDArray[np.void], following: NDArray[np.void] = _NONE) -> pl.DataFrame:
        """The operators of one batch in the schema OPS; records of another version or kind count as malformed.

        `following`, records of the next batch that are known already, only tell what became of this batch's operators:
        the launch of their group, their capture into a CUDA graph. An operator whose identity is none, as
        communicators.is_identity judges, has no comm_id, rank, nranks or gpu.
        """
        good = (events["version"] == EVENT_VERSION) & (events["kind"] <= NcclCall.REPLAY)
        self.malformed += int((~good).sum())
        records = self._records(events[good])
        if records.is_empty():
            return conform(records, "ops")
        kind = pl.col("kind")
        self._note_creations(records.filter(kind.is_between(NcclCall.COMM_INIT, NcclCall.COMM_GROW)))
        self.device_initiated.update(records.filter(kind == NcclCall.DEVICE_COMM)["pid"])
        notes = pl.concat([records, self._records(following)]).rename({"stream": "plan"})
        calls = self._graphs.capture(
            records.filter(kind < NcclCall.COMM_GONE), notes.filter(kind == NcclCall.CAPTURE)
        )
        calls = self._with_sequence_numbers(calls)
        replayed = self._graphs.replays(records.filter(kind == NcclCall.REPLAY).rename({"stream": "plan"}))
        origin = pl.when("captured").then(pl.lit("capture")).otherwise(pl.lit("call")).alias("origin")
        ends = records.filter(kind == NcclCall.COMM_GONE).drop("nccl_seq")
        rows = pl.concat(
            [calls.with_columns(origin), replayed.with_columns(pl.lit("replay").alias("origin")), ends],
            how="diagonal",
        ).sort("call_ns", maintain_order=True)
        numbered = self.communicators.number(rows).filter(kind != NcclCall.COMM_GONE)
        launches = notes.filter(kind == NcclCall.LAUNCH).select(
            "pid", "group", pl.col("call_ns").alias("launch_ns")
        )
        launched = numbered.join(
            launches.unique(("pid", "group")), on=("pid", "group"), how="left", maintain_order="left"
        )
        return conform(_operators(launched), "ops")

    def take_creations(self) -> pl.DataFrame:
        """The calls that make communicators since the last take, in CREATIONS, in order of time."""
        taken, self._creations = self._creations, self._creations.clear()
        return taken

    @property
    def unknown_replays(self) -> Counter[int]:
        """Replays of CUDA graphs whose capture was not seen, by process."""
        return self._graphs.unknown_replays

    def end_process(self, pid: int, gone_ns: int) -> None:
        """Ends what process `pid`, which ended at `gone_ns`, had."""
        self.communicators.end_process(pid, gone_ns)
        self._graphs.end_process(pid)

    def _records(self, events: NDArray[np.void]) -> pl.DataFrame:
        frame = pl.DataFrame(
            {name: np.ascontiguousarray(events[name]) for name in (*_PLAIN, *IDENTITY, "file")}
        )
        nodes = pl.DataFrame(
            {"pid": list(self._nodes), "node": list(self._nodes.values())},
            schema={"pid": pl.Int64, "node": pl.String},
        )
        return frame.with_columns(
            pl.col("tgid").cast(pl.Int64).alias("pid"),
            pl.col("mono_ns").cast(pl.Int64).alias("call_ns") + self._wall_offset_ns,
            *(pl.when(is_identity()).then(name).alias(name) for name in IDENTITY),
        ).join(nodes, on="pid", how="inner", maintain_order="left")

    def _note_creations(self, records: pl.DataFrame) -> None:
        made = with_comm_id(records).rename(
            {
                "stream": "address",
                "comm_id": "parent_comm_id",
                "call_ns": "t_ns",
                "nranks": "parent_nranks",
                "gpu": "parent_gpu",
            }
        )
        of_ranks = pl.when(pl.col("dtype") > 0).then("dtype").cast(pl.Int32, strict=False)
        made = made.with_columns(of_ranks.alias("nranks"))
        self._creations = pl.concat([self._creations, made.select(CREATIONS.names())])

    def _with_sequence_numbers(self, calls: pl.DataFrame) -> pl.DataFrame:
        """`calls` with `nccl_seq` as NCCL will number them: it counts at the launch, so inside a group it lags."""
        earlier = self._in_group
        grouped = calls.filter(pl.col("group") != 0)
        counts = grouped.group_by(_COUNTED_IN_GROUP).len("earlier")
        number = pl.col("nccl_seq")
        position = pl.int_range(pl.len(), dtype=pl.UInt64).over(_COUNTED_IN_GROUP)
        if earlier is not None:
            calls = calls.join(earlier, on=_COUNTED_IN_GROUP, how="left", maintain_order="left")
            counts = pl.concat([earlier, counts]).group_by(_COUNTED_IN_GROUP).sum()
            position = position + pl.col("earlier").fill_null(0)
        # Only the thread's latest group may go on in the next batch.
        self._in_group = counts.filter(pl.col("group") == pl.col("group").max().over("pid", "tid"))
        lag = pl.when(pl.col("group") != 0).then(position).otherwise(0)
        return calls.with_columns(pl.when(number != NO_SEQ).then(number + lag).alias("nccl_seq")).drop(
            "earlier", strict=False
        )


def _operators(calls: pl.DataFrame) -> pl.DataFrame:
    sizes = pl.lit(pl.Series([size for _, size in NCCL_DTYPES], dtype=pl.UInt64))
    names = pl.lit(pl.Series([name for name, _ in NCCL_DTYPES]))
    is_named = pl.col("dtype") < len(NCCL_DTYPES)
    index = pl.when(is_named).then("dtype").otherwise(0)
    ranks = pl.when(pl.col("kind").is_in(_PER_RANK)).then("nranks").otherwise(1).cast(pl.UInt64)
    is_sized = is_named & (pl.col("count") < _MOST_ELEMENTS)
    return with_comm_id(calls).with_columns(
        pl.lit(pl.Series(KINDS)).gather(pl.col("kind")).alias("kind"),
        pl.when(is_named)
        .then(names.gather(index))
        .otherwise(pl.format("unknown:{}", "dtype"))
        .alias("dtype"),
        pl.when(is_sized).then(pl.col("count") * sizes.gather(index) * ranks).alias("bytes"),
        pl.when(pl.col("kind").is_in(_PEERED)).then("peer").alias("peer"),
        pl.when(pl.col("group") != 0).then("group").alias("group"),
    )
