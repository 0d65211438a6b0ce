"""Clock domains: conversion between anchors, and a card's clock by way of a made ioctl."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.errors import DataError, HostError
from pulse_bpf.nic.clocks import (
    PTP_SYS_OFFSET_EXTENDED,
    PTP_SYS_OFFSET_PRECISE,
    Clock,
    anchor,
    phc_anchor,
    to_wall,
)
from pulse_bpf.schema import CLOCKS

WALL_NS = 1_796_000_000_000_000_000
HCA = Clock("hca", "mlx5_0")


def test_a_domain_names_its_device() -> None:
    """E3: a number without its clock is worthless."""
    assert (Clock("monotonic").domain, HCA.domain) == ("monotonic", "hca/mlx5_0")
    row = anchor("a", HCA, WALL_NS, 77, WALL_NS + 301)
    assert row.schema == CLOCKS
    assert row.row(0) == ("a", "hca/mlx5_0", 77, WALL_NS + 150, 151)


@given(
    st.integers(-50, 50),
    st.integers(0, 2**62),
    st.lists(st.integers(0, 100_000_000_000), min_size=1, max_size=20),
)
def test_a_drifting_clock_is_converted_within_its_stated_error(
    ppm: int, start: int, moments_ns: list[int]
) -> None:
    """A cycle counter of 156.25 MHz that runs `ppm` fast, anchored each 10 s within 200 ns."""
    rng = np.random.default_rng(start)

    def cycles(t_ns: int) -> int:
        return start + t_ns * 15625 * (1_000_000 + ppm) // 100_000_000_000

    anchors = pl.concat(
        anchor("a", HCA, WALL_NS + t_ns - 200 + shift, cycles(t_ns), WALL_NS + t_ns + 200 + shift)
        for t_ns in range(0, 60_000_000_000, 10_000_000_000)
        for shift in [int(rng.integers(-200, 201))]
    )
    raw = np.array([cycles(t_ns) for t_ns in moments_ns])
    wall_ns, error_ns = to_wall(anchors.sample(fraction=1.0, shuffle=True, seed=1), HCA, raw)
    off_ns = np.abs(wall_ns - WALL_NS - np.array(moments_ns))
    assert (off_ns <= error_ns + 10).all()
    inside = np.array(moments_ns) <= 50_000_000_000
    assert (off_ns[inside] < 300).all()
    assert (error_ns[inside] < 300_000).all()


def test_after_a_suspend_both_offsets_are_kept() -> None:
    """E4: the monotonic clock lags by an hour from one anchor to the next."""
    hour_ns = 3_600_000_000_000
    anchors = pl.concat(
        anchor("a", Clock("monotonic"), wall - 100, raw, wall + 100)
        for raw, wall in (
            (0, WALL_NS),
            (10**10, WALL_NS + 10**10),
            (10**10 + 10**6, WALL_NS + 10**10 + hour_ns),
            (2 * 10**10, WALL_NS + 2 * 10**10 + hour_ns),
        )
    )
    wall_ns, _ = to_wall(anchors, Clock("monotonic"), np.array([5 * 10**9, 15 * 10**9]))
    assert np.abs(wall_ns - [WALL_NS + 5 * 10**9, WALL_NS + 15 * 10**9 + hour_ns]).max() < 10**6


def test_one_anchor_does_not_tell_how_fast_a_clock_runs() -> None:
    one = anchor("a", HCA, WALL_NS, 5, WALL_NS)
    for clocks, clock in ((one, HCA), (pl.concat([one, one]), HCA), (one, Clock("dpa", "mlx5_0"))):
        with pytest.raises(DataError, match=f"{clock.domain}.*anchors"):
            to_wall(clocks, clock, np.array([1]))


def packed(t_ns: int) -> bytes:
    return struct.pack("=qII", t_ns // 10**9, t_ns % 10**9, 0)


class Card:
    """A hardware clock 37 s ahead of the wall clock (TAI), whose every reading takes longer than the one before."""

    AHEAD_NS = 37 * 10**9

    def __init__(self, precise: bool, backwards: bool = False) -> None:
        self.precise = precise
        self.backwards = backwards

    def ioctl(self, device: int, request: int, buffer: bytearray) -> int:
        if request == PTP_SYS_OFFSET_PRECISE:
            if not self.precise:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            buffer[:48] = packed(WALL_NS + self.AHEAD_NS) + packed(WALL_NS) + packed(5)
            return 0
        assert request == PTP_SYS_OFFSET_EXTENDED
        assert struct.unpack_from("=I", buffer) == (25,)
        for sample in range(25):
            t_ns, wait_ns = WALL_NS + sample * 10_000, 400 + 100 * abs(sample - 12)
            times = (t_ns, t_ns + wait_ns // 2 + self.AHEAD_NS, t_ns + wait_ns)
            if self.backwards:
                times = times[::-1]
            buffer[16 + sample * 48 : 64 + sample * 48] = b"".join(map(packed, times))
        return 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sys/class/net/eth0/device/ptp/ptp3").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/ptp3").touch()
    return tmp_path


@pytest.mark.parametrize(("precise", "error_ns"), [(True, 100), (False, 200)])
def test_a_cards_clock_by_the_tightest_reading(root: Path, precise: bool, error_ns: int) -> None:
    row = phc_anchor("a", "eth0", root, Card(precise).ioctl).row(0, named=True)
    assert row["domain"] == "phc/ptp3"
    assert row["raw"] - row["wall_ns"] == Card.AHEAD_NS
    assert row["error_ns"] == error_ns


def test_why_a_cards_clock_cannot_be_read(root: Path) -> None:
    with pytest.raises(HostError, match="eth1 has no hardware clock"):
        phc_anchor("a", "eth1", root, Card(True).ioctl)
    with pytest.raises(HostError, match="wall clock was set"):
        phc_anchor("a", "eth0", root, Card(False, backwards=True).ioctl)
    (root / "dev/ptp3").unlink()
    with pytest.raises(HostError, match="/dev/ptp3"):
        phc_anchor("a", "eth0", root, Card(True).ioctl)
