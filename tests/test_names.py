"""Names as numbers, and rows numbered by the call that they belong to."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.analysis.call_numbers import call_numbers
from pulse_bpf.analysis.names import numbered, numbered_names

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3), st.integers(0, 40)), max_size=60)
NAMES = st.lists(st.none() | st.text(max_size=3), max_size=30)


@given(ROWS)
def test_calls_are_numbered_in_order(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    process, call = call_numbers(*columns)
    processes = sorted({row[:2] for row in rows})
    calls = sorted(set(rows))
    assert process.tolist() == [processes.index(row[:2]) for row in rows]
    assert call.tolist() == [calls.index(row) for row in rows]


@given(NAMES, NAMES)
def test_numbered_names_sort_join_and_compare_as_text(
    nodes: list[str | None], peers: list[str | None]
) -> None:
    operators = pl.DataFrame({"node": nodes, "kind": nodes}, schema={"node": pl.String, "kind": pl.String})
    flows = pl.DataFrame({"peer_node": peers}, schema={"peer_node": pl.String})
    given_operators, given_flows, tables = numbered_names(operators, flows, {"nics": operators})
    assert given_operators["node"].dtype == given_flows["peer_node"].dtype == tables["nics"]["node"].dtype
    assert tables["nics"]["kind"].dtype == pl.String
    assert given_operators["node"].to_list() == nodes
    assert given_operators["node"].sort().to_list() == operators["node"].sort().to_list()
    both = given_operators.join(given_flows, left_on="node", right_on="peer_node")["node"]
    assert sorted(both) == sorted(operators.join(flows, left_on="node", right_on="peer_node")["node"])
    assert given_operators.filter(pl.col("kind") == "Send").height == nodes.count("Send")


@given(NAMES)
def test_numbers_of_text_depend_on_nothing_seen_before(names: list[str | None]) -> None:
    text = pl.Series("name", names, pl.String)
    pl.Series([f"{name}!" for name in names], dtype=pl.Categorical)
    numbers = text.to_frame().select(numbered(text)(pl.col("name")))["name"].to_list()
    known = sorted({name for name in names if name is not None})
    assert numbers == [None if name is None else known.index(name) for name in names]
