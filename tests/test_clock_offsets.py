"""Offsets between the clocks of nodes from made transfers: drift, asymmetric paths, queues, rings in one direction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pulse_bpf import analysis
from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.clock_offsets import Clock, moments, one_clock, solve
from pulse_bpf.analysis.load import load
from pulse_bpf.lab.sim.simulate import simulate

WALL_NS = 1_796_000_000_000_000_000
SECONDS = 4


@dataclass(frozen=True)
class Node:
    ahead_ns: int = 0
    ppm: float = 0.0

    def shows(self, t_ns: np.ndarray) -> np.ndarray:
        """The clock of the node at true times, ns from the start."""
        return WALL_NS + t_ns + self.ahead_ns + np.rint(t_ns * self.ppm * 1e-6).astype(np.int64)


NODES = {
    "a": Node(),
    "b": Node(3_000_000, 50.0),
    "c": Node(-40_000_000, -50.0),
    "d": Node(2_000_000_000, 20.0),
}
CHAIN = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "d"), ("d", "c")]
RING = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]


def transfers(
    ways: list[tuple[str, str]],
    delay_ns: dict[tuple[str, str], int] | None = None,
    nodes: dict[str, Node] = NODES,
    seconds: float = SECONDS,
    count: int = 4000,
) -> pl.DataFrame:
    """Transfers each way at random times; each waits in a queue on top of the delay of its path."""
    rng = np.random.default_rng(7)
    frames = []
    for sender, receiver in ways:
        sent = rng.integers(0, int(seconds * 1e9), count)
        wait = (delay_ns or {}).get((sender, receiver), 2_000) + rng.exponential(20_000, count)
        frames.append(
            pl.DataFrame(
                {
                    "node": sender,
                    "peer_node": receiver,
                    "sent_ns": nodes[sender].shows(sent),
                    "received_ns": nodes[receiver].shows(sent + wait.astype(np.int64)),
                }
            )
        )
    return pl.concat(frames).sample(fraction=1.0, shuffle=True, seed=3)


def errors_ns(clock: Clock, seconds: float = SECONDS) -> dict[str, float]:
    """How far the times of each node are off on the one clock, at their worst."""
    t_ns = np.arange(0, int(seconds * 1e9), 10**7)
    found = {}
    for name, node in NODES.items():
        events = pl.DataFrame({"node": name, "t_ns": node.shows(t_ns)})
        shown = clock.shifted("events", events)["t_ns"].to_numpy()
        found[name] = float(np.abs(shown - NODES["a"].shows(t_ns)).max())
    return found


@pytest.mark.parametrize("ways", [CHAIN, RING], ids=["a chain, both ways", "a ring, one way"])
def test_offsets_and_drift_of_50_ppm_are_found_within_the_error(ways: list[tuple[str, str]]) -> None:
    clock = solve(transfers(ways))
    assert clock.error_ns is not None
    assert max(errors_ns(clock).values()) <= clock.error_ns < 30_000
    assert max(errors_ns(clock).values()) < 5_000


def test_an_asymmetric_path_is_within_the_error() -> None:
    """30 us one way, 2 us back: the offset is off by 14 us, and nothing shows it."""
    clock = solve(transfers(CHAIN, {("b", "a"): 30_000, ("b", "c"): 30_000}))
    assert clock.error_ns is not None
    assert 10_000 < max(errors_ns(clock).values()) <= clock.error_ns


def test_a_drift_that_a_short_recording_cannot_tell_is_part_of_the_error() -> None:
    clock = solve(transfers(RING, seconds=0.5))
    assert clock.error_ns is not None
    assert max(errors_ns(clock, 0.5).values()) <= clock.error_ns


@pytest.mark.parametrize("ways", [[*CHAIN[:4], ("d", "c")], RING[:3], []])
def test_clocks_that_were_not_compared_both_ways_keep_their_own_time(ways: list[tuple[str, str]]) -> None:
    seen = transfers(ways) if ways else transfers(RING).clear()
    clock = solve(seen)
    assert clock.error_ns is None
    events = pl.DataFrame({"node": ["a", "d"], "t_ns": [WALL_NS, WALL_NS]})
    assert clock.shifted("events", events).equals(events)


def test_all_moments_of_an_operator_are_put_on_the_one_clock() -> None:
    """What bytes and clear-to-sends came when is compared with when the last one did."""
    moment_ns = int(NODES["d"].shows(np.array(1_000_000_000)))
    names = ("call_ns", "start_ns", "last_byte_ns", "byte_mean_ns", "credit_mean_ns", "first_gap_ns")
    operators = pl.DataFrame({"node": ["d"], **{name: [moment_ns] for name in names}})
    (row,) = solve(transfers(CHAIN)).shifted("operators", operators).select(names).iter_rows()
    assert len(set(row)) == 1
    assert abs(row[0] - moment_ns) > 1_000_000_000


def test_transfers_that_were_put_together_wrongly_do_not_make_the_error_smaller() -> None:
    """A receiver that seems to get data before they are sent: the bounds exclude each other."""
    wrong = transfers([("a", "b"), ("b", "a")], {("a", "b"): -400_000, ("b", "a"): 2_000})
    clock = solve(wrong)
    assert clock.error_ns is not None
    assert clock.error_ns >= 190_000


def test_clocks_that_are_stated_to_agree_are_left_alone() -> None:
    nodes = pl.DataFrame({"node": ["a", "b"], "clock_error_ns": [900, 1000]})
    clock = one_clock(metrics.OPERATORS.to_frame(), nodes)
    assert clock.offsets.is_empty()
    assert clock.error_ns == 1000


@pytest.mark.parametrize("condition", ["ntp", "no-clock-sync"])
def test_with_ntp_the_exchanges_of_a_moe_job_are_matched_between_ranks(
    tmp_path: Path, condition: str
) -> None:
    """Clocks differ by more than exchanges follow each other, and only their volumes and the collectives tell."""
    simulate(
        "healthy",
        tmp_path,
        seed=3,
        nodes=3,
        gpus=2,
        workload="moe",
        seconds=0.3,
        conditions=(condition,),
    )
    recording = load([tmp_path])
    operators, _ = analysis.measure(recording)
    clock = one_clock(operators, recording["nodes"])
    assert clock.error_ns is not None
    assert clock.error_ns < 300_000
    # On the one clock nothing arrives before it was sent, within the error.
    on_one = moments(clock.shifted("operators", operators))
    assert int((on_one["received_ns"] - on_one["sent_ns"]).min()) >= -2 * clock.error_ns  # type: ignore[arg-type, operator]
    rows = align(clock.shifted("operators", operators)).filter(
        pl.col("level") == "flow", pl.col("kind") == "Group", pl.col("step").is_not_null()
    )
    sent = rows.filter(pl.col("direction") == "tx")
    got = rows.filter(pl.col("direction") == "rx").select(
        "comm_id", "step", "expected_bytes", rank="peer_rank", peer_rank="rank"
    )
    both = sent.join(got, on=["comm_id", "step", "rank", "peer_rank"])
    same = both.filter((pl.col("expected_bytes") / pl.col("expected_bytes_right") - 1).abs() < 0.01)
    assert both.height > 50
    assert same.height == both.height == sent.height
