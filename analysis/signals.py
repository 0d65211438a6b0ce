"""What ports say of themselves: links that went down, errors, pauses, and traffic that is nobody's of the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding

PORT = ["node", "nic", "port"]
# Wire bytes of a packet's payload of 4096: Ethernet, IP, UDP and InfiniBand headers around it add 1.5 %.
PACKET_BYTES = 4096.0
# Of the packets that a port carries, the share with errors from which its cable or transceiver is at fault, how many
# there must be, and how far the worst port must stand out for the others to be healthy.
ERROR_SHARE, MIN_ERRORS, OVER_OTHERS = 2e-5, 20, 5.0
# Of an interval between two readings, the share in which a port kept its switch from sending, and how many frames.
PAUSED_SHARE, MIN_PAUSES = 0.01, 20
# Of a port's line rate, what must come in beyond the job's own traffic to be another tenant's.
FOREIGN_SHARE = 0.05
# Of what the heaviest sender to a port sends, what others must to be among those held up.
MUCH = 0.4
# Congestion notifications that make a receiving port congested.
MIN_CNPS = 20


def readings(counters: pl.DataFrame) -> pl.DataFrame:
    """One row per port and interval between readings: since_ns, t_ns and how far each counter went meanwhile.

    Takes port_counters; only cumulative counters count. A counter that a port does not have is null, one that
    did not change between two readings of the port 0. Values of 2^63 and more are no counts and left out.
    """
    known = counters.filter("cumulative").with_columns(pl.col("value").cast(pl.Int64, strict=False))
    wide = known.pivot("counter", index=[*PORT, "t_ns"], values="value", aggregate_function="max")
    names = [name for name in wide.columns if name not in (*PORT, "t_ns")]
    return (
        wide.sort(*PORT, "t_ns")
        .with_columns(pl.col(names).forward_fill().over(PORT))
        .with_columns(pl.col(names).diff().clip(0).over(PORT), since_ns=pl.col("t_ns").shift().over(PORT))
        .drop_nulls("since_ns")
    )


def intervals(tables: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """`readings` of the port_counters, as localization has them ready for all; nothing where there are none."""
    counters = tables["port_counters"]
    return (
        tables["readings"]
        if "readings" in tables
        else counters
        if counters.is_empty()
        else readings(counters)
    )


def find_signals(
    aligned: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
) -> list[Finding]:
    """Ports whose own counters and events say what is wrong with them, and congestion by other tenants.

    A port that went down, one with errors, and one that pauses its switch are at fault by themselves. Where
    a port receives much more than the job sends to it, and is congested, the network is at fault and no machine.
    `flows` are the owners of the queue pairs (attribute.FLOWS).
    """
    since = intervals(tables)
    found = _downs(tables["events"])
    down = {(finding.node, finding.nic) for finding in found}
    if not since.is_empty():
        found += [item for item in _errors(since) if (item.node, item.nic) not in down]
        paused = _pauses(since, aligned)
        found += paused
        pausing = {(finding.node, finding.nic) for finding in paused}
        tenants = _tenants(since, aligned, flows, tables)
        found += [item for item, port in tenants if port not in pausing | down]
    return found


def marks(tables: Mapping[str, pl.DataFrame]) -> pl.DataFrame | None:
    """How often each node and nic was asked to slow down (`marks`); None where no port counts it."""
    since = intervals(tables)
    if "rp_cnp_handled" not in since.columns:
        return None
    return since.group_by("node", "nic").agg(pl.col("rp_cnp_handled").sum().alias("marks"))


def _downs(events: pl.DataFrame) -> list[Finding]:
    ports = (
        events.filter(pl.col("kind").is_in(["port_down", "port_up"]))
        .group_by("node", "nic")
        .agg(
            pl.col("value").filter(pl.col("kind") == "port_down").sum().alias("downs"),
            pl.col("t_ns").min().alias("first"),
            pl.col("t_ns").max().alias("last"),
            pl.col("kind").sort_by("t_ns").last(),
        )
        .filter(pl.col("downs") > 0)
        .sort("downs", "node", "nic", descending=[True, False, False])
    )
    found = []
    for row in ports.iter_rows(named=True):
        state = "down" if row["kind"] == "port_down" else "up again"
        text = f"The port of {row['nic']} on {row['node']} went down {row['downs']} times; it is {state} at the end."
        found.append(
            Finding(
                kind="nic-down",
                cause="nic",
                scope="nic",
                confidence=0.97,
                slowdown=1.0,
                first_ns=row["first"],
                last_ns=row["last"],
                state=state,
                evidence=[Evidence("port_down", float(row["downs"]), 0.0, 0, text)],
                node=row["node"],
                nic=row["nic"],
                next_check=f"on {row['node']}: ethtool NETDEV; ethtool -m NETDEV; journalctl -k | grep NETDEV",
            )
        )
    return found


def _errors(since: pl.DataFrame) -> list[Finding]:
    if "port_rcv_errors" not in since.columns:
        return []
    ports = (
        since.with_columns(packets=pl.sum_horizontal(_data(since)) * 4 / PACKET_BYTES)
        .group_by("node", "nic")
        .agg(
            pl.col("port_rcv_errors", "packets").sum(),
            pl.col("since_ns").filter(pl.col("port_rcv_errors") > 0).min().alias("first"),
            pl.col("t_ns").filter(pl.col("port_rcv_errors") > 0).max().alias("last"),
        )
        .with_columns(share=pl.col("port_rcv_errors") / pl.col("packets").clip(1))
        .sort("port_rcv_errors", "node", "nic", descending=[True, False, False])
    )
    bad = ports.filter(pl.col("port_rcv_errors") >= MIN_ERRORS, pl.col("share") >= ERROR_SHARE)
    if bad.is_empty() or bad.height > max(1, ports.height // 4):
        return []
    usual = float(ports["share"].median() or 0.0)  # type: ignore[arg-type]
    found = []
    for row in bad.filter(pl.col("port_rcv_errors") * OVER_OTHERS >= bad["port_rcv_errors"][0]).iter_rows(
        named=True
    ):
        text = (
            f"The port of {row['nic']} on {row['node']} counted {row['port_rcv_errors']} packets with errors, "
            f"{row['share']:.3%} of what it carries; the median port {usual:.3%}."
        )
        found.append(
            Finding(
                kind="lossy-link",
                cause="network",
                scope="nic",
                confidence=0.95,
                slowdown=1.0,
                first_ns=row["first"],
                last_ns=row["last"],
                evidence=[Evidence("port_rcv_errors", float(row["port_rcv_errors"]), 0.0, 0, text)],
                node=row["node"],
                nic=row["nic"],
                next_check=f"on {row['node']}: ethtool -m NETDEV; ethtool -S NETDEV; change cable or transceiver",
            )
        )
    return found


def _data(since: pl.DataFrame) -> list[str]:
    return [name for name in ("port_xmit_data", "port_rcv_data") if name in since.columns]


def _pauses(since: pl.DataFrame, aligned: pl.DataFrame) -> list[Finding]:
    """NICs that pause their switch: they cannot store what arrives."""
    if "tx_prio3_pause_duration" not in since.columns:
        return []
    share = pl.col("tx_prio3_pause_duration") * 1000 / (pl.col("t_ns") - pl.col("since_ns"))
    ports = (
        since.with_columns(share=share)
        .group_by("node", "nic")
        .agg(
            pl.col("share").max(),
            pl.col("tx_prio3_pause").sum().alias("frames"),
            pl.col("since_ns").filter(pl.col("share") > PAUSED_SHARE / 2).min().alias("first"),
            pl.col("t_ns").filter(pl.col("share") > PAUSED_SHARE / 2).max().alias("last"),
        )
        .filter(pl.col("share") >= PAUSED_SHARE, pl.col("frames") >= MIN_PAUSES)
        .sort("share", "node", "nic", descending=[True, False, False])
    )
    if ports.is_empty():
        return []
    row = ports.row(0, named=True)
    ports = ports.filter(pl.col("share") * OVER_OTHERS >= row["share"])
    if ports.height > 2:
        return []
    return [_pause(row, aligned) for row in ports.iter_rows(named=True)]


def _pause(row: Mapping[str, Any], aligned: pl.DataFrame) -> Finding:
    sent = aligned.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("start_ns").is_between(row["first"], row["last"]),
    )
    of_port = (pl.col("node") == row["node"]) & (pl.col("nic") == row["nic"])
    own = sent.filter(of_port)["max_gbps"].quantile(0.9)
    others = sent.filter(~of_port)["max_gbps"].quantile(0.9)
    # A slot that lost lanes slows what the NIC fetches as well. A storm has pauses, between which it is fast.
    slot = own is not None and others is not None and own < 0.9 * others
    received = aligned.filter(
        pl.col("level") == "flow",
        pl.col("start_ns").is_between(row["first"], row["last"]),
        (of_port & (pl.col("direction") == "rx"))
        | (
            (pl.col("peer_node") == row["node"])
            & (pl.col("peer_nic") == row["nic"])
            & (pl.col("direction") == "tx")
        ),
    )["max_gbps"].quantile(0.9)
    steady = received is not None and others is not None and received < 0.8 * others
    node, nic, share = str(row["node"]), str(row["nic"]), float(str(row["share"]))
    text = (
        f"{nic} of {node} kept its switch from sending for up to {share:.0%} of the time, with {row['frames']} pause "
        "frames; no other port does."
    )
    return Finding(
        kind="pcie-slow" if slot else "nic-slow" if steady else "pause-storm",
        cause="nic",
        scope="nic",
        confidence=0.95,
        slowdown=1.0,
        first_ns=int(str(row["first"])),
        last_ns=int(str(row["last"])),
        evidence=[Evidence("paused_share", share, 0.0, 0, text)],
        node=node,
        nic=nic,
        next_check=f"on {node}: lspci -vv (LnkSta of NETDEV); ethtool -S NETDEV | grep pause",
    )


def _tenants(
    since: pl.DataFrame,
    aligned: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
) -> list[tuple[Finding, tuple[str, str]]]:
    """Congested ports that receive much more than the job sends to them, with the port of each."""
    if not {"port_rcv_data", "np_cnp_sent"} <= set(since.columns):
        return []
    congested = (
        since.group_by("node", "nic")
        .agg(
            (pl.col("port_rcv_data").sum() * 4).alias("received"),
            pl.col("np_cnp_sent").sum().alias("cnps"),
            pl.col("since_ns").min().alias("first"),
            pl.col("t_ns").max().alias("last"),
        )
        .filter(pl.col("cnps") >= MIN_CNPS)
    )
    if congested.is_empty():
        return []
    nics = tables["nics"]
    ports = (
        congested.join(_sent_to(congested, aligned, flows, tables["comms"]), on=["node", "nic"])
        .join(nics.group_by("node", "nic").agg(pl.col("link_gbps").max()), on=["node", "nic"], how="left")
        .with_columns(
            foreign=(pl.col("received") - pl.col("own"))
            * 8
            / (pl.col("last") - pl.col("first"))
            / pl.col("link_gbps")
        )
        .filter(pl.col("foreign") >= FOREIGN_SHARE)
        .sort("foreign", "node", "nic", descending=[True, False, False])
    )
    found = []
    for row in ports.iter_rows(named=True):
        port = (row["node"], row["nic"])
        text = (
            f"{port[1]} of {port[0]} receives {row['foreign']:.0%} of its line rate from outside the job, and asked "
            f"senders {row['cnps']} times to slow down."
        )
        finding = Finding(
            kind="congestion",
            cause="network",
            scope="network",
            confidence=0.9,
            slowdown=1.0,
            first_ns=row["first"],
            last_ns=row["last"],
            evidence=[Evidence("foreign_share", row["foreign"], 0.0, 0, text)],
            flows=_flows_into(aligned, flows, *port),
            next_check=f"who else sends to {port[0]}: its ports' tenants, and the switch's counters of that port",
        )
        found.append((finding, port))
    return found


def _sent_to(
    ports: pl.DataFrame, aligned: pl.DataFrame, flows: pl.DataFrame, comms: pl.DataFrame
) -> pl.DataFrame:
    """The most that the job can have sent to each node and nic of `ports`: `own` bytes, as its side saw them, else the
    senders.

    Where a row counts queue pairs to several peers together, all of it is taken to have gone to each of them.
    """
    of_job = comms.select("node", "pid").unique()
    ends = (["node", "nic"], ["peer_node", "peer_nic"])
    job = (
        pl.concat(flows.join(ports, left_on=end, right_on=["node", "nic"], how="semi") for end in ends)
        .unique("flow")
        .join(of_job, left_on=["node", "owner_pid"], right_on=["node", "pid"])
    )
    rows = (
        aligned.select("level", "direction", "node", "nic", "bytes", "flows")
        .filter(~pl.col("level").is_in(["nic", "port"]))
        .join(job.select("node", "nic").unique(), on=["node", "nic"], how="semi")
    )
    receives = pl.col("level").is_in(["flow", "traffic"]) & (pl.col("direction") == "rx")
    mine = (
        rows.with_row_index()
        .explode("flows")
        .join(job.select("flow", "peer_node", "peer_nic"), left_on="flows", right_on="flow")
        .unique(["index", "peer_node", "peer_nic"])
    )
    received = (
        mine.filter(pl.col("direction") == "rx")
        .unique("index")
        .group_by("node", "nic")
        .agg(pl.col("bytes").sum())
    )
    sent = mine.filter(pl.col("direction") == "tx")
    absent = comms.group_by("comm_id").agg(pl.col("nranks").max() > pl.col("rank").n_unique())["nranks"].any()
    if absent and not aligned.select(receives.any()).item():
        # What is sent by ranks that were not recorded is unknown.
        return received.rename({"bytes": "own"})
    to = sent.group_by(pl.col("peer_node").alias("node"), pl.col("peer_nic").alias("nic"))
    return (
        received.join(
            to.agg(pl.col("bytes").sum().alias("sent")), on=["node", "nic"], how="full", coalesce=True
        )
        .with_columns(own=pl.coalesce("bytes", "sent"))
        .select("node", "nic", "own")
    )


def _flows_into(aligned: pl.DataFrame, flows: pl.DataFrame, node: str, nic: str) -> list[dict[str, object]]:
    """The queue pairs that send much to a port, as findings name them."""
    to = aligned.filter(pl.col("level").is_in(["flow", "traffic"])).select(
        pl.when(pl.col("direction") == "tx").then(own).otherwise(peer).alias(name)
        for name, own, peer in (
            ("node", pl.col("node"), pl.col("peer_node")),
            ("nic", pl.col("nic"), pl.col("peer_nic")),
            ("peer_node", pl.col("peer_node"), pl.col("node")),
            ("peer_nic", pl.col("peer_nic"), pl.col("nic")),
            ("bytes", pl.col("bytes"), pl.col("bytes")),
        )
    )
    pairs = (
        to.filter(pl.col("peer_node") == node, pl.col("peer_nic") == nic)
        .group_by("node", "nic")
        .agg(pl.col("bytes").sum())
        .filter(pl.col("bytes") >= MUCH * pl.col("bytes").max())
    )
    chosen = flows.filter(pl.col("peer_node") == node, pl.col("peer_nic") == nic)
    chosen = chosen if pairs.is_empty() else chosen.join(pairs, on=["node", "nic"], how="semi")
    return chosen.sort("node", "nic", "qpn").select("node", "nic", "qpn", "peer_node", "peer_nic").to_dicts()
