"""Ports that lose what they send, by what receivers refused: counters of packets out of sequence at both ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.signals import MIN_ERRORS, OVER_OTHERS, PACKET_BYTES, intervals
from pulse_bpf.analysis.slow import MIN_MARKS

# Of the packets that a port sends, the share refused by receivers from which packets are lost for good, and of all
# refusals, what a port must have seen to be one that refuses.
REFUSED_SHARE, MUCH = 2e-5, 0.02
# Of what a port sends, what must go to the only receiver that refuses for it to be the port that loses.
NEARLY_ALL = 0.9


def find_refused(aligned: pl.DataFrame, tables: Mapping[str, pl.DataFrame]) -> list[Finding]:
    """The port whose packets receivers refuse as out of sequence, because some before them were lost.

    A sender counts refusals as packet_seq_err, a receiver as out_of_sequence. What one port loses on the way to
    several receivers it loses itself, or its cable. With a single receiver, to which alone it sends, that may also be
    the receiver's cable: but what is damaged there the receiver counts as port_rcv_errors, and where it does not the
    sender's cable is left. Where the receiver does not say, or a queue that overflows may be the reason, only the link
    is known. Nothing is said where several ports lose as much: then it is a queue, or a switch.
    """
    since = intervals(tables)
    if not {"packet_seq_err", "out_of_sequence", "port_xmit_data"} <= set(since.columns):
        return []
    ports = (
        since.group_by("node", "nic")
        .agg(
            pl.col("packet_seq_err", "out_of_sequence").sum(),
            *(_told(name, since) for name in ("port_rcv_errors", "rp_cnp_handled")),
            packets=pl.col("port_xmit_data").sum() * 4 / PACKET_BYTES,
            first=pl.col("since_ns").filter(pl.col("packet_seq_err") > 0).min(),
            last=pl.col("t_ns").filter(pl.col("packet_seq_err") > 0).max(),
        )
        .sort("packet_seq_err", "node", "nic", descending=[True, False, False])
    )
    if ports.is_empty():
        return []
    worst = ports.row(0, named=True)
    refused = int(worst["packet_seq_err"] or 0)
    second = int(ports["packet_seq_err"][1] or 0) if ports.height > 1 else 0
    share = refused / max(1.0, worst["packets"])
    if refused < MIN_ERRORS or share < REFUSED_SHARE or second * OVER_OTHERS > refused:
        return []
    node, nic = str(worst["node"]), str(worst["nic"])
    receivers = ports.filter(pl.col("out_of_sequence") >= MUCH * refused)
    text = (
        f"Receivers refused {refused} of the packets that {nic} of {node} sent ({share:.3%}), for some before them had "
        f"been lost; of no other port more than {second}."
    )
    peer = receivers.row(0, named=True) if receivers.height == 1 else None
    if peer is not None and _undamaged(peer, refused) and _unmarked(worst) and _all_to(aligned, worst, peer):
        text += f" {peer['nic']} of {peer['node']}, which refused them, counts no damage on its own cable."
        peer = None
    elif peer is None and not _sends_to(aligned, node, nic, receivers):
        return []
    return [
        Finding(
            kind="lossy-link",
            cause="network",
            scope="nic" if peer is None else "link",
            confidence=0.95,
            slowdown=1.0,
            first_ns=worst["first"],
            last_ns=worst["last"],
            evidence=[Evidence("packet_seq_err", float(refused), float(second), 0, text)],
            node=node,
            nic=nic,
            peer_node=None if peer is None else peer["node"],
            peer_nic=None if peer is None else peer["nic"],
            nodes=None if peer is None else [node, peer["node"]],
            next_check=f"on {node}: ethtool -m NETDEV; ethtool -S NETDEV; the switch's error counters of its port",
        )
    ]


def _told(name: str, since: pl.DataFrame) -> pl.Expr:
    """How far a counter went, null where the port or all ports do not have it."""
    if name not in since.columns:
        return pl.lit(None, pl.Int64).alias(name)
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)


def _undamaged(receiver: Mapping[str, Any], refused: int) -> bool:
    errors = receiver["port_rcv_errors"]
    return errors is not None and errors <= MUCH * refused


def _unmarked(sender: Mapping[str, Any]) -> bool:
    marks = sender["rp_cnp_handled"]
    return marks is not None and marks < MIN_MARKS


def _all_to(aligned: pl.DataFrame, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> bool:
    """Whether nearly all that the port sends goes to that receiver: what it sends to others would be lost as well."""
    sent = aligned.filter(
        pl.col("level").is_in(["flow", "traffic"]),
        pl.col("direction") == "tx",
        pl.col("node") == sender["node"],
        pl.col("nic") == sender["nic"],
    )
    there = (pl.col("peer_node") == receiver["node"]) & (pl.col("peer_nic") == receiver["nic"])
    return int(sent.filter(there)["bytes"].sum()) > NEARLY_ALL * int(sent["bytes"].sum())


def _sends_to(aligned: pl.DataFrame, node: str, nic: str, receivers: pl.DataFrame) -> bool:
    """Whether the port sends to those that refuse, as far as flows tell; some of them may not count."""
    peers = aligned.filter(
        pl.col("direction") == "tx", pl.col("node") == node, pl.col("nic") == nic, pl.col("bytes") > 0
    ).select(node="peer_node", nic="peer_nic")
    known = peers.drop_nulls().unique()
    return known.is_empty() or known.join(receivers, on=["node", "nic"]).height > 0 or receivers.is_empty()
