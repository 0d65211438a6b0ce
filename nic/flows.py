"""The flows of a capture: all packets between two addresses to one queue pair number, and whose traffic they are."""

from __future__ import annotations

import ipaddress
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars.exceptions import PolarsError

from pulse_bpf.errors import UsageError
from pulse_bpf.nic.frames import Packets
from pulse_bpf.nic.identity import gid_text
from pulse_bpf.nic.pairs import Pairs
from pulse_bpf.schema import I64, NICS, NODES, QPS, STR, U8, U32, U64, flow_id

I64Array = NDArray[np.int64]

# One flow costs about 2 KiB of memory.
MAX_FLOWS = 1 << 16
NO_ROOM, ELSEWHERE = -1, -2
_OWNERS = pl.Schema({"number": I64, "node": STR, "nic": STR, "port": U8, "qpn": U32, "flow": U64})


class FlowTable:
    """Numbers flows from 0 in the order they appear; `pairs` knows which two of them are one connection.

    A flow is counted where it was seen first: captured at a second place, its packets would be counted twice. `nics`
    (NICS rows) says whose a GID is; one that is not in it is a node and a NIC of its own, by that name.
    """

    def __init__(self, nics: pl.DataFrame) -> None:
        self.pairs = Pairs()
        self._nics = nics
        rows = nics.explode("gids").select("gids", "node", "nic", "port").iter_rows()
        self._owner = {gid: (node, nic, port) for gid, node, nic, port in rows if gid is not None}
        self._strangers: set[str] = set()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._place = np.zeros(0, np.int64)
        # By number: source GID, target GID, and of the first packet the source port and the time.
        self._flows: list[tuple[str, str, int, int]] = []
        self._receivers: list[tuple[int, str, str, int, int, int]] = []
        self._lives: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
        self._multipliers = np.random.default_rng().integers(0, 1 << 63, 5, np.uint64) * np.uint64(
            2
        ) + np.uint64(1)

    def __len__(self) -> int:
        return len(self._flows)

    def number(self, packets: Packets) -> I64Array:
        """The flow of each packet; NO_ROOM beyond MAX_FLOWS, ELSEWHERE when it was first seen at another place."""
        if not len(packets):
            return np.zeros(0, np.int64)
        key = np.column_stack([packets.addresses, packets.qpn.astype(np.uint64)])
        hashed = (key * self._multipliers).sum(axis=1, dtype=np.uint64)
        _, first, distinct = np.unique(hashed, return_index=True, return_inverse=True)
        if (key != key[first][distinct]).any():  # two keys of one hash, by chance once in centuries
            _, first, distinct = np.unique(key, axis=0, return_index=True, return_inverse=True)
        numbers = np.empty(len(first), np.int64)
        news = []
        for at in np.argsort(first, kind="stable").tolist():
            name = tuple(key[first[at]].tolist())
            found = self._numbers.get(name, NO_ROOM)
            if found == NO_ROOM and len(self._numbers) < MAX_FLOWS:
                found = self._numbers[name] = len(self._numbers)
                news.append(int(first[at]))
            numbers[at] = found
        self._add(packets, news)
        result = numbers[distinct]
        elsewhere = (
            (result >= 0) & (self._place[result] != packets.place) if len(self._place) else result >= 0
        )
        result[elsewhere] = ELSEWHERE
        return result

    def _add(self, packets: Packets, news: list[int]) -> None:
        """The flows that begin with these packets."""
        if not news:
            return
        for at in news:
            source_high, source_low, target_high, target_low = packets.addresses[at].tolist()
            source, target = _gid(source_high, source_low), _gid(target_high, target_low)
            self._strangers |= {source, target} - self._owner.keys()
            key = *self._owned(target), int(packets.qpn[at])
            lives = self._lives[key]
            self._receivers.append((len(self._flows), *key, flow_id(*key, len(lives))))
            lives.append(len(self._flows))
            self._flows.append((source, target, int(packets.source_port[at]), int(packets.t_ns[at])))
        self._place = np.append(self._place, packets.place[news])
        self.pairs.add_flows([flow[:2] for flow in self._flows[-len(news) :]])

    def receivers(self) -> pl.DataFrame:
        """The queue pair that each flow goes to, a row per number: node, nic, port, qpn, flow."""
        return pl.DataFrame(self._receivers, schema=_OWNERS, orient="row")

    def senders(self) -> pl.DataFrame:
        """The queue pair that each flow comes from, in the same columns; qpn and flow are null while unknown."""
        partners = self.pairs.partner.tolist()
        rows = [
            (
                number,
                *self._owned(flow[0]),
                *(self._receivers[partner][-2:] if partner >= 0 else (None, None)),
            )
            for number, (flow, partner) in enumerate(zip(self._flows, partners, strict=True))
        ]
        return pl.DataFrame(rows, schema=_OWNERS, orient="row")

    def qps(self) -> pl.DataFrame:
        """QPS rows, sorted by node, nic, qpn and life: one that hears from another address begins another life."""
        rows: list[dict[str, Any]] = []
        for (node, nic, port, qpn), lives in self._lives.items():
            begun_ns = [None, *(self._flows[number][3] for number in lives[1:])]
            for number, created_ns, gone_ns in zip(lives, begun_ns, [*begun_ns[1:], None], strict=True):
                source, target, *_ = self._flows[number]
                partner = int(self.pairs.partner[number])
                is_known = partner >= 0
                rows.append(
                    {
                        "node": node,
                        "nic": nic,
                        "port": port,
                        "qpn": qpn,
                        "flow": self._receivers[number][-1],
                        "peer_qpn": self._receivers[partner][-2] if is_known else None,
                        "local_gid": target,
                        "peer_gid": source,
                        "created_ns": created_ns,
                        "gone_ns": gone_ns,
                        "udp_sport": self._flows[partner][2] if is_known else None,
                        "origin": "capture",
                    }
                )
        return pl.DataFrame(rows, schema=QPS).sort("node", "nic", "port", "qpn", maintain_order=True)

    def nics(self) -> pl.DataFrame:
        """NICS rows: those given, and one for each GID that was in none of them."""
        rows = [{"node": gid, "nic": gid, "port": 1, "gids": [gid]} for gid in sorted(self._strangers)]
        return pl.concat([self._nics, pl.DataFrame(rows, schema=NICS)])

    def nodes(self) -> pl.DataFrame:
        """NODES rows of the nodes in nics(): all have the clock of the capture, and nothing is known of their own."""
        names = self.nics()["node"].unique().sort().to_list()
        return pl.DataFrame([{"node": node, "clock_source": "none"} for node in names], schema=NODES)

    def _owned(self, gid: str) -> tuple[str, str, int]:
        return self._owner.get(gid, (gid, gid, 1))


def read_nics_file(path: Path) -> pl.DataFrame:
    """Whose GIDs are whose, as NICS rows: a recording's nics.parquet, or a JSON list of objects with those columns.

    Of these node, nic and gids must be there; the port is 1 if it is not. UsageError says what is wrong.
    """
    try:
        rows = pl.read_parquet(path).to_dicts() if path.suffix == ".parquet" else json.loads(path.read_text())
        if not isinstance(rows, list):
            raise TypeError("it holds no list")
        frame = pl.DataFrame([_nic_row(row) for row in rows], schema=NICS)
    except (OSError, ValueError, PolarsError) as error:
        raise UsageError(f"cannot read the NICs in {path}", str(error).splitlines()[0]) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no list of NICs with node, nic and gids", str(error)) from error
    return frame


def _nic_row(row: dict[str, Any]) -> dict[str, Any]:
    gids = [gid_text(ipaddress.IPv6Address(gid)) for gid in row["gids"]]
    return {"port": 1, **row, "node": str(row["node"]), "nic": str(row["nic"]), "gids": gids}


def _gid(high: int, low: int) -> str:
    return gid_text(ipaddress.IPv6Address(high << 64 | low))
