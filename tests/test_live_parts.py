"""The parts of agents and collectors, one by one: jobs, cutting, storage, views, recorder, budgets."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numba
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_replay import AMPLE, Replay
from prometheus_client import CollectorRegistry

from pulse_bpf import analysis
from pulse_bpf.analysis.load import load
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.errors import DataError, HostError
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.live import agent, judging, status, wire
from pulse_bpf.live.agent import Agent, Budget
from pulse_bpf.live.jobs import MEMBERS, members
from pulse_bpf.live.memory import Spare
from pulse_bpf.live.recorder import FlightRecorder
from pulse_bpf.live.security import LinkError
from pulse_bpf.live.spool import Spool
from pulse_bpf.live.storage import STORED, Store, safe
from pulse_bpf.live.view import View
from pulse_bpf.schema import COMMS, COVERAGE, NODES, PROCESSES, SAMPLES

S = 1_000_000_000
NOBODY = pl.DataFrame(schema=MEMBERS)


def frame(schema: pl.Schema, **columns: list[object]) -> pl.DataFrame:
    """Rows with nulls in all columns that are not given."""
    height = len(next(iter(columns.values())))
    return pl.DataFrame(
        {name: pl.Series(columns.get(name, [None] * height), dtype=dtype) for name, dtype in schema.items()}
    )


def comms(*rows: tuple[str, int, str, int]) -> pl.DataFrame:
    node, pid, comm_id, nranks = map(list, zip(*rows, strict=True))
    return frame(COMMS, node=node, pid=pid, comm_id=comm_id, nranks=nranks)


def jobs(known: pl.DataFrame) -> dict[str, set[int]]:
    return {str(job): set(rows["pid"]) for (job,), rows in known.group_by("job")}


def test_processes_that_share_communicators_are_a_job_whatever_the_way() -> None:
    there = comms(
        ("a", 1, "pp-2", 2), ("b", 2, "pp-2", 2), ("b", 2, "dp-3", 3), ("c", 3, "dp-3", 3),
        ("a", 4, "own-1", 1), ("b", 5, "other-2", 2), ("c", 6, "other-2", 2), ("c", 6, "own-1", 1),
    )  # fmt: skip
    told = members(there, frame(PROCESSES, node=["a"], pid=[1]), NOBODY)
    assert jobs(told) == {"dp-3": {1, 2, 3}, "other-2": {5, 6}}
    # A job keeps its name when it makes larger communicators, or when another one becomes its part.
    later = pl.concat([there, comms(("a", 1, "world-9", 9))])
    assert jobs(members(later, frame(PROCESSES, node=["a"], pid=[1]), told)) == {
        "dp-3": {1, 2, 3},
        "other-2": {5, 6},
    }


def test_a_job_has_the_schedulers_name_where_all_agree_and_parts_have_different_ones() -> None:
    there = comms(("a", 1, "x-2", 2), ("b", 2, "x-2", 2), ("a", 3, "y-2", 2), ("b", 4, "y-2", 2))
    processes = frame(
        PROCESSES, node=["a", "b", "a", "b"], pid=[1, 2, 3, 4], job=["slurm-7", "slurm-7", "slurm-7", "8"]
    )
    told = members(there, processes, NOBODY)
    assert jobs(told) == {"slurm-7": {1, 2}, "y-2": {3, 4}}


@given(st.text(max_size=300))
def test_no_name_leads_out_of_its_directory(name: str) -> None:
    path = safe(name)
    assert path
    assert "/" not in path
    assert "\0" not in path
    assert not path.startswith(".")
    assert len(path.encode()) <= 100


@given(st.sets(st.text(max_size=20), min_size=2, max_size=5))
def test_different_names_have_different_directories(names: set[str]) -> None:
    assert len({safe(name) for name in names}) == len(names)


def operators(*call_ns: int) -> pl.DataFrame:
    return frame(STORED, call_ns=list(call_ns), node=["a"] * len(call_ns))


def stored(root: Path) -> list[int]:
    return sorted(
        ns for part in (root / "jobs").glob("*/*/*.parquet") for ns in pl.read_parquet(part)["call_ns"]
    )


def test_a_commit_is_all_or_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit({"../job": operators(1, 3601 * S)}, {"a": {"s": 4}})
    assert stored(tmp_path) == [1, 3601 * S]
    assert [path.name for path in sorted((tmp_path / "jobs").glob("*/*"))] == ["19700101T00", "19700101T01"]
    # Killed between the parts and the marks: the agent was not told, and sends it again.
    broken = Store(tmp_path, lambda path, write: _no_marks(path, write))
    with pytest.raises(HostError):
        broken.commit({"job": operators(2)}, {"a": {"s": 5}})
    assert (stored(tmp_path), broken.marks) == ([1, 2, 3601 * S], {"a": {"s": 4}})
    again = Store(tmp_path)
    assert (stored(tmp_path), again.marks) == ([1, 3601 * S], {"a": {"s": 4}})
    again.commit({"job": operators(2)}, {"a": {"s": 5}})
    assert stored(tmp_path) == [1, 2, 3601 * S]


def _no_marks(path: Path, write: Callable[[Path], object]) -> None:
    if path.name == "marks.json":
        raise HostError("cannot write", "killed")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)


def test_marks_that_cannot_be_read_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    Store(tmp_path).commit({"job": operators(1)}, {})
    (tmp_path / "marks.json").write_text("{")
    with pytest.raises(DataError, match=r"marks\.json"):
        Store(tmp_path)
    assert stored(tmp_path) == [1]


def test_what_is_old_goes_and_so_does_evidence_beyond_its_share(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit({"job": operators(1, 5 * 3600 * S)}, {})
    for number in range(3):
        store.keep_raw(f"finding{number}", "a", "samples/000000.parquet", b"x" * 100)
    left = store.retain(2, 250, 6 * 3600 * S)
    assert stored(tmp_path) == [5 * 3600 * S]
    assert len(list((tmp_path / "evidence").iterdir())) == 2
    assert left >= 200


def heard(spool: str, sequence: int, until_ns: int) -> wire.Step:
    rows = frame(wire.SENT_OPERATORS, node=["a"], call_ns=[until_ns - S], final=[True])
    coverage = frame(COVERAGE, node=["a"], first_ns=[0], last_ns=[until_ns], lost=[sequence])
    return wire.Step(spool, sequence, until_ns, {"operators": rows, "coverage": coverage})


def test_a_view_holds_the_last_seconds_without_a_gap() -> None:
    view = View()
    for number in range(10):
        view.take(heard("one", number, (10 + number) * S), number * S, number * S, 3 * S, 3 * S)
    assert (view.since_ns, view.until_ns, view.rows("operators").height) == (int(7.5 * S), 19 * S, 4)
    assert view.coverage()["lost"].to_list() == [3]
    # One that is missing begins anew; one that comes again changes nothing, nor what an earlier start left.
    view.take(heard("one", 11, 21 * S), 11 * S, 11 * S, 3 * S, 3 * S)
    assert (view.since_ns, view.rows("operators").height) == (21 * S, 1)
    view.take(heard("one", 11, 21 * S), 11 * S, 11 * S, 3 * S, 3 * S)
    view.take(heard("older", 3, 15 * S), 11 * S, 11 * S, 3 * S, 3 * S)
    assert (view.spool, view.rows("operators").height) == ("one", 1)
    # So does a clock that jumped.
    view.take(heard("one", 12, 3622 * S), 3612 * S, 12 * S, 3 * S, 3 * S)
    assert (view.since_ns, view.skew_ns, view.rows("operators").height) == (3622 * S, -3600 * S, 1)


@pytest.mark.parametrize(("every_s", "judged_s"), [(0.25, 4), (2.0, 32), (0.9, 16)])
def test_of_slow_jobs_more_of_the_past_is_judged(
    every_s: float, judged_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only a few operators end in the usual seconds, there would never be a verdict."""
    views = []
    for node in ("a", "b"):
        view = View()
        for second in range(60):
            until_ns = (second + 1) * S
            calls = [ns for n in range(400) if second * S <= (ns := int(n * every_s * S)) < until_ns]
            rows = {"node": [node], "pid": [1], "comm_id": ["c-2"], "level": ["flow"], "nranks": [2]}
            operators = frame(
                wire.SENT_OPERATORS,
                **{name: value * len(calls) for name, value in rows.items()},  # type: ignore[arg-type]
                op_seq=[int(ns // (every_s * S)) for ns in calls],
                program_pos=[int(ns // (every_s * S)) for ns in calls],
                call_ns=calls,
                last_byte_ns=[ns + S // 10 for ns in calls],
                end_ns=[ns + S // 10 for ns in calls],
                final=[True] * len(calls),
            )
            tables = {
                "nodes": frame(NODES, node=[node]),
                "operators": operators,
                "coverage": frame(COVERAGE, node=[node], first_ns=[0], last_ns=[until_ns], lost=[0]),
            }
            view.take(wire.Step(node, second, until_ns, tables), 0, 0, 8 * S, 36 * S)
        views.append(view)
    seen = []
    monkeypatch.setattr(analysis, "conclude", lambda recording, operators, flows: seen.append(operators))
    monkeypatch.setattr(judging, "judged", lambda *_: judging.Judgement())
    known = frame(MEMBERS, node=["a", "b"], pid=[1, 1], comm_id=["c-2", "c-2"], job=["job", "job"])
    judging.judge(judging.Case("job", known, views, 60 * S, 0, frozenset(), judging.LONGEST_NS))
    assert seen[0]["call_ns"].min() >= (60 - judged_s) * S
    assert seen[0]["call_ns"].min() < (60 - judged_s + every_s) * S


def test_the_curve_of_a_link_is_what_its_one_end_sends_to_the_other() -> None:
    """Each node of three sends twice to each other, and the link from a to b is slow; b sends more than a."""
    ends = [(one, two) for one in "abc" for two in "abc" if one != two for _ in range(2)]
    slow = [ends_of == ("a", "b") for ends_of in ends]
    operators = frame(
        OPERATORS,
        node=[one for one, _ in ends],
        peer_node=[two for _, two in ends],
        nic=["mlx5_0" for _ in ends],
        peer_nic=["mlx5_0" for _ in ends],
        comm_id=["c" for _ in ends],
        level=["flow" for _ in ends],
        direction=["tx" for _ in ends],
        bytes=[200 if one == "b" else 100 for one, _ in ends],
        burst_gbps=[2.0 if is_slow else 10.0 for is_slow in slow],
        last_byte_ns=[10 * S - 1 for _ in ends],
    )
    ports = {"nic": "mlx5_0", "peer_node": "b", "peer_nic": "mlx5_0", "nodes": ["a", "b"]}
    shown = status.curves(operators, {"scope": "link", "node": "a", **ports}, 10 * S)
    assert [(curve["role"], curve["label"], curve["gbps"][-1]) for curve in shown] == [
        ("suspect", "a mlx5_0", 2.0),
        ("twin", "c mlx5_0", 10.0),
    ]


def test_many_operators_are_held_no_longer_than_they_are_judged() -> None:
    view = View()
    step = heard("one", 0, S)
    many = step.tables["operators"].sample(1000, with_replacement=True)
    for number in range(30):
        tables = {**step.tables, "operators": many}
        view.take(wire.Step("one", number, (10 + number) * S, tables), 0, 0, 3 * S, 60 * S)
    assert view.rows("operators").height == 4999 // 1000 * 1000


def _seldom(measure: Callable[[], bool], late: int) -> Callable[[], bool]:
    numbers = count()

    def now_and_then() -> bool:
        number = next(numbers)
        return (number < 4 or number % late == 0) and measure()

    return now_and_then


@pytest.mark.parametrize("late", [1, 5])
def test_each_operator_is_cut_once_and_as_from_the_whole_recording(late: int, tmp_path: Path) -> None:
    """Also by an agent that comes to it `late` times as seldom as it should, without a CPU to spare."""
    directory = tmp_path / "recording"
    simulate("healthy", directory, seed=3, nodes=2, gpus=2, seconds=7.0, bin_us=200)
    replay = Replay(directory, tmp_path)
    for player in replay.players.values():
        player.agent.measure = _seldom(player.agent.measure, late)  # type: ignore[method-assign]
    replay.run()
    live = pl.concat([pl.read_parquet(part) for part in (tmp_path / "collector/jobs").glob("*/*/*.parquet")])
    key = ["node", "pid", "comm_id", "op_seq", "level", "direction", "nic", "peer_rank"]
    assert live.select(key).is_duplicated().sum() == 0
    whole, _ = analysis.measure(load([directory]))
    both = live.join(whole, on=key, nulls_equal=True, suffix="_whole")
    assert both.height == live.height > 500
    assert live.filter(pl.col("op_seq").is_not_null()).unique(key[:4]).height == (
        live.group_by(key[:3]).agg(pl.col("op_seq").max() + 1)["op_seq"].sum()
    )
    for name in ("program_pos", "call_ns", "start_ns", "end_ns", "bytes", "expected_bytes"):
        assert both.filter(pl.col(name).ne_missing(pl.col(f"{name}_whole"))).height == 0, name


def samples(*t_ns: int) -> pl.DataFrame:
    return frame(
        SAMPLES,
        node=["a"] * len(t_ns),
        t_ns=list(t_ns),
        bin_ns=[10] * len(t_ns),
        bytes=[1] * len(t_ns),
    )


def test_the_flight_recorder_keeps_the_last_seconds_and_gives_a_part_of_them(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "raw", 3.0, 10**6)
    recorder.replace("coverage", frame(COVERAGE, node=["a"], first_ns=[0], last_ns=[10 * S], lost=[0]))
    for second in range(10):
        recorder.append("samples", samples(second * S, second * S + S // 2))
    assert recorder.span_ns == 3 * S + S // 2
    files = {name: pl.read_parquet(io.BytesIO(content)) for name, content in recorder.between(0, 8 * S)}
    rows = pl.concat([part for name, part in files.items() if name.startswith("samples/")])
    assert rows["t_ns"].to_list() == [6 * S, 6 * S + S // 2, 7 * S, 7 * S + S // 2, 8 * S]
    assert files["coverage.parquet"].select("first_ns", "last_ns").row(0) == (6 * S, 8 * S)
    small = FlightRecorder(tmp_path / "raw", 3.0, 1)
    small.append("samples", samples(0))
    assert (small.size_bytes, list((tmp_path / "raw/samples").iterdir())) == (0, [])


def test_beyond_its_budget_an_agent_makes_bins_wider_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "PATIENCE", 2)
    monkeypatch.setattr(agent, "CALM_STEPS", 3)
    said: list[str] = []
    held = 2 * 10**9
    monkeypatch.setattr(agent, "resident_bytes", lambda: held)
    one = Agent(
        None,  # type: ignore[arg-type]
        Spool(tmp_path / "spool", 10**6, 10**6),
        FlightRecorder(tmp_path / "raw", 3.0, 10**6),
        Budget(cores=AMPLE.cores, memory_bytes=10**9, sent_bytes_per_s=AMPLE.sent_bytes_per_s),
        lambda: 0,
        CollectorRegistry(),
        said.append,
    )
    one.replace("nodes", frame(NODES, node=["a"]))

    def steps(first: int, count: int) -> None:
        for second in range(first, first + count):
            one.append("samples", samples(second * S, second * S + 10, second * S + 20))
            one.replace(
                "coverage", frame(COVERAGE, node=["a"], first_ns=[0], last_ns=[(second + 1) * S], lost=[0])
            )
            assert one.measure()

    steps(1, 2)
    assert said == ["beyond its budget (2.0 times); bins are 2 times as wide now"]
    steps(3, 1)
    assert one.metrics.bin_seconds._value.get() == pytest.approx(20e-9)
    held = 10**8
    steps(4, 3)
    assert said[1:] == ["within its budget again; bins are 1 times as wide as recorded"]


def test_an_agent_says_once_that_its_collector_is_away_and_when_it_is_back(tmp_path: Path) -> None:
    said: list[str] = []
    away: list[str] = []
    asked: list[int] = []
    now_ns = 0

    class Link:
        def send(self, content: bytes, oldest: int, sent_ns: int) -> dict[str, object]:
            asked.append(sent_ns)
            if away:
                raise LinkError("cannot talk to the collector", away[0])
            return {"acked": {}, "again": False, "state": False, "peers": -1, "raw": []}

    one = Agent(
        Link(),  # type: ignore[arg-type]
        Spool(tmp_path / "spool", 10**6, 10**6),
        FlightRecorder(tmp_path / "raw", 3.0, 10**6),
        AMPLE,
        lambda: now_ns,
        CollectorRegistry(),
        said.append,
    )
    one.replace("nodes", frame(NODES, node=["a"]))
    for second, why in enumerate((None, "refused", "refused", "hung up", "refused", None, None, "refused")):
        away[:] = [why] if why else []
        seen = frame(COVERAGE, node=["a"], first_ns=[0], last_ns=[(second + 1) * S], lost=[0])
        one.replace("coverage", seen)
        assert one.measure()
        now_ns = second * S
        assert one.send() is not bool(away)
        # One that refuses is not asked over and over.
        times = len(asked)
        now_ns += S // 20
        assert one.send() is not bool(away)
        assert len(asked) == times
    assert said == [
        "cannot talk to the collector: refused",
        "cannot talk to the collector: hung up",
        "the collector works again; batches that wait: 6",
        "cannot talk to the collector: refused",
    ]


def test_code_is_given_back_and_still_runs() -> None:
    before, later = numba.njit(lambda: 1), numba.njit(lambda: 2)
    assert before() == 1
    resident = code_kb()
    spare = Spare()
    spare.give_back()
    spare.give_back()
    assert code_kb() < resident / 2
    assert later() == 2


def code_kb() -> int:
    """How much code of libraries this process has in memory."""
    named, sizes = False, [0]
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            named = words[1] == "r-xp" and ".so" in words[-1]
        elif named and words[0] == "Rss:":
            sizes.append(int(words[1]))
    return sum(sizes)


def test_what_was_changed_in_memory_is_not_given_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old" * 100)
    with (tmp_path / "file").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 300, mmap.MAP_PRIVATE)
    mapped[:3] = b"new"
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ) == 0
    spare = Spare()
    spare.give_back()
    spare.give_back()
    assert mapped[:6] == b"newold"


JOINED = """
from pulse_bpf.live.memory import keep_tables_in_memory
{settle}
import polars as pl
frame = pl.DataFrame({{"key": range(5_000_000)}}).lazy()
joined = frame.join(frame.filter(pl.col("key") % 5 == 0), on="key", how="semi")
assert joined.collect(engine="streaming").height == 1_000_000
"""


def test_nothing_is_spilled_however_much_memory_polars_believes_to_use(tmp_path: Path) -> None:
    """What it believes drifts: a process was seen to spill with 19 GB of memory to spare."""

    def written_mb(settle: str) -> float:
        beliefs = {"POLARS_OOC_MEMORY_BUDGET_MB": "1", "POLARS_OOC_LOG_METRICS": "1"}
        # Other tests may have settled it for all that this process starts.
        others = {name: value for name, value in os.environ.items() if not name.startswith("POLARS_")}
        environment = others | beliefs | {"POLARS_OOC_SPILL_DIR": str(tmp_path)}
        script = [sys.executable, "-c", JOINED.format(settle=settle)]
        said = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stderr
        assert "spill_stats" in said
        return sum(map(float, re.findall(r"file_mb\(written=([0-9.]+)", said)))

    assert written_mb("") > 0
    assert written_mb("keep_tables_in_memory()") == 0
