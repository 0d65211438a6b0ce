"""Who is behind all with whom it exchanges, from a ring of ranks that hand blocks on to each other."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.behind import find_behind
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.lags import lags
from pulse_bpf.analysis.late import find_late
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.schema import empty

MS = 1_000_000
RANKS, STEPS, WIDE_NS = 8, 96, 10 * MS
COMPUTE_NS, TRANSFER_NS, BLOCK = 3 * MS, 1_300_000, 10_000_000
# After so many steps all wait for each other, as for the sum of an iteration.
ITERATION = 12


def _ring(
    kind: str = "Group",
    compute_ns: Callable[[int, int], int] = lambda rank, step: COMPUTE_NS,
    transfer_ns: Callable[[int], int] = lambda sender: TRANSFER_NS,
    drained_ns: Callable[[int], int] = lambda rank: 0,
    sent: Callable[[int, int], int] = lambda rank, step: BLOCK,
    numbered: Callable[[int, int], int] = lambda rank, step: step,
    bin_ns: int = WIDE_NS,
) -> pl.DataFrame:
    """Each rank computes, then exchanges with the next and the one before, or with all; both ends of a transfer end
    together, but for what `drained_ns` a rank gets later than its sender is done."""
    rows: list[dict[str, object]] = []
    free = [0] * RANKS
    for step in range(STEPS):
        if step % ITERATION == 0:
            free = [max(free)] * RANKS
        entry = [free[rank] + compute_ns(rank, step) for rank in range(RANKS)]
        ends = list(entry)
        with_whom = {rank: [1] if kind == "Group" else list(range(1, RANKS)) for rank in range(RANKS)}
        for rank, distances in with_whom.items():
            for distance in distances:
                to = (rank + distance) % RANKS
                end_ns = max(entry[rank], entry[to]) + transfer_ns(rank)
                ends[rank], ends[to] = max(ends[rank], end_ns), max(ends[to], end_ns + drained_ns(to))
        for rank, distances in with_whom.items():
            for way, sign in (("tx", 1), ("rx", -1)):
                for distance in distances:
                    peer = (rank + sign * distance) % RANKS
                    start_ns = entry[rank] if way == "tx" else max(entry[rank], entry[peer])
                    rows.append(
                        {
                            "level": "flow",
                            "node": f"node{rank}",
                            "nic": "mlx5_0",
                            "pid": 10 + rank,
                            "comm_id": "ring",
                            "rank": rank,
                            "nranks": RANKS,
                            "peer_rank": peer,
                            "peer_node": f"node{peer}",
                            "direction": way,
                            "kind": kind,
                            "op_bytes": None if kind == "Group" else BLOCK,
                            "op_seq": numbered(rank, step),
                            "program_pos": step,
                            "nccl_seq": numbered(rank, step),
                            "call_ns": step,
                            "start_ns": start_ns // bin_ns * bin_ns,
                            "last_byte_ns": ends[rank] // bin_ns * bin_ns + bin_ns,
                            "end_ns": ends[rank] // bin_ns * bin_ns + bin_ns,
                            "bin_ns": bin_ns,
                            "bytes": sent(rank if way == "tx" else peer, step),
                        }
                    )
        free = ends
    frame = pl.DataFrame(rows)
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    )


def _behind(rows: pl.DataFrame, clock_error_ns: int | None = 1000) -> list[Finding]:
    members = pl.DataFrame(
        [{"comm_id": "ring", "node": f"node{rank}", "rank": rank, "gpu": 5} for rank in range(RANKS)]
    )
    return find_behind(lags(align(rows), True), members, clock_error_ns)


def _slow(rank: int, step: int) -> int:
    return 3 * COMPUTE_NS if rank == 2 else COMPUTE_NS


@pytest.mark.parametrize("kind", ["Group", "AlltoAll"])
@pytest.mark.parametrize("bin_ns", [100_000, WIDE_NS])
def test_who_holds_up_a_wave_of_exchanges_is_named_whatever_the_bins(kind: str, bin_ns: int) -> None:
    rows = _ring(kind, _slow, bin_ns=bin_ns)
    (finding,) = _behind(rows)
    assert (finding.node, finding.gpu, finding.kind) == ("node2", 5, "gpu-slow")
    assert finding.lost_ns == pytest.approx(STEPS * 2 * COMPUTE_NS, rel=0.3)
    if bin_ns == WIDE_NS:
        assert not find_late(lags(align(rows), True), empty("comms"), None, True, 0)


@pytest.mark.parametrize("clock_error_ns", [None, 2 * COMPUTE_NS])
def test_clocks_that_may_be_as_far_apart_as_a_rank_is_behind_name_nobody(clock_error_ns: int | None) -> None:
    assert _behind(_ring(compute_ns=_slow), clock_error_ns) == []


def test_what_all_have_to_do_and_what_now_one_and_now_another_has_more_names_nobody() -> None:
    assert _behind(_ring()) == []
    in_turn = _ring(compute_ns=lambda rank, step: 3 * COMPUTE_NS if step % RANKS == rank else COMPUTE_NS)
    assert _behind(in_turn) == []


def test_a_slow_transfer_holds_both_its_ends() -> None:
    assert _behind(_ring(transfer_ns=lambda sender: 8 * TRANSFER_NS if sender == 2 else TRANSFER_NS)) == []


def test_who_gets_the_last_bytes_when_its_partners_are_done_is_not_late() -> None:
    drained = _ring("AlltoAll", drained_ns=lambda rank: 2 * COMPUTE_NS if rank == 2 else 0, bin_ns=100_000)
    assert _behind(drained) == []


def test_experts_of_unequal_load_are_not_compared() -> None:
    assert _behind(_ring("AlltoAll", _slow, sent=lambda rank, step: BLOCK * (10 + rank) // 10)) == []


def test_a_rank_whose_operators_were_taken_for_the_ones_before_is_not_behind() -> None:
    rows = _ring(numbered=lambda rank, step: max(0, step - 1) if rank == 2 else step, bin_ns=100_000)
    assert _behind(rows) == []


def test_a_rank_whose_exchanges_were_taken_two_for_one_is_not_behind() -> None:
    assert _behind(_ring(compute_ns=_slow, sent=lambda rank, step: (1 + (rank == 2)) * BLOCK)) == []
