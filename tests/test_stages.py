"""Who comes late in pipelines, by the replicas of its stage: two pipelines of two stages, on four machines."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.hosts import find_hosts
from pulse_bpf.analysis.lags import lags
from pulse_bpf.analysis.late import find_late
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.schema import empty

MS = 1_000_000
ITERATIONS, BATCHES, PERIOD_NS, SLOT_NS = 4, 6, 100 * MS, 10 * MS

Late = Callable[[int, int, int], int]


def _rows(
    late_ns: Late = lambda replica, iteration, batch: 0,
    call_late_ns: Late = lambda replica, iteration, batch: 0,
    missed: int = 0,
) -> pl.DataFrame:
    """In each iteration the first stage of each replica sends BATCHES activations to the second, `late_ns` later each,
    and all later ones with it; then the replicas of each stage sum their gradients. Node 0 and 1 are the first stage
    and the second of replica 0, of which the first `missed` calls were not seen."""
    rows: list[dict[str, object]] = []
    for iteration in range(ITERATIONS):
        ends = []
        for replica in range(2):
            at_ns = iteration * PERIOD_NS
            for batch in range(BATCHES):
                at_ns += SLOT_NS + late_ns(replica, iteration, batch)
                for stage, way in ((0, "tx"), (1, "rx")):
                    rows.append(
                        _row(replica, stage, way, f"pipe{replica}", stage, 1 - stage, at_ns)
                        | {
                            "kind": "Send" if way == "tx" else "Recv",
                            "peer_node": f"node{2 * replica + 1 - stage}",
                        }
                        | {"call_ns": _called_ns(stage, iteration, call_late_ns(replica, iteration, batch))}
                        | {"program_pos": iteration * (BATCHES + 1) + batch}
                        | {"op_seq": iteration * BATCHES + batch, "expected_bytes": 5_000_000}
                    )
            ends.append(at_ns)
        for replica in range(2):
            for stage in range(2):
                rows.extend(
                    _row(replica, stage, way, f"sum{stage}", replica, 1 - replica, ends[replica] + SLOT_NS)
                    | {"start_ns": ends[replica if way == "tx" else 1 - replica] + SLOT_NS}
                    | {"last_byte_ns": max(ends) + SLOT_NS + MS, "end_ns": max(ends) + SLOT_NS + MS}
                    | {"kind": "AllReduce", "peer_node": f"node{2 * (1 - replica) + stage}"}
                    | {
                        "call_ns": _called_ns(stage, iteration, call_late_ns(replica, iteration, BATCHES)),
                        "program_pos": iteration * (BATCHES + 1) + BATCHES,
                    }
                    | {"op_seq": iteration, "nccl_seq": iteration, "expected_bytes": 5_000_000}
                    for way in ("tx", "rx")
                )
    return _table(rows).filter((pl.col("node") != "node0") | (pl.col("program_pos") >= missed))


def _table(rows: list[dict[str, object]]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, infer_schema_length=None)
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    )


def _called_ns(stage: int, iteration: int, late_ns: int) -> int:
    """The hosts of first stages are late, those of second stages never."""
    return iteration * PERIOD_NS + (late_ns if stage == 0 else 0)


def _row(
    replica: int, stage: int, way: str, comm: str, rank: int, peer: int, start_ns: int
) -> dict[str, object]:
    node = 2 * replica + stage
    return {
        "level": "flow",
        "node": f"node{node}",
        "nic": "mlx5_0",
        "pid": 10 + node,
        "comm_id": comm,
        "rank": rank,
        "nranks": 2,
        "peer_rank": peer,
        "direction": way,
        "op_bytes": 5_000_000,
        "start_ns": start_ns,
        "last_byte_ns": start_ns + MS,
        "end_ns": start_ns + MS,
        "bin_ns": 20_000,
        "bytes": 5_000_000,
        "covered": True,
    }


def _late(rows: pl.DataFrame) -> list[str | None]:
    return [
        finding.node for finding in find_late(lags(align(rows), True), empty("comms"), None, True, lost=0)
    ]


def test_a_stage_that_takes_longer_than_its_replica_each_time_is_named() -> None:
    rows = _rows(late_ns=lambda replica, iteration, batch: 4 * MS if replica == 1 else 0)
    assert _late(rows) == ["node2"]
    assert _late(_rows()) == []


def test_calls_that_were_not_seen_at_the_beginning_do_not_matter() -> None:
    late = _rows(late_ns=lambda replica, iteration, batch: 4 * MS if replica == 1 else 0, missed=3)
    assert _late(late) == ["node2"]
    uneven = _rows(late_ns=lambda replica, iteration, batch: 4 * MS * (batch % 2), missed=3)
    assert _late(uneven) == []


def test_a_stage_with_more_to_do_in_all_replicas_is_not_late() -> None:
    assert _late(_rows(late_ns=lambda replica, iteration, batch: 8 * MS)) == []


def test_a_stage_that_waits_now_and_then_is_not_late() -> None:
    """As it does at the end of each iteration for the stage that it sends to."""
    rows = _rows(late_ns=lambda replica, iteration, batch: 20 * MS if (replica, batch) == (1, 5) else 0)
    assert _late(rows) == []


def test_operators_that_overlap_were_not_told_apart_and_name_nobody() -> None:
    rows = _rows(late_ns=lambda replica, iteration, batch: 4 * MS if replica == 1 else 0)
    tangled = rows.with_columns(
        start_ns=pl.when((pl.col("kind") == "Send") & (pl.col("program_pos") % 3 == 2))
        .then(pl.col("start_ns") - 2 * SLOT_NS)
        .otherwise("start_ns")
    )
    assert _late(tangled) == []


def test_what_comes_from_the_other_stage_is_known_by_what_that_sent() -> None:
    """The second stages answer each activation with a gradient, then comes the next; only what is sent is seen."""
    rows = []
    for replica, takes_ns in enumerate((2 * MS, 8 * MS)):
        at_ns = 0
        for batch in range(2 * BATCHES):
            for stage in range(2):
                kind = {"kind": "Send", "peer_node": f"node{2 * replica + 1 - stage}", "call_ns": batch}
                number = {"op_seq": batch, "program_pos": batch, "expected_bytes": 5_000_000}
                row = _row(replica, stage, "tx", f"pipe{replica}", stage, 1 - stage, at_ns)
                rows.append(row | kind | number)
                at_ns += MS + (takes_ns if stage == 0 else 2 * MS)
        for stage in range(2):
            row = _row(replica, stage, "tx", f"sum{stage}", replica, 1 - replica, at_ns)
            row |= {"last_byte_ns": 200 * MS, "end_ns": 200 * MS}
            kind = {
                "kind": "AllReduce",
                "peer_node": f"node{2 * (1 - replica) + stage}",
                "call_ns": 3 * BATCHES,
            }
            rows.append(row | kind | {"op_seq": 0, "nccl_seq": 0, "program_pos": 2 * BATCHES})
    assert _late(_table(rows)) == ["node3"]


def test_a_stage_whose_host_calls_late_is_compared_with_its_replica() -> None:
    def paused(replica: int, iteration: int, batch: int) -> int:
        return 40 * MS if replica == 1 and iteration % 2 and batch else 0

    found = find_hosts(lags(align(_rows(call_late_ns=paused)), True), True, 0)
    assert [(finding.kind, finding.node, finding.cause) for finding in found] == [
        ("host-pause", "node2", "host")
    ]
    assert find_hosts(lags(align(_rows()), True), True, 0) == []
    # It may have waited in the call before for what it got late, where nobody saw when that came.
    blind = _rows(call_late_ns=paused).with_columns(pl.lit(None, pl.Int64).alias("last_byte_ns"))
    assert find_hosts(lags(align(blind), True), True, 0) == []
