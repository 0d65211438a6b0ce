"""From the kernel's bins to the recording's tables: any bins, against a plain account of the same."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Any

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.nic import Tap
from pulse_bpf.nic.packets import BIN, COUNT_COLUMNS, PacketReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.probes.verbs import QP_EVENTS
from pulse_bpf.schema import NICS

# Port a/rxe1 is seen at its own interface 5, b/rxe2 at the switch's interface 6, and nobody has C.
ADDRESS = {"A": "::ffff:10.0.0.1", "B": "2001:db8::1:0:2", "C": "::ffff:10.0.0.3"}
TAPS = [
    # A card lists an address twice, once for each version of RoCE.
    Tap("a", "rxe1", 1, "h1", "device", (ADDRESS["A"], "fe80::1", ADDRESS["A"])),
    Tap("b", "rxe2", 1, "p2", "switch", (ADDRESS["B"],)),
]
IFINDEX = {"h1": 5, "p2": 6}
# (node, own address, that of its peer, its interface, the hook that sees what it receives)
PORTS = [("a", "A", "B", 5, 0), ("b", "B", "A", 6, 1)]
SAMPLE_COUNTS = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]
NIC = pl.DataFrame(
    [{"node": tap.node, "nic": tap.nic, "port": tap.port, "gids": list(tap.gids)} for tap in TAPS],
    schema=NICS,
)
BIN_NS, OFFSET_NS = 1000, 10**18 + 7

address = st.sampled_from(list(ADDRESS))
kernel_bins = st.lists(
    st.fixed_dictionaries(
        {
            "start_ns": st.integers(0, 3).map(lambda k: k * BIN_NS),
            "ifindex": st.sampled_from([5, 6, 7]),
            "egress": st.integers(0, 1),
            "source": address,
            "target": address,
            "qpn": st.integers(0x11, 0x13),
            "counts": st.tuples(*[st.integers(0, 5)] * len(COUNT_COLUMNS)),
        }
    ),
    max_size=30,
)


def raw(name: str) -> tuple[int, ...]:
    packed = ipaddress.IPv6Address(ADDRESS[name]).packed
    return tuple(int.from_bytes(packed[at : at + 8], "little") for at in (0, 8))


def pack(bins: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    packed = [
        (
            b["start_ns"],
            (b["qpn"], b["ifindex"], b["egress"], 0, raw(b["source"]), raw(b["target"])),
            b["counts"],
        )
        for b in bins
    ]
    return np.array(packed, BIN)


def known_qps() -> QpTable:
    """Queue pairs 0x11 and 0x12 of each port, connected to 0x12 and 0x13 of the other one."""
    qps = QpTable(NIC)
    rows = [
        {
            "node": node,
            "nic": nic,
            "port": 1,
            "qpn": qpn,
            "peer_qpn": qpn + 1,
            "peer_gid": ADDRESS[peer],
            "state": 2,
            "t_ns": OFFSET_NS,
            "destroyed": False,
        }
        for node, nic, peer in (("a", "rxe1", "B"), ("b", "rxe2", "A"))
        for qpn in (0x11, 0x12)
    ]
    qps.observe_uprobe(pl.DataFrame(rows, schema=QP_EVENTS))
    return qps


@given(st.lists(kernel_bins, max_size=4))
def test_tables_account_for_every_packet_of_a_port(batches: list[list[dict[str, Any]]]) -> None:
    reader = PacketReader(TAPS, None, known_qps(), BIN_NS, OFFSET_NS)  # type: ignore[arg-type]
    reader._map_ports(IFINDEX)
    tables = [reader._tables(pack(batch), 0) for batch in batches]
    tables.append(reader._tables(pack([]), 2 * OFFSET_NS))

    samples: Counter[tuple[Any, ...]] = Counter()
    events: Counter[tuple[Any, ...]] = Counter()
    port_samples: Counter[tuple[Any, ...]] = Counter()
    foreign = 0
    for bin_ in (bin_ for batch in batches for bin_ in batch):
        counts = dict(zip(COUNT_COLUMNS, bin_["counts"], strict=True))
        t_ns, is_foreign = bin_["start_ns"] + OFFSET_NS, True
        for node, own, peer, ifindex, receiving in PORTS:
            if bin_["ifindex"] != ifindex:
                continue
            if bin_["egress"] == receiving and bin_["target"] == own:
                is_foreign = False
                key = (node, bin_["qpn"], "rx", t_ns)
                samples.update({(*key, name): counts[name] for name in SAMPLE_COUNTS})
                for name, kind in (("naks", "nak"), ("rnrs", "rnr"), ("cnps", "cnp")):
                    events[node, bin_["qpn"], t_ns, kind] += counts[name]
            if bin_["egress"] != receiving and bin_["source"] == own:
                is_foreign = False
                if bin_["target"] == peer and bin_["qpn"] in (0x12, 0x13):
                    key = (node, bin_["qpn"] - 1, "tx", t_ns)
                    samples.update({(*key, name): counts[name] for name in SAMPLE_COUNTS})
                else:
                    port_samples.update({(node, t_ns, name): counts[name] for name in ("bytes", "packets")})
        foreign += counts["packets"] * is_foreign

    got_samples = summed(tables, "samples", ["node", "qpn", "direction", "t_ns"], SAMPLE_COUNTS)
    assert got_samples == +samples
    assert summed(tables, "port_samples", ["node", "t_ns"], ["bytes", "packets"]) == +port_samples
    got_events: Counter[tuple[Any, ...]] = Counter()
    for table in tables:
        for row in table["events"].select("node", "qpn", "t_ns", "kind", "value").iter_rows():
            got_events[row[:-1]] += row[-1]
    assert got_events == +events
    assert reader._foreign_packets == foreign
    for table in tables:
        assert table["samples"].equals(table["samples"].sort("flow", "direction", "t_ns"))
        assert not table["samples"].select("flow", "direction", "t_ns").is_duplicated().any()


def summed(
    tables: list[dict[str, pl.DataFrame]], name: str, key: list[str], values: list[str]
) -> Counter[tuple[Any, ...]]:
    total: Counter[tuple[Any, ...]] = Counter()
    for table in tables:
        for row in table[name].iter_rows(named=True):
            total.update({(*(row[column] for column in key), value): row[value] for value in values})
    return +total
