"""Anchors between the monotonic and the wall clock."""

from __future__ import annotations

import time

from pulse_bpf import clock
from pulse_bpf.schema import CLOCKS


def test_an_anchor_converts_monotonic_to_wall_within_its_error() -> None:
    anchor = clock.anchor()
    before_ns = time.time_ns()
    monotonic_ns = time.monotonic_ns()
    after_ns = time.time_ns()
    slack_ns = anchor.error_ns + 5_000_000
    assert before_ns - slack_ns <= monotonic_ns + anchor.offset_ns <= after_ns + slack_ns
    assert anchor.row("a").schema == CLOCKS


def test_the_discipline_is_one_of_the_formats_words() -> None:
    source, error_ns = clock.discipline()
    assert (source == "none" and error_ns is None) or (
        source == "ntp" and error_ns is not None and error_ns > 0
    )
