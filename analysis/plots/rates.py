"""The rate curves of a suspect beside others' in the same operators, cut out of the samples."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import polars as pl

from pulse_bpf.analysis.clock_offsets import Clock
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.samples import Samples
from pulse_bpf.schema import F64, I32, I64, STR

# A curve is drawn in so many bins at most, over so long at most.
MAX_BINS, MAX_NS = 1500, 2_000_000_000
# How much of what is shown lies before its operators and behind them, and behind those after which a job stood still.
MARGIN, STILL = 0.04, 0.6
# Operators of a communicator to either side of the one that tells most, if they are no farther than so many times what
# that one lasts.
BESIDE, FAR = 1, 4
# Operators that are shown before one that never ended, however far.
BEFORE_STOP = 3
TWINS = 2
# Twins carry what the suspect does, to this accuracy.
SAME_BYTES = 0.1

LINES = pl.Schema(
    {
        "panel": I64,
        "suspect": pl.Boolean,
        "sampled": pl.Boolean,
        "node": STR,
        "nic": STR,
        "pid": I64,
        "comm_id": STR,
        "rank": I32,
        "gpu": I32,
        "peer_node": STR,
    }
)
POINTS = pl.Schema({"panel": I64, "direction": STR, "t_ns": I64, "bin_ns": I64, "gbps": F64})
SPANS = pl.Schema(
    {
        "panel": I64,
        "kind": STR,
        "start_ns": I64,
        "end_ns": I64,
        "ended": pl.Boolean,
        "bytes": I64,
        "gbps": F64,
    }
)
_FLOW = ["node", "nic", "pid", "comm_id", "peer_node", "peer_nic", "peer_rank"]


@dataclass(frozen=True)
class RateCurves:
    """Some flow groups over the same time, one a panel: the suspect's first, if there is one, then its twins'.

    `lines` (LINES) say whose they are, `points` (POINTS) are what the process sends by its NIC to one peer, and
    receives by it, per bin without gaps; `spans` (SPANS) the operators of what is sent, with their rates while sending.
    All times are on one clock. Of lines that are not `sampled` there are no samples, and the points are those of the
    operators: evenly spread over the time in which each sends.
    """

    lines: pl.DataFrame
    points: pl.DataFrame
    spans: pl.DataFrame
    first_ns: int
    last_ns: int


def cut(
    aligned: pl.DataFrame,
    late: pl.DataFrame,
    samples: Samples,
    clock: Clock,
    finding: Finding | None,
    suspects: Collection[str] = (),
) -> RateCurves | None:
    """The curves around the operator that tells most of `finding`; without one of ranks chosen by nothing they do.

    `aligned` (align.align) and `late` (frames.late_cells) are on the one `clock`, `samples` on each node's own. None
    where nothing that was sent is known of the suspect. Nodes that are `suspects` for whatever reason are no twins.
    """
    sent = aligned.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("bytes") > 0,
        pl.col("start_ns").is_not_null(),
        pl.col("comm_id").is_not_null(),
    )
    own = sent if finding is None else _of_suspect(sent, finding)
    if own.is_empty():
        return None
    stopped = finding is not None and finding.cause == "stop"
    flow, first_ns, last_ns = _shown(own, sent, late, finding)
    blamed = [*suspects, *(_nodes_of(finding) if finding is not None else ())]
    others = sent.filter(~pl.col("node").is_in(blamed))
    lines = pl.concat(
        [flow.with_columns(suspect=finding is not None), _twins(flow, others, first_ns, last_ns)]
    )
    lines = (
        lines.unique(_FLOW, keep="first", maintain_order=True).with_row_index("panel").cast({"panel": I64})
    )
    shown_ns = last_ns - first_ns
    first_ns -= round(MARGIN * shown_ns)
    last_ns = min(last_ns + round((STILL if stopped else MARGIN) * shown_ns), first_ns + MAX_NS)
    inside = (pl.col("start_ns") < last_ns) & (pl.col("last_byte_ns") > first_ns)
    spans = sent.filter(inside).join(lines.select(*_FLOW, "panel"), on=_FLOW, nulls_equal=True)
    points = _points(aligned, lines, samples, clock, first_ns, last_ns)
    lines = lines.with_columns(sampled=pl.col("panel").is_in(points["panel"].implode()))
    spans = spans.sort("panel", "start_ns").select(
        "panel",
        "kind",
        "start_ns",
        end_ns=pl.coalesce("end_ns", "last_byte_ns"),
        ended=pl.col("end_ns").is_not_null(),
        bytes="bytes",
        gbps=pl.coalesce("burst_gbps", "active_gbps"),
    )
    bare = lines.filter(~pl.col("sampled")).select("panel")
    points = pl.concat([points, _steps(spans.join(bare, on="panel", how="semi"), first_ns, last_ns)])
    return RateCurves(lines.select(LINES.names()).cast(LINES), points, spans.cast(SPANS), first_ns, last_ns)


def _nodes_of(finding: Finding) -> list[str]:
    flows = [node for flow in finding.flows or () for node in (flow["node"], flow["peer_node"])]
    return [*({finding.node, *(finding.nodes or ()), *flows} - {None})]


def _of_suspect(sent: pl.DataFrame, finding: Finding) -> pl.DataFrame:
    """What the suspect sends, as closely as it was seen; of flows that share a path, what these send."""
    if finding.node is None and finding.flows:
        ends = pl.DataFrame(
            [(flow["node"], flow["nic"], flow["peer_node"]) for flow in finding.flows],
            schema={"node": STR, "nic": STR, "peer_node": STR},
            orient="row",
        ).unique()
        return sent.join(ends, on=ends.columns, how="semi")
    found = sent.filter(pl.col("node").is_in(_nodes_of(finding)))
    if finding.scope == "link":
        found = found.filter(pl.col("node") == finding.node, pl.col("peer_node") == finding.peer_node)
    # What a late GPU computes may leave by a neighbour's process: the latest of its machine is shown.
    late = finding.cause in ("compute", "host")
    for name in ("comm_id",) if late else ("nic", "peer_nic", "pid", "comm_id"):
        closer = found.filter(pl.col(name) == pl.lit(getattr(finding, name), found.schema[name]))
        found = found if closer.is_empty() else closer
    return found


def _shown(
    own: pl.DataFrame, sent: pl.DataFrame, late: pl.DataFrame, finding: Finding | None
) -> tuple[pl.DataFrame, int, int]:
    """The flow to show and from when to when: around the operator in which it lost most, or the last before a stop."""
    scored = _scored(own, sent, late)
    before, after, far = BESIDE, BESIDE, float(FAR)
    if finding is None or finding.cause == "stop":
        # The flow that moved most: what else it did must not decide.
        flows = scored.group_by(_FLOW).agg(pl.col("bytes").sum())
        most = flows.sort("bytes", *_FLOW, descending=[True, *[False] * len(_FLOW)]).head(1)
        ours = scored.join(most, on=_FLOW, how="semi", nulls_equal=True).sort("start_ns")
        best = ours[-1] if finding is not None else ours[ours.height // 2]
        if finding is not None:
            before, far = BEFORE_STOP, np.inf
    else:
        during = scored.filter(
            pl.col("last_byte_ns") >= finding.first_ns, pl.col("start_ns") <= finding.last_ns
        )
        scored = scored if during.is_empty() else during
        # Many operators may tell as much: the longest of those, so that its shape is seen.
        clear = scored.filter(pl.col("score") >= 0.5 * pl.col("score").max())
        best = clear.sort("bytes", "score", "start_ns", descending=[True, True, False]).head(1)
        ours = scored.join(best.select(_FLOW), on=_FLOW, how="semi", nulls_equal=True).sort("start_ns")
    at = int(np.searchsorted(ours["start_ns"].to_numpy(), best["start_ns"][0]))
    start_ns, last_ns = int(best["start_ns"][0]), int(best["last_byte_ns"][0])
    # Who comes late is waited for: the others' part of the operator begins before.
    first_ns = min(start_ns, int(best["begun_ns"].fill_null(start_ns)[0]))
    far_ns = far * (last_ns - first_ns)
    for row in ours[max(0, at - before) : at + after + 1].iter_rows(named=True):
        if first_ns - row["last_byte_ns"] <= far_ns and row["start_ns"] - last_ns <= far_ns:
            first_ns, last_ns = min(first_ns, row["start_ns"]), max(last_ns, row["last_byte_ns"])
    if finding is not None and finding.cause == "stop":
        last_ns = max(last_ns, min(finding.first_ns, last_ns + MAX_NS // 2))
    usual = best.with_columns(bytes=pl.lit(int(ours["bytes"].median() or 0), I64))  # type: ignore[arg-type]
    return usual.select(*_FLOW, "rank", "gpu", "kind", "op_bytes", "bytes"), first_ns, last_ns


def _scored(own: pl.DataFrame, sent: pl.DataFrame, late: pl.DataFrame) -> pl.DataFrame:
    """`own` with the time each operator lost by being slow or late (score), and when any rank began it (begun_ns)."""
    key = ["comm_id", "step"]
    usual = (
        sent.filter(pl.col("step").is_not_null())
        .group_by(key)
        .agg(pl.col("burst_gbps").quantile(0.75).alias("usual_gbps"), begun_ns=pl.col("start_ns").min())
    )
    slow_ns = pl.col("active_ns") * (1 - pl.col("burst_gbps") / pl.col("usual_gbps")).clip(0)
    late_ns = 1e6 * pl.col("value").fill_nan(None)
    return (
        own.join(usual, on=key, how="left")
        .join(late.select(*key, "node", "pid", "value"), on=[*key, "node", "pid"], how="left")
        .with_columns(score=pl.max_horizontal(slow_ns, late_ns).fill_null(0))
    )


def _twins(flow: pl.DataFrame, others: pl.DataFrame, first_ns: int, last_ns: int) -> pl.DataFrame:
    """TWINS flows of other machines at that time, nearest to the usual of those that do the same; of each machine one.

    Best are those that do the same and exchange nothing with it, then those of its communicator, then with its name of
    NIC. Some may do only something alike.
    """
    like = flow.row(0, named=True)
    same = (
        (pl.col("kind") == like["kind"])
        & pl.col("op_bytes").eq_missing(pl.lit(like["op_bytes"]))
        & ((pl.col("bytes") / like["bytes"] - 1).abs() < SAME_BYTES)
    )
    found = (
        others.filter(
            pl.col("start_ns") < last_ns, pl.col("last_byte_ns") > first_ns, pl.col("node") != like["node"]
        )
        .with_columns(unlike=~same.fill_null(False))
        .group_by(_FLOW, maintain_order=True)
        .agg(
            pl.col("unlike").min(),
            pl.col("rank", "gpu", "kind", "op_bytes").first(),
            pl.col("bytes").median().cast(I64),
            pl.col("burst_gbps").median(),
        )
    )
    usual = pl.col("burst_gbps").filter(~pl.col("unlike")).median()
    return (
        found.with_columns(
            partner=(pl.col("node") == like["peer_node"]) | (pl.col("peer_node") == like["node"]),
            other_comm=(pl.col("comm_id") != like["comm_id"]).fill_null(True),
            other_nic=pl.col("nic") != like["nic"],
            unusual=(pl.col("burst_gbps") - usual).abs(),
        )
        .sort("unlike", "partner", "other_comm", "other_nic", "unusual", *_FLOW, nulls_last=True)
        .unique("node", keep="first", maintain_order=True)
        .head(TWINS)
        .with_columns(suspect=pl.lit(False))
        .select(*flow.columns, "suspect")
    )


def _points(
    aligned: pl.DataFrame, lines: pl.DataFrame, samples: Samples, clock: Clock, first_ns: int, last_ns: int
) -> pl.DataFrame:
    found = [pl.DataFrame(schema=POINTS)]
    process = ["node", "nic", "pid"]
    for line in lines.iter_rows(named=True):
        of = pl.DataFrame([line]).select(process).cast({"pid": I64})
        here = aligned.filter(pl.col("level") == "flow").join(of, on=process, how="semi", nulls_equal=True)
        peer = pl.all_horizontal(pl.col(name).eq_missing(pl.lit(line[name])) for name in _FLOW[3:])
        ahead_ns = first_ns - int(
            clock.shifted("samples", pl.DataFrame({"node": [line["node"]], "t_ns": [first_ns]}))["t_ns"][0]
        )
        for way, rows in (("tx", here.filter(peer)), ("rx", here)):
            flows = rows.filter(pl.col("direction") == way)["flows"].explode().unique().drop_nulls()
            part = samples.between(line["node"], flows, first_ns + ahead_ns, last_ns + ahead_ns)
            part = part.filter(pl.col("tx") == (way == "tx"))
            if part.is_empty():
                continue
            found.append(
                _dense(part, first_ns + ahead_ns, last_ns + ahead_ns).select(
                    pl.lit(line["panel"], I64).alias("panel"),
                    pl.lit(way).alias("direction"),
                    pl.col("t_ns") - ahead_ns,
                    "bin_ns",
                    "gbps",
                )
            )
    return pl.concat(found)


def _dense(rows: pl.DataFrame, first_ns: int, last_ns: int) -> pl.DataFrame:
    """t_ns, bin_ns and gbps of every bin from `first_ns` to `last_ns`; several are one where there are many."""
    width_ns = int(rows["bin_ns"].max())  # type: ignore[arg-type]
    phase_ns = int(rows["t_ns"][0]) % width_ns
    first = (first_ns - phase_ns) // width_ns
    count = max(1, (last_ns - phase_ns) // width_ns + 1 - first)
    times = -(-count // MAX_BINS)
    place = ((rows["t_ns"].to_numpy() - phase_ns) // width_ns - first) // times
    count = -(-count // times)
    sums = np.bincount(np.clip(place, 0, count - 1), rows["bytes"].to_numpy().astype(np.float64), count)
    wide_ns = width_ns * times
    return pl.DataFrame(
        {
            "t_ns": phase_ns + first * width_ns + wide_ns * np.arange(count),
            "bin_ns": np.full(count, wide_ns),
            "gbps": 8 * sums / wide_ns,
        },
        schema={"t_ns": I64, "bin_ns": I64, "gbps": F64},
    )


def _steps(spans: pl.DataFrame, first_ns: int, last_ns: int) -> pl.DataFrame:
    """POINTS of operators, each at its average rate from its first byte to its last."""
    found = [pl.DataFrame(schema=POINTS)]
    wide_ns = max(1, (last_ns - first_ns) // MAX_BINS)
    edges = first_ns + wide_ns * np.arange(MAX_BINS + 1)
    for (panel,), part in spans.partition_by("panel", as_dict=True).items():
        gbps = np.zeros(MAX_BINS)
        for start_ns, end_ns, moved in part.select("start_ns", "end_ns", "bytes").iter_rows():
            shared = np.minimum(edges[1:], end_ns) - np.maximum(edges[:-1], start_ns)
            gbps += 8 * moved * np.clip(shared, 0, None) / max(1, end_ns - start_ns) / wide_ns
        found.append(
            pl.DataFrame(
                {"panel": panel, "direction": "tx", "t_ns": edges[:-1], "bin_ns": wide_ns, "gbps": gbps}
            ).cast(POINTS)
        )
    return pl.concat(found)
