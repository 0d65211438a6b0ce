"""What counts as located: hand-made answers beside hand-made truths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.lab.scoring import LOCATED, Outcome, Score, score

NODES = 8
Json = dict[str, Any]


def _nic(node: int, nic: int = 0, kind: str = "nic-slow") -> Json:
    return {"kind": kind, "scope": "nic", "node": f"n{node}", "nic": f"mlx5_{nic}"}


def _gpu(node: int, gpu: int = 0, kind: str = "gpu-slow") -> Json:
    return {"kind": kind, "scope": "gpu", "node": f"n{node}", "gpu": gpu}


def _node(node: int, kind: str = "host-cpu", **more: object) -> Json:
    return {"kind": kind, "scope": "node", "node": f"n{node}", **more}


def _link(src: int, dst: int, nic: int = 0, kind: str = "lossy-link") -> Json:
    return {
        "kind": kind,
        "scope": "link",
        "node": f"n{src}",
        "nic": f"mlx5_{nic}",
        "peer_node": f"n{dst}",
        "peer_nic": f"mlx5_{nic}",
    }


def _group(*nodes: int) -> Json:
    return {"kind": "nic-slow", "scope": "group", "nodes": [f"n{node}" for node in nodes]}


def _network(*pairs: tuple[int, int], kind: str = "congestion") -> Json:
    flows = [
        {"node": f"n{a}", "nic": "mlx5_0", "qpn": 100 + a, "peer_node": f"n{b}", "peer_nic": "mlx5_0"}
        for a, b in pairs
    ]
    return {"kind": kind, "scope": "network", "flows": flows}


def _score(claims: list[Json], faults: list[Json]) -> Score:
    return score({"findings": claims}, {"faults": faults}, NODES)


def _outcome(claim: Json, fault: Json) -> Outcome:
    return _score([claim], [fault]).outcomes[0]


ALIKE = {**_nic(1), "indistinguishable_from": [_nic(2)]}


@pytest.mark.parametrize(
    ("claim", "fault", "outcome"),
    [
        (_nic(1), _nic(1), "exact"),
        (_nic(1, 3), _nic(1), "machine"),
        (_gpu(1), _nic(1), "machine"),
        (_node(1), _nic(1), "machine"),
        (_nic(2), _nic(1), "wrong"),
        (_gpu(1, 3), _gpu(1, 3), "exact"),
        (_node(1), _gpu(1, 3), "machine"),
        (_node(1), _node(1), "exact"),
        (_node(1, nic="mlx5_2"), _node(1), "exact"),
        (_nic(1), _node(1), "machine"),
        # A pair that nothing can tell apart is named by its link, or guessed at.
        (_link(1, 2), ALIKE, "exact"),
        (_link(2, 1), ALIKE, "exact"),
        (_group(1, 2), ALIKE, "exact"),
        (_link(1, 2), {**_nic(1), "indistinguishable_from": [{"node": "n2", "nic": "mlx5_0"}]}, "exact"),
        (_link(1, 2), {**_nic(1), "indistinguishable_from": [{"node": "n2", "nic": "mlx5_1"}]}, "group"),
        (_link(1, 3), ALIKE, "group"),
        (_nic(1), ALIKE, "exact"),
        (_nic(2), ALIKE, "wrong"),
        # What could have been told apart should have been.
        (_link(1, 2), _nic(1), "group"),
        (_link(3, 2), _nic(1), "wrong"),
        (_group(1, 2, 3), _gpu(1), "group"),
        (_group(2, 3), _gpu(1), "wrong"),
        (_group(*range(NODES)), _gpu(1), "wrong"),
        (_link(1, 2), _link(1, 2), "exact"),
        (_link(2, 1), _link(1, 2), "exact"),
        (_link(1, 2, nic=3), _link(1, 2), "group"),
        (_link(1, 3), _link(1, 2), "wrong"),
        (_group(1, 2, 3), _link(1, 2), "group"),
        (_group(*range(NODES)), _link(1, 2), "wrong"),
        (_nic(1), _link(1, 2), "wrong"),
        (_network((1, 2), (3, 4)), _network((1, 2), (3, 4)), "exact"),
        (_network((2, 1), (3, 4)), _network((1, 2), (3, 4)), "exact"),
        (_network((1, 2), (5, 6), (6, 7)), _network((1, 2), (3, 4)), "group"),
        (_network(), _network((1, 2)), "group"),
        (_link(1, 2), _network((1, 2)), "wrong"),
        (_network((1, 2)), _nic(1), "wrong"),
        ({**_node(1), "scope": "workload", "kind": "imbalance"}, _node(1), "missed"),
    ],
)
def test_one_claim_about_one_fault(claim: Json, fault: Json, outcome: Outcome) -> None:
    assert _outcome(claim, fault) == outcome


def test_nothing_found() -> None:
    assert _score([], [_nic(1), _gpu(2)]) == Score(["missed", "missed"], [False, False], 0, 0, 0)


def test_a_healthy_job() -> None:
    assert _score([], []) == Score([], [], 0, 0, 0)
    assert _score([_nic(1), _network()], []) == Score([], [], 2, 2, 1)
    assert _score([{**_node(1), "scope": "workload"}], []) == Score([], [], 0, 0, 0)


def test_a_workload_that_is_as_it_is_is_no_fault() -> None:
    uneven = {**_node(1), "scope": "workload", "kind": "uneven-stage"}
    assert _score([_gpu(1)], [uneven]) == Score([], [], 1, 1, 1)


def test_the_kind_is_judged_apart() -> None:
    assert _score([_nic(1, kind="pcie-slow")], [_nic(1)]) == Score(["exact"], [False], 1, 0, 0)
    assert _score([_nic(1)], [_nic(1)]).kinds_right == [True]


def test_what_comes_after_a_healthy_component_does_not_count() -> None:
    assert _score([_nic(5), _nic(1)], [_nic(1)]) == Score(["wrong"], [False], 2, 1, 1)
    assert _score([_nic(1), _nic(5)], [_nic(1)]) == Score(["exact"], [True], 2, 1, 1)


def test_each_claim_is_kept_with_how_sure_it_is() -> None:
    claims = [{**_nic(1), "confidence": 0.9}, {**_nic(5), "confidence": 0.6}]
    stated = [(each.kind, each.confidence, each.right) for each in _score(claims, [_nic(1)]).stated]
    assert stated == [("nic-slow", 0.9, True), ("nic-slow", 0.6, False)]


def test_the_better_of_two_answers_counts() -> None:
    assert _score([_node(1), _nic(1)], [_nic(1)]).outcomes == ["exact"]
    assert _score([_nic(1), _node(1)], [_nic(1)]).outcomes == ["exact"]


def test_a_healthy_part_of_a_faulty_machine_is_a_false_claim_but_no_healthy_machine() -> None:
    assert _score([_nic(1, 3)], [_nic(1)]) == Score(["machine"], [True], 1, 1, 0)
    assert _score([_node(1)], [_nic(1)]) == Score(["machine"], [False], 1, 0, 0)


def test_each_of_two_faults_has_its_outcome() -> None:
    faults = [_nic(1), _gpu(2, 4)]
    assert _score([_gpu(2, 4)], faults).outcomes == ["missed", "exact"]
    assert _score([_nic(1), _gpu(2, 4)], faults) == Score(["exact", "exact"], [True, True], 2, 0, 0)
    assert _score([_nic(1), _gpu(3)], faults) == Score(["exact", "wrong"], [True, False], 2, 1, 1)


def test_an_end_of_a_link_or_of_a_congested_flow_is_a_healthy_machine() -> None:
    assert _score([_nic(1)], [_link(1, 2)]).healthy_machines == 1
    assert _score([_nic(1)], [_network((1, 2))]).healthy_machines == 1
    assert _score([_network((1, 2))], [_nic(1)]).healthy_machines == 0


COMPONENTS = st.one_of(
    st.builds(_nic, st.integers(0, 7), st.integers(0, 7)),
    st.builds(_gpu, st.integers(0, 7), st.integers(0, 7)),
    st.builds(_node, st.integers(0, 7)),
    st.integers(0, 6).map(lambda src: _link(src, src + 1)),
    st.integers(0, 6).map(lambda src: _network((src, src + 1))),
)


@given(COMPONENTS)
def test_to_name_the_fault_itself_is_exact(fault: Json) -> None:
    assert _score([fault], [fault]) == Score(["exact"], [True], 1, 0, 0)


@given(st.lists(COMPONENTS, max_size=4), st.lists(COMPONENTS, max_size=3))
def test_the_counts_agree_with_each_other(claims: list[Json], faults: list[Json]) -> None:
    result = _score(claims, faults)
    located = sum(outcome in LOCATED for outcome in result.outcomes)
    assert result.healthy_machines <= result.false_claims <= result.claims == len(claims)
    assert sum(result.kinds_right) <= located
    if result.false_claims == 0:
        assert "wrong" not in result.outcomes
    if not claims:
        assert set(result.outcomes) <= {"missed"}
