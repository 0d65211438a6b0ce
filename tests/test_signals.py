"""What ports say of themselves names them, and nothing else is named by it."""

from __future__ import annotations

import polars as pl
import pytest

from pulse_bpf.analysis import metrics
from pulse_bpf.analysis.attribute import FLOWS
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.signals import find_signals
from pulse_bpf.schema import COMMS, EVENTS, NICS, PORT_COUNTERS

NODES = ("a", "b", "c")
MS = 1_000_000
# What a port moves in a reading's interval, in words of four bytes: half of 400 Gbit/s.
WORDS = 25_000_000 * 25


def readings(**wrong: int) -> dict[str, pl.DataFrame]:
    """Ten readings of three ports; `wrong` are counters of port b that grow by so much each time."""
    usual = {"port_rcv_data": WORDS, "port_xmit_data": WORDS, "np_cnp_sent": 0, "port_rcv_errors": 0}
    usual |= {"tx_prio3_pause": 0, "tx_prio3_pause_duration": 0}
    rows = [
        {"node": node, "nic": "mlx5_0", "port": 1, "source": "sysfs", "counter": counter, "cumulative": True}
        | {"t_ns": 100 * MS * reading, "value": reading * (wrong.get(counter, step) if node == "b" else step)}
        for node in NODES
        for counter, step in usual.items()
        for reading in range(10)
    ]
    return {
        "port_counters": pl.DataFrame(rows, schema=PORT_COUNTERS),
        "events": pl.DataFrame(schema=EVENTS),
        "comms": pl.DataFrame(
            {"node": NODES, "pid": [1, 2, 3], "comm_id": "00-3", "rank": [0, 1, 2], "nranks": 3},
            schema_overrides=COMMS,
        ),
        "nics": pl.DataFrame(
            {"node": NODES, "nic": "mlx5_0", "port": 1, "link_gbps": 400.0}, schema_overrides=NICS
        ),
    }


def operators() -> tuple[pl.DataFrame, pl.DataFrame]:
    """One row of all that each port received, from the port before it; and both of its queue pairs."""
    before = dict(zip(NODES, (*NODES[-1:], *NODES[:-1]), strict=True))
    rows = [
        {"node": node, "nic": "mlx5_0", "direction": "rx", "level": "flow", "bytes": 9 * WORDS * 4}
        | {
            "peer_node": before[node],
            "peer_nic": "mlx5_0",
            "flows": [number],
            "start_ns": 0,
            "max_gbps": 390.0,
        }
        for number, node in enumerate(NODES)
    ]
    owners = [
        {"flow": number + of, "node": node, "nic": "mlx5_0", "owner_pid": NODES.index(node) + 1, "qpn": of}
        | {"peer_node": peer, "peer_nic": "mlx5_0"}
        for number, end in enumerate(NODES)
        for of, node, peer in ((0, end, before[end]), (10, before[end], end))
    ]
    return pl.DataFrame(rows, schema=metrics.OPERATORS), pl.DataFrame(owners, schema=FLOWS)


def found(tables: dict[str, pl.DataFrame]) -> list[Finding]:
    return find_signals(*operators(), tables)


def test_quiet_ports_say_nothing() -> None:
    assert found(readings()) == []


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("lossy-link", {"port_rcv_errors": 500}),
        ("pause-storm", {"tx_prio3_pause": 50, "tx_prio3_pause_duration": 5_000}),
    ],
)
def test_the_port_with_the_counts_is_named(kind: str, wrong: dict[str, int]) -> None:
    assert [(item.kind, item.scope, item.node) for item in found(readings(**wrong))] == [(kind, "nic", "b")]


def test_a_reading_that_is_no_count_is_left_out() -> None:
    tables = readings(port_rcv_errors=1000)
    broken = pl.when(pl.int_range(pl.len()) == 7).then(2**64 - 1).otherwise("value").cast(pl.UInt64)
    tables["port_counters"] = tables["port_counters"].with_columns(value=broken)
    assert [(item.node, item.kind) for item in found(tables)] == [("b", "lossy-link")]


def test_a_few_errors_are_no_lossy_link() -> None:
    assert found(readings(port_rcv_errors=1)) == []


def test_much_from_outside_at_a_congested_port_is_the_network() -> None:
    (item,) = found(readings(port_rcv_data=WORDS * 3 // 2, np_cnp_sent=50))
    assert (item.kind, item.scope, item.node) == ("congestion", "network", None)
    assert [(flow["node"], flow["peer_node"]) for flow in item.flows or []] == [("a", "b")]
    assert found(readings(port_rcv_data=WORDS * 3 // 2)) == []


@pytest.mark.parametrize(
    ("kinds", "state"), [(["port_down"], "down"), (["port_down", "port_up"], "up again")]
)
def test_a_port_that_went_down_is_named(kinds: list[str], state: str) -> None:
    events = [
        {"node": "c", "nic": "mlx5_0", "port": 1, "t_ns": number, "kind": kind, "value": 1}
        for number, kind in enumerate(kinds)
    ]
    (item,) = found(readings() | {"events": pl.DataFrame(events, schema=EVENTS)})
    assert (item.kind, item.node, item.state) == ("nic-down", "c", state)
