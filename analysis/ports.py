"""Ports that went down: for good, or again and again."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding

PORT = ["node", "nic", "port"]


def find_ports(aligned: pl.DataFrame, events: pl.DataFrame, end_ns: int) -> list[Finding]:
    """A finding for each port that carried traffic and was seen to go down before `end_ns`.

    Less sure where no operator is known to have used it.
    """
    downs = (
        events.filter(pl.col("kind").is_in(["port_down", "port_up"]), pl.col("t_ns") <= end_ns)
        .sort(*PORT, "t_ns", "kind")
        .group_by(PORT, maintain_order=True)
        .agg(
            pl.col("value").filter(pl.col("kind") == "port_down").sum().alias("downs"),
            pl.col("t_ns").filter(pl.col("kind") == "port_down").min().alias("down_ns"),
            (pl.col("kind").last() == "port_down").alias("stays"),
            pl.col("t_ns").max().alias("last_ns"),
        )
        .filter(pl.col("downs") > 0)
    )
    flows = aligned.filter(pl.col("level") != "nic", pl.col("bytes") > 0)
    used = flows.group_by(PORT).agg(
        pl.col("last_byte_ns").max(),
        (pl.col("level") == "flow").any().alias("by_operators"),
    )
    everyone = aligned["node"].drop_nulls().unique().sort()
    return [
        _finding(row, end_ns, everyone) for row in downs.join(used, on=PORT).sort(PORT).iter_rows(named=True)
    ]


def _finding(row: dict[str, object], end_ns: int, everyone: pl.Series) -> Finding:
    node, nic, down_ns = str(row["node"]), str(row["nic"]), int(str(row["down_ns"]))
    last_byte_ns, downs = int(str(row["last_byte_ns"])), int(str(row["downs"]))
    if row["stays"]:
        before = max(0, end_ns - last_byte_ns) / 1e9
        text = (
            f"The port of {nic} on {node} went down and did not come back; its last byte was {before:.2f} s before "
            "the end."
        )
    else:
        text = f"The port of {nic} on {node} went down {downs} {'time' if downs == 1 else 'times'} and came back."
    last_ns = end_ns if row["stays"] else int(str(row["last_ns"]))
    first_ns = min(down_ns, last_byte_ns) if row["stays"] else down_ns
    return Finding(
        kind="nic-down",
        cause="stop" if row["stays"] else "nic",
        scope="nic",
        confidence=(0.97 if row["stays"] else 0.9) if row["by_operators"] else 0.8,
        slowdown=0.0,
        first_ns=first_ns,
        last_ns=last_ns,
        lost_ns=last_ns - first_ns if row["stays"] else None,
        state="down" if row["stays"] else "flapping",
        evidence=[Evidence("port_down", float(downs), 0.0, 1, text)],
        node=node,
        nic=nic,
        victims=[name for name in everyone if name != node],
        next_check=f"on {node}: ip -s link show NETDEV; dmesg | grep -iE 'mlx5|link (up|down)'; ethtool -m NETDEV",
    )
