"""The operators that a process's calls make, and what each should put on which flows."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf.analysis.calls import CAPTURED
from pulse_bpf.analysis.curves import Longs
from pulse_bpf.analysis.node_calls import match_calls
from pulse_bpf.analysis.samples import PORT
from pulse_bpf.schema import F64, I64, U32, U64

PROCESS = ["node", "pid"]
# What the flows of one group have in common.
KEY = [*PROCESS, "nic", "port", "comm_id", "use", "rank", "peer_rank", "peer_node", "peer_nic", "direction"]

# What makes calls a program.
CALLED = (
    *("node", "pid", "tid", "comm_id", "rank", "nranks", "gpu", "seq", "kind", "bytes", "peer", "group"),
    *("call_ns", "nccl_seq", "origin"),
)
# How far bytes may be from the share that a whole number of channels makes: a recording cuts operators at its ends.
SHARE_TOLERANCE = 0.02
# A kind of operator that would carry more than so many times all bytes of a flow group does not use it.
MOST = 20.0


def program(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The operators of each process in program order, and what their point-to-point calls carry, of calls (CALLED).

    All Send and Recv calls of one ncclGroup on one communicator are one operator of kind "Group". Calls that
    were captured into a graph move nothing and are left out. The operators have: op (a number for the row),
    node, pid, comm_id, rank, nranks, gpu, kind, op_bytes (null for Group), root, call_ns (of the first call),
    op_seq and program_pos (from 0, within the communicator and the process), nccl_seq, origin. The second
    frame has op, direction, peer_rank, bytes.
    """
    calls = (
        ops.filter(pl.col("comm_id").is_not_null(), ~CAPTURED)
        .sort("node", "pid", "call_ns", "comm_id", "seq")
        .with_row_index("call")
        .with_columns(two_sided=pl.col("kind").is_in(["Send", "Recv"]))
    )
    grouped = pl.col("two_sided") & pl.col("group").is_not_null()
    calls = calls.with_columns(
        first_call=pl.when(grouped)
        .then(pl.col("call").min().over("node", "pid", "tid", "comm_id", "two_sided", "group"))
        .otherwise("call")
    )
    operators = (
        calls.group_by("first_call", maintain_order=True)
        .agg(
            pl.col("node", "pid", "comm_id", "rank", "nranks", "gpu", "nccl_seq", "origin").first(),
            pl.when(grouped.first()).then(pl.lit("Group")).otherwise(pl.col("kind").first()).alias("kind"),
            pl.when(~grouped.first()).then(pl.col("bytes").first()).alias("op_bytes"),
            pl.when(~grouped.first()).then(pl.col("peer").first()).alias("root"),
            pl.col("call_ns").min(),
        )
        .sort("first_call")
        .with_columns(
            op=pl.col("first_call").cast(U32),
            op_seq=pl.int_range(pl.len(), dtype=U64).over("node", "pid", "comm_id"),
            program_pos=pl.int_range(pl.len(), dtype=U64).over("node", "pid"),
        )
        .drop("first_call")
    )
    sent = (
        calls.filter("two_sided", pl.col("peer") != pl.col("rank"))
        .with_columns(direction=pl.when(pl.col("kind") == "Send").then(pl.lit("tx")).otherwise(pl.lit("rx")))
        .group_by(pl.col("first_call").cast(U32).alias("op"), "direction", pl.col("peer").alias("peer_rank"))
        .agg(pl.col("bytes").sum())
    )
    return operators, sent


class Volumes:
    """What the `operators` (as `program` has them, with what they `sent`) should put on groups of flows.

    Calls outside the time in which a port was `covered` take no bytes there. Volumes are those of NCCL's ring
    algorithm (chains for Broadcast and Reduce) and of direct transfers, from its published design; other algorithms
    show as a factor, which is learned later.
    """

    def __init__(self, operators: pl.DataFrame, sent: pl.DataFrame, covered: pl.DataFrame) -> None:
        self._covered = covered
        self._sent = sent.with_columns(tx=pl.col("direction") == "tx").drop("direction")
        self._processes = (
            operators.select(*PROCESS, "comm_id").unique(maintain_order=True).with_row_index("who")
        )
        # Whose calls are those of one communicator on one node.
        members = self._processes.with_columns(together=pl.struct("node", "comm_id").rank("dense"))
        of_kind = pl.col("kind").rank("dense").cast(I64)
        own = operators.join(members, on=[*PROCESS, "comm_id"], nulls_equal=True).with_columns(
            of_kind=of_kind,
            # What of its volume an operator of the ring moves depends on its size, too.
            of_size=of_kind.max() + pl.struct("kind", "op_bytes").rank("dense").cast(I64),
            certain=pl.col("kind").is_in(["Group", "Send", "Recv"]),
            size=pl.col("op_bytes").cast(F64),
            nranks=pl.col("nranks").cast(F64),
        )
        first_ns, last_ns = _first_calls(own)
        self._operators = own.with_columns(first_call_ns=first_ns, last_call_ns=last_ns).select(
            *("op", "who", "kind", "size", "nranks", "root", "program_pos", "of_kind", "of_size"),
            *("certain", "call_ns", "first_call_ns", "last_call_ns"),
        )

    def of(self, groups: pl.DataFrame, chosen: pl.Series, until_ns: int) -> pl.DataFrame:
        """group, op, kind_index, certain, direct, seen, first_call_ns, last_call_ns, volume > 0, in program order.

        `groups`, of which those `chosen` are asked for, have the columns KEY, `total` bytes until `until_ns`, and
        `channels`, the queue pairs they came on. Shares of rings and of NICs are taken from the calls `seen` by then.
        `kind_index` is equal where operators move the same multiple of their volume.
        """
        where = ["node", "comm_id", "direction"]
        # Point-to-point calls have queue pairs of their own, unless a transport has one for all that two processes say.
        own = pl.col("use").is_in(["pairs", "alltoall"]).fill_null(False)
        collective = (pl.col("use") == "collective").fill_null(False)
        peer = [*PROCESS, *where[1:], "peer_rank", "peer_node"]
        asked = pl.col("group").is_in(chosen.implode())
        groups = (
            groups.filter(asked.any().over("node", "comm_id"))
            .join(self._processes, on=[*PROCESS, "comm_id"])
            .join(self._covered, on=PORT, how="left")
            .with_columns(
                tx=pl.col("direction") == "tx",
                no_direct=collective & own.any().over(where),
                no_ring=own & collective.any().over(where),
                # Several NICs to one peer share its direct transfers as they share bytes.
                lane=pl.col("total") / pl.col("total").sum().over(peer),
            )
        )
        pairs = groups.select(
            *("group", "who", "tx", "rank", "peer_rank", "total", "lane", "no_direct", "no_ring"),
            *("from_ns", "to_ns"),
        ).join(self._operators, on="who")
        pairs = pairs.join(self._sent, on=["op", "tx", "peer_rank"], how="left", maintain_order="left")
        size, nranks, kind = pl.col("size"), pl.col("nranks"), pl.col("kind")
        from_rank = pl.when("tx").then("rank").otherwise("peer_rank")
        to_rank = pl.when("tx").then("peer_rank").otherwise("rank")
        direct = (
            pl.when("no_direct")
            .then(0.0)
            .when("certain")
            .then(pl.col("bytes").cast(F64))
            .when(
                (kind == "AlltoAll")
                | ((kind == "Gather") & (to_rank == pl.col("root")))
                | ((kind == "Scatter") & (from_rank == pl.col("root")))
            )
            .then(size / nranks)
            .otherwise(0.0)
        )
        ring = (
            pl.when("no_ring")
            .then(0.0)
            .when(kind == "AllReduce")
            .then(2 * (nranks - 1) / nranks * size)
            .when(kind.is_in(["AllGather", "ReduceScatter"]))
            .then((nranks - 1) / nranks * size)
            .when((kind == "Broadcast") & (to_rank != pl.col("root")).fill_null(True))
            .then(size)
            .when((kind == "Reduce") & (from_rank != pl.col("root")).fill_null(True))
            .then(size)
            .otherwise(0.0)
        )
        pairs = pairs.with_columns(
            direct=direct.fill_null(0.0), ring=ring.fill_null(0.0), seen=pl.col("first_call_ns") < until_ns
        )
        # Calls are recorded before the first byte is counted, and after the last.
        carried = (
            pairs.filter("seen", pl.col("call_ns").is_between("from_ns", "to_ns"))
            .group_by("group", "of_size")
            .agg(pl.col("direct", "ring").sum())
        )
        # More than the group carries in all is no part of it.
        unused = carried.join(groups.select("group", "total"), on="group").filter(
            pl.col("ring") > MOST * pl.col("total")
        )
        if not unused.is_empty():
            key = ["group", "of_size"]
            pairs = pairs.join(
                unused.select(*key, none=pl.lit(0.0)), on=key, how="left", maintain_order="left"
            )
            pairs = pairs.with_columns(ring=pl.coalesce("none", "ring"))
        shares = _shares(groups, carried.group_by("group").agg(pl.col("direct").sum()), where)
        by_ring = pl.col("ring") > 0
        return (
            pairs.filter(asked)
            .join(shares, on="group", how="left", maintain_order="left")
            .select(
                "group",
                "op",
                pl.when(by_ring).then("of_size").otherwise("of_kind").alias("kind_index"),
                *("certain", "first_call_ns", "last_call_ns", "seen", "program_pos", "call_ns"),
                pl.col("direct") > 0,
                *("from_ns", "to_ns"),
                volume=pl.col("direct") * pl.col("lane")
                + pl.col("ring") * pl.col("share").fill_nan(0).fill_null(0),
            )
            .filter(pl.col("volume") > 0, pl.col("call_ns").is_between("from_ns", "to_ns"))
            .sort("group", "program_pos")
            .drop("from_ns", "to_ns", "call_ns", "program_pos")
        )


def called_ns(groups: pl.DataFrame, operators: pl.DataFrame, covered: pl.DataFrame, number: int) -> pl.Series:
    """When the process of each of `groups` made call `number` on its communicator since its node was `covered`.

    The least moment there is where it made fewer, or another process sends for it.
    """
    begun = covered.group_by("node").agg(pl.col("from_ns").max())
    calls = (
        operators.join(begun, on="node", how="left")
        .filter((pl.col("call_ns") >= pl.col("from_ns")).fill_null(True))
        .group_by(*PROCESS, "comm_id")
        .agg(pl.col("call_ns").sort().get(number - 1, null_on_oob=True))
    )
    found = groups.join(calls, on=[*PROCESS, "comm_id"], how="left", maintain_order="left")["call_ns"]
    return found.fill_null(np.iinfo(np.int64).min)


def _shares(groups: pl.DataFrame, direct: pl.DataFrame, where: list[str]) -> pl.DataFrame:
    """group, share: what part of a ring of its communicator each group carries.

    Who the ring's neighbours are shows in which peers carry more than the direct transfers explain. Its channels
    are spread over the node's NICs, whichever process posts; each carries the same. A queue pair of a tree beside them,
    which carries a few bytes, counts as a channel: then NICs have as many of them each, or what was measured holds.
    """
    rest = groups.join(direct, on="group").with_columns(rest=(pl.col("total") - pl.col("direct")).clip(0))
    rest = rest.with_columns(main=pl.col("rest") >= 0.25 * pl.col("rest").max().over(where))
    channels = pl.col("channels") / pl.col("channels").sum().over(*where, "main")
    measured = pl.col("rest") / pl.col("rest").sum().over(*where, "main")
    alike = 1 / pl.len().over(*where, "main")
    return rest.select(
        "group",
        share=pl.when(~pl.col("main"))
        .then(pl.when(pl.col("direct") > 0).then(0.0).otherwise(1.0))
        .when((measured / channels - 1).abs() < SHARE_TOLERANCE)
        .then(channels)
        .when((measured / alike - 1).abs() < SHARE_TOLERANCE)
        .then(alike)
        .otherwise(measured),
    )


def _first_calls(operators: pl.DataFrame) -> tuple[Longs, Longs]:
    """When the first and the last process of the node made the call of each of the `operators`.

    With PXN a queue pair carries what another GPU of the node sends, so bytes may flow from then on. Observed
    sequences of two processes may begin one call apart; they are matched by kind, size and time. Point-to-point
    calls are the caller's own.
    """
    call_ns = operators["call_ns"].to_numpy()
    first_ns, last_ns = call_ns.copy(), call_ns.copy()
    shared = np.flatnonzero(~operators["certain"].to_numpy())
    who, together, step, of_size = (
        operators[name].cast(I64).to_numpy()[shared] for name in ("who", "together", "op_seq", "of_size")
    )
    order = np.lexsort((step, who, together))
    begins = np.flatnonzero(np.diff(who[order], prepend=-1, append=-1))
    if len(shared):
        match_calls(
            begins, together[order], step[order], of_size[order], shared[order], call_ns, first_ns, last_ns
        )
    return first_ns, last_ns
