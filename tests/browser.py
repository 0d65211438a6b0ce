"""A headless Chromium that opens a page and says what it complained about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SCREENS = {"laptop": (1280, 800), "phone": (390, 844)}


def chromium() -> str | None:
    """The first program here that is one; a snap's wrapper, which cannot see temporary files, is none."""
    found = (shutil.which(program) for program in PROGRAMS)
    return next((path for path in found if path and "snap" not in os.path.realpath(path)), None)


@dataclass
class Opened:
    """A page that was drawn; `complaints` are its errors and warnings, and what it asked a network for."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def bottom_of(self, selector: str) -> float:
        """How far below the upper edge of the screen an element ends, not scrolled."""
        box = self.page.locator(selector).first.bounding_box()
        assert box is not None, f"{selector} cannot be seen"
        return box["y"] + box["height"]


@contextmanager
def started() -> Iterator[Browser]:
    """A browser, without its sandbox where root runs it, which Chromium refuses otherwise."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, screen: str, scheme: str = "light") -> Iterator[Opened]:
    """The report in `path`, drawn on a `screen` of SCREENS in the "light" or the "dark"."""
    width, height = SCREENS[screen]
    dark = "dark" if scheme == "dark" else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=dark)  # type: ignore[arg-type]
    context.set_default_timeout(120_000)
    page = context.new_page()
    shown = Opened(page)
    page.on("console", lambda message: shown.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("file:", "data:", "blob:"))
            else shown.complaints.append(f"asks for {request.url}")
        ),
    )
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        yield shown
    finally:
        context.close()
