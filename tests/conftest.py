"""Marks that need something of the host: skipped with a reason, or failed where PULSE_REQUIRE names them."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# A slow machine is no failure: hypothesis would take an example of over 200 ms for one.
settings.register_profile("pulse", deadline=None)
settings.load_profile("pulse")

REQUIRED = frozenset(filter(None, os.environ.get("PULSE_REQUIRE", "").split(",")))


def _root() -> str | None:
    return None if os.geteuid() == 0 else "needs root"


@functools.cache
def _bcc() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    try:
        from pulse_bpf.check import try_uprobe

        try_uprobe()
    except Exception as error:
        return f"this host loads no BPF programs: {error}"
    return None


@functools.cache
def _rxe() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("qemu-system-x86_64") is None and not os.path.exists("/sys/module/rdma_rxe"):
        return "neither soft-RoCE nor qemu-system-x86_64 is here"
    return None


@functools.cache
def _browser() -> str | None:
    from browser import chromium

    return None if chromium() else "no headless Chromium is here (apt-get install chromium-headless-shell)"


CONDITIONS: dict[str, Callable[[], str | None]] = {
    "root": _root,
    "bcc": _bcc,
    "rxe": _rxe,
    "browser": _browser,
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for tests that are marked so."""
    from browser import started

    with started() as running:
        yield running


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, condition in CONDITIONS.items():
        if item.get_closest_marker(mark) is None:
            continue
        reason = condition()
        if reason is None:
            continue
        if mark in REQUIRED:
            pytest.fail(f"PULSE_REQUIRE names {mark}, but: {reason}", pytrace=False)
        pytest.skip(f"{mark}: {reason}")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes may share the run: a file is one's, and what works on the kernel of this host is all one's."""
    for item in items:
        kernel = any(item.get_closest_marker(mark) for mark in ("root", "bcc", "rxe"))
        item.add_marker(pytest.mark.xdist_group("kernel" if kernel else item.path.name))
