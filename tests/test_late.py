"""Who comes late to operators by its own doing, from hand-made rows: one per process, operator and direction."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import comb

import polars as pl
import pytest

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.hosts import find_hosts
from pulse_bpf.analysis.lags import lags
from pulse_bpf.analysis.late import _chances, excesses, find_late
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.schema import empty

MS = 1_000_000
RANKS, STEPS, PERIOD_NS, SPAN_NS = 6, 12, 20 * MS, 5 * MS


def _rows(
    kind: str = "AllReduce",
    late_ns: Callable[[int, int], int] = lambda rank, step: 0,
    call_late_ns: Callable[[int, int], int] = lambda rank, step: 0,
    sent_bytes: Callable[[int, int], int] = lambda rank, step: 10_000_000,
    received: bool = True,
) -> pl.DataFrame:
    """STEPS operators in which each rank sends to the next one; all end SPAN_NS after the last has come."""
    rows: list[dict[str, object]] = []
    for step in range(STEPS):
        begin_ns = step * PERIOD_NS
        entries = [begin_ns + late_ns(rank, step) for rank in range(RANKS)]
        end_ns = max(entries) + SPAN_NS
        for rank in range(RANKS):
            ways = {"tx": (rank + 1) % RANKS} | ({"rx": (rank - 1) % RANKS} if received else {})
            for way, peer in ways.items():
                rows.append(
                    {
                        "level": "flow",
                        "node": f"node{rank}",
                        "nic": "mlx5_0",
                        "pid": 10 + rank,
                        "comm_id": "world",
                        "rank": rank,
                        "nranks": RANKS,
                        "peer_rank": peer,
                        "peer_node": f"node{peer}",
                        "direction": way,
                        "kind": kind,
                        "op_bytes": 10_000_000,
                        "op_seq": step,
                        "program_pos": step,
                        "nccl_seq": step,
                        "call_ns": begin_ns - MS + call_late_ns(rank, step),
                        "start_ns": entries[rank if way == "tx" else peer],
                        "last_byte_ns": end_ns,
                        "end_ns": end_ns,
                        "bin_ns": 20_000,
                        "bytes": sent_bytes(rank if way == "tx" else peer, step),
                    }
                )
    return _table(rows)


def _table(rows: list[dict[str, object]]) -> pl.DataFrame:
    frame = pl.DataFrame(rows)
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    )


def _longer(rows: pl.DataFrame) -> pl.DataFrame:
    """A recording in which 28 ms are little: before the last operator all pause."""
    pause_ns = pl.when(pl.col("op_seq") == STEPS - 1).then(25 * PERIOD_NS).otherwise(0)
    return rows.with_columns(pl.col("call_ns", "start_ns", "last_byte_ns", "end_ns") + pause_ns)


def _late(rows: pl.DataFrame, lost: int = 0) -> list[tuple[str | None, int]]:
    found = find_late(lags(align(rows), True), empty("comms"), None, True, lost)
    return [(finding.node, int(finding.lost_ns or 0)) for finding in found]


@pytest.mark.parametrize("kind", ["AllReduce", "Group"])
@pytest.mark.parametrize("received", [True, False])
def test_a_rank_that_is_late_after_its_own_previous_end_is_named(kind: str, received: bool) -> None:
    rows = _rows(kind, late_ns=lambda rank, step: 4 * MS if rank == 2 else 0, received=received)
    assert _late(rows) == [("node2", 4 * MS * (STEPS - 1))]


def test_a_machine_is_named_without_its_rank_where_it_is_unknown_to_whom_it_sent() -> None:
    """Two of its ranks may have sent by the late process, and channels say only which of them sends to whom."""
    rows = _rows(late_ns=lambda rank, step: 4 * MS if rank == 2 else 0).with_columns(
        peer_rank=pl.lit(None, pl.Int32)
    )
    node = {"node": "node2", "comm_id": "world", "nranks": RANKS}
    members = pl.DataFrame([node | {"rank": rank, "gpu": rank, "pid": 10 + rank} for rank in (2, 7)])
    channels = pl.DataFrame({"comm_id": ["world"] * 2, "rank": [2, 7], "ring_next": [3, 8]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (finding,) = find_late(lags(align(rows), True), members, channels, True, 0)
    assert (finding.node, finding.scope, finding.rank, finding.gpu) == ("node2", "node", None, None)


def test_nobody_is_named_when_all_are_equally_late() -> None:
    assert _late(_rows(late_ns=lambda rank, step: 4 * MS)) == []


def test_a_single_long_delay_is_enough_when_nobody_else_has_any() -> None:
    rows = _rows(late_ns=lambda rank, step: 15 * MS if (rank, step) == (1, 5) else 0)
    assert _late(rows) == [("node1", 15 * MS)]
    # A call that was lost looks like one.
    assert _late(rows, lost=1) == []
    elsewhere = _rows(late_ns=lambda rank, step: {(1, 5): 15 * MS, (3, 8): 12 * MS}.get((rank, step), 0))
    assert _late(elsewhere) == []


@pytest.mark.parametrize(("apart_ns", "named"), [(PERIOD_NS, ["node1"]), (100_000, [])])
def test_late_to_what_was_called_together_is_late_once(apart_ns: int, named: list[str]) -> None:
    """After a common pause, a rank that comes later than the others is late to all operators of that moment."""
    rows = _rows(late_ns=lambda rank, step: 4 * MS if rank == 1 and 3 <= step < 10 else 0)
    volley = pl.when(pl.col("op_seq").is_between(3, 9)).then(
        3 * PERIOD_NS - MS + (pl.col("op_seq").cast(pl.Int64) - 3) * apart_ns
    )
    rows = _longer(rows.with_columns(call_ns=volley.otherwise("call_ns")))
    assert [node for node, _ in _late(rows)] == named


@pytest.mark.parametrize(("times", "others", "named"), [(6, 0, []), (7, 0, ["node1"]), (7, 1, [])])
def test_a_machine_that_is_the_last_by_chance_is_not_slow(times: int, others: int, named: list[str]) -> None:
    """Somebody is the last after each pause; one of six machines too often in a row means something."""
    last = [1] * times + [4] * others

    rows = _rows(late_ns=lambda rank, step: 4 * MS if last[step - 2 : step - 1] == [rank] else 0)
    assert [node for node, _ in _late(_longer(rows))] == named


@pytest.mark.parametrize(
    ("wins", "volleys", "nodes"), [(1, 1, 2), (3, 4, 8), (10, 11, 2), (40, 60, 3), (2, 9, 8)]
)
@pytest.mark.parametrize("processes", [1, 8])
def test_the_chance_of_being_last_is_not_less_than_the_binomial_says(
    wins: int, volleys: int, nodes: int, processes: int
) -> None:
    """Node 0 is the last in `wins` volleys of two operators each, another of its processes each time."""
    keys = [(node, node * 100 + pid) for node in range(nodes) for pid in range(processes)]
    rows = [
        {"team": 0, "place": 2 * volley + half, "node": node, "pid": pid, "call_ns": volley * 10 * MS}
        | {"excess_ns": 2 if pid == (volley % processes if volley < wins else 100 * (nodes - 1)) else 0}
        for volley in range(volleys)
        for half in (0, 1)
        for node, pid in keys
    ]
    compared = pl.DataFrame(rows)
    chances = dict(_chances(compared.filter(pl.col("excess_ns") > 0), compared).iter_rows())

    def at_least(wins: int, among: int) -> float:
        tail = (
            comb(volleys, k) * (1 / among) ** k * (1 - 1 / among) ** (volleys - k)
            for k in range(wins, volleys + 1)
        )
        return min(1.0, among * sum(tail))

    most = max(sum(1 for volley in range(wins) if volley % processes == pid) for pid in range(processes))
    exact = min(at_least(wins, nodes), at_least(most, nodes * processes))
    assert exact <= chances[0] * (1 + 1e-9)
    assert chances[0] <= min(1.0, 2 * (volleys + 1) * exact)


def test_an_expert_with_more_tokens_is_no_slow_machine() -> None:
    """It computes longer before it sends, and sends more."""
    rows = _rows(
        "Group",
        late_ns=lambda rank, step: 6 * MS if rank == 2 else 2 * MS,
        sent_bytes=lambda rank, step: 40_000_000 if rank == 2 else 10_000_000,
    )
    assert _late(rows) == []


def test_a_rank_that_cannot_send_before_its_receiver_has_called_is_not_late() -> None:
    """Receiver 2 calls late, and so sends late; rank 1 sends late because of that alone."""
    rows = _rows(
        late_ns=lambda rank, step: 5 * MS if rank in (1, 2) else 0,
        call_late_ns=lambda rank, step: 5 * MS if rank == 2 else 0,
    )
    ranks = excesses(lags(align(rows), True), True)
    assert ranks.filter("waits")["rank"].unique().to_list() == [1]
    assert [node for node, _ in _late(rows)] == ["node2"]


def test_what_is_seen_in_bins_as_wide_as_operators_are_apart_says_nothing() -> None:
    rows = _rows(late_ns=lambda rank, step: 15 * MS if rank == 2 else 0)
    assert _late(rows.with_columns(bin_ns=pl.lit(10 * MS, pl.Int64))) == []


@pytest.mark.parametrize(("bins", "named"), [(4, []), (6, ["node2"])])
def test_late_is_more_than_cutting_may_be_off_by_in_wide_bins(bins: int, named: list[str]) -> None:
    rows = _rows(late_ns=lambda rank, step: bins * MS if rank == 2 else 0)
    found = _late(rows.with_columns(bin_ns=pl.lit(MS, pl.Int64)))
    assert [node for node, _ in found] == named


@pytest.mark.parametrize("missed", [1, 2, 5])
def test_calls_in_volleys_match_when_a_rank_was_seen_later_than_others(missed: int) -> None:
    """Within a volley calls are nearer to each other than ranks are apart."""
    calls = [
        {
            "comm_id": "ring",
            "rank": rank,
            "op_seq": volley * 7 + place - (missed if rank else 0),
            "kind": "Group",
            "call_ns": volley * 200 * MS + place * 30_000 + 40_000 * rank,
        }
        for rank in range(3)
        for volley in range(4)
        for place in range(7)
        if rank == 0 or volley * 7 + place >= missed
    ]
    apart = align(_table(calls)).group_by("step").agg(pl.col("call_ns").max() - pl.col("call_ns").min())
    assert apart["call_ns"].max() == 80_000


def test_a_process_that_stood_still_as_recording_began_ends_nothing_before_others_call() -> None:
    """Rank 0 calls each volley nearly a volley later than the others, which made their first calls before."""
    volley_calls, volley_ns = 20, 200 * MS
    rows = [
        {
            "comm_id": "ring",
            "rank": rank,
            "op_seq": volley * volley_calls + place - (volley_calls if rank else 0),
            "kind": "AllReduce",
            "call_ns": volley * volley_ns + place * 30_000 + (0 if rank else volley_ns - 40 * MS),
            "last_byte_ns": (volley + 1) * volley_ns - 35 * MS + place * MS,
            "bin_ns": 20_000,
        }
        for rank in range(3)
        for volley in range(5)
        for place in range(volley_calls)
        if rank == 0 or volley
    ]
    ends = align(_table(rows), 0).group_by("step").agg(pl.col("last_byte_ns").n_unique(), pl.len())
    assert ends["last_byte_ns"].to_list() == [1] * (5 * volley_calls)
    assert ends["len"].sum() == len(rows)


def test_what_a_process_is_late_on_several_communicators_in_turn_adds_up() -> None:
    """Once on each of two; once on one says too little."""

    def late(*steps: int) -> list[tuple[str | None, int]]:
        rows = _rows(late_ns=lambda rank, step: 7 * MS if rank == 2 and step in steps else 0)
        comm = pl.format("world{}", pl.col("program_pos") % 2)
        return _late(rows.with_columns(comm_id=comm, op_seq=pl.col("op_seq") // 2))

    assert late(4, 7) == [("node2", 14 * MS)]
    assert late(4) == late(7) == []


def test_stray_bytes_before_and_after_a_silence_are_no_part_of_an_operator() -> None:
    """Most ranks seem to begin right after the operator before and to end late, with a few bytes of control data."""
    rows = _rows(late_ns=lambda rank, step: 4 * MS if rank == 2 else 0)
    rows = rows.with_columns(first_stall_len_ns=pl.lit(10 * MS, pl.Int64))
    stray = pl.when(pl.col("start_ns") % PERIOD_NS == 0)
    before = rows.with_columns(
        start_ns=stray.then(pl.col("start_ns") - 10 * MS).otherwise("start_ns"),
        first_stall_ns=stray.then(pl.col("start_ns") - 10 * MS),
        first_stall_bytes=stray.then(160).cast(pl.UInt64),
    )
    assert [node for node, _ in _late(before)] == ["node2"]
    after = rows.with_columns(
        last_byte_ns=pl.col("last_byte_ns") + 10 * MS,
        first_stall_ns=pl.col("last_byte_ns"),
        first_stall_bytes=pl.col("bytes").cast(pl.UInt64) - 160,
    )
    assert [node for node, _ in _late(after)] == ["node2"]


def test_a_flow_that_was_cut_late_hides_no_late_rank() -> None:
    """Bytes of much later operators were taken for the last ones of one flow, at both its ends."""
    rows = _rows(late_ns=lambda rank, step: 4 * MS if rank == 2 else 0)
    edge = (pl.col("rank") == 4) & (pl.col("direction") == "tx") | (pl.col("rank") == 5) & (
        pl.col("direction") == "rx"
    )
    cut = rows.with_columns(
        last_byte_ns=pl.when(edge & (pl.col("op_seq") == 3)).then(8 * PERIOD_NS).otherwise("last_byte_ns")
    )
    assert [node for node, _ in _late(cut)] == ["node2"]


def test_who_sends_late_because_a_neighbour_held_it_up_before_is_not_late() -> None:
    """Round a ring of exchanges between neighbours all take 2 ms for their work; only who waits comes at once."""
    behind = {2: 8, 1: 2, 3: 2}
    rows = _rows("Group", late_ns=lambda rank, step: behind.get(rank, 0) * MS if step % 4 == 3 else 2 * MS)
    compared = excesses(lags(align(rows), True), True)
    assert set(compared.filter(pl.col("excess_ns") > MS)["rank"]) == {2}


def test_what_several_operators_wait_at_once_for_a_late_rank_counts_once() -> None:
    rows = _rows(late_ns=lambda rank, step: 6 * MS if rank == 2 else 0)
    several = [
        rows.with_columns(comm_id=pl.lit(f"world{place}"), program_pos=4 * pl.col("program_pos") + place)
        for place in range(4)
    ]
    assert _late(pl.concat(several)) == [("node2", 6 * MS * (STEPS - 1))]


@pytest.mark.parametrize(("one_clock", "named"), [(True, []), (False, ["node1"])])
def test_a_rank_whose_receiver_called_late_by_the_same_clock_is_not_late(
    one_clock: bool, named: list[str]
) -> None:
    """Receiver 2 still had to end what the others had ended before."""
    late = (5, 8)
    rows = _rows(
        late_ns=lambda rank, step: 12 * MS if rank in (1, 2) and step in late else 0,
        call_late_ns=lambda rank, step: 12 * MS if rank == 2 and step in late else 0,
    )
    ends_late = (pl.col("rank") == 2) & (pl.col("op_seq") + 1).is_in(late)
    rows = rows.with_columns(
        pl.when(ends_late).then(pl.col(name) + 12 * MS).otherwise(name).alias(name)
        for name in ("last_byte_ns", "end_ns")
    )
    found = find_late(lags(align(rows), one_clock), empty("comms"), None, one_clock, 0)
    assert [finding.node for finding in found] == named


def _both_ways(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows`, and the same with each rank's partner on the other side of it."""
    back = pl.when(pl.col("direction") == "tx").then(RANKS - 1).otherwise(1)
    other = ((pl.col("rank") + back) % RANKS).cast(pl.Int32)
    return pl.concat([rows, rows.with_columns(peer_rank=other, peer_node=pl.format("node{}", other))])


def test_partners_that_a_late_rank_holds_up_are_not_late_themselves() -> None:
    """Ranks 1 and 3 exchange with rank 2, which takes nothing yet, and with others, which come on time."""
    held = _rows("Group", late_ns=lambda rank, step: 12 * MS if rank in (1, 2, 3) and step % 3 == 1 else 0)
    assert [node for node, _ in _late(_both_ways(held))] == ["node2"]
    # Of two that are as late as each other, and whose other partners are not, either may hold up the other.
    two = _rows("Group", late_ns=lambda rank, step: 12 * MS if rank in (1, 2) and step % 3 == 1 else 0)
    assert _late(_both_ways(two)) == []


def test_a_small_sum_that_seems_to_end_long_before_says_nothing_of_the_operators_before_it() -> None:
    """Bytes of the first operator were taken for those of the sum after the last one."""
    rows = _rows(late_ns=lambda rank, step: 4 * MS if rank == 2 else 0)
    last = rows.filter(pl.col("op_seq") == STEPS - 1).with_columns(
        *(pl.lit(STEPS).cast(OPERATORS[name]).alias(name) for name in ("op_seq", "program_pos", "nccl_seq")),
        *(pl.lit(MS, pl.Int64).alias(name) for name in ("start_ns", "last_byte_ns", "end_ns")),
        op_bytes=pl.lit(4).cast(OPERATORS["op_bytes"]),
    )
    assert [node for node, _ in _late(pl.concat([rows, last]))] == ["node2"]


@pytest.mark.parametrize(("late_ms", "named"), [(6, ["node2"]), (0, [])])
def test_a_host_that_calls_late_after_it_waited_for_a_long_operator(late_ms: int, named: list[str]) -> None:
    """All but rank 2 call 1 ms after an operator ended, as a loop does that waits for each one."""
    late = {4: late_ms * MS, 8: late_ms * MS}
    rows = _rows(call_late_ns=lambda rank, step: -13 * MS + (late.get(step, 0) if rank == 2 else 0))
    ranks = lags(align(rows.with_columns(covered=pl.lit(True))), True)
    assert [finding.node for finding in find_hosts(ranks, True, 0)] == named


TREES = ({1: 0, 2: 1, 3: 1, 4: 0, 5: 4}, {2: 3, 0: 2, 1: 2, 5: 3, 4: 5})


@pytest.mark.parametrize(
    ("late", "named"), [(({0, 1, 2}, {2, 3}), ["node2"]), (({0, 1, 2}, set()), []), ((set(), set()), [])]
)
def test_in_trees_who_is_late_in_both_is_late_and_those_above_it_wait(
    late: tuple[set[int], set[int]], named: list[str]
) -> None:
    """Each node has a GPU and a NIC in each of two trees, and exchanges with all that are next to it there."""
    rows: list[dict[str, object]] = []
    for step in range(STEPS):
        begin_ns = step * PERIOD_NS
        for tree, above in enumerate(TREES):
            edges = [*above.items(), *((parent, child) for child, parent in above.items())]
            for node, peer in edges:
                for way in ("tx", "rx"):
                    first = node if way == "tx" else peer
                    rows.append(
                        {
                            "level": "flow",
                            "node": f"node{node}",
                            "nic": f"mlx5_{tree}",
                            "pid": 10 * node + tree,
                            "comm_id": "world",
                            "rank": 2 * node + tree,
                            "nranks": 12,
                            "peer_rank": 2 * peer + tree,
                            "peer_node": f"node{peer}",
                            "direction": way,
                            "kind": "AllReduce",
                            "op_bytes": 10_000_000,
                            "op_seq": step,
                            "program_pos": step,
                            "nccl_seq": step,
                            "call_ns": begin_ns - MS,
                            "start_ns": begin_ns + (4 * MS if first in late[tree] else 0),
                            "last_byte_ns": begin_ns + 9 * MS,
                            "end_ns": begin_ns + 9 * MS,
                            "bin_ns": 20_000,
                            "bytes": 10_000_000,
                        }
                    )
    assert [node for node, _ in _late(_table(rows))] == named
