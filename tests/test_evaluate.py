"""The evaluation: its episodes, and what its tables say of them."""

from __future__ import annotations

import functools
import json
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import recordings
from recordings import Fault

from pulse_bpf import analysis, schema
from pulse_bpf.analysis.baselines.calls import CALLS
from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, OK, USAGE
from pulse_bpf.lab import episodes
from pulse_bpf.lab.boundaries import Boundaries
from pulse_bpf.lab.episodes import Answer, Outcome, carry_out, plan
from pulse_bpf.lab.scoreboard import answers, faults, level, total
from pulse_bpf.lab.scoring import Score, Stated
from pulse_bpf.lab.sim.scenarios import SCENARIOS
from pulse_bpf.lab.tables import Table, tables, wilson

NAMES = list(SCENARIOS)
SLOW = {"kind": "nic-slow", "scope": "nic", "node": "node1", "nic": "rxe0", "severity": 2.0, "effect": 2.0}
EXACT, MISSED, WRONG = (
    Score(["exact"], [True], 1, 0, 0),
    Score(["missed"], [False], 0, 0, 0),
    Score(["wrong"], [False], 1, 1, 1),
)


def test_the_same_seed_plans_the_same_episodes_whatever_their_number() -> None:
    few, many = plan(5, NAMES, 7, 8, 8), plan(40, NAMES, 7, 8, 8)
    assert many[:5] == few
    assert plan(5, NAMES, 8, 8, 8) != few
    assert len({episode.seed for episode in many}) == 40


def test_episodes_go_round_all_scenarios_within_what_each_allows() -> None:
    planned = plan(3 * len(NAMES), NAMES, 1, 8, 8)
    for number, episode in enumerate(planned):
        scenario = SCENARIOS[episode.scenario]
        assert episode.scenario == NAMES[number % len(NAMES)]
        assert scenario.severities[0] <= episode.severity <= scenario.severities[1]
        assert episode.onset in scenario.onsets
        assert episode.workload in scenario.workloads
        assert 0.5 <= episode.seconds <= 2.0
        assert episode.seconds * 1e6 / episode.bin_us <= 50_001


@functools.cache
def _slow_tables() -> dict[str, pl.DataFrame]:
    return recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))


def _fake_simulate(scenario: str, output: Path, **_options: object) -> Path:
    """A little recording with a slow egress at node1, and its truth: operators just as the analysis has them."""
    recordings.write(output, _slow_tables())
    (output / "truth.json").write_text(json.dumps({"scenario": scenario, "healthy": False, "faults": [SLOW]}))
    operators = analysis.operators([output]).select(schema.OPERATORS.names())
    operators.drop_nulls("peer_rank").write_parquet(output / "truth_operators.parquet")
    pl.DataFrame(schema=CALLS).write_parquet(output / "truth_calls.parquet")
    return output


def _breaks(*_: object, **_options: object) -> Any:
    raise ValueError("out of luck")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulations replaced by `_fake_simulate`, temporary directories in a folder of their own."""
    monkeypatch.setattr(episodes, "simulate", _fake_simulate)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


EPISODE = plan(1, NAMES, 1, 4, 1)[0]


def test_pulse_and_baselines_are_asked_about_one_simulation(
    simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"verdict": "anomaly", "findings": [{**SLOW, "node": "node3"}]}
    asked = SimpleNamespace(locate=lambda calls, recording: wrong)
    monkeypatch.setitem(episodes.BASELINES, "wrong", asked)
    outcome = carry_out(EPISODE, ["pulse", "wrong"], None)
    pulse, other = outcome.answers
    assert outcome.error is None
    assert outcome.faults == [SLOW]
    assert (pulse.verdict, pulse.score) == ("anomaly", EXACT)
    assert pulse.boundaries is not None
    assert pulse.boundaries.true == pulse.boundaries.found == pulse.boundaries.ends_within_1 > 0
    assert (other.score, other.boundaries) == (WRONG, None)
    assert list(simulated.iterdir()) == []


def test_a_method_that_fails_has_found_nothing(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(episodes.BASELINES, "broken", SimpleNamespace(locate=_breaks))
    answer, pulse = carry_out(EPISODE, ["broken", "pulse"], None).answers
    assert (answer.verdict, answer.score) == ("failed", MISSED)
    assert answer.error is not None
    assert answer.error.startswith("ValueError: out of luck (test_evaluate.py:")
    assert pulse.score == EXACT


def test_a_simulation_that_fails_is_told(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "simulate", _breaks)
    outcome = carry_out(EPISODE, ["pulse"], None)
    assert outcome.error is not None
    assert outcome.answers == []
    assert list(simulated.iterdir()) == []


def test_recordings_are_kept_where_asked(simulated: Path) -> None:
    carry_out(EPISODE, ["pulse"], simulated / "kept")
    assert (simulated / "kept" / f"0000-{EPISODE.scenario}" / "truth.json").exists()


def _outcome(number: int, given: Score, fault: dict[str, Any] | None = SLOW, **more: Any) -> Outcome:
    episode = replace(EPISODE, number=number, severity=2.0, **more)
    answer = Answer("pulse", "anomaly", given, 0.5, boundaries=Boundaries(10, 8, 4, 8, 6, 8))
    return Outcome(episode, [] if fault is None else [fault], [answer], 1.0)


def test_what_the_rows_come_to() -> None:
    quiet, alarm = Score([], [], 0, 0, 0), Score([], [], 1, 1, 1)
    outcomes = [
        _outcome(0, EXACT),
        _outcome(1, MISSED),
        _outcome(2, WRONG),
        _outcome(3, MISSED, {**SLOW, "effect": 1.01}),
        _outcome(4, MISSED, {**SLOW, "effect": None}),
        _outcome(5, quiet, None),
        _outcome(6, alarm, None),
    ]
    sums = total(faults(outcomes), answers(outcomes))
    assert (sums["faults"], sums["too_small_faults"]) == (4, 1)
    assert (sums["exact"], sums["missed"], sums["wrong"]) == (1, 2, 1)
    assert sums["recall"] == 0.25
    assert sums["precision"] == pytest.approx(1 / 3)
    assert (sums["healthy_episodes"], sums["false_alarms"], sums["healthy_machines"]) == (2, 1, 2)
    assert sums["boundaries"]["true"] == 70
    assert sums["computing_s"]["median"] == 0.5


def test_recall_is_promised_of_faults_that_are_bad_enough() -> None:
    mild = _outcome(0, MISSED)
    mild = replace(mild, episode=replace(mild.episode, severity=1.2))
    sums = total(*(rows([mild, _outcome(1, EXACT)]) for rows in (faults, answers)))
    assert (sums["faults"], sums["recall"]) == (2, 1.0)


@pytest.mark.parametrize(
    ("outcomes", "reached"),
    [
        ("eeeeeeeeee", "exact"),
        ("eeeeeeeeem", "exact"),
        ("eeeeeeeemm", "machine"),
        ("eeeeeemmgw", "group"),
        ("eeeeeeeeww", "wrong"),
        ("eeeeeeee--", "missed"),
        ("eeeeeee--w", "missed"),
        ("", "-"),
    ],
)
def test_a_level_is_what_nine_of_ten_reach(outcomes: str, reached: str) -> None:
    names = {"e": "exact", "m": "machine", "g": "group", "-": "missed", "w": "wrong"}
    rows = pl.DataFrame(
        {"outcome": [names[letter] for letter in outcomes], "kind_right": False},
        schema={"outcome": pl.String, "kind_right": pl.Boolean},
    )
    assert level(rows) == reached


def _table(made: list[Table], title: str) -> list[list[str]]:
    return next(table.rows for table in made if table.title == title)


def test_the_tables_name_every_scenario_method_and_failure() -> None:
    broken = Outcome(replace(EPISODE, number=3), [], [], 1.0, "SimulationError: no | luck")
    healthy = _outcome(2, Score([], [], 0, 0, 0), None, scenario=NAMES[-1])
    made = tables([_outcome(0, EXACT), _outcome(1, WRONG), healthy, broken], ["pulse"])
    by_name = {row[1]: row[2] for row in _table(made, "Scenarios")}
    assert by_name == {
        SCENARIOS[EPISODE.scenario].title: "wrong 1/2",
        SCENARIOS[NAMES[-1]].title: "quiet 1/1",
    }
    assert ["recall", "50.0%"] in _table(made, "All episodes")
    assert ["2.0 to 2.5", "1/2"] in _table(made, "Recall by severity")
    assert _table(made, "Failures") == [["simulation", "SimulationError: no / luck", "1", "3"]]
    severity = next(table for table in made if table.title == "Recall by severity")
    assert '    x-axis ["2.0 to 2.5"]\n' in severity.markdown()
    assert "    bar [50.0]\n" in severity.markdown()
    boundaries = _table(made, "Operator boundaries")[0]
    assert boundaries[2:] == ["30", "80.0%", "50.0%", "100.0%", "75.0%", "100.0%"]
    for table in made:
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert len(table.markdown().splitlines()) >= len(table.rows) + 3


def test_conditions_and_stated_confidence_have_tables_of_their_own() -> None:
    sure, unsure = Stated("nic-slow", 0.97, True), Stated("nic-slow", 0.62, False)
    outcomes = [
        _outcome(0, replace(EXACT, stated=[sure]), bin_us=32, conditions=("ntp",)),
        _outcome(1, replace(WRONG, stated=[unsure]), bin_us=1000, conditions=()),
        _outcome(2, Score([], [], 0, 0, 0), None, scenario="healthy-tenant", bin_us=32, conditions=()),
    ]
    made = tables(outcomes, ["pulse"])
    under = {row[0]: row[1:] for row in _table(made, "What pulse says under each condition")}
    assert under["ntp"] == ["1", "0", "1/1", "100.0%", "100.0%", "0/0"]
    assert under["none"] == ["2", "1", "0/1", "0.0%", "0.0%", "0/1"]
    assert under["bins of 32 us"] == ["2", "0", "1/1", "100.0%", "100.0%", "0/1"]
    assert under["a second tenant"] == ["1", "0", "0/0", "-", "-", "0/1"]
    rows = {row[0]: row[1:4] for row in _table(made, "How sure pulse may be")}
    assert rows == {"60% to 70%": ["1", "62.0%", "0.0%"], "95% to 100%": ["1", "97.0%", "100.0%"]}


def test_an_interval_of_a_share_holds_it_and_narrows() -> None:
    low, high = wilson(9, 10)
    assert (low, high) == pytest.approx((0.596, 0.982), abs=0.001)
    assert wilson(0, 3)[0] == 0.0
    assert low < wilson(90, 100)[0] < 0.9 < wilson(90, 100)[1] < high


@pytest.mark.parametrize(
    "wrong", [["--method", "guess"], ["--scenarios", "flood"], ["--episodes", "0"], ["--jobs", "0"]]
)
def test_what_there_is_not_cannot_be_evaluated(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "evaluate", *wrong]) == USAGE
    assert "Traceback" not in capsys.readouterr().err


def test_the_tables_come_also_where_the_page_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def done(_carry_out: object, _episodes: object, _jobs: int) -> list[Outcome]:
        return [_outcome(0, EXACT)]

    monkeypatch.setattr("pulse_bpf.lab.evaluate._carried_out", done)
    assert main(["lab", "evaluate", "--episodes", "1", "--markdown", str(tmp_path)]) == HOST
    assert SCENARIOS[EPISODE.scenario].title in capsys.readouterr().out


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (["--nodes", "1"], "--nodes must be at least 2"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--keep", "."], "is not empty"),
        (["--keep", __file__], "is not a directory"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_is_run(
    odd: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_bpf.lab.evaluate._carried_out", lambda *_: pytest.fail("it ran"))
    assert main(["lab", "evaluate", *odd]) == USAGE
    assert told in capsys.readouterr().err


def test_thirty_episodes_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "evaluation.md"
    again = ["--episodes", "30", "--seed", "1", "--method", "pulse", "aegis", "--nodes", "6", "--gpus", "2"]
    assert main(["lab", "evaluate", *again, "--json", "--markdown", str(page)]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["command"] == shlex.join(["pulse", "lab", "evaluate", *again])
    assert [entry["episode"]["scenario"] for entry in report["episodes"]] == NAMES[:30]
    for entry in report["episodes"]:
        assert entry["error"] is None
        assert [answer["error"] for answer in entry["answers"]] == [None, None]
        scopes = set(SCENARIOS[entry["episode"]["scenario"]].scopes)
        assert bool(entry["faults"]) == bool(scopes - {"workload"})
    for sums in report["methods"].values():
        assert sums["episodes"] == 30
        assert sums["faults"] + sums["too_small_faults"] == sum(
            len(entry["faults"]) for entry in report["episodes"]
        )
    assert f"    {report['command']} --markdown" in page.read_text()
    # The first episodes of a longer evaluation are the same, to the byte of what every method says of them.
    few = ["2" if word == "30" else word for word in again]
    assert main(["lab", "evaluate", *few, "--json", "--jobs", "1"]) == OK
    for entry, same in zip(json.loads(capsys.readouterr().out)["episodes"], report["episodes"], strict=False):
        for answer, before in zip(entry["answers"], same["answers"], strict=True):
            assert {**answer, "computing_s": 0} == {**before, "computing_s": 0}
        assert entry["faults"] == same["faults"]
