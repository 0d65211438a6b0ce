"""Which queue pairs this machine has and had, merged from everything that can be observed about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from pulse_bpf.schema import I64, QPS, STR, U32, U64, flow_id

Origin = Literal["uprobe", "netlink", "capture"]
_RANK: dict[Origin, int] = {"capture": 0, "netlink": 1, "uprobe": 2}
_RESET, _INIT = 0, 1  # enum ibv_qp_state

_LEARNT = ("peer_qpn", "peer_gid", "pid", "udp_sport", "service_level", "path_mtu", "retry_count", "timeout")

# What the lookups below need to know about each life.
_LIVES = pl.Schema(
    {
        "nic": STR,
        "qpn": U32,
        "flow": U64,
        "peer_gid": STR,
        "peer_qpn": U32,
        "from_ns": I64,
        "gone_ns": I64,
        "first": pl.Boolean,
    }
)


@dataclass
class _Life:
    """One life of one queue pair number, from its creation to its destruction."""

    node: str
    nic: str
    port: int
    qpn: int
    flow: int
    origin: Origin
    seen_ns: int  # when it was first observed; it began before
    created_ns: int | None
    gone_ns: int | None = None
    peer_qpn: int | None = None
    peer_gid: str | None = None
    seen_peer_gid: str | None = None
    local_gid: str | None = None
    pid: int | None = None
    udp_sport: int | None = None
    service_level: int | None = None
    path_mtu: int | None = None
    retry_count: int | None = None
    timeout: int | None = None
    listed: bool = False  # by netlink, so that its absence there means its end

    def contradicts(self, origin: Origin, seen: Mapping[str, Any]) -> bool:
        """Whether `seen` cannot be this life. Process ids are only compared where they stem from one namespace."""
        compared = ["peer_qpn", "peer_gid"] + (["pid"] if origin == self.origin == "netlink" else [])
        pairs = ((getattr(self, name), seen.get(name)) for name in compared)
        return any(mine is not None and other is not None and mine != other for mine, other in pairs)

    def learn(self, origin: Origin, seen: Mapping[str, Any]) -> None:
        """Takes over what `seen` knows; the better origin wins."""
        better = _RANK[origin] >= _RANK[self.origin]
        for name in _LEARNT:
            value = seen.get(name)
            if value is not None and (better or getattr(self, name) is None):
                setattr(self, name, value)
        if better:
            self.origin = origin


class QpTable:
    """The lives of all queue pairs on the ports in `nics` (NICS rows), numbered per queue pair from 0.

    Assumptions: a device has one queue pair per QPN at a time, whatever its port. Observations of one origin
    come in the order of time. If they do not, a life may be split in two, and its bytes with it. Where
    neither uprobes nor netlink tell that a QPN was reused, both lives count as one.
    """

    def __init__(self, nics: pl.DataFrame) -> None:
        self._nodes: dict[str, str] = dict(nics.select("nic", "node").iter_rows())
        ports = nics.group_by("nic").agg(pl.col("port").unique())
        self._only_port = {nic: found[0] for nic, found in ports.iter_rows() if len(found) == 1}
        self._lives: dict[tuple[str, int], list[_Life]] = {}
        self._listed_ns: int | None = None
        self._cached_lookups: tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame] | None = None

    def observe_uprobe(self, frame: pl.DataFrame) -> None:
        """Merges calls of ibv_modify_qp and ibv_destroy_qp.

        Columns: node str, nic str, port u8?, qpn u32, peer_qpn u32?, peer_gid str?, pid i64, state i32? (enum
        ibv_qp_state), t_ns i64 (wall), service_level, path_mtu, retry_count, timeout i32?, destroyed bool.
        A port that is not given is the only one of its device; of a device with several, the first.
        """
        self._cached_lookups = None
        for seen in frame.sort("t_ns").iter_rows(named=True):
            key, t_ns, inits = (seen["nic"], seen["qpn"]), seen["t_ns"], seen["state"] in (_RESET, _INIT)
            if seen["destroyed"]:
                self._end(key, t_ns)
                continue
            if seen["state"] == _RESET and seen["port"] is None and key[0] not in self._only_port:
                continue  # the next change tells its port
            life = self._latest(key)
            if (
                life is None
                or (life.gone_ns is not None and life.gone_ns < t_ns)
                or (inits and life.peer_qpn is not None and life.seen_ns < t_ns)
                or life.contradicts("uprobe", seen)
            ):
                life = self._begin("uprobe", seen, t_ns, t_ns if inits else None)
            elif inits and (life.created_ns is None or life.origin != "uprobe"):
                life.created_ns = t_ns
            life.learn("uprobe", seen)

    def observe_netlink(self, frame: pl.DataFrame, t_ns: int) -> None:
        """Merges one complete listing, finished at wall time `t_ns`, in the columns of Nldev.queue_pairs(), and those
        of qpc.with_contexts() where a device tells them.

        Assumes that what uprobes saw before the listing began has been merged. What an earlier listing had and
        this one has not is gone. A listed queue pair that uprobes saw destroyed is taken for one on its way out,
        not for a new one; should the same process have reused its number for the same peer unseen, both lives
        count as one. Devices that are not recorded are skipped.
        """
        self._cached_lookups = None
        present = set()
        for seen in frame.iter_rows(named=True):
            key = (seen["nic"], seen["qpn"])
            if seen["nic"] not in self._nodes:
                continue
            present.add(key)
            life = self._latest(key)
            if life is None or life.contradicts("netlink", seen):
                life = self._begin("netlink", seen, t_ns, self._listed_ns)
            life.learn("netlink", seen)
            life.listed = True
        for key, lives in self._lives.items():
            if key not in present and lives[-1].listed and lives[-1].gone_ns is None:
                lives[-1].gone_ns = t_ns
        self._listed_ns = t_ns

    def observe_capture(self, frame: pl.DataFrame) -> None:
        """Merges packets received by queue pairs: the busiest peer of each names its peer GID, once.

        Columns: node, nic, local_gid, peer_gid str, port u8, qpn u32, packets. Packets never end a life: an
        earlier peer may go on repeating long after its partner's number was reused.
        """
        busiest = frame.sort("packets").unique(["nic", "qpn"], keep="last")
        for seen in busiest.iter_rows(named=True):
            life = self._latest((seen["nic"], seen["qpn"]))
            if life is None:
                life = self._begin("capture", seen, 0, None)
            if life.gone_ns is None and life.seen_peer_gid is None:
                self._cached_lookups = None
                life.seen_peer_gid = seen["peer_gid"]
                life.local_gid = seen["local_gid"]

    def resolve_tx(self, sent: pl.DataFrame) -> pl.DataFrame:
        """`sent` sorted by last_ns, with the local `qpn` and its `flow` that sent to (peer_gid, peer_qpn).

        Columns needed: nic, peer_gid str, peer_qpn u32, last_ns i64 (the last moment of the bin). The answer is
        the latest life begun by then with that very peer. If the peer's GID of none is known to be that, it is the
        only living one with this peer QPN whose peer GID is unknown: right as long as all queue pairs of the device
        are listed; those made past the verbs library are not, and could be mistaken for it. Else both are null.
        """
        _, known, only = self._lookups()
        peer = ["nic", "peer_gid", "peer_qpn"]
        fall_back = pl.col("is_known").is_null()
        return (
            sent.sort("last_ns")
            .join_asof(known, left_on="last_ns", right_on="from_ns", by=peer, check_sortedness=False)
            .join(only, on=["nic", "peer_qpn"], how="left", suffix="_only", maintain_order="left")
            .with_columns(
                pl.when(fall_back).then(f"{name}_only").otherwise(name).alias(name)
                for name in ("qpn", "flow")
            )
            .drop("from_ns", "is_known", "qpn_only", "flow_only")
        )

    def flows(self, received: pl.DataFrame) -> pl.DataFrame:
        """`received` sorted by last_ns, with the `flow` of each (nic, qpn) at last_ns, the last moment of its bin."""
        begun, _, _ = self._lookups()
        return (
            received.sort("last_ns")
            .join_asof(
                begun, left_on="last_ns", right_on="from_ns", by=["nic", "qpn"], check_sortedness=False
            )
            .drop("from_ns")
        )

    def frame(self) -> pl.DataFrame:
        """All lives as QPS rows, sorted by node, nic, qpn and life; created_ns is null for older than recorded."""
        rows = [
            {
                "flow": life.flow,
                "peer_gid": life.peer_gid or life.seen_peer_gid,
                "node": life.node,
                "nic": life.nic,
                "port": life.port,
                "qpn": life.qpn,
                "peer_qpn": life.peer_qpn,
                "local_gid": life.local_gid,
                "pid": life.pid,
                "created_ns": life.created_ns,
                "gone_ns": life.gone_ns,
                "udp_sport": life.udp_sport,
                "service_level": life.service_level,
                "path_mtu": life.path_mtu,
                "retry_count": life.retry_count,
                "timeout": life.timeout,
                "origin": life.origin,
            }
            for life in self._all()
        ]
        return pl.DataFrame(rows, schema=QPS).sort("node", "nic", "qpn", maintain_order=True)

    def _all(self) -> Iterable[_Life]:
        return (life for lives in self._lives.values() for life in lives)

    def _latest(self, key: tuple[str, int]) -> _Life | None:
        lives = self._lives.get(key)
        return lives[-1] if lives else None

    def _begin(self, origin: Origin, seen: Mapping[str, Any], seen_ns: int, created_ns: int | None) -> _Life:
        """A new life of a queue pair, first observed at seen_ns; it ends the one before."""
        nic, qpn = seen["nic"], seen["qpn"]
        lives = self._lives.setdefault((nic, qpn), [])
        if lives:
            last = lives[-1]
            if last.gone_ns is None:
                last.gone_ns = seen_ns if created_ns is None else created_ns
            created_ns = max(last.gone_ns, created_ns or 0)
        node = self._nodes.get(nic) or seen["node"]
        port = seen["port"] or self._only_port.get(nic, 1)
        flow = flow_id(node, nic, port, qpn, len(lives))
        lives.append(_Life(node, nic, port, qpn, flow, origin, seen_ns, created_ns))
        return lives[-1]

    def _end(self, key: tuple[str, int], t_ns: int) -> None:
        """Ends the life that a destruction at t_ns means: the last one seen by then, not a later one that a
        listing has already shown."""
        lives = self._lives.get(key, [])
        life = next((life for life in reversed(lives) if life.seen_ns <= t_ns), lives[-1] if lives else None)
        if life is not None:
            life.gone_ns = t_ns if life.gone_ns is None else min(life.gone_ns, t_ns)

    def _lookups(self) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Lives by (nic, qpn), by the peer they are known to have, and by peer QPN where only that is known."""
        if self._cached_lookups is None:
            rows = [
                (
                    life.nic,
                    life.qpn,
                    life.flow,
                    life.peer_gid or life.seen_peer_gid,
                    life.peer_qpn,
                    life.created_ns or 0,
                    life.gone_ns,
                    life is self._lives[life.nic, life.qpn][0],
                )
                for life in self._all()
            ]
            lives = pl.DataFrame(rows, schema=_LIVES, orient="row").sort("from_ns")
            # What is older than the first life known belongs to it.
            begun = lives.select(
                "nic", "qpn", "flow", pl.when("first").then(0).otherwise("from_ns").alias("from_ns")
            )
            connected = lives.filter(pl.col("peer_qpn").is_not_null())
            # Two lives begun at once with one peer: at least one is stale, and which one cannot be told.
            one_or_null = [
                pl.when(pl.len() == 1).then(pl.col(name).first()).alias(name) for name in ("qpn", "flow")
            ]
            known = (
                connected.filter(pl.col("peer_gid").is_not_null())
                .group_by("nic", "peer_gid", "peer_qpn", "from_ns")
                .agg(*one_or_null)
                .with_columns(is_known=True)
            )
            unknown = connected.filter(pl.col("peer_gid").is_null() & pl.col("gone_ns").is_null())
            only = unknown.unique(["nic", "peer_qpn"], keep="none").select("nic", "peer_qpn", "qpn", "flow")
            self._cached_lookups = begun.sort("from_ns"), known.sort("from_ns"), only
        return self._cached_lookups
