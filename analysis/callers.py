"""Which calls of a node's processes are one operator, as calls come: who made it first, and who last."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.curves import Longs
from pulse_bpf.analysis.node_calls import UNKNOWN, match_calls
from pulse_bpf.analysis.pairing import FOREVER
from pulse_bpf.schema import BOOL, F64, I32, I64, STR, U32, U64

PROCESS = ["node", "pid"]
OWN = [*PROCESS, "comm_id"]
# What comes later than this after what it belongs to is not waited for: the next call of an ncclGroup, the same call of
# another process, the first byte of a flow group that takes part. Where it comes even later, as when a process is held
# up inside of a group for so long, it is taken for something else.
LATEST_NS = 2_000_000_000
# So many calls of each process are the first.
EARLY = 8

# Operators of which it is known when others of the node called.
LISTED = pl.Schema(
    {"op": U32, "who": I64, "kind": STR, "size": F64, "nranks": F64, "root": I32, "certain": BOOL}
    | {"call_ns": I64, "first_call_ns": I64, "last_call_ns": I64}
)
_HELD = pl.Schema(
    {name: LISTED[name] for name in LISTED.names()[:-2]} | {"op_seq": U64, "op_bytes": U64, "listed": BOOL}
)


class Callers:
    """The processes of some nodes on communicators, with a number `who`: those `known` (OWN), and those that call.

    With PXN a queue pair carries what another GPU of the node sends, so bytes may flow from the first process's
    call on. Observed sequences of two processes may begin one call apart; they are matched by kind, size and time,
    as most of the first calls that both are seen to make. Point-to-point calls are the caller's own.
    """

    def __init__(self, known: pl.DataFrame) -> None:
        self._comms = known.select("node", "comm_id").unique()
        self._held = pl.DataFrame(schema=_HELD)
        self._last = np.zeros(0, np.int64)
        self._members, self._comm = np.zeros(0, np.int64), np.zeros(1, np.int64)
        self._shifts = np.zeros((0, 1), np.int64)
        # When each made its EARLY first calls, and before when none of its operators is unlisted.
        self.early_ns = np.zeros((0, EARLY), np.int64)
        self.unlisted_ns = np.zeros(0, np.int64)
        self._who = known.select(OWN).clear().with_columns(who=pl.lit(None, I64))
        self._number(known)

    def of(self, frame: pl.DataFrame) -> pl.DataFrame:
        """`frame` with `who` its rows are of, null for none."""
        return frame.join(self._who, on=OWN, how="left", nulls_equal=True, maintain_order="left")

    @property
    def unlisted(self) -> NDArray[np.uint32]:
        """The operators that are not listed yet."""
        return self._held.filter(~pl.col("listed"))["op"].to_numpy()

    def add(self, operators: pl.DataFrame, until_ns: int, held: pl.DataFrame) -> pl.DataFrame:
        """Takes `operators` (program.Program, which says `until_ns` and `held`), those that are known to count with
        `counts`. Returns what is new of LISTED, each process's in order.

        An operator is listed when all processes that may make its call have, or made a later one.
        """
        own = operators.join(self._comms, on=["node", "comm_id"], how="semi", maintain_order="left")
        self._number(own.select(OWN).unique(maintain_order=True))
        own = self.of(own)
        self._count(own.filter("counts"))
        new = own.with_columns(
            certain=pl.col("kind").is_in(["Group", "Send", "Recv"]), size=pl.col("op_bytes"), listed=False
        ).select(pl.col(name).cast(dtype) for name, dtype in _HELD.items())
        here = pl.concat([self._held, new])
        first_ns, last_ns, complete, unlisted_ns = self._matched(here)
        who, call_ns = here["who"].to_numpy(), here["call_ns"].to_numpy()
        listed = here["listed"].to_numpy()
        complete |= (call_ns < until_ns - LATEST_NS) | (until_ns == FOREVER)
        # Each process's in order.
        waits = np.full(len(self._last), len(here))
        np.minimum.at(waits, who[~complete & ~listed], np.flatnonzero(~complete & ~listed))
        ready = ~listed & (np.arange(len(here)) < waits[who])
        left = ~listed & ~ready
        np.minimum.at(unlisted_ns, who[left], first_ns[left])
        ends_ns = self._who.join(held, on=PROCESS, how="left", maintain_order="left")["held_ns"]
        self.unlisted_ns = np.minimum(unlisted_ns, ends_ns.fill_null(until_ns).to_numpy())
        self.unlisted_ns = np.minimum(self.unlisted_ns, until_ns)
        # What others may still be matched with.
        lasting = left | (call_ns >= until_ns - 2 * LATEST_NS) if until_ns < FOREVER else left
        self._held = here.with_columns(listed=pl.Series(listed | ready)).filter(pl.Series(lasting))
        return (
            here.with_columns(first_call_ns=pl.Series(first_ns), last_call_ns=pl.Series(last_ns))
            .filter(pl.Series(ready))
            .select(LISTED.names())
        )

    def _number(self, found: pl.DataFrame) -> None:
        new = found.join(self._who, on=OWN, how="anti", nulls_equal=True, maintain_order="left")
        if new.is_empty():
            return
        new = new.with_columns(who=len(self._last) + pl.int_range(new.height))
        self._who = pl.concat([self._who, new])
        # An unknown process is none that others wait for.
        comms = self._who.select(pl.struct("node", "comm_id", pl.col("pid").is_null()).rank("dense"))
        together = comms.to_series().to_numpy()
        self._members = np.argsort(together, kind="stable")
        self._comm = np.flatnonzero(np.diff(together[self._members], prepend=0, append=-1))
        most = int(np.diff(self._comm).max())
        shifts = np.full((self._who.height, max(most, self._shifts.shape[1])), UNKNOWN)
        shifts[: len(self._shifts), : self._shifts.shape[1]] = self._shifts
        self._shifts = shifts
        self._last = np.r_[self._last, np.full(new.height, -1)]
        self.early_ns = np.concatenate([self.early_ns, np.full((new.height, EARLY), FOREVER)])
        self.unlisted_ns = np.r_[self.unlisted_ns, np.full(new.height, -FOREVER)]

    def _count(self, own: pl.DataFrame) -> None:
        few = np.flatnonzero(self.early_ns[:, -1] == FOREVER)
        first = own.filter(pl.col("who").is_in(pl.Series(few).implode()))
        for who, call_ns in first.group_by("who").agg(pl.col("call_ns").sort().head(EARLY)).iter_rows():
            self.early_ns[who] = np.sort(np.r_[self.early_ns[who], call_ns])[:EARLY]

    def _matched(self, here: pl.DataFrame) -> tuple[Longs, Longs, NDArray[np.bool_], Longs]:
        """When the first and the last process made each call `here`, whether more may make it, and, of each process,
        when others made the first call that it has not made."""
        who, step, call_ns = (here[name].cast(I64).to_numpy() for name in ("who", "op_seq", "call_ns"))
        np.maximum.at(self._last, who, step)
        alike = here.select(pl.struct("kind", "op_bytes").rank("dense").cast(I64)).to_series().to_numpy()
        shared = np.flatnonzero(~here["certain"].to_numpy())
        shared = shared[np.lexsort((step[shared], who[shared]))]
        begin, end = np.searchsorted(
            who[shared], [np.arange(len(self._last)), np.arange(1, len(self._last) + 1)]
        )
        first_ns, last_ns = call_ns.copy(), call_ns.copy()
        complete = np.ones(len(here), np.bool_)
        others_ns = np.full(len(self._last), FOREVER)
        match_calls(
            self._members,
            self._comm,
            begin,
            end,
            step[shared],
            alike[shared],
            shared,
            call_ns,
            self._last,
            self._shifts,
            first_ns,
            last_ns,
            complete,
            others_ns,
        )
        return first_ns, last_ns, complete, others_ns
