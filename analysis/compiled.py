"""Compiling loops that neither polars nor numpy can do without one pass over the samples each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function` as machine code that holds no lock, kept between runs.

    It is kept beside the package, where that may not be written in the user's cache directory, and where neither
    may be, it is compiled again in each run.
    """
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba: no locator available
        return cast(F, njit(nogil=True)(function))
