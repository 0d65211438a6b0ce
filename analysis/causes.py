"""What makes a job slow: which of the evidence about ports, paths and machines stands, alone or beside other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import polars as pl

from pulse_bpf.analysis.behind import find_behind
from pulse_bpf.analysis.capped import CEILING, find_capped
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.held import beside, find_held, no_brake
from pulse_bpf.analysis.held_ports import find_held_ports
from pulse_bpf.analysis.hosts import find_hosts
from pulse_bpf.analysis.inside import behind_ports, find_inside
from pulse_bpf.analysis.lags import lags
from pulse_bpf.analysis.late import find_late
from pulse_bpf.analysis.loss import find_loss
from pulse_bpf.analysis.marked import find_marked, pressed
from pulse_bpf.analysis.passing import not_passed_on
from pulse_bpf.analysis.refused import find_refused
from pulse_bpf.analysis.signals import intervals, marks
from pulse_bpf.analysis.slow import SENT, find_slow
from pulse_bpf.analysis.twins import LEAST_BYTES, TWO_SIDED

# Evidence of a port that needs no other to compare with.
ALONE = (CEILING, "packet_seq_err")
# Evidence of a machine that is late, which may have waited for another.
LATE = "start_lag_ns"
# Of what a machine sends or receives, the share of unseen machines from which they may be what slows it.
MUCH_UNSEEN = 0.3
# So many machines are at fault at once, and no more.
MOST_FAULTS = 2
# Of the time lost by flows that are slow for no known reason, what a late machine must have cost to be the reason.
WAITED = 0.7
# What a host that calls late now and then must have cost of what slow ports did, not to be beside the point.
BESIDE = 0.1
# A port that sends at this share of its line rate is not slow, whatever the others seem to reach.
LINE_RATE = 0.95
# So sure of a machine that it is late by itself, it is one cause, whatever else is slow.
SURE = 0.84


def find_causes(
    aligned: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
    signals: list[Finding],
    one_clock: bool,
    clock_error_ns: int | None,
) -> tuple[list[Finding], list[str]]:
    """What makes a job slow beside its `signals`, and what stands in the way of naming it.

    `one_clock`: whether the times of all nodes are comparable beside their bins; each is wrong by at most
    `clock_error_ns` (None: unknown).

    Each kind of evidence is looked for on its own, and what it shows by itself stands beside the others': a port that
    says of itself what is wrong, one that repeats what it sends, one with a ceiling, flows that share a queue in the
    network, a machine that comes late. The rates of flows beside each other, and silences, are told only where none of
    those explains them. Nothing is certain of a machine that exchanges much with one of which nothing was seen.
    """
    found, unexplained = _causes(aligned, flows, tables, signals, one_clock, clock_error_ns)
    kept = not_passed_on(aligned, tables.get("channels"), found, signals)
    if len(kept) < len(found):
        # What holds up its ring by itself passes on nothing.
        holding = [(item.node, item.nic) for item in find_held_ports(aligned, marks(tables))]
        kept = [item for item in found if item in kept or (item.node, item.nic) in holding]
    found = behind_ports(aligned, kept)
    # What an unseen machine sends slowly, or takes slowly, its neighbours in a ring pass on as slowly.
    blind, waits = _beside_unseen(aligned)
    unsure = [
        (blind & {item.node, *(item.nodes or ())} and item.evidence[0].metric not in ALONE)
        or (item.node in waits and item.evidence[0].metric == LATE)
        for item in found
    ]
    return [
        replace(item, confidence=0.4) if beside else item for item, beside in zip(found, unsure, strict=True)
    ], unexplained


def _causes(
    aligned: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
    signals: list[Finding],
    one_clock: bool,
    clock_error_ns: int | None,
) -> tuple[list[Finding], list[str]]:
    asked = marks(tables)
    faulty = {item.node for item in signals}
    with ThreadPoolExecutor() as other:
        ceilings = other.submit(find_capped, aligned, asked)
        lossy = (
            [] if signals else find_refused(aligned, tables) or find_loss(aligned, tables["events"], flows)
        )
        late = [] if signals or lossy else _late(aligned, tables, one_clock, clock_error_ns)
    faulty |= {item.node for item in lossy}
    capped = [item for item in ceilings.result() if item.node not in faulty]
    if signals or lossy:
        # What a port says of itself, or what it loses, explains what is slow and late around it.
        return lossy + capped, []
    network = find_marked(aligned, flows, asked, intervals(tables))
    held = find_held(aligned, tables["nics"]) if one_clock and not network else []
    # What a machine that is slow inside takes and sends at a constant rate looks like a ceiling of the ports there.
    driven = [item for item in capped if item.scope == "nic" and no_brake(aligned, item)]
    if held and any(beside(aligned, item, held[0]) for item in driven):
        machine = [item for item in late if item.node == held[0].node] or held
        return [
            *machine,
            *(item for item in capped if item not in driven or not beside(aligned, item, held[0])),
        ], []
    if not held:
        # Beside none that is known to be slow inside, it may be beside one that is not known.
        capped = [replace(item, confidence=0.4) if item in driven else item for item in capped]
    if capped or network:
        # Around slow flows others come late, those of a ring or of few pairs clearly less than what causes it: beside
        # a port with a ceiling, another machine's own lateness stands; of a path's flows, both ends may look late.
        places = {place for item in capped for place in (item.node, *(item.nodes or ()))}
        if network or len(places) >= MOST_FAULTS:
            late = []
        elif not late:
            late = held
        late = [item for item in late if item.node not in places]
        if capped and not network and not late:
            late = _further(capped, find_held_ports(aligned, asked))
        return [*capped, *network, *late], []
    if pressed(asked):
        # Whom the network slows down makes others late, and which rank is late by itself is not known.
        late = [item if item.cause == "host" else replace(item, confidence=0.4) for item in late]
    slow, unexplained, lost_ns = find_slow(aligned, flows, asked)
    full = [item for item in slow if _at_line_rate(item, tables["nics"])]
    slow = [item for item in slow if item not in full]
    unexplained = [
        *unexplained,
        *(f"{item.nic} of {item.node} is slower than others, at its line rate" for item in full),
    ]
    if slow:
        late = [item for item in late if item.cause != "host" or int(item.lost_ns or 0) >= BESIDE * lost_ns]
    # Around a slow port others come late, and what a late machine sends is slow: what costs more is the cause.
    # Where no port is named, what seems slow may have waited.
    sure = [item for item in late if item.confidence >= SURE]
    outweighs = late and int(late[0].lost_ns or 0) >= (1.0 if slow else WAITED) * lost_ns
    if outweighs or (late and late[0].cause == "host") or (sure and one_clock and not slow):
        slow, unexplained = [], []
    # By each node's own clock alone, who has sent its last byte seems late where a slow port still holds up the others.
    # Of what shares a path in the network, both ends may.
    if slow and one_clock and len(slow) < MOST_FAULTS:
        places = {place for item in slow for place in (item.node, *(item.nodes or ()))}
        places |= {flow[end] for item in slow for flow in item.flows or () for end in ("node", "peer_node")}
        slow = [*slow, *(item for item in sure if item.node not in places)]
    found = slow if slow or unexplained else late
    if found == slow:
        found = [*slow, *_further(slow, find_held_ports(aligned, asked))]
    if found:
        return found, unexplained
    # What flows in fits and starts through a machine that is slow inside seems slow now and then.
    inside = find_inside(aligned) or held or find_held_ports(aligned, asked)
    return inside, [] if inside else unexplained


def _further(known: list[Finding], ports: list[Finding]) -> list[Finding]:
    """Those of `ports` that hold up other rings than those of the one port that is `known`."""
    if len(known) != 1 or known[0].scope != "nic":
        return []
    return [item for item in ports if item.node != known[0].node and item.nic != known[0].nic]


def _late(
    aligned: pl.DataFrame, tables: Mapping[str, pl.DataFrame], one_clock: bool, clock_error_ns: int | None
) -> list[Finding]:
    ranks = lags(aligned, one_clock)
    lost = int(tables["coverage"].filter(pl.col("nic").is_null())["lost"].sum())
    return (
        find_hosts(ranks, one_clock, lost)
        or find_late(ranks, tables["comms"], tables.get("channels"), one_clock, lost)
        or find_behind(ranks, tables["comms"], clock_error_ns)
        or find_hosts(ranks, one_clock, lost, often=True)
    )


def _at_line_rate(item: Finding, nics: pl.DataFrame) -> bool:
    """Whether a port that is said to send slowly sends as fast as it can."""
    if item.scope != "nic" or item.evidence[0].metric != SENT:
        return False
    port = nics.filter(pl.col("node") == item.node, pl.col("nic") == item.nic)
    return item.evidence[0].value >= LINE_RATE * float(port["link_gbps"].max() or math.inf)  # type: ignore[arg-type]


def _beside_unseen(aligned: pl.DataFrame) -> tuple[set[str], set[str]]:
    """The nodes none of whose traffic was seen, by whatever name, and those that exchange much with one of them; and
    those with an exchange in pairs with one, for which they wait however small it is."""
    moved = aligned.select("level", "direction", "node", "peer_node", "bytes", "kind", "op_bytes").filter(
        pl.col("level") == "flow", pl.col("bytes") > 0
    )
    # Without a side that receives, what the unseen send is unknown, and taken to be as much as what is sent to them.
    pairs = moved.group_by("node", "peer_node", "direction").agg(pl.col("bytes").sum())
    unseen = ~pl.col("peer_node").is_in(pairs["node"].implode())
    shares = pairs.group_by("node", "direction").agg(
        share=pl.col("bytes").filter(unseen).sum() / pl.col("bytes").sum()
    )
    beside = shares.filter(pl.col("share") >= MUCH_UNSEEN)["node"]
    pairwise = pl.col("kind").is_in([*TWO_SIDED, "Group"]) & (
        pl.col("op_bytes").fill_null(LEAST_BYTES) >= LEAST_BYTES
    )
    waits = moved.filter(unseen & pairwise)["node"]
    return {*beside, *pairs.filter(unseen)["peer_node"].drop_nulls()}, set(waits)
