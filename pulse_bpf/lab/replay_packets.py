"""From samples to packets: what of a recording's rows goes over the wire, when, and with which sequence number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Mirror of struct packet in replay.c.
PACKET = np.dtype(
    [
        ("due_ns", "<u8"),
        ("flow", "<u4"),
        ("psn", "<u4"),
        ("message_bytes", "<u4"),
        ("payload_bytes", "<u2"),
        ("opcode", "u1"),
        ("reserved", "u1"),
    ]
)
# A samples row as the planner takes it, of flow number `flow`; -1 stands for packets that the recording does not count.
ROW = np.dtype(
    [(name, "<i8") for name in ("t_ns", "bin_ns", "flow", "mtu", "bytes", "retx_bytes", "packets")]
    + [(name, "<i8") for name in ("ctl_packets", "ack_packets")]
)
# BTH opcodes (InfiniBand specification, table 38).
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST_IMM, WRITE_ONLY, WRITE_ONLY_IMM, ACKNOWLEDGE = 6, 7, 9, 10, 11, 17
# A row's packets in the order they are sent: clear-to-send writes, new data, repeated data, acknowledgements.
CTL, NEW, AGAIN, ACK = range(4)
# What a clear-to-send write of one slot carries.
CTL_BYTES = 64
PSN_MASK = 0xFFFFFF
# A meter remembers about the latest 2,048 numbers one by one.
FURTHEST_BACK = 1024
# About as many packets are planned at a time, but never less than what begins at one time.
CHUNK_PACKETS = 1 << 17

Ints = NDArray[np.int64]


class Planner:
    """Plans the packets of rows that come in the order of t_ns, for flows numbered from 0 that begin at `first_psns`.

    Time 0 of due_ns is `first_ns`, which no row may be before; `speed` is how much faster than recorded they go.
    The packets of a row are spread evenly over its bin. Its new data are one RDMA WRITE WITH IMMEDIATE of full
    packets and a rest; what it repeats is one more, with the sequence numbers used last. Packets that a row counts
    beyond what its bytes take become writes of one byte or, where it has too few, of none: the format does not
    say what they were (congestion notifications, READ requests, short messages). Acknowledgements name what was
    sent last on their flow's partner, and without one a number of their own flow, which means nothing.
    """

    def __init__(self, first_psns: Ints, partners: Ints, first_ns: int, speed: float) -> None:
        self._first_psns = first_psns
        self._partners = partners
        self._latest_psns = (first_psns - 1) & PSN_MASK
        self._first_ns = first_ns
        self._speed = speed
        self._sent = np.zeros(len(first_psns), np.int64)
        self._later = np.zeros(0, PACKET)
        # Repeats that open a flow: they are nobody's repeats here. Rows whose packets could not carry their bytes.
        self.unrepeated_bytes = 0
        self.crowded_rows = 0

    def plan(self, rows: NDArray[np.void], until_ns: int | None) -> Iterator[NDArray[np.void]]:
        """The packets of `rows`, and those left from before, that are due before `until_ns` (None: all), in order.

        No later row may begin before `until_ns`. They come in pieces, some of them empty.
        """
        counts, data_bytes, before = self._count(rows)
        begin = 0
        for end in _cuts(rows["t_ns"], counts.sum(axis=1)):
            next_ns = int(rows["t_ns"][end]) if end < len(rows) else until_ns
            part = slice(begin, end)
            packets = self._expand(rows[part], counts[part], data_bytes[part], before[part])
            packets = np.concatenate([self._later, packets])
            packets = packets[np.argsort(packets["due_ns"], kind="stable")]
            due = len(packets)
            if next_ns is not None:
                due = int(np.searchsorted(packets["due_ns"], self._due(np.array([next_ns]))[0]))
            self._acknowledge(packets[:due])
            yield packets[:due]
            self._later = packets[due:]
            begin = end

    def _acknowledge(self, packets: NDArray[np.void]) -> None:
        """Gives acknowledgements in `packets`, which are in order, the number sent last on the flow they answer."""
        flow, is_ack = packets["flow"].astype(np.int64), packets["opcode"] == ACKNOWLEDGE
        answered = np.where(is_ack, self._partners[flow], flow)
        order = np.argsort(answered, kind="stable")
        answered, is_ack = answered[order], is_ack[order]
        starts = np.flatnonzero(np.diff(answered, prepend=-2))
        start = np.repeat(starts, np.diff(starts, append=len(order)))
        latest = np.maximum.accumulate(np.where(is_ack, -1, np.arange(len(order))))
        psn = np.where(latest >= start, packets["psn"][order[latest]], self._latest_psns[answered])
        named = is_ack & (answered >= 0)
        packets["psn"][order[named]] = psn[named]
        requests = order[~is_ack]
        last = requests[np.flatnonzero(np.diff(flow[requests], append=-1))]
        self._latest_psns[flow[last]] = packets["psn"][last]

    def _due(self, t_ns: Ints) -> NDArray[np.uint64]:
        due: NDArray[np.uint64] = ((t_ns - self._first_ns) / self._speed).astype(np.uint64)
        return due

    def _count(self, rows: NDArray[np.void]) -> tuple[Ints, Ints, Ints]:
        """Packets by row and kind, bytes by row and kind, and how many numbers each row's flow has used before it."""
        counts, data_bytes = np.zeros((2, len(rows), 4), np.int64)
        mtu, flow = rows["mtu"], rows["flow"]
        counts[:, CTL], counts[:, ACK] = rows["ctl_packets"], rows["ack_packets"]
        data_bytes[:, AGAIN] = np.minimum(rows["retx_bytes"], rows["bytes"])
        data_bytes[:, NEW] = rows["bytes"] - data_bytes[:, AGAIN]
        counts[:, AGAIN] = -(-data_bytes[:, AGAIN] // mtu)
        least = -(-data_bytes[:, NEW] // mtu)
        others = counts[:, CTL] + counts[:, AGAIN] + counts[:, ACK]
        counts[:, NEW] = np.maximum(least, rows["packets"] - others)
        self.crowded_rows += int(((rows["packets"] >= 0) & (rows["packets"] < others + least)).sum())

        requests = counts[:, :ACK].sum(axis=1)
        opens = (self._sent[flow] == 0) & (_before(requests, flow) == 0) & (requests == counts[:, AGAIN])
        self.unrepeated_bytes += int(data_bytes[opens, AGAIN].sum())
        for table in (counts, data_bytes):
            table[opens, NEW] += table[opens, AGAIN]
            table[opens, AGAIN] = 0

        used = counts[:, CTL] + counts[:, NEW]
        before = self._sent[flow] + _before(used, flow)
        np.add.at(self._sent, flow, used)
        return counts, data_bytes, before

    def _expand(
        self, rows: NDArray[np.void], counts: Ints, data_bytes: Ints, before: Ints
    ) -> NDArray[np.void]:
        """One packet after the other; what is the same for a kind in a row is computed once, as a *segment*."""
        each = counts.ravel()
        segment = np.repeat(np.arange(len(each)), each)
        row, kind = segment // 4, segment % 4
        packets = np.zeros(len(segment), PACKET)
        position = np.arange(len(segment))
        place = position - (np.cumsum(each) - each)[segment]

        total = counts.sum(axis=1)
        of_row = position - (np.cumsum(total) - total)[row]
        # At some place inside its share of the bin that differs between flows, which would else all send at once.
        phase = 100 + (rows["flow"] * 618) % 800
        share_ns = rows["bin_ns"] / (1000 * np.maximum(total, 1))
        in_bin_ns = ((1000 * of_row + phase[row]) * share_ns[row]).astype(np.int64)
        packets["due_ns"] = self._due(rows["t_ns"][row] + in_bin_ns)
        packets["flow"] = rows["flow"][row]

        used = before + counts[:, CTL] + counts[:, NEW]
        back = np.minimum(np.minimum(counts[:, AGAIN], used), FURTHEST_BACK)
        starts = np.stack([before, before + counts[:, CTL], used - back, used], axis=1).ravel()
        steps = np.where(kind == AGAIN, place % np.maximum(back, 1)[row], np.where(kind == ACK, 0, place))
        packets["psn"] = (self._first_psns[rows["flow"]][row] + starts[segment] + steps) & PSN_MASK

        self._cut(packets, segment, place, each, data_bytes.ravel(), np.repeat(rows["mtu"], 4))
        ctl, ack = kind == CTL, kind == ACK
        packets["opcode"][ctl], packets["opcode"][ack] = WRITE_ONLY, ACKNOWLEDGE
        packets["payload_bytes"][ctl] = packets["message_bytes"][ctl] = CTL_BYTES
        packets["payload_bytes"][ack] = packets["message_bytes"][ack] = 0
        return packets

    @staticmethod
    def _cut(
        packets: NDArray[np.void], segment: Ints, place: Ints, count: Ints, size: Ints, mtu: Ints
    ) -> None:
        """Cuts the `size` bytes of each segment into its packets: one message of full packets and a rest, then
        single bytes; a message of one packet is an ONLY."""
        enough = size >= count
        full = np.where(enough, np.minimum((size - count) // (mtu - 1), count), 0)
        rest = np.where(enough & (full < count), size - full * mtu - (count - full - 1), 0)
        message_packets = np.where(enough, full + (full < count), 1)[segment]
        in_message = place < message_packets
        single = np.where(enough[segment], 1, place < size[segment])
        payload = np.where(
            place < full[segment],
            mtu[segment],
            np.where(in_message & enough[segment], rest[segment], single),
        )
        packets["payload_bytes"] = payload
        several = in_message & (message_packets > 1)
        opcode = np.full(len(segment), WRITE_ONLY_IMM)
        opcode[several] = WRITE_MIDDLE
        opcode[several & (place == message_packets - 1)] = WRITE_LAST_IMM
        opcode[several & (place == 0)] = WRITE_FIRST
        packets["opcode"] = opcode
        packets["message_bytes"] = np.where(several, (full * mtu + rest)[segment], payload)


def _before(values: Ints, flow: Ints) -> Ints:
    """For each row the sum of `values` over the earlier rows of its flow."""
    order = np.argsort(flow, kind="stable")
    sorted_values = values[order]
    running = np.cumsum(sorted_values) - sorted_values
    starts = np.flatnonzero(np.diff(flow[order], prepend=-1))
    result = np.empty_like(running)
    result[order] = running - np.repeat(running[starts], np.diff(starts, append=len(order)))
    return result


def _cuts(t_ns: Ints, packets: Ints) -> list[int]:
    """Where to cut rows into parts of about CHUNK_PACKETS, only between different times; the last is the end."""
    changes = np.flatnonzero(np.diff(t_ns)) + 1
    filled = np.cumsum(packets)[changes - 1] // CHUNK_PACKETS
    cuts: Any = changes[np.flatnonzero(np.diff(filled, prepend=0))]
    return [*cuts.tolist(), len(t_ns)]
