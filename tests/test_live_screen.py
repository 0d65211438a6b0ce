"""The screen of `pulse watch`: on terminals of any size, with any names, and while the collector hangs or is away."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from findings import event, finding, status, status_job
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot
from textual.widgets import DataTable

from pulse_bpf.cli import main
from pulse_bpf.errors import NO_DATA, HostError
from pulse_bpf.live.screen import Screen
from pulse_bpf.live.status_text import job_text, sparkline

HOSTILE = "\x1b[31m\x07[bold red]x[/] \u202e{0}\n$"


def run(
    ask: Callable[[], Any],
    act: Callable[[Screen, Pilot[None]], Coroutine[Any, Any, None]],
    size: tuple[int, int] = (100, 30),
) -> None:
    async def session() -> None:
        screen = Screen(ask, "collector:9000", 0.05)
        async with screen.run_test(size=size) as pilot:
            await act(screen, pilot)

    asyncio.run(session())


def shown(screen: Screen) -> str:
    """What is on the terminal, line by line."""
    return "\n".join(strip.text for strip in screen.screen._compositor.render_strips())


async def until(screen: Screen, pilot: Pilot[None], text: str) -> str:
    """What is shown once `text` is."""
    for _ in range(400):
        await pilot.pause(0.025)
        if text in shown(screen):
            return shown(screen)
    raise AssertionError(f"{text!r} is not in\n{shown(screen)}")


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (300, 80)], ids=str)
def test_a_job_is_shown_in_full(size: tuple[int, int]) -> None:
    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        text = await until(screen, pilot, "Groups of ranks")
        for part in (
            "collector:9000  1 jobs at",
            "Job 4711: ANOMALY (confidence 90%), iteration 1,250.0 ms",
            "► NIC mlx5_0 of node node3 (nic-slow) 90% sure, 2.00x slower, for 0:01:30",
            "It sends at 40 Gbit/s.",
            "from 0 to 90.0 Gbit/s",
            "► node3 mlx5_0 ▄▄▄",
            "  node1 mlx5_0 ███",
            "1 of 2 nodes are missing: node4 (for 0:00:40)",
            "2 events were lost",
            "1 data of 2",
        ):
            assert part in text, text

    run(lambda: status(status_job()), act, size)


@pytest.mark.parametrize("size", [(40, 12), (20, 5), (1, 1)], ids=str)
def test_a_small_terminal_shows_what_fits(size: tuple[int, int]) -> None:
    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        for _ in range(20):
            await pilot.pause(0.02)
        assert size[0] < 40 or "ANOMALY" in shown(screen)
        assert max(map(len, shown(screen).splitlines())) <= size[0]
        await pilot.resize_terminal(100, 30)
        await until(screen, pilot, "Groups of ranks")

    run(lambda: status(status_job()), act, size)


def test_names_are_shown_and_do_nothing() -> None:
    hostile = finding(node=HOSTILE, nic=HOSTILE, kind=HOSTILE, next_check=HOSTILE)
    hostile["evidence"][0]["text"] = HOSTILE
    job = status_job(HOSTILE, open=[event(finding=hostile)], missing=[HOSTILE])
    job["nodes"][1]["node"] = job["groups"][0]["kind"] = HOSTILE
    for curve in job["curves"]:
        curve["label"] = HOSTILE

    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        text = await until(screen, pilot, "Not certain")
        assert text.replace("\n", "").isprintable()
        literal = "?[31m?[bold red]x[/] ?{0}?$"
        assert text.count(literal) >= 10
        for strip in screen.screen._compositor.render_strips():
            assert not any("\x1b" in segment.text for segment in strip)

    run(lambda: status(job), act, (250, 40))


@pytest.mark.parametrize(
    "jobs", [[], [status_job(nodes=[], open=[], curves=[], groups=[], iteration_ns=None)]]
)
def test_little_is_known(jobs: list[dict[str, Any]]) -> None:
    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        await until(screen, pilot, "iteration unknown" if jobs else "No job reports here")

    run(lambda: status(*jobs), act)


def test_the_job_with_findings_is_chosen_first_and_stays_chosen() -> None:
    jobs = [status_job("healthy", open=[]), status_job("sick"), status_job("other", open=[])]

    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        await until(screen, pilot, "Job sick:")
        await pilot.press("down")
        await until(screen, pilot, "Job other:")
        jobs.insert(0, status_job("new"))
        await until(screen, pilot, "4 jobs")
        assert "Job other:" in shown(screen)
        assert screen.query_one(DataTable).cursor_row == 3
        jobs.pop()
        await until(screen, pilot, "3 jobs")
        assert "Job other:" not in shown(screen)

    run(lambda: status(*jobs), act)


def test_what_is_known_stays_while_the_collector_is_away() -> None:
    trouble = ["it is away"]

    def ask() -> dict[str, Any]:
        if trouble:
            raise HostError(trouble[0] + " [red]\x1b[31m")
        return status(status_job())

    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        await until(screen, pilot, "it is away [red]?[31m")
        trouble.clear()
        assert "away" not in await until(screen, pilot, "Job 4711")
        trouble.append("it is gone")
        assert "Job 4711: ANOMALY" in await until(screen, pilot, "no newer answer: it is gone")

    run(ask, act)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_a_collector_that_hangs_holds_up_no_key(key: str) -> None:
    leave = threading.Event()
    asked = []

    def ask() -> dict[str, Any]:
        asked.append(True)
        leave.wait(30)
        return status(status_job())

    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        await until(screen, pilot, "asking ...")
        await pilot.press("r", "r")
        await pilot.pause(0.3)
        assert len(asked) == 1
        leave.set()
        await until(screen, pilot, "Job 4711")
        leave.clear()
        await pilot.press(key)
        leave.set()
        assert screen._exit

    run(ask, act)


def test_sigterm_ends_it() -> None:
    async def act(screen: Screen, pilot: Pilot[None]) -> None:
        await until(screen, pilot, "Job 4711")
        os.kill(os.getpid(), signal.SIGTERM)
        await pilot.pause(0.1)
        assert screen._exit

    run(lambda: status(status_job()), act)


RATES = st.lists(st.floats(0, 400), max_size=300)


@given(RATES, st.integers(1, 120))
def test_bars_are_on_the_given_scale(rates: list[float], columns: int) -> None:
    bars = sparkline(rates, columns, max(rates, default=0.0))
    assert len(bars) <= min(columns, len(rates))
    assert set(bars) <= set(" ▁▂▃▄▅▆▇█")
    if len(rates) <= columns:
        assert [bar != " " for bar in bars.ljust(len(rates))] == [rate > 0 for rate in rates]
        assert not rates or max(rates) == 0 or bars[rates.index(max(rates))] == "█"
    assert set(sparkline(rates, columns, 10 * max(rates, default=0.0))) <= set(" ▁")


@given(st.text(max_size=60), st.integers(5, 200))
def test_lines_of_curves_fit(label: str, columns: int) -> None:
    job = status_job(curves=[{"role": "suspect", "label": label, "bin_ns": 1000, "gbps": [1.0] * 500}])
    lines = job_text(job, 0, columns).split("\n")
    (line,) = (line for line in lines if "█" in line.plain)
    assert line.cell_len <= columns


def test_a_verdict_that_comes_late_is_told_to() -> None:
    assert "too much to judge" not in job_text(status_job(), 0, 80).plain
    late = job_text(status_job(lag_ns=75 * 1_000_000_000), 0, 80).plain
    assert "This is how it was 0:01:15 ago: the collector has too much to judge" in late


def test_no_process_of_those_named_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert main(["watch", "--once", "-p", str(ended.pid)]) == NO_DATA
    assert f"process {ended.pid} cannot be observed: it has ended" in capsys.readouterr().err
