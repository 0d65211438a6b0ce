"""What a Parquet file says of its columns without a row being read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pulse_bpf.schema import STR


class Footer(NamedTuple):
    """How many `rows` a file has; of each column the least value, the greatest and how many are missing.

    None is what the file does not tell.
    """

    rows: int
    bounds: dict[str, tuple[Any, Any, int | None]]

    def constants(self, schema: pl.Schema) -> dict[str, Any]:
        """The columns of `schema` that have one value in all rows, null where there is none, with it."""
        constants: dict[str, Any] = {name: None for name in schema if name not in self.bounds}
        for name, (low, high, nulls) in self.bounds.items():
            if nulls == self.rows or (nulls == 0 and low is not None and low == high):
                constants[name] = low
        return constants


def footer_of(path: Path, schema: pl.Schema) -> Footer:
    """The columns of `schema` in the file `path`; ValueError where one is no such thing."""
    meta = pq.read_metadata(path)
    found = meta.schema.to_arrow_schema()
    for name in schema:
        index = found.get_field_index(name)
        if index >= 0 and not _fits(found.field(index).type, schema[name]):
            raise ValueError(f"{name} is {found.field(index).type}, not {schema[name]}")
    bounds = {name: _bounds(meta, index) for index, name in enumerate(meta.schema.names) if name in schema}
    return Footer(meta.num_rows, bounds)


def _fits(found: pa.DataType, wanted: pl.DataType) -> bool:
    if pa.types.is_dictionary(found):
        found = found.value_type
    text = pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)
    return bool(pa.types.is_null(found) or (text if wanted == STR else pa.types.is_integer(found)))


def _bounds(meta: pq.FileMetaData, index: int) -> tuple[Any, Any, int | None]:
    """Least and greatest value of a column and how many are missing; None what the footer does not tell."""
    columns = [meta.row_group(number).column(index).statistics for number in range(meta.num_row_groups)]
    if any(found is None or not found.has_null_count for found in columns):
        return None, None, None
    valued = [found for found in columns if found.num_values]
    nulls = sum(found.null_count for found in columns)
    if not valued or not all(found.has_min_max for found in valued):
        return None, None, nulls
    return min(found.min for found in valued), max(found.max for found in valued), nulls
