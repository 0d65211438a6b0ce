"""Who stopped a job: on simulated jobs, and step by step on rows made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pulse_bpf.analysis import analyze, stuck
from pulse_bpf.analysis.gradient import is_ring, lowest
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.mismatch import find_mismatch
from pulse_bpf.analysis.silence import silence
from pulse_bpf.analysis.stops import find_stops
from pulse_bpf.analysis.waits import Waits, direct, few_ends
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.schema import empty

MS, MB = 1_000_000, 1_000_000
A, B, C, D = (("a", 1), ("b", 2), ("c", 3), ("d", 4))


@pytest.mark.parametrize(
    ("scenario", "workload", "source"),
    [
        ("hang-before", "dp", "diag+netlink"),
        ("hang-before", "megatron", "pcc"),
        ("hang-inside", "fsdp", "packets"),
        ("hang-kernel", "dp", "pcc"),
        ("hang-kernel", "moe-alltoall", "packets"),
        ("hang-kernel", "neighbour", "packets"),
        ("hang-kernel", "neighbour", "pcc"),
        ("crash", "neighbour", "packets"),
        ("mismatch", "megatron", "packets"),
        ("nic-down", "context", "diag+netlink"),
    ],
)
def test_the_machine_that_stopped_a_simulated_job_is_named_alone(
    scenario: str, workload: str, source: str, tmp_path: Path
) -> None:
    recording = tmp_path / "r"
    simulate(scenario, recording, seed=5, nodes=4, gpus=2, workload=workload, seconds=0.5, source=source)
    fault = json.loads((recording / "truth.json").read_text())["faults"][0]
    findings = analyze([recording])
    assert findings.verdict == "anomaly"
    assert [(found.kind, found.node) for found in findings.findings] == [(fault["kind"], fault["node"])]
    found = findings.findings[0]
    assert found.gpu in (None, fault.get("gpu"))
    assert found.nic in (None, fault.get("nic"))
    assert found.node is not None
    assert found.next_check is not None
    assert found.next_check.startswith(f"on {found.node}: ")
    assert fault["node"] not in found.victims
    if scenario == "mismatch":
        assert "while rank" in found.evidence[0].text


def rows(*made: dict[str, Any]) -> pl.DataFrame:
    """Operators (and `step`) of the columns given; of each `a` in "node" the process has pid 1, of b 2 and so on."""
    columns = {**OPERATORS, "step": pl.Int64}
    filled = [
        {"pid": ord(row["node"][0]) - 96, "level": "flow", "comm_id": "1-4", "bin_ns": MS, "covered": True}
        | row
        for row in made
    ]
    return pl.DataFrame(filled, schema=columns)


def ring(**sent: float) -> pl.DataFrame:
    """One operator of a ring in which each node, in their order, sent so many MB to the next, over one NIC."""
    names = list(sent)
    after = dict(zip(names, names[1:] + names[:1], strict=True))
    return rows(
        *(
            {
                "node": name,
                "nic": "n0",
                "rank": rank,
                "peer_node": after[name],
                "peer_rank": (rank + 1) % len(names),
            }
            | {"direction": "tx", "bytes": int(mega * MB), "step": 1, "nranks": len(names)}
            for rank, (name, mega) in enumerate(sent.items())
        )
    )


def test_after_a_gpu_that_stopped_each_sends_a_chunk_more_and_before_it_buffers_fill() -> None:
    found = lowest(ring(a=30, b=10, c=20, d=30))
    assert found is not None
    assert found.processes == [B]
    assert found.gpu


@pytest.mark.parametrize(
    "sent", [{"a": 30, "b": 10.0, "c": 10.5, "d": 20}, {"a": 40, "b": 40, "c": 10.0, "d": 20, "e": 30}]
)
def test_what_goes_into_a_stopped_process_ends_with_what_comes_out(sent: dict[str, float]) -> None:
    """Which of the two flows ended with fewer bytes is chance."""
    if "e" in sent:
        sent["b"] = 10.5
    found = lowest(ring(**sent))
    assert found is not None
    assert found.processes == [C]
    assert not found.gpu


def test_between_the_two_patterns_both_ends_of_the_lowest_edge_are_suspects() -> None:
    found = lowest(ring(a=30, b=10, c=17.2, d=24))
    assert found is not None
    assert found.processes == [B, C]


def test_with_several_channels_only_the_one_of_the_process_that_stopped_is_behind() -> None:
    other = ring(a=50, b=50, c=50, d=50).with_columns(nic=pl.lit("n1"), rank=pl.col("rank") + 4)
    found = lowest(pl.concat([ring(a=30, b=10, c=20, d=30), other.with_columns(pid=pl.col("pid") + 10)]))
    assert found is not None
    assert found.processes == [B]
    assert not found.gpu


def test_how_channels_differ_that_go_on_says_nothing_of_the_one_that_stopped() -> None:
    """They stand somewhere in the next operator, in no order, and what is seen at their two ends may differ."""
    other = ring(a=81, b=93, c=110, d=80, e=92).with_columns(
        pl.col("rank", "peer_rank") + 5, nic=pl.lit("n1"), pid=pl.col("pid") + 10
    )
    done = ring(a=50, b=50, c=50, d=50, e=50).with_columns(
        pl.col("rank", "peer_rank") + 10, nic=pl.lit("n2"), pid=pl.col("pid") + 20
    )
    ends = done.with_columns(direction=pl.lit("rx"), node="peer_node", peer_node="node", bytes=90 * MB)
    ends = ends.with_columns(rank="peer_rank", peer_rank="rank").cast({"bytes": pl.Int64})
    found = lowest(pl.concat([ring(a=60, b=30, c=40, d=45, e=120), other, done, ends]))
    assert found is not None
    assert found.processes == [C]
    assert lowest(pl.concat([ring(a=60, b=30, c=90, d=40, e=120), other])) is None


def test_in_a_ring_that_changes_nics_the_process_with_the_least_in_and_out_is_named() -> None:
    """Even nodes send by n1 in one ring and by n0 in the other; d's process of n0 stopped."""
    first = ring(a=26, b=12, c=10, d=20, e=30, f=28)
    second = ring(a=20, b=30, c=29, d=10, e=15, f=18)
    odd, even = pl.col("rank") % 2 == 1, pl.col("rank") % 2 == 0
    lanes = [
        pl.concat([first.filter(odd), second.filter(even)]).with_columns(nic=pl.lit("n1")),
        pl.concat([first.filter(even), second.filter(odd)]).sort("rank"),
    ]
    lanes[0] = lanes[0].with_columns(pl.col("rank", "peer_rank") + 6, pid=pl.col("pid") + 10).sort("rank")
    done = ring(a=50, b=50, c=50, d=50, e=50, f=50).with_columns(pl.col("rank", "peer_rank") + 12)
    lanes += [done.with_columns(nic=pl.lit("n2"), pid=pl.col("pid") + 20)]
    found = lowest(pl.concat(lanes))
    assert found is not None
    assert found.processes == [D]
    assert not found.gpu


def test_a_channel_that_is_behind_by_far_the_most_is_that_of_a_process_and_no_gpu() -> None:
    """The others differ as well, as they were stopped in the midst of it, and c has sent the least in all."""
    other = ring(a=54, b=52, c=41, d=50).with_columns(nic=pl.lit("n1"), rank=pl.col("rank") + 4)
    found = lowest(pl.concat([ring(a=50, b=30, c=40, d=60), other.with_columns(pid=pl.col("pid") + 10)]))
    assert found is not None
    assert found.processes[0][0] == "b"
    assert not found.gpu


@pytest.mark.parametrize(
    "sent",
    [
        {"a": 10, "b": 10, "c": 10, "d": 10},
        {"a": 10, "b": 40, "c": 12, "d": 45, "e": 20},
        {"a": 10, "b": 20},
        {"a": 410, "b": 210, "c": 310, "d": 410},
        {"a": 210, "b": 10, "c": 110, "d": 210},
    ],
)
def test_without_a_gradient_nobody_is_named(sent: dict[str, float]) -> None:
    assert lowest(ring(**sent)) is None


def test_ends_that_disagree_by_more_than_the_gradient_name_nobody() -> None:
    tx = ring(a=30, b=10, c=20, d=30)
    rx = tx.with_columns(
        direction=pl.lit("rx"),
        node="peer_node",
        peer_node="node",
        rank="peer_rank",
        peer_rank="rank",
        bytes=pl.when(pl.col("node") == "a").then(pl.col("bytes") + 20 * MB).otherwise("bytes"),
    )
    assert lowest(pl.concat([tx, rx])) is None
    agreeing = rx.with_columns(bytes=pl.when(pl.col("node") == "b").then(30 * MB).otherwise("bytes"))
    assert lowest(pl.concat([tx, agreeing])) is not None


def test_a_tree_is_no_ring() -> None:
    tree = ring(a=10, b=20, c=30, d=40)
    other = tree.filter(pl.col("node") == "a").with_columns(
        peer_node=pl.lit("c"), peer_rank=pl.lit(2, pl.Int32)
    )
    assert is_ring(tree)
    assert not is_ring(pl.concat([tree, other]))


def waits(held: list[tuple[Any, Any]], starved: list[tuple[Any, Any]], *local: set[Any]) -> Waits:
    made = Waits()
    for waiting, on in held:
        made.add(waiting, on, True)
    for waiting, on in starved:
        made.add(waiting, on, False)
    for group in local:
        made.add_local(group)
    return made


def test_waiting_is_walked_to_its_end() -> None:
    assert waits([(A, B), (B, C)], [(D, C)]).ends({}) == [{C}]


def test_what_is_proven_goes_before_what_only_got_nothing() -> None:
    assert waits([(A, B)], [(C, D)]).ends({}) == [{B}]
    assert waits([], [(A, B), (C, D)]).ends({}) == [{B}, {D}]


def test_of_a_star_of_pairs_it_is_the_one_in_all() -> None:
    both = [(A, B), (B, A), (B, C), (C, B)]
    assert waits([], both).ends({}) == [{B}]


def test_of_a_pair_it_is_the_one_that_moved_nothing_afterwards() -> None:
    pair = [(A, B), (B, A)]
    assert waits([], pair).ends({A: 5_000_000}) == [{B}]
    assert waits([], pair).ends({}) == [{A, B}]
    assert waits([], pair).ends({A: 5_000_000, B: 5_000_000}) == [{A, B}]


def test_of_a_pair_it_is_the_one_that_holds_up() -> None:
    assert waits([(A, B)], [(B, A)]).ends({}) == [{B}]


def test_what_is_not_proven_leads_nowhere_from_where_what_is_proven_ends() -> None:
    """a is in most pairs, but its second process provably waits on b, and on a all others do."""
    second = ("a", 9)
    unproven = [(B, A), (A, D), (D, A)]
    assert waits([(C, A), (D, A), (second, B)], unproven, {A, second}).ends({}) == [{B}]


def test_inside_a_node_one_waits_for_the_others() -> None:
    """a's second process waits on b by what is seen; its first one by what is not."""
    second = ("a", 9)
    assert waits([(C, A), (second, B)], []).ends({}) == [{A}, {B}]
    assert waits([(C, A), (second, B)], [], {A, second}).ends({}) == [{B}]


def pending(kind: str, *made: dict[str, Any]) -> pl.DataFrame:
    """First pending operators of ranks: `sent` share, and edges as (direction, peer, share, bytes in MiB)."""
    return pl.DataFrame(
        [
            {
                "rank": row["rank"],
                "kind": kind,
                "sent": row.get("sent"),
                "edges": [
                    {"direction": way, "peer_rank": peer, "share": share, "bytes": int(mebi * 2**20)}
                    for way, peer, share, mebi in row["edges"]
                ],
            }
            for row in made
        ],
        schema_overrides={"sent": pl.Float64},
    )


def held_and_starved(part: pl.DataFrame) -> tuple[set[Any], set[Any]]:
    made = Waits()
    assert direct(made, part, {0: A, 1: B, 2: C}, 0.002, "?")
    return made.held, made.starved


def test_a_sender_that_filled_the_slots_waits_on_its_receiver() -> None:
    one = {"rank": 0, "sent": 0.1, "edges": [("tx", 1, 0.1, 1.0), ("rx", 1, 0.0, 0.0)]}
    assert held_and_starved(pending("Group", one)) == ({(A, B)}, {(A, B)})


def test_where_more_passed_than_slots_hold_either_may_have_stopped() -> None:
    one = {"rank": 0, "sent": 0.4, "edges": [("tx", 1, 0.4, 3.6)]}
    assert held_and_starved(pending("Group", one)) == (set(), {(A, B), (B, A)})


def test_a_receiver_of_which_nothing_is_seen_may_have_stopped_as_well() -> None:
    sends = {"rank": 0, "sent": 0.0, "edges": [("tx", 1, 0.0, 0.0)]}
    mute = {"rank": 1, "edges": []}
    assert held_and_starved(pending("Group", sends, mute)) == (set(), {(A, B), (B, A)})
    done = {"rank": 1, "edges": [("rx", 0, 0.0, 0.0)]}
    assert held_and_starved(pending("Group", sends, done)) == (set(), {(B, A)})


def test_of_two_ranks_in_a_ring_the_one_that_sent_a_buffer_more_waits() -> None:
    ahead = {"rank": 0, "sent": 0.2, "edges": [("tx", 1, 0.2, 20.0), ("rx", 1, 0.16, 16.0)]}
    assert held_and_starved(pending("AllReduce", ahead)) == ({(A, B)}, set())
    even = {"rank": 0, "sent": 0.2, "edges": [("tx", 1, 0.2, 20.0), ("rx", 1, 0.19, 19.0)]}
    assert held_and_starved(pending("AllReduce", even)) == (set(), {(A, B), (B, A)})


def test_what_two_channels_hold_is_no_full_buffer_where_another_pair_has_one() -> None:
    sends = {"rank": 0, "sent": 0.2, "edges": [("tx", 1, 0.4, 2.0)]}
    other = {"rank": 2, "sent": 0.1, "edges": [("tx", 0, 0.2, 1.0)]}
    assert held_and_starved(pending("Group", sends)) == ({(A, B)}, set())
    assert held_and_starved(pending("Group", sends, other)) == ({(C, A)}, {(A, B), (B, A)})


def test_only_transfers_of_one_rank_or_two_that_are_open_were_told_apart_however_coarse() -> None:
    def open_to(hub: int, *others: int) -> list[dict[str, Any]]:
        return [{"rank": each, "edges": [("tx", hub, 0.3, 1.0)]} for each in others]

    assert few_ends(pending("AlltoAll", *open_to(0, 1, 2, 3, 4, 5, 6, 7)))
    assert few_ends(pending("Group", *open_to(0, 1, 2, 3, 4), *open_to(5, 0, 1, 2, 3)))
    assert not few_ends(pending("AlltoAll", *open_to(0, 1, 2, 3, 4, 5, 6, 7), *open_to(3, 4)))
    assert not few_ends(pending("AlltoAll", *open_to(0, 1, 2)))
    assert not few_ends(pending("AlltoAll", *(item for hub in range(5) for item in open_to(hub, 5, 6, 7))))


def test_an_all_to_all_in_which_several_ranks_moved_nothing_waits_for_something_else() -> None:
    """Of one rank's transfers there are rows, by a stray byte in one of them."""
    stray = {"rank": 0, "sent": 0.0, "edges": [("tx", 1, 0.0, 0.0), ("tx", 2, 0.0, 0.0), ("rx", 1, 0.0, 0.0)]}
    mute = [{"rank": rank, "edges": []} for rank in (1, 2)]
    assert held_and_starved(pending("AlltoAll", stray, *mute)) == (set(), set())
    assert held_and_starved(pending("AlltoAll", stray))[1] >= {(B, A)}


def test_several_receivers_of_one_sender_did_not_all_stop() -> None:
    one = {"rank": 0, "sent": 0.4, "edges": [("tx", 1, 0.4, 3.6), ("tx", 2, 0.3, 2.7)]}
    assert held_and_starved(pending("Group", one)) == ({(B, A), (C, A)}, set())


def test_several_ranks_of_which_none_sent_anything_wait_on_something_else() -> None:
    mute = [{"rank": rank, "sent": 0.0, "edges": [("tx", (rank + 1) % 3, 0.0, 0.0)]} for rank in range(3)]
    assert held_and_starved(pending("Group", *mute)) == (set(), set())
    assert held_and_starved(pending("Group", *mute[:2])) != (set(), set())


def test_ends_that_disagree_say_nothing() -> None:
    part = pending(
        "Group",
        {"rank": 0, "sent": 0.4, "edges": [("tx", 1, 0.4, 3.6)]},
        {"rank": 1, "edges": [("rx", 0, 0.6, 5.4)]},
    )
    assert not direct(Waits(), part, {0: A, 1: B}, 0.002, "?")


def test_a_rank_that_was_not_recorded_may_be_the_one() -> None:
    made = Waits()
    assert direct(
        made, pending("Group", {"rank": 0, "sent": 0.1, "edges": [("tx", 7, 0.1, 1.0)]}), {0: A}, 0.002, "?"
    )
    assert made.held == {(A, ("?", 7))}


@pytest.mark.parametrize("came", [0, 2**20])
def test_a_stage_to_which_nothing_came_waits_on_a_stage_before_it_whoever_waits_on_it(came: int) -> None:
    """c waits in a sum for a, which waits in a receive: for b, or b for a that does not take what b sends."""

    def flow(node: str, comm: str, way: str, peer: str, moved: int, **more: Any) -> dict[str, Any]:
        rank, peer_rank = sorted([node, peer]).index(node), sorted([node, peer]).index(peer)
        size = 4 * MB if comm == "1-2" else 160 * MB
        return {
            "node": node, "comm_id": comm, "direction": way, "nic": "n0", "rank": rank, "nranks": 2, "gpu": 0,
            "peer_node": peer, "peer_rank": peer_rank, "bytes": moved, "expected_bytes": size, "op_bytes": size,
            "completion": moved / size, "last_byte_ns": 0, "bin_ns": 1000, "max_gbps": 1.0,
        } | more  # fmt: skip

    made = [
        flow("a", "1-2", "rx", "b", 4 * MB, kind="Recv", program_pos=0),
        flow("b", "1-2", "tx", "a", 4 * MB, kind="Send", program_pos=0),
        *(
            flow(node, "2-2", way, peer, size, kind="AllReduce", program_pos=pos, step=pos)
            for node, peer in (("a", "c"), ("c", "a"))
            for pos, sent in ((1, 160 * MB), (3, 4 * 2**20))
            for way, size in (
                ("tx", sent if node == "c" or pos == 1 else 0),
                ("rx", sent if node == "a" or pos == 1 else 0),
            )
        ),
        flow("a", "1-2", "rx", "b", came, kind="Recv", program_pos=2, level="flow" if came else "call"),
        *([flow("b", "1-2", "tx", "a", came, kind="Send", program_pos=2)] if came else []),
    ]
    found = stuck._inside(rows(*made), stuck._pending(rows(*made)))
    if came:
        assert isinstance(found, stuck.Root)
        assert found.suspects == [A]
    else:
        assert isinstance(found, str)


def test_a_rank_of_which_nothing_was_recorded_may_be_held_by_the_one_that_stopped() -> None:
    """What an agent that is missing would have shown is known from its peers alone."""
    recorded = pl.DataFrame({"node": ["a"], "pid": [1], "rank": [0], "comm_id": ["00-2"]})
    root = stuck._root(recorded, waits([((stuck.UNRECORDED, 1), ("a", 1))], []), [], [("a", 1)], ["a"])
    assert root.evidence[0].text.startswith("rank 1, of which nothing was recorded, and 0 others are held in")


def test_a_communicator_most_of_whose_ranks_never_move_a_byte_has_the_wrong_bytes() -> None:
    made = ring(a=30, b=10, c=20, d=30, e=10)
    silent = pl.when(pl.col("rank") < 2).then("bytes").otherwise(0).alias("bytes")
    assert not stuck._astray(made)
    assert stuck._astray(made.with_columns(silent))
    inside = made.with_columns(silent, node=pl.lit("a"))
    assert not stuck._astray(inside)


def calls(**kinds: str) -> pl.DataFrame:
    """The calls of each node's process on one communicator: a letter each, another letter another size."""
    return rows(
        *(
            {"node": node, "rank": rank, "level": "call", "kind": "AllReduce", "op_bytes": ord(letter) * 1000}
            | {"op_seq": place, "program_pos": place, "nccl_seq": place, "call_ns": (place + 1) * MS}
            for rank, (node, letters) in enumerate(kinds.items())
            for place, letter in enumerate(letters)
        )
    )


def test_the_rank_whose_call_differs_from_the_others_is_named_with_both_calls() -> None:
    found = find_mismatch(calls(a="xyzxyz", b="xyzxyz", c="xyxyz", d="xyzxyz"), False)
    assert found is not None
    assert found.suspects == [C]
    assert "Call number 2" in found.evidence[0].text
    assert "rank 2 calls AllReduce of 120,000 bytes" in found.evidence[0].text
    assert "ranks 0, 1, 3 call AllReduce of 122,000 bytes" in found.evidence[0].text


def test_a_size_that_is_not_known_is_no_other_size() -> None:
    made = calls(a="xyzxyz", b="xyzxyz", c="xyxyz", d="xyzxyz")
    unknown = (pl.col("node") == "c") & (pl.col("op_seq") == 1)
    alike = calls(a="xyzxyz", b="xyzxyz", c="xyzxyz", d="xyzxyz")
    sizes = pl.when(~unknown).then("op_bytes").alias("op_bytes")
    assert find_mismatch(alike, False) is None
    assert find_mismatch(alike.with_columns(sizes), False) is None
    assert find_mismatch(made.with_columns(sizes), False) is None
    kinds = pl.when(unknown).then(pl.lit("Broadcast")).otherwise("kind").alias("kind")
    found = find_mismatch(alike.with_columns(sizes, kinds), False)
    assert found is not None
    assert found.suspects == [C]


def test_calls_are_counted_where_nccl_does_not_unless_some_were_lost() -> None:
    uncounted = calls(a="xyzwxyzw", b="yzwxyzw", c="xyzwxzw", d="xyzwxyzw").with_columns(
        nccl_seq=pl.lit(None, pl.UInt64)
    )
    found = find_mismatch(uncounted, False)
    assert found is not None
    assert found.suspects == [C]
    assert find_mismatch(uncounted, True) is None
    assert find_mismatch(uncounted.filter(pl.col("node") != "c"), False) is None


def test_sequences_that_no_single_change_explains_are_no_mismatch() -> None:
    late = calls(a="xyzwvxyzwv", b="xyzwxyvwzv").with_columns(nccl_seq=pl.lit(None, pl.UInt64))
    assert find_mismatch(late, False) is None


def test_of_two_ranks_both_are_named_unless_a_third_process_does_as_one() -> None:
    two = calls(a="xyzxyzxyz", b="xyzxzxyz")
    found = find_mismatch(two, False)
    assert found is not None
    assert found.suspects == [A, B]
    other = two.filter(pl.col("node") == "a").with_columns(
        node=pl.lit("c"), pid=pl.lit(3, pl.Int64), comm_id=pl.lit("2-4"), rank=pl.lit(2, pl.Int32)
    )
    found = find_mismatch(pl.concat([two, other]), False)
    assert found is not None
    assert found.suspects == [B]


def busy(node: str, *spans: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"node": node, "start_ns": a * MS, "last_byte_ns": b * MS, "call_ns": a * MS} for a, b in spans]


def test_a_job_is_silent_when_all_its_nodes_are_for_longer_than_they_ever_paused() -> None:
    until = pl.DataFrame({"node": ["a", "b"], "until_ns": [200 * MS, 1200 * MS]})
    spans = [(0, 40), (60, 100)]
    there = busy("a", *spans)
    # b's clock is a second ahead.
    other = busy("b", *((1000 + begin, 1000 + end) for begin, end in spans))
    found = silence(rows(*there, *other), until)
    assert found is not None
    assert (found.end_ns - found.since_ns, found.longest_ns) == (100 * MS, 20 * MS)
    assert silence(rows(*there, *other, *busy("b", (1170, 1180))), until) is None
    assert silence(rows(*busy("a", (0, 10), (90, 100))), until) is None


def job(**last: int) -> pl.DataFrame:
    """Calls every 10 ms on one communicator of which each node's rank made so many, and no traffic."""
    return calls(**{node: "x" * count for node, count in last.items()}).with_columns(
        step=pl.col("op_seq").cast(pl.Int64), call_ns=pl.col("call_ns") * 10
    )


def stops(
    aligned: pl.DataFrame, end_ms: int, gone: dict[str, int] | None = None, lost: int = 0
) -> list[tuple[str, str | None]]:
    tables = {name: empty(name) for name in ("processes", "coverage", "events")}
    if lost:
        calls_lost = pl.DataFrame(
            {"node": ["b"], "lost": [lost]}, schema={"node": pl.String, "lost": pl.UInt64}
        )
        tables["coverage"] = pl.concat([empty("coverage"), calls_lost], how="diagonal")
    tables["processes"] = pl.concat(
        [
            empty("processes"),
            pl.DataFrame(
                [
                    {"node": node, "pid": ord(node) - 96, "gone_ns": None if gone is None else gone.get(node)}
                    for node in aligned["node"].unique()
                ],
                schema={"node": pl.String, "pid": pl.Int64, "gone_ns": pl.Int64},
            ),
        ],
        how="diagonal",
    )
    return [(item.kind, item.node) for item in find_stops(aligned, tables, end_ms * MS).findings]


def test_who_never_called_is_named_and_nobody_where_all_called() -> None:
    assert stops(job(a=12, b=11, c=12, d=12), 300) == [("hang", "b")]
    assert stops(job(a=12, b=12, c=12, d=12), 300) == []
    assert stops(job(a=12, b=11, c=11, d=11), 300) == []


def test_a_rank_behind_is_no_hang_before_it_is_so_for_longer_than_it_paused() -> None:
    """The job goes on, by its calls; b's last one was 10 or 60 ms before the end, as long as it ever paused or more."""
    assert stops(job(a=12, b=11, c=12, d=12), 121) == []
    assert stops(job(a=30, b=11, c=30, d=30), 301) == [("hang", "b")]


def test_where_calls_were_lost_a_rank_behind_in_a_job_that_goes_on_is_no_hang() -> None:
    assert stops(job(a=30, b=11, c=30, d=30), 301, lost=1) == []


def test_the_first_process_to_go_crashed_and_those_that_end_together_did_not() -> None:
    silent = job(a=12, b=11, c=12, d=12)
    assert stops(silent, 9000, {"c": 125 * MS}) == [("crash", "c")]
    assert stops(silent, 9000, {"c": 125 * MS, "a": 8000 * MS}) == [("crash", "c")]
    together = dict.fromkeys("abcd", 130 * MS)
    assert stops(job(a=12, b=12, c=12, d=12), 9000, together) == []


def test_two_jobs_are_judged_apart() -> None:
    second = job(e=12, f=12).with_columns(comm_id=pl.lit("9-2"))
    assert stops(pl.concat([job(a=12, b=11, c=12, d=12), second]), 300) == [("hang", "b")]
