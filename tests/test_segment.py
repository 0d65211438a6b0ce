"""Cutting curves into operators, against what the model says happened."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import recordings
from recordings import BIN_NS, T0_NS, Fault, Job

from pulse_bpf.analysis import callers, measure, program, segment, stream, unsettled
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.pairing import FOREVER
from pulse_bpf.analysis.segment import _shares


def operators_of(frames: dict[str, pl.DataFrame]) -> pl.DataFrame:
    return measure(Recording(frames))[0]


def errors(job: Job, operators: pl.DataFrame) -> pl.DataFrame:
    """Per true (host, peer, direction, operator) seen as a row: start and end error in bins, and bytes missing."""
    truth = pl.DataFrame(
        [(*key, *value) for key, value in job.truth.items()],
        schema=["rank", "peer_rank", "direction", "number", "first", "last", "packets"],
        orient="row",
    )
    calls = pl.DataFrame(job.calls, schema=["tick", "rank", "number", "kind"], orient="row")
    truth = truth.join(calls.select("tick", "rank", "number"), on=["rank", "number"])
    found = operators.filter(pl.col("level") == "flow").with_columns(
        tick=(pl.col("call_ns") - T0_NS) // BIN_NS,
        rank=pl.col("rank").cast(pl.Int64),
        peer_rank=pl.col("peer_rank").cast(pl.Int64),
    )
    return truth.join(found, on=["rank", "peer_rank", "direction", "tick"], how="left").with_columns(
        start_error=((pl.col("start_ns") - T0_NS) / BIN_NS - pl.col("first")).abs(),
        end_error=((pl.col("end_ns") - T0_NS) / BIN_NS - pl.col("last") - 1).abs(),
        missing=pl.col("packets") * recordings.PACKET - (pl.col("bytes") - pl.col("retx_bytes")),
    )


@pytest.mark.parametrize(
    "fault", [None, Fault("egress", 1, 1.0), Fault("late", 2, 5.0), Fault("loss", 0, 0.02)]
)
@pytest.mark.parametrize("compute", [0, 20])
def test_every_operator_is_found_with_its_bytes_and_times(fault: Fault | None, compute: int) -> None:
    job = recordings.run(steps=8, fault=fault, compute=compute, seed=3)
    operators = operators_of(recordings.tables(job))
    found = errors(job, operators)
    assert found["bytes"].null_count() == 0
    assert found["missing"].abs().max() == 0
    assert found["start_error"].max() <= 1
    assert found["end_error"].max() <= 1
    assert (found["completion"] - 1).abs().max() < 0.004
    assert operators.filter(pl.col("level") == "traffic")["bytes"].sum() == 0


@pytest.mark.parametrize("begin", [30, 200, 377, 555])
def test_a_recording_that_begins_inside_an_operator_shifts_nothing(begin: int) -> None:
    job = recordings.run(steps=10, seed=5)
    found = errors(job, operators_of(recordings.tables(job, begin))).filter(pl.col("tick") >= begin)
    assert found["missing"].abs().max() == 0
    assert found["start_error"].max() <= 1
    assert found["end_error"].max() <= 1


@pytest.mark.parametrize("begin", [200, 377])
def test_a_job_that_stands_still_just_after_the_recording_began_is_cut_as_any_other(begin: int) -> None:
    """As after a checkpoint, here with a card's meter that says only a while later that it counts.

    For longer than it otherwise takes to learn how traffic is cut, there is one call, and bytes of several.
    """
    job = recordings.run(steps=10, kinds=("AllReduce", "AllReduce", "Group"), seed=5)
    step = next(tick for tick, _, number, _ in sorted(job.calls) if tick > begin + 60 and number % 3 == 1)
    still_ns, paused_ns = 5_000_000_000, T0_NS + step * BIN_NS

    def moved(time: str, by_ns: int) -> pl.Expr:
        return pl.col(time) + pl.when(pl.col(time) >= paused_ns).then(by_ns).otherwise(0)

    frames = recordings.tables(job, begin)
    times = {"samples": "t_ns", "ops": "call_ns", "coverage": "last_ns"}
    frames |= {name: frames[name].with_columns(moved(time, still_ns)) for name, time in times.items()}
    last_ns = frames["ops"].filter(pl.col("call_ns") < paused_ns)["call_ns"].max()
    late = pl.when(pl.col("source") == "packets").then(pl.lit(last_ns) - 5 * BIN_NS).otherwise("first_ns")
    frames["coverage"] = frames["coverage"].with_columns(first_ns=late)
    operators = operators_of(frames).with_columns(
        moved(time, -still_ns) for time in ("call_ns", "start_ns", "end_ns")
    )
    found = errors(job, operators).filter(pl.col("tick") >= step)
    assert found.height > 200
    assert found["missing"].abs().max() == 0
    assert found["end_error"].max() <= 1


def test_a_queue_pair_that_is_first_seen_late_has_no_part_in_what_was_called_long_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one whose owner is known only then: operators are not taken for unfinished for what nobody saw."""
    job = recordings.run(steps=14, seed=5)
    frames = recordings.tables(job)
    begin, latest = 600, 150
    for module in (callers, program, segment, stream, unsettled):
        monkeypatch.setattr(module, "LATEST_NS", latest * BIN_NS)
    late = (pl.col("node") == "node1") & (pl.col("qpn") == 17)
    unseen = late & (pl.col("t_ns") < T0_NS + begin * BIN_NS)
    found = errors(job, operators_of(frames | {"samples": frames["samples"].filter(~unseen)}))
    own = (pl.col("rank") == 1) & (pl.col("peer_rank") == 0)
    assert found.filter(~own)["missing"].abs().max() == 0
    before = found.filter(own, pl.col("tick") < begin - latest)
    assert before.height > 5
    assert before["bytes"].null_count() == before.height
    after = found.filter(own, pl.col("tick") >= begin)
    assert after.height > 5
    assert after["missing"].abs().max() == 0
    assert after["end_error"].max() <= 1


def test_lost_samples_spoil_only_their_operator() -> None:
    job = recordings.run(steps=8, seed=1)
    frames = recordings.tables(job)
    hole = pl.col("t_ns").is_between(T0_NS + 400 * BIN_NS, T0_NS + 430 * BIN_NS)
    found = errors(job, operators_of(frames | {"samples": frames["samples"].filter(~hole)}))
    spoiled = found.filter(pl.col("first").is_between(250, 430))
    assert spoiled.filter(pl.col("missing") > 0).height > 0
    rest = found.filter(~pl.col("first").is_between(250, 430))
    assert rest["missing"].abs().max() == 0
    assert rest["end_error"].max() <= 1


def test_an_operator_that_never_completes_has_no_end() -> None:
    job = recordings.run(steps=10, fault=Fault("stop", 2, at=12), after_stop=200)
    last = (
        operators_of(recordings.tables(job))
        .filter(pl.col("level") == "flow")
        .sort("op_seq")
        .group_by("rank")
        .tail(1)
    )
    assert last["end_ns"].null_count() == 4
    assert last["completion"].max() < 1


def test_calls_that_run_ahead_are_cut_by_volume_and_silence() -> None:
    """All calls of four operators at once, long before most of their traffic, as CUDA streams allow."""
    job = recordings.run(steps=12, kinds=("AllReduce",), seed=2, compute=15)
    frames = recordings.tables(job)
    first = (pl.col("seq") // 4 * 4).alias("first")
    ahead = (
        frames["ops"]
        .sort("node", "seq")
        .with_columns(
            call_ns=pl.col("call_ns").first().over("node", first) + pl.col("seq").cast(pl.Int64) % 4 * 1000
        )
    )
    operators = operators_of(frames | {"ops": ahead}).filter(pl.col("level") == "flow")
    assert not operators["paced"].any()
    truth = pl.DataFrame(
        [(*key, *value) for key, value in job.truth.items()],
        schema=["rank", "peer_rank", "direction", "op_seq", "first", "last", "packets"],
        orient="row",
    ).cast({"rank": pl.Int32, "op_seq": pl.UInt64})
    found = operators.join(truth, on=["rank", "direction", "op_seq"])
    assert found.height == len(job.truth)
    assert ((found["start_ns"] - T0_NS) / BIN_NS - found["first"]).abs().max() <= 1
    assert ((found["end_ns"] - T0_NS) / BIN_NS - found["last"] - 1).abs().max() <= 1


def test_a_wire_that_counts_headers_is_a_factor_not_a_shift() -> None:
    job = recordings.run(steps=10, seed=4)
    frames = recordings.tables(job)
    wire = frames["samples"].with_columns(bytes=(pl.col("bytes") * 1.0625).round().cast(pl.UInt64))
    found = errors(job, operators_of(frames | {"samples": wire}))
    assert found["end_error"].max() <= 1
    assert (found["completion"] - 1).abs().max() < 0.01


def test_two_neighbours_of_a_ring_are_found_by_their_traffic() -> None:
    """Ranks need not follow each other in the ring: here rank r sends to r - 1."""
    job = recordings.run(steps=6, kinds=("AllReduce",), seed=6)
    frames = recordings.tables(job)
    mirrored = frames["comms"].with_columns(rank=3 - pl.col("rank"))
    calls = frames["ops"].with_columns(rank=3 - pl.col("rank"))
    operators = operators_of(frames | {"comms": mirrored, "ops": calls})
    sent = operators.filter(pl.col("level") == "flow", pl.col("direction") == "tx")
    assert ((sent["rank"] - sent["peer_rank"]) % 4 == 1).all()
    assert (sent["completion"] - 1).abs().max() < 0.004
    assert sent.height == 24


def test_the_curve_of_the_slow_port_is_slow_and_the_average_is_the_same_everywhere() -> None:
    job = recordings.run(steps=3, kinds=("AllReduce",), fault=Fault("egress", 1, 1.0), chunk=160)
    sent = operators_of(recordings.tables(job)).filter(pl.col("level") == "flow", pl.col("direction") == "tx")
    by_rank = (
        sent.group_by("rank")
        .agg(
            pl.col("burst_gbps").median(),
            (pl.col("bytes") * 8 / (pl.col("end_ns") - pl.col("start_ns"))).median().alias("average"),
        )
        .sort("rank")
    )
    bursts = by_rank["burst_gbps"].to_list()
    assert bursts[1] < 0.4 * min(bursts[:1] + bursts[2:])
    assert by_rank["average"].max() < 1.6 * by_rank["average"].min()


def test_queue_pairs_of_a_tree_are_no_channels_of_the_ring_beside_it() -> None:
    """Four NICs carry two channels each, one a few bytes of a tree as well; of three channels one has two of them."""
    where = ["node", "comm_id", "direction"]

    def shares(total: list[int], channels: list[int]) -> list[float]:
        count = len(total)
        same = {name: ["x"] * count for name in where}
        groups = pl.DataFrame({"group": range(count), **same, "total": total, "channels": channels})
        return _shares(groups, groups.select("group", direct=pl.lit(0.0)), where)["share"].to_list()

    assert shares([4_258_394_103, 4_255_910_703, 4_249_390_080, 4_253_584_384], [3, 2, 2, 2]) == [0.25] * 4
    assert shares([2_000_100, 1_000_000], [2, 1]) == pytest.approx([2 / 3, 1 / 3], abs=1e-12)
    assert shares([1_900_000, 1_000_000], [1, 1]) == pytest.approx([1.9 / 2.9, 1 / 2.9])


def test_calls_of_two_processes_that_run_ahead_are_matched_by_those_after_a_pause() -> None:
    """Twenty calls in a row are closer to each other than the two processes are, whichever are compared."""
    steps = np.arange(60)
    ahead_ns = steps // 20 * 100_000_000 + steps % 20 * 12_000
    rows = [
        {"pid": pid, "op": 60 * pid + step, "op_seq": step, "call_ns": int(ahead_ns[step]) + 13_000 * pid}
        for pid in (0, 1)
        for step in steps
    ]
    common = {
        "node": "a",
        "comm_id": "c",
        "kind": "AllReduce",
        "op_bytes": 1 << 20,
        "nranks": 8,
        "root": None,
    }
    operators = pl.DataFrame([row | common | {"counts": True} for row in rows])
    known = pl.DataFrame({"node": ["a", "a"], "pid": [0, 1], "comm_id": ["c", "c"]})
    held = pl.DataFrame(schema={"node": pl.String, "pid": pl.Int64, "held_ns": pl.Int64})
    listed = callers.Callers(known).add(operators, FOREVER, held)
    assert (listed["last_call_ns"] - listed["first_call_ns"]).unique().to_list() == [13_000]
