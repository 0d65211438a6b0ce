"""Ports that hold up a ring, by when bytes move on the ways into, out of and behind them: in bins of any width."""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.held import NEXT, OPERATOR, RING, ways
from pulse_bpf.analysis.rates import DEVIATIONS, LEAST_PART, MIN_OPERATORS
from pulse_bpf.analysis.slow import MIN_MARKS

# What is measured of a port that holds up its ring.
HELD = "port_held_up"
# A machine with fewer other ports, or fewer ports in all, has nothing to compare one with.
MIN_OTHERS, MIN_PORTS = 3, 16
# For how much of the time that it takes a port must send at its fastest bin's rate: what holds up others is never idle
# meanwhile, and who waits sends in bursts, which bins show that are narrow enough.
MIN_BUSY = 0.8
# How much longer than the machine's other rings one takes that a port holds up.
SLOWER = 1.05
# Of what stays before a port alone, at most this share stays before the machine's other ports: more is the machine's.
OTHERS = 0.3
# So many ports are at fault at once, and no more.
MOST = 2
# Rings of one kind of operator, of one size to a factor of 1.4, should take as long as each other.
ALIKE = ["kind", "nranks", "size"]
PORT = ["node", "nic"]
WAY = [*ALIKE, "comm_id", *PORT]


def find_held_ports(aligned: pl.DataFrame, marks: pl.DataFrame | None) -> list[Finding]:
    """Ports, at most two, that hold up the ring through them: behind them all wait, and before them buffers are full.

    What a slow port sends moves later than what comes to its machine, and what its successor passes on hardly later
    still (held.ways: the second difference along the ring). A moment is known to a bin at best, but how bins fall on
    operators differs from one to the next, so that a mean over many is known far better: bins may hold a whole
    operator. What all ports of a machine have in common, a late rank, a slow GPU, another clock, or how its bins fall,
    is taken off. Beside that, the port's ring must take longer than the machine's others, and no other port of
    the ring may show much of the same. Assumes that a communicator's rings use the same NIC of each machine and that
    slowness lasts for many of its operators; else no port stands out. A slow receiver holds up its sender
    alike: where nobody counted what the network marked (`marks`), it is the way between both.
    """
    # Of a source that sees only what is sent, credits and acknowledgements are rows as well.
    data = pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over(*OPERATOR, "direction")
    ports = _ports(ways(aligned.filter(pl.col("level") == "flow").filter(data)))
    ring = [*ALIKE, "comm_id", "nic"]
    worst = pl.col("excess_ns").max().over(ring)
    others = pl.col("excess_ns").filter(pl.col("excess_ns") < pl.col("excess_ns").max()).max().over(ring)
    noise = 1.4826 * pl.col("excess_ns").abs().median().over(ALIKE)
    chosen = ports.filter(
        pl.col("excess_ns") == worst,
        others <= NEXT * worst,
        pl.col("excess_ns")
        >= pl.max_horizontal(DEVIATIONS * noise, _student(DEVIATIONS) * pl.col("error_ns")),
        pl.len().over(ALIKE) >= MIN_PORTS,
        pl.col("usual_ns") <= OTHERS * pl.col("excess_ns"),
        pl.col("slower") >= SLOWER,
        pl.col("busy") >= MIN_BUSY,
    )
    if marks is not None:
        # What is slow by itself fills no queue; who sends into one is asked to slow down more than others are.
        queued = pl.col("marks") > pl.max_horizontal(pl.lit(MIN_MARKS), pl.col("marks").median())
        chosen = chosen.join(marks.filter(queued), on=PORT, how="anti")
    chosen = chosen.sort(pl.col("excess_ns") / pl.col("error_ns"), descending=True).unique(
        PORT, keep="first", maintain_order=True
    )
    if chosen.height > MOST or chosen["node"].n_unique() < chosen.height:
        return []
    nodes = ports["node"].unique().sort().to_list()
    return [_finding(port, nodes, marks is not None) for port in chosen.to_dicts()]


def _student(deviations: float) -> pl.Expr:
    """How many errors of a mean over so many `operators` are as improbable as so many `deviations` of a known width.

    The first terms of Fisher's expansion: few operators tell their own spread badly.
    """
    free, square = pl.col("operators") - 1.0, deviations**2
    first = (square + 1) / (4 * free)
    return deviations * (1 + first + (5 * square**2 + 16 * square + 3) / (96 * free**2))


def _ports(rings: pl.DataFrame) -> pl.DataFrame:
    """Per port (WAY): `operators`; `excess_ns`, by how much more bytes stay before it than before the other ports of
    its machine, on average; `error_ns`, how well that is known; `slower`, how many times as long its ring takes; and
    `busy`, the share of its time that it would need at the rate of its fastest bin."""
    size = (pl.col("bytes").log(2) * 2).round().alias("size")
    took_ns = (pl.col("last_byte_ns").max() - pl.col("start_ns").min() - pl.col("bin_ns").max()).over(RING)
    ports = (
        rings.with_columns(size, took_ns=took_ns)
        .group_by(WAY)
        .agg(
            pl.col("peer_node", "peer_nic").first(),
            pl.col("start_ns").min(),
            pl.col("last_byte_ns").max(),
            pl.col("stays_ns", "took_ns").mean(),
            error_ns=pl.col("stays_ns").std() / pl.len().sqrt(),
            busy=(8 * pl.col("bytes") / pl.col("gbps")).sum()
            / (pl.col("last_byte_ns") - pl.col("start_ns") - pl.col("bin_ns")).sum(),
            operators=pl.len(),
        )
        .filter(pl.col("operators") >= MIN_OPERATORS)
    )
    beside = ports.select(*ALIKE, "node", "stays_ns", "took_ns", other="nic")
    usual = (
        ports.select(WAY)
        .join(beside, on=[*ALIKE, "node"], nulls_equal=True)
        .filter(pl.col("other") != pl.col("nic"))
        .group_by(WAY)
        .agg(
            others=pl.col("other").n_unique(),
            usual_ns=pl.col("stays_ns").median(),
            usual_took_ns=pl.col("took_ns").median(),
        )
        .filter(pl.col("others") >= MIN_OTHERS)
    )
    return ports.join(usual, on=WAY, nulls_equal=True).with_columns(
        excess_ns=pl.col("stays_ns") - pl.col("usual_ns"),
        slower=pl.col("took_ns") / pl.col("usual_took_ns"),
    )


def _finding(port: dict[str, Any], nodes: list[str], counted: bool) -> Finding:
    """Of a slow port, or of the way to its receiver where nobody `counted` what the network marked."""
    node, nic, operators, sure = (
        port["node"],
        port["nic"],
        port["operators"],
        port["excess_ns"] / port["error_ns"],
    )
    ends = [node, port["peer_node"]]
    text = (
        f"What {nic} of {node} sends moves later than what comes to {node} and what {port['peer_node']} passes on, by "
        f"{port['excess_ns'] / 1e3:.0f} us more than on the other ports of {node} (on average over {operators} "
        f"operators, known to {port['error_ns'] / 1e3:.0f} us), and its ring takes {port['slower']:.2f} times as long "
        "as theirs."
    )
    return Finding(
        kind="nic-slow" if counted else "unknown",
        cause="nic" if counted else "network",
        scope="nic" if counted else "link",
        confidence=round(min(0.9, 0.5 + 0.2 * min(1.0, sure / 20) + 0.2 * min(1.0, operators / 20)), 3),
        slowdown=round(port["slower"], 3),
        first_ns=port["start_ns"],
        last_ns=port["last_byte_ns"],
        lost_ns=int(operators * (port["took_ns"] - port["usual_took_ns"])),
        evidence=[Evidence(HELD, port["excess_ns"], port["usual_ns"], operators, text)],
        node=node,
        nic=nic,
        peer_node=None if counted else port["peer_node"],
        peer_nic=None if counted else port["peer_nic"],
        nodes=None if counted else ends,
        victims=[other for other in nodes if other not in (ends[:1] if counted else ends)],
        next_check=f"on {node}: tc -s qdisc show dev NETDEV; ethtool NETDEV; ethtool -S NETDEV",
    )
