"""A live finding in words: findings as the log and the status have them are dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.text import printable, suspect

_FIELDS = {field.name for field in fields(Finding)} - {"evidence", "victims"}


def headline(finding: Mapping[str, Any]) -> str:
    """Who is at fault, in a line that steers no terminal."""
    known = {name: value for name, value in finding.items() if name in _FIELDS}
    return printable(suspect(Finding(**known, evidence=[])))


def culprit(finding: Mapping[str, Any]) -> tuple[str, str]:
    """The node that a finding names, and the part of it or the other end; empty where it names none or several."""
    scope, node = finding["scope"], finding.get("node") or ""
    if scope == "gpu":
        gpu = finding.get("gpu")
        return node, f"rank {finding.get('rank')}" if gpu is None else f"gpu {gpu}"
    if scope == "nic":
        return node, finding.get("nic") or ""
    if scope == "link":
        return node, finding.get("peer_node") or ""
    return (node, "") if scope == "node" else ("", "")
