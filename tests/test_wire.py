"""What agents send: it comes out as it went in, and nothing else comes in."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.errors import DataError
from pulse_bpf.live import wire


def step(**given: object) -> wire.Step:
    operators = pl.DataFrame(
        {"node": ["node0"], "op_seq": [3], "call_ns": [17], "final": [True]},
        schema_overrides={name: wire.SENT_OPERATORS[name] for name in ("node", "op_seq", "call_ns", "final")},
    )
    whole = pl.DataFrame(
        {
            name: operators[name] if name in operators.columns else pl.Series([None], dtype=dtype)
            for name, dtype in wire.SENT_OPERATORS.items()
        }
    )
    values = {"spool": "a", "sequence": 7, "until_ns": 5, "tables": {"operators": whole}}
    return wire.Step(**(values | given))  # type: ignore[arg-type]


def changed(name: str, value: object) -> pa.RecordBatch:
    """A batch whose field `name` is not what it should be."""
    rows = wire.encode(step()).to_pylist()
    rows[0][name] = value
    return pa.RecordBatch.from_pylist(rows, wire.ENVELOPE)


def test_a_step_comes_out_as_it_went_in() -> None:
    there = wire.decode(wire.unpacked(wire.packed(wire.encode(step()))))
    assert (there.spool, there.sequence, there.until_ns) == ("a", 7, 5)
    assert there.tables["operators"].equals(step().tables["operators"])


def test_a_step_without_news_is_a_step() -> None:
    assert wire.decode(wire.encode(step(tables={}))).tables == {}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("table", "samples", "do not belong together"),
        ("table", "../../etc/passwd", "do not belong together"),
        ("raw_bytes", 2**40, "unpacks to more"),
        ("rows", 2**40, "unpacks to more"),
        ("spool", "a" * 100, "too long"),
        ("rows", 2, "malformed"),
        ("raw_bytes", 10, "malformed"),
        ("data", b"no zstd", "malformed"),
        ("data", b"", "malformed"),
        ("table", "nodes", "other columns"),
    ],
)
def test_what_is_wrong_is_refused(name: str, value: object, why: str) -> None:
    with pytest.raises(DataError, match=why):
        wire.decode(changed(name, value))


def test_other_columns_too_much_and_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="envelope"):
        wire.decode(pa.record_batch({"a": [1]}))
    with pytest.raises(DataError, match="0 tables"):
        wire.decode(pa.RecordBatch.from_pylist([], wire.ENVELOPE))
    double = pa.RecordBatch.from_pylist(2 * wire.encode(step()).to_pylist(), wire.ENVELOPE)
    with pytest.raises(DataError, match="do not belong together"):
        wire.decode(double)
    monkeypatch.setattr(wire, "MOST_BYTES", 100)
    with pytest.raises(DataError, match="100 is the most"):
        wire.decode(wire.encode(step()))


@given(st.data())
def test_bytes_that_were_changed_on_the_way_are_refused_or_harmless(data: st.DataObject) -> None:
    content = bytearray(wire.packed(wire.encode(step())))
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        there = wire.decode(wire.unpacked(bytes(content)))
    except DataError:
        return
    for table, frame in there.tables.items():
        assert frame.schema == wire.SCHEMAS[table]
