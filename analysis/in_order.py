"""Rows in order of a key, with a number for it: windows over a number take a fifth of the time of those over names."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl


def in_order(rows: pl.DataFrame, key: Sequence[str], *then: str | pl.Expr) -> pl.DataFrame:
    """`rows` sorted by `key`, and by what comes `then`, with `same` (u32): equal where all of the key is."""
    return rows.sort(*key, *then).with_columns(same=numbered(key))


def numbered(key: Sequence[str]) -> pl.Expr:
    """Counts the changes of the `key` of rows that are sorted by it."""
    changes = (pl.col(name).ne_missing(pl.col(name).shift()) for name in key)
    return pl.any_horizontal(changes).cum_sum().set_sorted()
