"""The last seconds of a node, cut into operators with each step; each operator leaves once, when it is settled."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from pulse_bpf import analysis
from pulse_bpf.analysis import attribute
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.program import program
from pulse_bpf.live.wire import SENT_OPERATORS, STATE
from pulse_bpf.nic import Tables
from pulse_bpf.schema import STREAMED, TABLES, conform, empty

# All agents cut at the same moments, so that none of the ranks that are compared was watched for longer.
STEP_NS = 500_000_000
# What a second of warm-up, the longest usual operator and one step need.
WINDOW_NS = 2_500_000_000
# An operator that ended so long ago gets no more bytes: twice what the walk through the samples waits.
SETTLED_NS = 100_000_000
# What of other nodes tells where this one's queue pairs lead.
PEERS = ("nics", "qps", "comms", "channels")
# Whose queue pairs are is asked again when what is known of them changed, and after so long.
OWNERS_NS = 5_000_000_000
_COMM = ["node", "pid", "comm_id"]
_SENT = ("events", "port_counters")
_COUNTS = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]


class Cutting:
    """Tables of a recording in, as they grow (`append`) or are replaced; what is to be sent of each step out.

    Only what was called within the last `window_ns` is cut, so an operator that takes longer, or that was called longer
    before it moves, is sent as incomplete: a job whose operators last seconds needs a wider window. So much more is cut
    as a step comes late, as where the node has no CPU to spare.
    """

    def __init__(self, window_ns: int = WINDOW_NS, step_ns: int = STEP_NS) -> None:
        self._window_ns, self._step_ns = window_ns, step_ns
        self._grown: dict[str, list[pl.DataFrame]] = {table: [] for table in STREAMED}
        self._state: dict[str, pl.DataFrame] = {}
        self._peers: dict[str, pl.DataFrame] = {}
        self._told: dict[str, pl.DataFrame] = {}
        self._owners: pl.DataFrame | None = None
        self._owned_ns = 0
        self._until_ns: int | None = None
        # How many operators of each process and communicator left the window, and which were sent for good.
        self._left = pl.DataFrame(schema={name: OPERATORS[name] for name in (*_COMM, "op_seq")})
        self._final = self._left
        self._open = pl.DataFrame(schema=OPERATORS)
        # How many bins of the source are one, and how wide that is: 0 before any came.
        self.widen = 1
        self.bin_ns = 0

    def append(self, table: str, frame: pl.DataFrame) -> None:
        """More rows of a table that grows; samples come `widen` bins in one."""
        if frame.is_empty():
            return
        frame = conform(frame, table)
        if table == "samples":
            frame = _wider(frame, self.widen)
            self.bin_ns = int(frame["bin_ns"].max())  # type: ignore[arg-type]
        self._grown[table].append(frame)

    def replace(self, table: str, frame: pl.DataFrame) -> None:
        """The whole of a small table."""
        frame = conform(frame, table)
        if table in (*PEERS, "processes") and not frame.equals(self._state.get(table, empty(table))):
            self._owners = None
        self._state[table] = frame

    def know(self, peers: Mapping[str, pl.DataFrame]) -> None:
        """What the collector says of other nodes (PEERS)."""
        self._peers, self._owners = dict(peers), None

    def due(self) -> int | None:
        """To when it may be cut now: the last multiple of the step that all sources have seen; None where that was."""
        coverage = self._state.get("coverage", empty("coverage"))
        seen = coverage.group_by(pl.col("nic").is_null()).agg(pl.col("last_ns").max())["last_ns"].min()
        if not isinstance(seen, int):
            return None
        until_ns = seen - seen % self._step_ns
        return None if self._until_ns is not None and until_ns <= self._until_ns else until_ns

    def step(self, until_ns: int) -> Tables:
        """What is to be sent (wire.SCHEMAS) of the time up to `until_ns`: operators, and what is new or has changed."""
        late_ns = 0 if self._until_ns is None else until_ns - self._until_ns - self._step_ns
        since_ns = until_ns - self._window_ns - max(late_ns, 0)
        left = self._forget(since_ns)
        if until_ns - self._owned_ns >= OWNERS_NS:
            self._owners = None
        recording = self._recording(since_ns, until_ns)
        if self._owners is None:
            self._owners, self._owned_ns = attribute.flows(recording), until_ns
        rows, flows = analysis.measure_with(recording, self._owners), self._owners
        nodes = self._state["nodes"]["node"].implode()
        told = {
            "operators": self._marked(rows.filter(pl.col("node").is_in(nodes)), left, until_ns),
            "coverage": self._state["coverage"],
            **{table: self._news(table, until_ns) for table in _SENT},
        }
        self._until_ns = until_ns
        return told | self._changed(self._state | {"flows": flows.filter(pl.col("node").is_in(nodes))})

    def greet(self, until_ns: int) -> Tables:
        """What is to be sent of the time up to `until_ns` before anything is cut: how things are."""
        self._until_ns = until_ns
        return self._changed(self._state)

    def tell_all(self) -> None:
        """Sends all tables with the next step, as to a collector that knows nothing."""
        self._told.clear()

    def _changed(self, state: Mapping[str, pl.DataFrame]) -> Tables:
        new = {
            table: state[table]
            for table in STATE
            if table in state and not _same(state[table], self._told.get(table))
        }
        self._told |= new
        return new

    def _recording(self, since_ns: int, until_ns: int) -> Recording:
        def within(table: str, time: str) -> pl.DataFrame:
            frames = [
                frame.filter(pl.col(time).is_between(since_ns, until_ns, closed="left"))
                for frame in self._grown[table]
            ]
            return pl.concat([empty(table), *frames])

        coverage = self._state["coverage"].with_columns(
            pl.col("first_ns").clip(lower_bound=since_ns), pl.col("last_ns").clip(upper_bound=until_ns)
        )
        known = {
            table: pl.concat([self._state.get(table, empty(table)), self._peers.get(table, empty(table))])
            for table in TABLES
            if table not in STREAMED
        }
        grown = {table: empty(table) for table in STREAMED} | {
            "ops": within("ops", "call_ns"),
            "samples": within("samples", "t_ns"),
            "port_samples": within("port_samples", "t_ns"),
            "op_details": empty("op_details"),
        }
        return Recording(
            {**known, **grown, "coverage": coverage.filter(pl.col("first_ns") < pl.col("last_ns"))}
        )

    def _news(self, table: str, until_ns: int) -> pl.DataFrame:
        since_ns = self._until_ns or 0
        new = pl.col("t_ns").is_between(since_ns, until_ns, closed="left")
        return pl.concat([empty(table), *(frame.filter(new) for frame in self._grown[table])])

    def _forget(self, since_ns: int) -> pl.DataFrame:
        """Lets go of all before `since_ns`, operators as a whole; how many of each communicator have left by now."""
        for table, frames in self._grown.items():
            time = "call_ns" if table == "ops" else "wall_ns" if table == "clocks" else "t_ns"
            if table == "op_details":
                frames.clear()
            elif table != "ops":
                frames[:] = [frame for frame in frames if frame[time].max() >= since_ns]  # type: ignore[operator]
        ops = pl.concat([empty("ops"), *self._grown["ops"]])
        # The calls of one group are one operator, which begins with the first.
        begun = (
            pl.when(pl.col("group").is_null())
            .then("call_ns")
            .otherwise(pl.col("call_ns").min().over("node", "pid", "tid", "group"))
        )
        old = ops.select(begun < since_ns).to_series()
        gone, _ = program(ops.filter(old))
        self._grown["ops"] = [ops.filter(~old)]
        counts = gone.group_by(_COMM).agg(pl.len().cast(pl.UInt64).alias("op_seq"))
        both = pl.concat([self._left, counts.select(self._left.columns)])
        self._left = both.group_by(_COMM).agg(pl.col("op_seq").sum())
        return self._left

    def _marked(self, rows: pl.DataFrame, left: pl.DataFrame, until_ns: int) -> pl.DataFrame:
        """`rows` (metrics.OPERATORS) with their numbers since the agent began, and whether they are final."""
        of_process = left.group_by("node", "pid").agg(pl.col("op_seq").sum().alias("left_before"))
        numbered = (
            rows.join(left.rename({"op_seq": "left"}), on=_COMM, how="left", maintain_order="left")
            .join(of_process, on=["node", "pid"], how="left", maintain_order="left")
            .with_columns(
                op_seq=pl.col("op_seq") + pl.col("left").fill_null(0),
                program_pos=pl.col("program_pos") + pl.col("left_before").fill_null(0),
            )
            .select(OPERATORS.names())
        )
        called = pl.col("op_seq").is_not_null() & pl.col("comm_id").is_not_null()
        own = numbered.filter(called)
        # What was open and can no longer be measured stays as it was, and is final once it has left.
        again = self._open.join(own, on=[*_COMM, "op_seq"], how="anti")
        own = pl.concat([own, again])
        sent = self._final.rename({"op_seq": "sent"})
        own = own.join(sent, on=_COMM, how="left", maintain_order="left")
        own = own.filter(pl.col("op_seq") >= pl.col("sent").fill_null(0)).drop("sent")
        until = _settled(own, until_ns).join(left.rename({"op_seq": "left"}), on=_COMM, how="left")
        until = until.select(*_COMM, op_seq=pl.max_horizontal("op_seq", "left"))
        own = own.join(until.rename({"op_seq": "until"}), on=_COMM, how="left", maintain_order="left")
        own = own.with_columns(final=pl.col("op_seq") < pl.col("until")).drop("until")
        self._final = pl.concat([self._final, until]).group_by(_COMM).agg(pl.col("op_seq").max())
        self._open = own.filter(~pl.col("final")).drop("final")
        other = numbered.filter(~called).with_columns(final=pl.lit(False))
        return pl.concat([own, other]).select(SENT_OPERATORS.names())


def _settled(rows: pl.DataFrame, until_ns: int) -> pl.DataFrame:
    """node, pid, comm_id and `op_seq`: the first operator of each that may still change.

    An operator is settled when all its flows have ended for a while; one that moved nothing when a later one of its
    communicator moved something, or when none ever does: its process may be waiting, and it has not begun.
    """
    flow, settled_ns = pl.col("level") == "flow", until_ns - SETTLED_NS
    ended = (pl.col("end_ns").is_not_null() & (pl.col("last_byte_ns") < settled_ns)) | ~flow
    operators = rows.group_by(*_COMM, "op_seq").agg(
        ended.all().alias("ended"), flow.any().alias("moved"), pl.col("call_ns").min()
    )
    last_moved = pl.col("op_seq").filter("moved").max().over(_COMM)
    done = (
        pl.when("moved")
        .then("ended")
        .when(last_moved.is_null())
        .then(pl.col("call_ns") < settled_ns)
        .otherwise(pl.col("op_seq") < last_moved)
    )
    first_open = pl.col("op_seq").filter(~pl.col("done")).min()
    return (
        operators.with_columns(done=done)
        .group_by(_COMM)
        .agg(pl.coalesce(first_open, pl.col("op_seq").max() + 1).alias("op_seq"))
    )


def _same(frame: pl.DataFrame, other: pl.DataFrame | None) -> bool:
    # How sure an attribution is changes with every second, which nobody asks of the collector.
    unsure = [name for name in ("confidence", "evidence") if name in frame.columns]
    return other is not None and frame.drop(unsure).equals(other.drop(unsure))


def _wider(samples: pl.DataFrame, times: int) -> pl.DataFrame:
    """`samples` with so many bins in one."""
    if times == 1:
        return samples
    others = [name for name in samples.columns if name not in (*_COUNTS, "t_ns", "bin_ns")]
    wide = pl.col("bin_ns").cast(pl.Int64) * times
    return (
        samples.with_columns(t_ns=pl.col("t_ns") - pl.col("t_ns") % wide, bin_ns=wide.cast(pl.UInt32))
        .group_by(*others, "t_ns", "bin_ns", maintain_order=True)
        .agg(pl.when(pl.col(_COUNTS).count() > 0).then(pl.col(_COUNTS).sum()))
        .select(samples.columns)
    )
