"""Names as numbers: what every rule compares, joins and sorts by is text, of which there is little that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import polars as pl

from pulse_bpf.analysis.metrics import LEVELS
from pulse_bpf.schema import I64, STR

# The columns of names, in any table, and those that only operators have.
NAMES = ("node", "nic", "peer_node", "peer_nic", "comm_id", "parent_comm_id", "direction")
OF_OPERATORS = ("kind", "level")
# What rules put into such columns, or compare them with, whether it is in the data or not.
KNOWN = ("rx", "tx", *LEVELS, "port", "Send", "Recv", "Group", "AlltoAll")


def numbered_names(
    operators: pl.DataFrame, flows: pl.DataFrame, tables: Mapping[str, pl.DataFrame]
) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, pl.DataFrame]]:
    """The same frames with all names in one pl.Enum, in the order of text: equal, sorted and joined as before.

    A comparison takes a sixth of the time, a sort half, and a column a quarter of the memory of text.
    """
    frames = {"": operators, " ": flows, **tables}
    columns = {
        name: [
            column
            for column in (*NAMES, *(OF_OPERATORS if not name else ()))
            if frame.schema.get(column) == STR
        ]
        for name, frame in frames.items()
    }
    found = {
        value
        for name, frame in frames.items()
        for column in columns[name]
        for value in frame[column].unique()
    }
    names = pl.Enum(sorted({*KNOWN, *found} - {None}))
    given = {name: frame.cast(dict.fromkeys(columns[name], names)) for name, frame in frames.items()}
    return given.pop(""), given.pop(" "), given


def numbered(names: pl.Series) -> Callable[[pl.Expr], pl.Expr]:
    """What makes of expressions of these names, text or as `numbered_names` gives them, their numbers (i64)."""
    text = names.dtype == STR
    known = pl.Enum(names.drop_nulls().unique().sort()) if text else names.dtype
    return lambda name: name.cast(known).to_physical().cast(I64)
