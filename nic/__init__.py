"""Readers of network-card traffic: one class per source behind the `Reader` protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import polars as pl

Tables = dict[str, pl.DataFrame]


@dataclass(frozen=True)
class Tap:
    """Where the packets of one RDMA port can be seen.

    `side` "device": `netdev` is the port's own interface, its ingress is what the port receives.
    `side` "switch": `netdev` is the far end of the cable (a bridge or switch port), its ingress is what the
    port sent, after any shaping. `gids` are the port's own GIDs as `nics.gids` writes them.
    """

    node: str
    nic: str
    port: int
    netdev: str
    side: Literal["device", "switch"]
    gids: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """What a reader can honestly claim, as it goes into the manifest."""

    name: str
    vantage: str
    per_qp: bool
    directions: tuple[str, ...]
    bin_ns: int | None
    bytes_are: Literal["wire", "payload"]


class Reader(Protocol):
    """One source of traffic counts; rows come out in the shape of the recording's tables, times as wall clock."""

    @property
    def source(self) -> Source: ...

    @property
    def notes(self) -> list[str]:
        """What is worth telling the user once; grows while it runs."""

    def start(self) -> None:
        """Begin to count; HostError when this host cannot."""

    def drain(self) -> None:
        """Take what would overflow, cheaply; never fails."""

    def read(self) -> Tables:
        """What has been counted since the last call, by table name, each in its schema of the recording."""

    def stop(self) -> Tables:
        """End counting, leave nothing armed, and return the rest. May be called more than once."""

    def period_ns(self) -> tuple[int, int] | None:
        """The time between readings as measured, median and 99th percentile; None for what does not read by time."""

    def coverage(self) -> pl.DataFrame:
        """The `coverage` rows so far: what was seen from when to when, and how many events were lost."""
