"""Compiling loops that neither polars nor numpy can do without one pass over the samples each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])

# What each file here was like when it was compiled.
SOURCES = tuple(
    (path.name, path.stat().st_mtime, path.stat().st_size)
    for path in sorted(Path(__file__).parent.glob("*.py"))
)


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
    return cast(F, made)
