"""The log of findings: a fault is one finding for as long as it lasts, also after a crash at any byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from findings import SECOND_NS, finding
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.errors import HostError
from pulse_bpf.live import findings_log
from pulse_bpf.live.findings_log import Event, FindingsLog

HANG = finding(kind="hang", cause="stop", scope="node", node="node1", nic=None)
SUSPECTS = {"kind": "gpu-slow", "cause": "compute", "nic": None}


@pytest.fixture
def log(tmp_path: Path) -> FindingsLog:
    return FindingsLog(tmp_path / "findings.jsonl")


def verdicts(
    log: FindingsLog,
    findings: list[dict[str, Any]],
    first_s: float,
    last_s: float,
    seen: list[str] | None = None,
) -> list[Event]:
    """The events of a verdict each half second, the last second included."""
    times = range(round(2 * first_s), round(2 * last_s) + 1)
    return [event for half in times for event in log.update("job", findings, half * SECOND_NS // 2, seen)]


def states(events: list[Event]) -> list[str]:
    return [event["state"] for event in events]


def test_a_fault_opens_when_it_is_seen_again_and_closes_when_it_was_absent_for_long(log: FindingsLog) -> None:
    assert log.update("job", [finding()], 10 * SECOND_NS) == []
    (opened,) = log.update("job", [finding()], 10 * SECOND_NS + 1)
    assert opened["state"] == "opened"
    assert opened["opened_ns"] == opened["at_ns"] == 10 * SECOND_NS + 1
    assert opened["finding"] == finding()
    assert log.open() == log.open("job") == [opened]
    assert log.open("another") == []
    assert verdicts(log, [finding()], 11, 20) == []
    assert verdicts(log, [], 20.5, 49.5) == []
    (closed,) = verdicts(log, [], 50, 50)
    assert closed == {**opened, "state": "closed", "at_ns": 50 * SECOND_NS}
    assert log.open() == []
    again = verdicts(log, [finding()], 60, 62)
    assert states(again) == ["opened"]
    assert again[0]["id"] != opened["id"]


def test_what_few_operators_say_opens_later(log: FindingsLog) -> None:
    few = finding(evidence=[{**finding()["evidence"][0], "operators": 5}])
    assert verdicts(log, [few], 0, 0.5) == []
    assert states(verdicts(log, [few], 1, 1)) == ["opened"]
    counted = finding(kind="nic-down", evidence=[{**finding()["evidence"][0], "operators": 0}])
    assert states(verdicts(log, [counted], 10, 10.5)) == ["opened"]


def test_what_is_seen_once_is_a_coincidence(log: FindingsLog) -> None:
    for second in range(0, 60, 2):
        assert verdicts(log, [finding()], second, second) == []
        assert verdicts(log, [], second + 0.5, second + 1.5) == []


def test_what_is_not_sure_enough_does_not_open_but_stays_open(log: FindingsLog) -> None:
    doubtful = finding(confidence=findings_log.MIN_CONFIDENCE - 0.01)
    assert verdicts(log, [doubtful], 0, 10) == []
    assert states(verdicts(log, [finding()], 10, 11)) == ["opened"]
    assert "closed" not in states(verdicts(log, [doubtful], 11.5, 90))


def test_a_short_gap_leaves_it_open(log: FindingsLog) -> None:
    assert states(verdicts(log, [finding()], 0, 5)) == ["opened"]
    for second in range(6, 200, 25):
        assert verdicts(log, [], second, second + 23) == []
        assert verdicts(log, [finding()], second + 24, second + 24) == []


def test_a_stop_opens_at_once(log: FindingsLog) -> None:
    assert states(log.update("job", [HANG], SECOND_NS)) == ["opened"]


def test_nothing_is_closed_by_what_was_not_seen(log: FindingsLog) -> None:
    assert states(verdicts(log, [finding()], 0, 5)) == ["opened"]
    assert verdicts(log, [], 5.5, 300, ["node0", "node1"]) == []
    assert verdicts(log, [], 300.5, 600, []) == []
    # Between verdicts nobody looked, whatever the clock says.
    assert log.update("job", [], 9_000 * SECOND_NS) == []
    assert log.update("job", [], 10 * SECOND_NS) == []
    assert states(verdicts(log, [], 10.5, 60, ["node3"])) == ["closed"]


def test_a_finding_on_no_machine_is_closed_by_any_that_was_seen(log: FindingsLog) -> None:
    congestion = finding(kind="congestion", cause="network", scope="network", node=None, nic=None)
    assert states(verdicts(log, [congestion], 0, 5)) == ["opened"]
    assert verdicts(log, [], 5.5, 100, []) == []
    assert states(verdicts(log, [], 100.5, 140, ["node0"])) == ["closed"]


def test_only_what_changes_much_is_told_and_not_too_often(log: FindingsLog) -> None:
    verdicts(log, [finding()], 0, 1)
    assert verdicts(log, [finding(slowdown=2.2, confidence=0.85, last_ns=7)], 1.5, 20) == []
    more = [finding()["evidence"][0], {**finding()["evidence"][0], "metric": "bin_cv"}]
    for changed in (finding(slowdown=3.0), finding(confidence=0.7), finding(evidence=more)):
        (event,) = log.update("job", [changed], 30 * SECOND_NS)
        assert event["state"] == "updated"
        assert event["finding"] == changed
        assert log.open() == [event]
        assert log.update("job", [finding()], 31 * SECOND_NS) == []
        assert states(log.update("job", [finding()], 36 * SECOND_NS)) == ["updated"]


def test_suspects_that_are_narrowed_down_are_one_finding(log: FindingsLog) -> None:
    group = finding(scope="group", node=None, nodes=["node1", "node2"], **SUSPECTS)
    node = finding(scope="node", node="node2", **SUSPECTS)
    gpu = finding(scope="gpu", node="node2", gpu=5, **SUSPECTS)
    (opened,) = verdicts(log, [group], 0, 5)
    assert log.update("job", [node], 20 * SECOND_NS) == []  # one verdict names nobody
    events = verdicts(log, [node], 20.5, 30) + verdicts(log, [gpu], 30.5, 40)
    assert states(events) == ["updated", "updated"]
    assert {event["id"] for event in events} == {opened["id"]}
    assert [event["finding"]["scope"] for event in events] == ["node", "gpu"]
    other = finding(scope="gpu", node="node2", gpu=6, **SUSPECTS)
    assert states(verdicts(log, [gpu, other], 40.5, 45)) == ["opened"]


def test_a_fault_whose_kind_becomes_known_is_one_finding_and_told_at_once(log: FindingsLog) -> None:
    link = {"scope": "link", "node": "node1", "nic": "mlx5_3", "peer_node": "node2", "peer_nic": "mlx5_3"}
    unknown = finding(kind="unknown", cause="network", **link)
    port = finding(kind="nic-slow", cause="nic", scope="nic", node="node1", nic="mlx5_3")
    (opened,) = verdicts(log, [unknown], 0, 2)
    events = verdicts(log, [port], 2.5, 5)
    assert [(event["state"], event["id"]) for event in events] == [("updated", opened["id"])]
    assert events[0]["finding"]["kind"] == "nic-slow"
    assert verdicts(log, [unknown], 5.5, 40) == []


def test_a_link_is_the_same_from_both_ends(log: FindingsLog) -> None:
    link = {"kind": "lossy-link", "cause": "network", "scope": "link", "nic": None}
    there = finding(**link, node="node1", peer_node="node2")
    back = finding(**link, node="node2", peer_node="node1")
    assert states(verdicts(log, [there], 0, 1)) == ["opened"]
    assert "opened" not in states(verdicts(log, [back], 1.5, 90))
    assert len(log.open()) == 1


def test_jobs_have_findings_of_their_own(log: FindingsLog) -> None:
    for at_ns in (0, SECOND_NS):
        log.update("one", [finding()], at_ns)
        log.update("two", [finding()], at_ns)
    assert [event["job"] for event in log.open()] == ["one", "two"]
    assert states(log.end("one", 2 * SECOND_NS)) == ["closed"]
    assert [event["job"] for event in log.open()] == ["two"]


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "findings.jsonl"
    log = FindingsLog(path)
    log.update("job", [HANG], 0)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        log.update("job", [finding()], SECOND_NS)
        for second in (2, 3):
            with pytest.raises(HostError, match="No space left"):
                log.update("job", [finding()], second * SECOND_NS)
            assert len(log.open()) == 1
    assert states(log.update("job", [finding()], 4 * SECOND_NS)) == ["opened"]
    assert path.read_bytes().startswith(before)
    assert FindingsLog(path).open() == log.open()
    assert FindingsLog(path).skipped == 0


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot keep the findings"):
        FindingsLog(tmp_path / "none/findings.jsonl").update("job", [HANG], 0)


def test_a_long_log_is_put_aside_with_what_is_open_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings_log, "LONGEST_LOG_BYTES", 4000)
    path = tmp_path / "findings.jsonl"
    log = FindingsLog(path)
    verdicts(log, [finding()], 0, 1)
    for number in range(200):
        log.update("other", [HANG], number)
        log.end("other", number)
    assert len(log.open("job")) == 1
    assert FindingsLog(path).open() == log.open()
    assert path.stat().st_size <= 4000
    assert (tmp_path / "findings.jsonl.1").stat().st_size <= 4000


def test_what_was_open_before_a_kill_is_open_after_it(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_findings_log import FindingsLog, HANG
log = FindingsLog(Path({str(tmp_path / "findings.jsonl")!r}))
for number in range(10**9):
    for event in log.update(str(number), [HANG], number):
        print(event["id"], flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.readlines()
    log = FindingsLog(tmp_path / "findings.jsonl")
    whole = [line.strip() for line in told if line.endswith("\n")]
    kept = [event["id"] for event in log.open()]
    assert len(whole) >= 20
    assert kept[: len(whole)] == whole
    assert len(kept) <= len(whole) + 1


NODES = st.sampled_from(["node0", "node1"])
FINDINGS = st.one_of(
    st.builds(
        lambda node, sure: finding(node=node, confidence=sure), NODES, st.sampled_from([0.3, 0.6, 0.9])
    ),
    st.builds(lambda node: finding(scope="node", node=node, **SUSPECTS), NODES),
    st.builds(
        lambda node, gpu: finding(scope="gpu", node=node, gpu=gpu, **SUSPECTS), NODES, st.integers(0, 1)
    ),
    st.just(finding(scope="group", node=None, nodes=["node0", "node1"], **SUSPECTS)),
    st.just(HANG),
)
STEPS = st.lists(
    st.tuples(
        st.lists(FINDINGS, max_size=3),
        st.integers(-2, 40).map(lambda seconds: seconds * SECOND_NS),
        st.sampled_from([None, (), ("node0",), ("node0", "node1")]),
    ),
    max_size=25,
)


@given(STEPS)
def test_states_alternate_and_no_identity_is_open_twice(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "findings.jsonl"
        log = FindingsLog(path)
        events = []
        now_ns = 0
        for findings, passed_ns, seen in steps:
            now_ns += passed_ns
            events += log.update("job", findings, now_ns, seen)
            check_open(events, log)
        assert FindingsLog(path).open() == log.open()
        assert [json.loads(line) for line in path.read_text().splitlines()] == events if events else True


@given(STEPS, st.floats(0, 1), st.booleans())
def test_a_log_that_is_cut_anywhere_goes_on_consistently(
    steps: list[Any], share: float, damaged: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "findings.jsonl"
        log = FindingsLog(path)
        now_ns = 0
        for findings, passed_ns, seen in steps:
            now_ns += passed_ns
            log.update("job", findings, now_ns, seen)
        content = path.read_bytes() if path.exists() else b""
        cut = content[: round(share * len(content))]
        path.write_bytes(b"\x00{damage\n" * damaged + cut)
        whole = cut[: cut.rfind(b"\n") + 1]
        events = [json.loads(line) for line in whole.splitlines()]
        log = FindingsLog(path)
        assert log.skipped == damaged + (whole != cut)
        check_open(events, log)
        before = len(events)
        for findings, passed_ns, seen in steps:
            now_ns += passed_ns
            events += log.update("job", findings, now_ns, seen)
            check_open(events, log)
        again = FindingsLog(path)
        assert again.open() == log.open()
        assert again.skipped == damaged + (whole != cut and len(events) == before)


def check_open(events: list[Event], log: FindingsLog) -> None:
    """Each finding opens once, and closes at most once and last; what is open is what the events say, each once."""
    last: dict[str, Event] = {}
    for event in events:
        if event["id"] not in last:
            assert event["state"] == "opened"
        else:
            assert event["state"] != "opened"
            assert last[event["id"]]["state"] != "closed"
        last[event["id"]] = event
    opened = [event for event in last.values() if event["state"] != "closed"]
    key = lambda event: event["id"]  # noqa: E731
    assert sorted(log.open(), key=key) == sorted(opened, key=key)
    culprits = Counter(
        (
            event["finding"]["kind"],
            event["finding"]["scope"],
            event["finding"]["node"],
            event["finding"].get("gpu"),
        )
        for event in opened
    )
    assert all(count == 1 for count in culprits.values())
