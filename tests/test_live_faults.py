"""Faults of our own, while a simulated job runs: nothing is lost, nothing is doubled, nobody is wrongly accused."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from live_replay import Replay
from prometheus_client import CollectorRegistry

from pulse_bpf.analysis import Window, analyze
from pulse_bpf.analysis.load import load
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.live import judging
from pulse_bpf.live.collector import OVER_NS, Collector, steady_clock
from pulse_bpf.live.judges import Judge
from pulse_bpf.live.security import LinkError

S = 1_000_000_000
AWAY = LinkError("cannot talk to the collector", "the network is cut")
HOUR_NS = 3600 * S
# An operator that an agent was measuring when it was killed is gone with its memory.
SETTLING_NS = 3 * S


def stored(collector: Collector) -> pl.DataFrame:
    """All that a collector has on its disk."""
    parts = sorted((collector.store.root / "jobs").glob("*/*/*.parquet"))
    return pl.concat([pl.read_parquet(part) for part in parts])


def assert_each_once(replay: Replay, until_ns: int) -> pl.DataFrame:
    """Nothing is there twice; what was called up to then."""
    rows = stored(replay.collector)
    key = ["node", "pid", "comm_id", "call_ns", "kind", "level", "direction", "nic", "peer_rank", "peer_node"]
    assert rows.select(key).is_duplicated().sum() == 0
    assert rows.select("agent", "spool", "sequence").n_unique() > 3
    return rows.filter(pl.col("call_ns") < until_ns)


def called(replay: Replay, since_ns: int, until_ns: int) -> pl.DataFrame:
    """node, pid and call_ns of the calls that a job made between two moments."""
    now = pl.col("call_ns").is_between(since_ns, until_ns, closed="left")
    return replay.tables["ops"].filter(now, pl.col("comm_id").is_not_null()).select("node", "pid", "call_ns")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("healthy") / "recording"
    simulate("healthy", directory, seed=2, nodes=3, gpus=1, seconds=19.0, bin_us=200)
    return directory


def test_nothing_is_lost_or_doubled_and_nobody_accused_whatever_fails(healthy: Path, tmp_path: Path) -> None:
    replay = Replay(healthy, tmp_path)
    begin = replay.now_ns
    # Less than a window says nothing of whose work is unequal by chance only.
    replay.run(begin + 3 * S)
    assert replay.collector.status()["jobs"][0]["verdict"] == "undecided"
    replay.run(begin + 6 * S)
    assert replay.collector.status()["jobs"][0]["verdict"] == "healthy"

    # kill -9 of the collector, with batches that it had taken and not yet stored.
    commit = replay.collector.commit
    replay.collector.commit = lambda: None  # type: ignore[method-assign]
    replay.run(begin + 6 * S + S // 2)
    assert len(replay.collector._pending) > 0
    replay.collector.commit = commit  # type: ignore[method-assign]
    replay.collector = replay.new_collector()
    replay.run(begin + 12 * S)

    # The network of a node is cut for longer than the others wait for it, and the collector's disk is full meanwhile.
    replay.links["node1"].cut = AWAY
    replay.run(begin + 13 * S)
    replay.full = True
    replay.run(begin + 14 * S)
    replay.full = False
    replay.run(begin + 16 * S)
    status = replay.collector.status()["jobs"][0]
    assert (status["verdict"], status["confidence"]) == ("undecided", pytest.approx(2 / 3, abs=0.01))
    replay.links["node1"].cut = None
    replay.run(replay.last_ns)
    assert replay.events == []
    until_ns = replay.last_ns - SETTLING_NS
    there = assert_each_once(replay, until_ns).select("node", "pid", "call_ns").unique()
    expected = called(replay, begin, until_ns)
    assert expected.height > 100
    assert expected.join(there, on=["node", "pid", "call_ns"], how="anti").height == 0
    assert replay.collector.status()["jobs"][0]["confidence"] == 1.0


def test_an_agent_that_is_killed_and_comes_back_with_a_wrong_clock_is_no_fault_of_the_job(
    healthy: Path, tmp_path: Path
) -> None:
    replay = Replay(healthy, tmp_path)
    begin = replay.now_ns
    replay.run(begin + 3 * S)
    killed_ns = replay.now_ns
    del replay.players["node0"]
    replay.run(begin + 5 * S)
    # The other agents are still there, and what they say of the job no longer makes it healthy.
    job = replay.collector.status()["jobs"][0]
    assert (job["verdict"], job["confidence"]) == ("undecided", pytest.approx(2 / 3, abs=0.01))
    replay.players["node0"] = replay.new_player("node0", 0.0, ahead_ns=HOUR_NS)
    replay.run()
    assert replay.events == []
    job = replay.collector.status()["jobs"][0]
    assert (job["confidence"], [node["missing"] for node in job["nodes"]]) == (1.0, [False] * 3)
    moved = (
        pl.when(pl.col("call_ns") > begin + HOUR_NS).then(pl.col("call_ns") - HOUR_NS).otherwise("call_ns")
    )
    rows = assert_each_once(replay, replay.last_ns + 2 * HOUR_NS).with_columns(call_ns=moved)
    again_ns = begin + 5 * S
    for since_ns, until_ns in ((begin, killed_ns - SETTLING_NS), (again_ns, replay.last_ns - SETTLING_NS)):
        expected = called(replay, since_ns, until_ns)
        assert expected.join(rows, on=["node", "pid", "call_ns"], how="anti").height == 0


def test_a_fault_is_found_as_pulse_analyze_finds_it_and_its_raw_samples_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "recording"
    simulate("nic-slow", directory, seed=4, nodes=3, gpus=2, seconds=8.0, bin_us=200, onset="late")
    fault = json.loads((directory / "truth.json").read_text())["faults"][0]
    replay = Replay(directory, tmp_path)
    replay.run()
    opened = [event for event in replay.events if event["state"] == "opened"]
    assert len(opened) == 1
    live = opened[0]["finding"]
    until_ns = next(iter(replay.collector._jobs.values())).until_ns
    whole = analyze([directory], Window(until_ns - judging.WINDOW_NS, until_ns)).to_dict()["findings"][0]
    named = ("kind", "cause", "scope", "node", "nic")
    assert [live.get(name) for name in named] == [whole.get(name) for name in named]
    assert (live["node"], live["nic"]) == (fault["node"], fault["nic"])
    assert opened[0]["at_ns"] - fault["start_ns"] < 4 * S

    job = replay.collector.status()["jobs"][0]
    assert [event["id"] for event in job["open"]] == [opened[0]["id"]]
    suspect, *twins = job["curves"]
    assert (suspect["role"], suspect["label"]) == ("suspect", f"{fault['node']} {fault['nic']}")
    assert [twin["role"] for twin in twins] == ["twin", "twin"]
    assert 0 < max(suspect["gbps"][-4:]) < 0.7 * max(twins[0]["gbps"])

    # What was kept is a recording, and says the same.
    evidence = replay.collector.store.evidence(opened[0]["id"])
    kept = load([evidence])
    assert (sorted(kept.samples.nodes), kept.damaged) == (["node0", "node1", "node2"], [])
    again = analyze([evidence]).to_dict()["findings"][0]
    assert [again.get(name) for name in named] == [live.get(name) for name in named]

    # A collector that is killed knows what is open.
    replay.collector = replay.new_collector()
    assert [event["id"] for event in replay.collector.log.open()] == [opened[0]["id"]]


def test_a_job_that_the_analysis_cannot_take_is_undecided_and_says_why(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_case: object) -> None:
        raise ValueError("what is this?")

    replay = Replay(healthy, tmp_path)
    monkeypatch.setattr(judging, "judge", fail)
    replay.run(replay.now_ns + 6 * S)
    job = replay.collector.status()["jobs"][0]
    assert (job["verdict"], job["missing"]) == (
        "undecided",
        ["the analysis failed: ValueError: what is this?"],
    )
    assert (replay.events, replay.collector.log.open()) == ([], [])


def test_verdicts_are_made_in_a_process_that_may_die_and_that_keeps_to_its_share(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(healthy, tmp_path)
    replay.run(replay.now_ns + 6 * S)
    (job,) = replay.collector._jobs.values()
    job.until_ns = 0
    case = replay.collector._next_case()
    assert case is not None
    job.busy, job.until_ns = False, 0
    judge = Judge(0.5)
    pipe = judge._pipe

    def send_to_the_dead(case: judging.Case) -> None:
        judge.close()
        pipe.send(case)

    try:
        monkeypatch.setattr(judge, "_pipe", SimpleNamespace(send=send_to_the_dead, recv=pipe.recv))
        assert replay.collector.judge_next(judge) == []
        assert replay.collector.status()["jobs"][0]["verdict"] == "undecided"
        job.until_ns = 0
        began = time.monotonic()
        assert replay.collector.judge_next(judge) == []
        judge.rest(lambda: False)
        assert judge_cpu_s(judge) < 0.5 * (time.monotonic() - began) + 0.1
        assert judge(case) == judging.judge(case)
        assert replay.collector.status()["jobs"][0]["verdict"] == "healthy"
    finally:
        judge.close()


def test_the_job_that_waited_longest_is_judged_next_and_how_late_it_is_is_told(
    healthy: Path, tmp_path: Path
) -> None:
    """Two jobs of one collector, each of which agents go on to tell of."""
    replay = Replay(healthy, tmp_path)
    replay.collector.judge = list  # type: ignore[method-assign,assignment]
    replay.run(replay.now_ns + 6 * S)
    (name, job), now_ns = next(iter(replay.collector._jobs.items())), replay.now_ns
    replay.collector._jobs["other"] = dataclasses.replace(job)
    taken = []

    def note(case: judging.Case) -> judging.Verdict:
        taken.append(case.job)
        # While it is judged no other thread takes it.
        assert replay.collector._jobs[case.job].busy
        return judging.failed(ValueError("none"))

    assert replay.collector.lag_ns == 0
    for seconds in (1, 2, 7):
        assert replay.collector.judge_next(note) == []
        replay.now_ns = now_ns + seconds * S
        for view in replay.collector._views.values():
            view.until_ns, view.seen_ns = view.until_ns + S, replay.now_ns
    assert taken == [name, "other", name]
    lag_ns = {each["job"]: each["lag_ns"] for each in replay.collector.status()["jobs"]}
    # Agents told of a second more each time; that they came later than they should is not for want of judging.
    assert lag_ns == {name: S, "other": 2 * S}
    assert replay.collector.lag_ns == 2 * S


def finding_on(node: str) -> dict[str, object]:
    evidence = [{"metric": "gbps", "value": 1.0, "reference": 2.0, "operators": 50, "text": ""}]
    part = {"kind": "host-cpu", "cause": "host", "scope": "node", "node": node, "confidence": 0.95}
    return part | {"slowdown": 2.0, "evidence": evidence, "first_ns": 0, "last_ns": 1}


def test_a_job_whose_agents_were_started_again_after_its_end_is_over(healthy: Path, tmp_path: Path) -> None:
    replay = Replay(healthy, tmp_path)
    replay.run(replay.now_ns + 4 * S)
    collector, (name,) = replay.collector, replay.collector._jobs
    for _ in range(3):
        opened = collector.log.update(name, [finding_on("node0")], replay.now_ns)
    assert [event["state"] for event in collector.log.open()] == ["opened"], opened
    # New agents do not know processes that ended before.
    for view in collector._views.values():
        view.state["processes"] = view.state["processes"].clear()
    replay.collector.judge = replay.collector.look_after  # type: ignore[method-assign]
    events = [event for _ in range(90) for event in replay.tick()]
    assert events == [], "they may only be about to be found again"
    events = [event for _ in range(20) for event in replay.tick()]
    assert [event["state"] for event in events] == ["closed"]
    assert collector._jobs == {}
    assert collector.log.open() == []


def test_what_an_earlier_collector_opened_of_a_job_that_nobody_speaks_of_is_closed(tmp_path: Path) -> None:
    now_ns = S
    first = Collector(tmp_path, lambda: now_ns, CollectorRegistry())
    for _ in range(3):
        first.log.update("gone", [finding_on("node0")], now_ns)
    again = Collector(tmp_path, lambda: now_ns, CollectorRegistry())
    assert [event["job"] for event in again.log.open()] == ["gone"]
    assert again.look_after() == []
    now_ns += OVER_NS + S
    assert [event["state"] for event in again.look_after()] == ["closed"]
    assert again.log.open() == []


def judge_cpu_s(judge: Judge) -> float:
    """CPU seconds of the process that judges, user and system."""
    fields = Path(f"/proc/{judge._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_step_of_the_wall_clock_is_none_of_the_collectors() -> None:
    wall, monotonic = [100 * S], [5 * S]
    now = steady_clock(lambda: wall[0], lambda: monotonic[0])
    wall[0] += HOUR_NS
    monotonic[0] += S
    assert now() == 101 * S
