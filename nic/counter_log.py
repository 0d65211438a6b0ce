"""What has become of counters between two readings: changes, wraps and resets."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from pulse_bpf.schema import PORT_COUNTERS

# The per-port error counters of mlx5 that are 32 bits wide in the card and wrap (QUERY_Q_COUNTER in the kernel's
# include/linux/mlx5/mlx5_ifc.h). Any other counter is taken as 64 bits wide: it goes back only when it was reset.
WRAPPING = frozenset(
    {
        "out_of_buffer",
        "out_of_sequence",
        "duplicate_request",
        "rnr_nak_retry_err",
        "packet_seq_err",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "roce_adp_retrans",
        "roce_adp_retrans_to",
        "roce_slow_restart",
    }
)
# No port sees so many exceptional packets: a 32-bit counter that would have to have counted faster was reset.
_MAX_PACKETS_PER_S = 100_000_000

Port = tuple[str, str, int]
"""Node, RDMA device and port; port 0 stands for what counts for the whole device."""


@dataclass(frozen=True)
class Change:
    """What a counter counted since `since_ns`, the time of the reading before. `count` None: it was reset in between,
    so nobody can tell."""

    since_ns: int
    count: int | None


class CounterLog:
    """Remembers each counter's last reading, and collects the port_counters rows of `source`.

    A row is written for the first reading of a counter and whenever its value is another than before: within coverage,
    a counter without a row kept its value. Values and names are the device's own; wrapped counters go on counting.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._last: dict[tuple[Port, str], tuple[int, int, int]] = {}
        self._rows: list[tuple[str, str, int, str, str, int, int, bool]] = []

    def add(self, port: Port, counter: str, t_ns: int, value: int, cumulative: bool = True) -> Change | None:
        """Takes one reading, at wall time `t_ns`; None when there is none to compare it with.

        `cumulative` False: a state, which may go either way, and whose change counts nothing.
        """
        last = self._last.get((port, counter))
        since_ns, raw, wrapped = last or (t_ns, value, 0)
        count: int | None = value - raw if cumulative else 0
        if cumulative and value < raw:
            count = (value - raw) % 2**32
            elapsed_ns = max(t_ns - since_ns, 1)
            wraps = counter in WRAPPING and raw < 2**32
            if wraps and count * 1_000_000_000 <= _MAX_PACKETS_PER_S * elapsed_ns:
                wrapped += 2**32
            else:
                count = None
        self._last[port, counter] = t_ns, value, wrapped
        if last is None or value != raw:
            self._rows.append((*port, self._source, counter, t_ns, wrapped + value, cumulative))
        return None if last is None else Change(since_ns, count)

    def take(self) -> pl.DataFrame:
        """The rows since the last call, in order of time."""
        rows, self._rows = self._rows, []
        return pl.DataFrame(rows, schema=PORT_COUNTERS, orient="row").sort("t_ns", maintain_order=True)
