"""What each operator should put on which flows, and when the processes of a node called it."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.callers import LATEST_NS, LISTED, PROCESS, Callers
from pulse_bpf.analysis.curves import Longs
from pulse_bpf.analysis.samples import PORT
from pulse_bpf.schema import BOOL, F64, I32, I64, STR, U32, U64

# What the flows of one group have in common.
KEY = [*PROCESS, "nic", "port", "comm_id", "use", "rank", "peer_rank", "peer_node", "peer_nic", "direction"]

# How far bytes may be from the share that a whole number of channels makes: a recording cuts operators at its ends.
SHARE_TOLERANCE = 0.02
# A kind of operator that would carry more than so many times all bytes of a flow group does not use it.
MOST = 20.0


# What `Volumes` keeps of operators, of what they sent, of groups whose shares are settled, and of what they move.
SENT = pl.Schema({"op": U32, "peer_rank": I32, "bytes": U64, "tx": BOOL})
SETTLED = pl.Schema(
    {"group": U32, "who": I64, "tx": BOOL, "rank": I32, "peer_rank": I32}
    | {"no_direct": BOOL, "no_ring": BOOL, "lane": F64, "share": F64, "direct_share": F64}
    | {"from_ns": I64, "to_ns": I64}
)
FACTORS = pl.Schema({"group": U32, "by_ring": BOOL, "kind": STR, "of_size": F64, "factor": F64})


def groups_of(flows: pl.DataFrame) -> tuple[pl.DataFrame, Longs]:
    """The flow groups there may be, one per KEY, and the one of each flow, received and sent: -1 for none, and for what
    is known to be control."""
    known = flows.with_row_index("number").filter(pl.col("comm_id").is_not_null())
    both = pl.concat([known.with_columns(direction=pl.lit(way)) for way in ("rx", "tx")])
    both = both.filter((pl.col("direction") == pl.col("data")).fill_null(True))
    groups = (
        both.group_by(KEY)
        .agg(pl.col("gpu", "peer_pid").first(), pl.col("wire_factor").mean())
        .sort(KEY)
        .with_row_index("group")
        .with_columns(
            group=pl.col("group").cast(U32),
            process=pl.struct(PROCESS).rank("dense") - 1,
            port_index=pl.struct(PORT).rank("dense") - 1,
            peers=pl.len().over(*PORT, "pid", "comm_id"),
        )
    )
    of = both.select("number", "direction", *KEY[:-1]).join(
        groups.select("group", *KEY), on=KEY, nulls_equal=True
    )
    group_of = np.full(2 * len(flows), -1, np.int64)
    stream = 2 * of["number"].to_numpy().astype(np.int64) + (of["direction"] == "tx").to_numpy()
    group_of[stream] = of["group"].to_numpy()
    return groups, group_of


class Volumes:
    """What operators, as they come, should put on the `groups` of flows (`group` and the columns KEY).

    Calls outside the time in which a port was `covered` take no bytes there. Volumes are those of NCCL's ring
    algorithm (chains for Broadcast and Reduce) and of direct transfers, from its published design; other algorithms
    show as a factor, which is learned later.
    """

    def __init__(self, groups: pl.DataFrame, covered: pl.DataFrame) -> None:
        self._covered = covered
        self._begun = covered.group_by("node").agg(pl.col("from_ns").max())
        self._callers = Callers(groups.select(*PROCESS, "comm_id").unique(maintain_order=True))
        self.who = self._callers.of(groups)["who"].to_numpy()
        self._operators = pl.DataFrame(schema=LISTED)
        self._sent = pl.DataFrame(schema=SENT)
        self._settled = pl.DataFrame(schema=SETTLED)
        self._unused = pl.DataFrame(schema={"group": U32, "kind": STR, "size": F64, "none": F64})
        self._factors = pl.DataFrame(schema=FACTORS)
        self._common = np.ones(groups.height)

    @property
    def early_ns(self) -> Longs:
        """When each group's process called first on its communicator: [groups, EARLY], FOREVER where it did not yet."""
        return np.asarray(self._callers.early_ns[self.who], np.int64)

    @property
    def unlisted_ns(self) -> Longs:
        """Before when each group has no operator that is not listed yet."""
        return np.asarray(self._callers.unlisted_ns[self.who], np.int64)

    @property
    def unlisted(self) -> NDArray[np.uint32]:
        """The operators that are not listed yet."""
        return self._callers.unlisted

    def add(
        self, operators: pl.DataFrame, sent: pl.DataFrame, until_ns: int, held: pl.DataFrame
    ) -> pl.DataFrame:
        """Takes operators and what they `sent` (program.Program). Returns what those that are now listed put on groups
        whose shares are settled: group, op, direct, first_call_ns, last_call_ns, volume, and its `factor`."""
        begun = operators.join(self._begun, on="node", how="left", maintain_order="left")
        begun = begun.with_columns(counts=(pl.col("call_ns") >= pl.col("from_ns")).fill_null(True))
        listed = self._callers.add(begun, until_ns, held)
        self._operators = pl.concat([self._operators, listed])
        self._sent = pl.concat(
            [
                self._sent,
                sent.select("op", "peer_rank", "bytes", tx=pl.col("direction") == "tx").select(SENT.names()),
            ]
        )
        pairs = self._settled.join(listed, on="who")
        calls = self._with_volumes(_moved(self._with_sent(pairs)), self._unused)
        by = ["group", "by_ring", "kind", "of_size"]
        calls = calls.join(self._factors, on=by, how="left", nulls_equal=True, maintain_order="left")
        common = pl.Series("common", self._common[calls["group"].to_numpy()])
        return calls.with_columns(factor=pl.col("factor").fill_null(common))

    def forget(self, until_ns: int) -> None:
        """Groups that are settled from now on have nothing to do with operators before `until_ns`."""
        self._operators = self._operators.filter(pl.col("call_ns") >= until_ns)
        self._sent = self._sent.join(self._operators, on="op", how="semi", maintain_order="left")

    def of(self, groups: pl.DataFrame, since_ns: Longs, chosen: Longs, until_ns: int) -> pl.DataFrame:
        """group, op, kind_index, certain, direct, seen, first_call_ns, last_call_ns, volume > 0, in program order.

        `groups`, of which those `chosen` are asked for, have the columns KEY, `total` bytes until `until_ns`, and
        `channels`, the queue pairs they came on. Shares of rings and of NICs are taken from the calls `seen` by then.
        A group takes part in calls from its `since_ns` on. `kind_index` is equal where operators move the same multiple
        of their volume: those of one (by_ring, kind, of_size).
        """
        where = ["node", "comm_id", "direction"]
        # Point-to-point calls have queue pairs of their own, unless a transport has one for all that two processes say.
        own = pl.col("use").is_in(["pairs", "alltoall"]).fill_null(False)
        collective = (pl.col("use") == "collective").fill_null(False)
        peer = [*PROCESS, *where[1:], "peer_rank", "peer_node"]
        asked = pl.col("group").is_in(pl.Series(chosen, dtype=U32).implode())
        number = groups["group"].to_numpy()
        groups = (
            groups.with_columns(who=pl.Series(self.who[number]), since_ns=pl.Series(since_ns[number]))
            .filter(asked.any().over("node", "comm_id"))
            .join(self._covered, on=PORT, how="left", maintain_order="left")
            .with_columns(
                tx=pl.col("direction") == "tx",
                no_direct=collective & own.any().over(where),
                no_ring=own & collective.any().over(where),
                # Several NICs to one peer share its direct transfers as they share bytes.
                lane=pl.col("total") / pl.col("total").sum().over(peer),
            )
        )
        pairs = (
            groups.filter(asked)
            .join(self._operators, on="who")
            .filter(pl.col("call_ns") >= pl.col("since_ns"))
        )
        # Another process of the node may have called long before.
        seen = (pl.col("first_call_ns") < until_ns) & (pl.col("call_ns") < until_ns + LATEST_NS)
        pairs = _moved(self._with_sent(pairs)).with_columns(seen=seen)
        # Calls are recorded before the first byte is counted, and after the last.
        carried = (
            pairs.filter("seen", pl.col("call_ns").is_between("from_ns", "to_ns"))
            .group_by("group", "kind", "size")
            .agg(pl.col("direct", "ring").sum())
        )
        # More than the group carries in all is no part of it.
        unused = carried.join(groups.select("group", "total"), on="group").filter(
            pl.col("ring") > MOST * pl.col("total")
        )
        unused = unused.select("group", "kind", "size", none=pl.lit(0.0))
        self._unused = pl.concat([self._unused, unused])
        direct = carried.group_by("group").agg(pl.col("direct").sum())
        before = self._settled.join(groups.select("group", "total"), on="group")
        before = before.select("group", direct=pl.col("direct_share") * pl.col("total"))
        shares = _shares(groups, pl.concat([direct, before]), where)
        settled = groups.filter(asked).join(direct, on="group", how="left", maintain_order="left")
        settled = settled.join(shares, on="group", how="left", maintain_order="left")
        self._settled = pl.concat(
            [
                self._settled,
                settled.with_columns(
                    direct_share=pl.col("direct").fill_null(0.0) / pl.col("total"),
                    share=pl.col("share").fill_nan(0).fill_null(0),
                ).select(SETTLED.names()),
            ]
        )
        pairs = pairs.join(
            self._settled.select("group", "share"), on="group", how="left", maintain_order="left"
        )
        kind, by_size = pl.col("kind").rank("dense"), pl.struct("kind", "size").rank("dense")
        return self._with_volumes(pairs, unused).with_columns(
            kind_index=pl.when("by_ring").then(kind.max() + by_size).otherwise(kind).cast(I64)
        )

    def learned(self, group: int, factors: pl.DataFrame, common: float) -> None:
        """What a group was found to move of the volume of calls, by kind (FACTORS), and of those of other kinds."""
        self._factors = pl.concat([self._factors, factors])
        self._common[group] = common

    def _with_sent(self, pairs: pl.DataFrame) -> pl.DataFrame:
        return pairs.join(self._sent, on=["op", "tx", "peer_rank"], how="left", maintain_order="left")

    @staticmethod
    def _with_volumes(pairs: pl.DataFrame, unused: pl.DataFrame) -> pl.DataFrame:
        if not unused.is_empty():
            key = ["group", "kind", "size"]
            pairs = pairs.join(unused, on=key, how="left", nulls_equal=True, maintain_order="left")
            pairs = pairs.with_columns(ring=pl.coalesce("none", "ring")).drop("none")
        return (
            pairs.with_columns(
                by_ring=pl.col("ring") > 0,
                volume=pl.col("direct") * pl.col("lane") + pl.col("ring") * pl.col("share"),
                direct=pl.col("direct") > 0,
            )
            .filter(pl.col("volume") > 0, pl.col("call_ns").is_between("from_ns", "to_ns"))
            .with_columns(of_size=pl.when("by_ring").then("size"))
            .sort("group", "op")
        )


def _moved(pairs: pl.DataFrame) -> pl.DataFrame:
    """`pairs` of a group and an operator, with what the latter would put on the former: `direct`, and by a `ring`."""
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
    return pairs.with_columns(direct=direct.fill_null(0.0), ring=ring.fill_null(0.0))


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
