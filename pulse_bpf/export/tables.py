"""Operators and findings as files for other programs: CSV, Parquet and JSON."""

from __future__ import annotations

import io
from typing import Any

import polars as pl

from pulse_bpf.analysis.findings import Findings
from pulse_bpf.schema import F64, I32, I64, STR

# One row per finding: the contract's fields, with what is measured and said about it as text.
_FINDINGS: dict[str, pl.DataType | type[pl.DataType]] = {
    "id": STR,
    "kind": STR,
    "cause": STR,
    "scope": STR,
    "confidence": F64,
    "slowdown": F64,
    "lost_ns": I64,
    "slowed_ns": I64,
    "first_ns": I64,
    "last_ns": I64,
    "state": STR,
    "node": STR,
    "nic": STR,
    "gpu": I32,
    "rank": I32,
    "pid": I64,
    "comm_id": STR,
    "peer_node": STR,
    "peer_nic": STR,
    "nodes": pl.List(STR),
    "victim_count": I64,
    "victims": pl.List(STR),
    "evidence": pl.List(STR),
    "next_check": STR,
}
FINDINGS = pl.Schema(_FINDINGS)


def findings_table(found: Findings) -> pl.DataFrame:
    """The findings as FINDINGS rows, most probable first; none where nothing was found."""
    rows: list[dict[str, Any]] = []
    for number, finding in enumerate(found.findings, 1):
        content = finding.to_dict(number)
        victims = content.pop("victims")
        evidence = [item["text"] for item in content.pop("evidence")]
        rows.append(
            {
                **content,
                "victim_count": victims["count"],
                "victims": victims["examples"],
                "evidence": evidence,
            }
        )
    return pl.DataFrame([{name: row.get(name) for name in FINDINGS} for row in rows], schema=FINDINGS)


def findings(found: Findings, form: str) -> bytes:
    """The findings as a file of this form: in JSON the whole contract, else findings_table."""
    return found.to_json().encode() + b"\n" if form == "json" else rows(findings_table(found), form)


def rows(table: pl.DataFrame, form: str) -> bytes:
    """A table as a file: CSV and JSON (an object a line) with a row a line, in CSV lists as text, or Parquet."""
    buffer = io.BytesIO()
    if form == "parquet":
        table.write_parquet(buffer)
    elif form == "json":
        table.write_ndjson(buffer)
    else:
        lists = [name for name, dtype in table.schema.items() if isinstance(dtype, pl.List)]
        table.with_columns(pl.col(lists).cast(pl.List(STR)).list.join("; ")).write_csv(buffer)
    return buffer.getvalue()
