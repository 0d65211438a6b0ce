"""Compiling loops that neither polars nor numpy can do without one pass over the samples each."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import event

F = TypeVar("F", bound=Callable[..., object])

# What each file here was like when it was compiled.
SOURCES = tuple(
    (path.name, path.stat().st_mtime, path.stat().st_size)
    for path in sorted(Path(__file__).parent.glob("*.py"))
)
# Where what was compiled is kept.
KEPT_IN: set[str] = set()


def compiled(function: F) -> F:
    """`function` as machine code that holds no lock, kept between runs.

    It is kept beside the package, where that may not be written in the user's cache directory, and where neither
    may be, it is compiled again in each run.
    """
    try:
        made: Any = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba: no locator available
        return cast(F, njit(nogil=True)(function))
    # Numba looks only whether the file of the function has changed, not those of the functions it calls.
    with suppress(AttributeError):
        kept = made._cache._cache_file
        kept._source_stamp = (kept._source_stamp, SOURCES)
        KEPT_IN.add(made._cache.cache_path)
    return cast(F, made)


@contextmanager
def when_compiling(tell: Callable[[], object]) -> Iterator[None]:
    """Calls `tell` before the first function is compiled that was not kept, and keeps Ctrl-C from getting lost in LLVM.

    LLVM calls back into Python, and what is raised there it drops: until it is done, an interruption waits.
    """
    listeners = {"numba:compile": _Once(tell), "numba:llvm_lock": _Uninterrupted()}
    events: Any = event  # numba has no types
    for kind, listener in listeners.items():
        events.register(kind, listener)
    try:
        yield
    finally:
        for kind, listener in listeners.items():
            events.unregister(kind, listener)


class _Once(event.Listener):
    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell: Callable[[], object] | None = tell

    def on_start(self, _event: event.Event) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def on_end(self, _event: event.Event) -> None:
        pass


class _Uninterrupted(event.Listener):
    def __init__(self) -> None:
        self._depth, self._interrupted = 0, False
        self._usual: Any = None

    def on_start(self, _event: event.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            self._usual = signal.signal(signal.SIGINT, self._wait)
        self._depth += 1

    def on_end(self, _event: event.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            signal.signal(signal.SIGINT, self._usual)
            if self._interrupted:
                self._interrupted = False
                signal.raise_signal(signal.SIGINT)

    def _wait(self, *_: object) -> None:
        self._interrupted = True
