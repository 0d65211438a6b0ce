"""What a collector holds in memory of one agent: the last seconds of its operators, and how things are there."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl

from pulse_bpf.live.cutting import WINDOW_NS as CUT_NS
from pulse_bpf.live.wire import NONE, STATE, Step

# A clock that is further from the others' than this is taken to be set wrong, and its times are moved.
SKEWED_NS = 1_000_000_000
# An agent that said nothing for so long is missing.
MISSING_NS = 5_000_000_000
# Operators of an agent are few below so many rows.
SPARSE_ROWS = 5000
_LOSS = ["node", "source", "nic", "port", "direction", "pid"]


class Held(NamedTuple):
    """What one step said, and to when on its agent's clock."""

    until_ns: int
    tables: Mapping[str, pl.DataFrame]

    @property
    def rows(self) -> int:
        return self.tables["operators"].height


@dataclass
class View:
    """One agent: `seen_ns` is by the collector's clock, `skew_ns` how far that is ahead of the agent's.

    `since_ns`: from when on, by the agent's clock, nothing is missing. All is of the agent's latest `spool`: another
    start of the agent numbers operators anew.
    """

    nodes: frozenset[str] = frozenset()
    seen_ns: int = 0
    skew_ns: int = 0
    spool: str = ""
    sequence: int = -1
    since_ns: int = 0
    from_start: bool = False
    until_ns: int = 0
    lost: int = 0
    state: dict[str, pl.DataFrame] = field(default_factory=dict)
    open: pl.DataFrame = field(default_factory=lambda: NONE["operators"])
    held: deque[Held] = field(default_factory=deque)

    @property
    def knows_state(self) -> bool:
        """Whether all that says how things are was heard, without which the rest means nothing."""
        return all(table in self.state for table in ("nodes", "nics", "processes", "comms", "qps"))

    @property
    def sparse(self) -> bool:
        """Whether the operators held are few."""
        return sum(held.rows for held in self.held) < SPARSE_ROWS

    def take(self, step: Step, sent_ns: int, now_ns: int, window_ns: int, sparse_ns: int) -> None:
        """`step`, sent at `sent_ns` by the agent's clock and heard now; what an earlier start left is old.

        What is older than `window_ns` is kept while operators are few, what is older than `sparse_ns` is not.
        """
        skew_ns = now_ns - sent_ns
        jumped = self.spool == step.spool and abs(skew_ns - self.skew_ns) > SKEWED_NS
        self.seen_ns, self.skew_ns = now_ns, skew_ns
        if step.spool == self.spool and step.sequence <= self.sequence:
            return
        other = step.spool != self.spool
        if other and self.spool and step.until_ns <= self.until_ns and not jumped:
            # Left over from an earlier start.
            return
        if other or jumped or step.sequence != self.sequence + 1:
            self.held.clear()
            # What the first step after a gap says began before it is not all there.
            self.since_ns = step.until_ns
            self.from_start = step.sequence == 0
        self.spool, self.sequence, self.until_ns = step.spool, step.sequence, step.until_ns
        self.state |= {table: step.tables[table] for table in STATE if table in step.tables}
        if "nodes" in step.tables:
            self.nodes = frozenset(step.tables["nodes"]["node"].drop_nulls())
        if "operators" in step.tables:
            if self.from_start and "coverage" in step.tables and not self.held:
                began_ns: int = step.tables["coverage"].select(pl.col("first_ns").min()).item() or 0
                self.since_ns = max(began_ns, step.until_ns - CUT_NS)
            final = pl.col("final")
            self.open = step.tables["operators"].filter(~final)
            kept = {
                name: step.tables[name]
                for name in ("coverage", "events", "port_counters")
                if name in step.tables
            }
            operators = _alone(step.tables["operators"].filter(final))
            self.held.append(Held(step.until_ns, {**kept, "operators": operators}))
            self.lost = int(kept["coverage"]["lost"].sum()) if "coverage" in kept else self.lost
        # Operators that began in the window may be final seconds after it.
        while self.held and self.held[0].until_ns < step.until_ns - (sparse_ns if self.sparse else window_ns):
            self.held.popleft()

    def since(self, first_ns: int) -> View:
        """A copy with what was said after `first_ns`: nothing that was called from then on is missing in it."""
        held = deque(each for each in self.held if each.until_ns > first_ns)
        return View(**{**vars(self), "held": held, "state": dict(self.state)})

    def rows(self, table: str) -> pl.DataFrame:
        """All rows held of a table that grows; of the operators also those that are open."""
        frames = [held.tables[table] for held in self.held if table in held.tables]
        if table == "operators":
            frames.append(self.open)
        return pl.concat([NONE[table], *frames])

    def coverage(self) -> pl.DataFrame:
        """The latest coverage, with what was lost since the first step that is held."""
        said = [held.tables["coverage"] for held in self.held if "coverage" in held.tables]
        if not said:
            return NONE["coverage"]
        before = said[0].select(*_LOSS, pl.col("lost").alias("before")).unique(_LOSS)
        latest = said[-1].join(before, on=_LOSS, how="left", nulls_equal=True, maintain_order="left")
        newly = pl.col("lost") - pl.min_horizontal("lost", pl.col("before").fill_null(0))
        # The first step that is held may itself be the first that lost something.
        lost = "lost" if len(said) == 1 else newly
        return latest.with_columns(lost=pl.col(lost) if isinstance(lost, str) else lost).drop("before")


def _alone(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` in memory of its own: texts of one that came in a message keep all of that, twice what it needs."""
    return pl.DataFrame.deserialize(io.BytesIO(frame.serialize()))
