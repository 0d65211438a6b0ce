"""What single pieces of evidence name, and what they do not: late calls, and causes beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from pulse_bpf.analysis import causes, metrics
from pulse_bpf.analysis.attribute import FLOWS
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.hosts import find_hosts
from pulse_bpf.analysis.loss import find_loss
from pulse_bpf.schema import EVENTS, empty

NODES = ("a", "b", "c", "d")
US, MS = 1_000, 1_000_000
OPERATORS = 60
STEP = pl.Schema({**metrics.OPERATORS, "step": pl.Int64})


def calls(late: dict[str, dict[int, int]]) -> pl.DataFrame:
    """Each node's rank calls an operator every 2 ms, `late` ones so many ms later; a sync every 20th waits for all."""
    rows = []
    done = dict.fromkeys(NODES, 0)
    for step in range(OPERATORS):
        for rank, node in enumerate(NODES):
            done[node] += 2 * MS + late.get(node, {}).get(step, 0) * MS
            rows.append(
                {
                    "node": node,
                    "pid": rank,
                    "rank": rank,
                    "comm_id": "00-4",
                    "kind": "AllReduce",
                    "step": step,
                    "team": "00-4",
                    "place": step,
                    "pipeline": False,
                }
                | {"program_pos": step, "call_ns": done[node], "own_end_ns": None, "covered": True}
            )
        if step % 20 == 19:
            done = dict.fromkeys(NODES, max(done.values()))
    return pl.DataFrame(rows, schema_overrides={"own_end_ns": pl.Int64})


def test_calls_in_time_name_no_host() -> None:
    assert find_hosts(calls({}), True, 0) == []


@pytest.mark.parametrize(
    ("late", "kind"),
    [({5: 4, 27: 6, 44: 3}, "host-cpu"), ({30: 40}, "host-pause"), ({5: 50, 25: 60}, "host-pause")],
)
def test_the_host_that_calls_late_now_and_then_is_named(late: dict[int, int], kind: str) -> None:
    ranks = calls({"c": late})
    (item,) = find_hosts(ranks, True, 0)
    assert (item.kind, item.scope, item.node, item.rank) == (kind, "node", "c", 2)
    assert find_hosts(ranks, True, lost=1) == []


def test_who_calls_late_often_is_named_where_nothing_else_is() -> None:
    """A process that shares its CPUs all the time looks like one that waits for a slow GPU, on the same machine."""
    every = calls({"c": {step: 4 for step in range(OPERATORS) if step % 20 < 7}})
    assert find_hosts(every, True, 0) == []
    (item,) = find_hosts(every, True, 0, often=True)
    assert (item.scope, item.node, item.confidence) == ("node", "c", 0.75)
    assert find_hosts(calls({"c": {5: 4, 27: 6, 44: 3}}), True, 0, often=True) == []


def test_few_late_calls_of_several_processes_name_their_machine() -> None:
    """Its processes are late once each; so little of the time that it hardly matters is not said."""
    ranks = calls({"c": {20: 5}})
    twins = ranks.with_columns(
        pid=pl.col("pid") + 10,
        rank=pl.col("rank") + 4,
        call_ns=pl.when((pl.col("node") == "c") & (pl.col("step") >= 20) & (pl.col("step") < 40))
        .then(pl.col("call_ns") - 5 * MS)
        .otherwise("call_ns"),
    )
    other = twins.with_columns(
        call_ns=pl.when((pl.col("node") == "c") & (pl.col("step") >= 50))
        .then(pl.col("call_ns") + 5 * MS)
        .otherwise("call_ns")
    )
    both = pl.concat([ranks, other])
    assert [item.node for item in find_hosts(both, True, 0)] == ["c"]
    assert find_hosts(ranks, True, 0) == []
    # The same in a recording that is much longer.
    last = (pl.col("step") == OPERATORS - 1) & pl.lit(True)
    longer = both.with_columns(call_ns=pl.when(last).then(10_000 * MS).otherwise("call_ns"))
    assert find_hosts(longer, True, 0) == []


def test_what_all_processes_of_a_machine_come_late_from_is_one_occasion() -> None:
    """As the end of a checkpoint is, which takes one machine a few milliseconds longer than the others."""
    ranks = calls({"c": {20: 5}})
    both = pl.concat([ranks, ranks.with_columns(pid=pl.col("pid") + 10, rank=pl.col("rank") + 4)])
    assert find_hosts(both, True, 0) == []


def test_a_call_is_not_late_by_what_the_operator_before_lasted() -> None:
    """A rank that got its last packet, or its last acknowledgement, late waits for that in its call."""
    ranks = calls({"c": {30: 40}})
    waits = (pl.col("node") == "c") & (pl.col("program_pos") == 29)
    ended = ranks.with_columns(own_end_ns=pl.col("call_ns") + pl.when(waits).then(41 * MS).otherwise(MS))
    assert find_hosts(ended, True, 0) == []
    (item,) = find_hosts(ranks.with_columns(own_end_ns=pl.col("call_ns") + MS), True, 0)
    assert item.node == "c"


def test_a_call_that_comes_with_the_others_is_not_late() -> None:
    """After a checkpoint all call at once: who had come to it earlier waited longer since the call before."""
    early = (9, 29, 49)
    came = (pl.col("node") == "c") & pl.col("program_pos").is_in(early)
    ranks = calls({}).with_columns(call_ns=10 * pl.col("call_ns") - pl.when(came).then(6 * MS).otherwise(0))
    # The others' operators are known to have ended just before they called the next; its own are not.
    ended = ranks.with_columns(own_end_ns=pl.when(pl.col("node") != "c").then(pl.col("call_ns") + 19 * MS))
    assert find_hosts(ended, True, 0) == []
    assert find_hosts(ended, False, 0) == []
    (item,) = find_hosts(calls({"c": dict.fromkeys(early, 6)}), True, 0)
    assert item.node == "c"


def test_a_pause_after_a_long_wait_is_late_where_many_ranks_call_at_once() -> None:
    """All wait long for what they called before, and then call at once, but for one that is late now and then."""
    nodes = [(name, local) for name in NODES for local in range(4)]
    rows = [
        {
            "node": node,
            "pid": 10 * NODES.index(node) + local,
            "rank": rank,
            "place": step,
            "program_pos": step,
        }
        | {"comm_id": "00-16", "kind": "AllReduce", "step": step, "team": "00-16", "pipeline": False}
        | {"call_ns": (100 * step + (rank * step % 7) / 10) * MS, "own_end_ns": None, "covered": True}
        for step in range(12)
        for rank, (node, local) in enumerate(nodes)
    ]
    ranks = pl.DataFrame(rows, schema_overrides={"own_end_ns": pl.Int64}).cast({"call_ns": pl.Int64})
    assert find_hosts(ranks, True, 0) == []
    late = (pl.col("rank") == 9) & pl.col("step").is_in([4, 8])
    paused = ranks.with_columns(call_ns=pl.col("call_ns") + pl.when(late).then(25 * MS).otherwise(0))
    (item,) = find_hosts(paused, True, 0)
    assert (item.kind, item.node, item.rank) == ("host-pause", "c", 9)
    assert find_hosts(paused, False, 0) == []
    # What is late each time may wait for its GPU; and where all differ as much, nobody is.
    each = pl.col("rank") == 9
    slow = ranks.with_columns(
        call_ns=pl.col("call_ns") + pl.when(each).then(25 * MS * (pl.col("step") % 2)).otherwise(0)
    )
    assert find_hosts(slow, True, 0) == []
    uneven = paused.with_columns(call_ns=pl.col("call_ns") + pl.col("rank") * pl.col("step") % 7 * MS)
    assert find_hosts(uneven, True, 0) == []


def test_what_ended_everywhere_before_the_others_called_is_not_waited_for() -> None:
    """Bytes of the next operator that were taken for those of the one before hide no pause."""
    ranks = calls({"c": {30: 40}})
    cut_late = (pl.col("node") == "c") & (pl.col("program_pos") == 29)
    ended = ranks.with_columns(own_end_ns=pl.col("call_ns") + pl.when(cut_late).then(46 * MS).otherwise(MS))
    (item,) = find_hosts(ended, True, 0)
    assert (item.kind, item.node) == ("host-pause", "c")


def test_nobody_is_late_while_nobody_watched_the_traffic() -> None:
    ranks = calls({"c": {30: 40}})
    assert find_hosts(ranks.with_columns(covered=pl.col("program_pos") > 35), True, 0) == []


def test_late_calls_on_two_machines_name_neither() -> None:
    assert find_hosts(calls({"a": {3: 5, 23: 5, 43: 5}, "c": {5: 5, 25: 5, 45: 5}}), True, 0) == []


def test_a_rank_matched_with_the_wrong_operators_is_not_late() -> None:
    """Its long gap at each sync is one operator off from the others', and it is never in step."""
    ranks = calls(
        {"a": {19: 100, 39: 100}, "b": {19: 100, 39: 100}, "c": {19: 100, 39: 100}, "d": {19: 100, 39: 100}}
    )
    shifted = ranks.with_columns(
        place=pl.when(pl.col("node") == "c").then(pl.col("place") - 1).otherwise("place"),
        call_ns=pl.when(pl.col("node") == "c").then(pl.col("call_ns") + 140 * MS).otherwise("call_ns"),
    )
    assert find_hosts(shifted, True, 0) == []


@pytest.mark.parametrize(
    ("hit", "named"),
    [
        ({"b": {1, 9}, "c": {4, 12}, "d": {6, 14}}, True),
        ({"b": {1, 9}, "c": {1, 9}, "d": {1, 9}}, False),
    ],
)
def test_rare_repeats_on_all_flows_of_a_port_are_its_loss(hit: dict[str, set[int]], named: bool) -> None:
    """Hardly any operator of a job that loses packets ends, and each has many flows; one bad moment is no loss."""
    rows = [
        {"node": source, "nic": "x", "peer_node": target, "peer_nic": "x", "direction": "tx", "level": "flow"}
        | {"call_ns": step * MS, "start_ns": step * MS, "last_byte_ns": step * MS + 1, "bytes": 100_000}
        | {"retx_bytes": 10_000 if source == "a" and step in hit[target] else 0}
        for source in NODES
        for target in NODES
        if target != source
        for step in range(20)
    ]
    ends = pl.DataFrame(schema={name: FLOWS[name] for name in FLOWS})
    found = find_loss(pl.DataFrame(rows, schema_overrides=STEP), pl.DataFrame(schema=EVENTS), ends)
    assert [(item.kind, item.scope, item.node) for item in found] == [("lossy-link", "nic", "a")] * named


@pytest.mark.parametrize(("mb", "scope"), [(0.1, "nic"), (10.0, "link")])
def test_a_flow_too_small_to_be_hit_by_loss_does_not_clear_its_port(mb: float, scope: str) -> None:
    """What "a" sends to "b" and "c" is lost now and then; of what it sends to "d", nothing was."""
    hit = {("a", "b"): 12, ("a", "c"): 1 if scope == "nic" else 0}
    sizes = {("a", "b"): 10.0, ("a", "c"): 1.0, ("a", "d"): mb}
    rows = [
        {"node": source, "nic": "x", "peer_node": target, "peer_nic": "x", "direction": "tx", "level": "flow"}
        | {"call_ns": step * MS, "start_ns": step * MS, "last_byte_ns": step * MS + 1}
        | {"bytes": int(sizes.get((source, target), 1.0) * 1e6) // 20}
        | {"retx_bytes": 100_000 if step < hit.get((source, target), 0) else 0}
        for source in NODES
        for target in NODES
        if target != source
        for step in range(20)
    ]
    ends = pl.DataFrame(schema={name: FLOWS[name] for name in FLOWS})
    (found,) = find_loss(pl.DataFrame(rows, schema_overrides=STEP), pl.DataFrame(schema=EVENTS), ends)
    assert (found.scope, found.node) == (scope, "a")


def _finding(kind: str, cause: Any, node: str) -> Finding:
    return Finding(kind, cause, "node", 0.9, 2.0, 0, 1, [], node=node, lost_ns=10)


RULES: dict[str, Any] = {
    **{rule: [] for rule in ("find_hosts", "find_loss", "find_marked", "find_refused", "find_capped")},
    **{rule: [] for rule in ("find_late", "find_behind", "find_held", "find_held_ports")},
    **{rule: [] for rule in ("find_inside", "lags")},
    "find_slow": ([], [], 0),
}


def _found(
    monkeypatch: pytest.MonkeyPatch, nics: pl.DataFrame | None = None, **said: Any
) -> tuple[list[Finding], list[str]]:
    """What is named where each rule says what is given by its name, and the others nothing."""
    for rule, answer in (RULES | said).items():
        monkeypatch.setattr(causes, rule, lambda *given, answer=answer, **how: answer)
    tables = {name: empty(name) for name in ("port_counters", "coverage", "events", "comms", "nics")}
    if nics is not None:
        tables["nics"] = nics
    rows = pl.DataFrame(schema={**metrics.OPERATORS, "step": pl.Int64})
    return causes.find_causes(rows, pl.DataFrame(schema=FLOWS), tables, [], True, 0)


@pytest.mark.parametrize(("ports", "late"), [(["a"], ["c"]), (["a", "b"], [])])
def test_who_is_late_beside_two_slow_ports_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, ports: list[str], late: list[str]
) -> None:
    capped = [_finding("nic-slow", "nic", node) for node in ports]
    found, why = _found(monkeypatch, find_capped=capped, find_late=[_finding("gpu-slow", "compute", "c")])
    assert [item.node for item in found] == ports + late
    assert why == []


@pytest.mark.parametrize(
    ("sure", "ports", "named"),
    [(0.9, [], ["c"]), (0.7, [], []), (0.9, ["a"], ["a", "c"]), (0.7, ["a"], ["a"]), (0.9, ["c"], ["c"])],
)
def test_who_is_surely_late_is_named_beside_what_seems_slow(
    monkeypatch: pytest.MonkeyPatch, sure: float, ports: list[str], named: list[str]
) -> None:
    late = [replace(_finding("gpu-slow", "compute", "c"), confidence=sure)]
    slow = [_finding("nic-slow", "nic", node) for node in ports]
    unexplained = [] if slow else ["some flows were slow"]
    found, why = _found(monkeypatch, find_late=late, find_slow=(slow, unexplained, 100))
    assert [item.node for item in found] == named
    assert bool(why) == (not named)


@pytest.mark.parametrize(("lost_ns", "named"), [(9, ["a"]), (11, ["c"])])
def test_calls_that_are_late_now_and_then_beside_a_port_that_costs_far_more_name_no_host(
    monkeypatch: pytest.MonkeyPatch, lost_ns: int, named: list[str]
) -> None:
    """A process of a busy machine comes late to a few calls, whatever else is wrong."""
    late = [replace(_finding("host-pause", "host", "c"), lost_ns=lost_ns)]
    slow = [_finding("nic-slow", "nic", "a")]
    found, _ = _found(monkeypatch, find_hosts=late, find_slow=(slow, [], 100))
    assert [item.node for item in found] == named


@pytest.mark.parametrize(("gbps", "named"), [(390.6, []), (300.0, ["a"])])
def test_a_port_that_sends_at_its_line_rate_is_not_slow_however_fast_others_seem(
    monkeypatch: pytest.MonkeyPatch, gbps: float, named: list[str]
) -> None:
    seen = [Evidence("burst_gbps", gbps, 614.2, 84, "")]
    slow = replace(_finding("nic-slow", "nic", "a"), scope="nic", nic="mlx5_0", evidence=seen)
    port = {"node": "a", "nic": "mlx5_0", "port": 1, "link_gbps": 400.0}
    nics = pl.concat([empty("nics"), pl.DataFrame([port])], how="diagonal_relaxed")
    found, why = _found(monkeypatch, find_slow=([slow], [], 100), nics=nics)
    assert [item.node for item in found] == named
    assert bool(why) == (not named)


@pytest.mark.parametrize(("end", "named"), [("c", [None]), ("b", [None, "c"])])
def test_an_end_of_a_slow_path_is_not_named_late(
    monkeypatch: pytest.MonkeyPatch, end: str, named: list[str | None]
) -> None:
    path = replace(
        _finding("path-collision", "network", "a"),
        scope="network",
        node=None,
        flows=[{"node": "a", "nic": "mlx5_0", "qpn": 1, "peer_node": end, "peer_nic": "mlx5_0"}],
    )
    late = [_finding("gpu-slow", "compute", "c")]
    found, _ = _found(monkeypatch, find_slow=([path], [], 100), find_late=late)
    assert [item.node for item in found] == named


@pytest.mark.parametrize(
    ("kind", "peer", "sure"),
    [
        ("Recv", "b", True),
        ("Recv", "unseen", False),
        ("Group", "unseen", False),
        ("AllReduce", "unseen", True),
    ],
)
def test_a_stage_is_not_surely_late_whose_neighbour_was_not_recorded(
    monkeypatch: pytest.MonkeyPatch, kind: str, peer: str, sure: bool
) -> None:
    """It may have waited for it, however little they exchange."""
    late = replace(
        _finding("gpu-slow", "compute", "a"), evidence=[Evidence("start_lag_ns", 1.0, 0.0, 9, "a is late")]
    )
    monkeypatch.setattr(causes, "_causes", lambda *given: ([late], []))
    made = [
        {"node": "a", "kind": "AllReduce", "peer_node": "b", "bytes": 10**9},
        {"node": "b", "kind": "AllReduce", "peer_node": "a", "bytes": 10**9},
        {"node": "a", "kind": kind, "peer_node": peer, "bytes": 10**6},
    ]
    rows = pl.DataFrame(
        [{"level": "flow", "direction": "rx"} | row for row in made], schema=metrics.OPERATORS
    )
    (found,), _ = causes.find_causes(rows, pl.DataFrame(schema=FLOWS), {}, [], True, 0)
    assert (found.confidence >= 0.5) == sure


def _port(node: str, nic: str = "mlx5_0") -> Finding:
    seen = [Evidence("ceiling_gbps", 200.0, 390.0, 40, "")]
    return replace(_finding("nic-slow", "nic", node), scope="nic", nic=nic, evidence=seen)


@pytest.mark.parametrize(
    ("held", "named"), [([], [("a", 0.4)]), (["c"], [("a", 0.9), ("c", 0.9)]), (["a"], [("a", 0.9)])]
)
def test_a_ceiling_that_holds_up_nothing_is_a_ports_where_what_holds_up_all_is_known_elsewhere(
    monkeypatch: pytest.MonkeyPatch, held: list[str], named: list[tuple[str, float]]
) -> None:
    monkeypatch.setattr(causes, "no_brake", lambda *given: True)
    monkeypatch.setattr(causes, "beside", lambda rows, port, machine: port.node == machine.node)
    machines = [_finding("intra-node-slow", "intra-node", node) for node in held]
    found, _ = _found(monkeypatch, find_capped=[_port("a")], find_held=machines)
    assert [(item.node, item.confidence) for item in found] == named


@pytest.mark.parametrize(("node", "nic"), [("b", "mlx5_1"), ("b", "mlx5_0"), ("a", "mlx5_1")])
@pytest.mark.parametrize("known", ["find_capped", "find_slow"])
def test_beside_a_slow_port_one_that_holds_up_another_ring_is_named(
    monkeypatch: pytest.MonkeyPatch, known: str, node: str, nic: str
) -> None:
    slow = [_port("a")]
    said = {known: slow if known == "find_capped" else (slow, [], 100), "find_held_ports": [_port(node, nic)]}
    found, _ = _found(monkeypatch, **said)
    assert [item.node for item in found] == (["a", "b"] if (node, nic) == ("b", "mlx5_1") else ["a"])


@pytest.mark.parametrize(("holds", "named"), [([], ["a"]), (["b"], ["a", "b"]), (["c"], ["a"])])
def test_a_port_that_holds_up_its_ring_itself_does_not_pass_on_what_another_sends(
    monkeypatch: pytest.MonkeyPatch, holds: list[str], named: list[str]
) -> None:
    monkeypatch.setattr(causes, "not_passed_on", lambda rows, channels, found, signals: found[:1])
    ports, holding = [_port("a"), _port("b")], [_port(node) for node in holds]
    found, _ = _found(monkeypatch, find_capped=ports, find_held_ports=holding)
    assert [item.node for item in found] == named
