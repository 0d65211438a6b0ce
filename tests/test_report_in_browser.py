"""Reports in a real browser: no error, the suspect on the first screen, plots drawn, on a laptop and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import browser
import polars as pl
import pytest
import recordings
from recordings import Fault
from rich.console import Console

from pulse_bpf.judge import Judged, judge
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.report.page import page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

# Looked at by people, and kept for them.
SHOTS = Path(__file__).parents[1] / "build" / "reports"
TWELVE = (
    "gpu-slow",
    "gpu-contended",
    "host-cpu",
    "pcie-slow",
    "host-pause",
    "nic-slow",
    "nic-flap",
    "lossy-link",
    "congestion",
    "path-collision",
    "pause-storm",
    "hang-inside",
)


def _check(chromium: Browser, name: str, judged: Judged, whole: bool) -> None:
    """Opens the report of `judged` on every screen, looks at it, and keeps pictures of it, or of its first screen."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    path = SHOTS / f"{name}.html"
    path.write_text(page(judged, [name]))
    first = judged.findings.findings[0] if judged.findings.findings else None
    for screen, scheme in (("laptop", "light"), ("phone", "dark")):
        with browser.opened(chromium, path, screen, scheme) as shown:
            assert shown.complaints == []
            width, height = browser.SCREENS[screen]
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
            assert shown.bottom_of("h1") < height
            told = shown.page.locator("header").inner_text()
            assert judged.findings.verdict in told.lower()
            if first is not None and first.node is not None:
                assert first.node in shown.page.locator("h1").inner_text()
            plots = shown.page.locator(".plot")
            assert plots.count() >= 5
            for number in range(plots.count()):
                box = plots.nth(number).locator(".main-svg").first.bounding_box()
                assert box is not None
                assert 0 < box["width"] <= width
                assert box["height"] > 100
            shown.page.screenshot(path=SHOTS / f"{name}-{screen}.png", full_page=whole)


@pytest.mark.parametrize("scenario", ["healthy", "nic-slow"])
def test_a_report_opens(tmp_path: Path, chromium: Browser, scenario: str) -> None:
    simulate(scenario, tmp_path / "r", seed=3, nodes=4, gpus=2, seconds=0.4)
    judged = judge([tmp_path / "r"], None, Console(quiet=True))
    assert judged.findings.verdict == ("healthy" if scenario == "healthy" else "anomaly")
    _check(chromium, f"small-{scenario}", judged, whole=False)


@pytest.mark.parametrize(
    ("shot", "name"), [("markup", "<script>document.body.remove()</script>"), ("long", "n" * 300)]
)
def test_a_hostile_name_stays_a_name(tmp_path: Path, chromium: Browser, shot: str, name: str) -> None:
    tables = recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    renamed = {
        table: frame.with_columns(pl.col("node").replace("node1", name)) if "node" in frame.columns else frame
        for table, frame in tables.items()
    }
    judged = judge([recordings.write(tmp_path / "r", renamed)], None, Console(quiet=True))
    assert judged.findings.findings[0].node == name
    _check(chromium, f"named-{shot}", judged, whole=True)


@pytest.mark.long
@pytest.mark.parametrize("scenario", TWELVE)
def test_the_report_of_each_scenario_opens(tmp_path: Path, chromium: Browser, scenario: str) -> None:
    simulate(scenario, tmp_path / "r", seed=5)
    _check(chromium, scenario, judge([tmp_path / "r"], None, Console(quiet=True)), whole=True)
