"""The simulated network against what is known of networks: rates, shares, queues, loss, broken links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sim_networks import MIB, TREE, all_gpus, everyone, one
from sim_programs import (
    MS,
    Case,
    background,
    by_flow,
    bytes_in,
    case,
    changes,
    line,
    moved_by_connection,
    programs,
)
from sim_volumes import wire_bytes

from pulse_bpf.lab.sim.model import NONE, Array, Cluster, Incident, Kind, Result, Seen, Stage, Target
from pulse_bpf.lab.sim.simulate import simulate

Floats = NDArray[np.float64]

# A pair of switches' queues: marking begins, a port's buffer is full.
MARKED_BYTES, FULL_BYTES = 400e3, 2000e3
FOREVER_NS = 1e12


def transfer(size: int, src: int, dst: int) -> Array:
    return np.concatenate([one(Kind.SEND, size, src, dst), one(Kind.RECV, size, dst, src)])


def duration_ns(result: Result) -> Floats:
    return np.asarray(result.call_times["end_ns"] - result.call_times["start_ns"])


def seen(result: Result, kind: Seen) -> Array:
    rows: Array = result.events[result.events["kind"] == kind]
    return rows


def last_counters(result: Result) -> Array:
    rows: Array = result.counters[result.counters["t_ns"] == result.ended_ns]
    return rows


# Rates


@pytest.mark.parametrize("channels", [1, 8])
def test_a_ring_of_64_has_the_bus_bandwidth_of_its_nics(channels: int) -> None:
    cluster = Cluster(nodes=8, gpus=8, channels=channels)
    size = channels * 128 * MIB
    made = case(cluster, [all_gpus(cluster)], everyone(Kind.ALL_REDUCE, size, 64))
    bus_bytes_per_ns = 2 * 63 / 64 * size / duration_ns(made.run()).max()
    assert bus_bytes_per_ns == pytest.approx(channels * line(cluster), rel=0.05)


def test_a_tree_moves_data_up_and_down_at_once() -> None:
    """Two trees, in each of which most nodes have two children or none: each NIC sends up once and down twice."""
    cluster = Cluster(nodes=8, gpus=2, channels=2)
    size = 512 * MIB
    made = case(cluster, [all_gpus(cluster)], everyone(Kind.ALL_REDUCE, size, 16), options=TREE)
    busiest = wire_bytes(made.network, made.calls)
    per_nic = np.zeros(16)
    for connection, of_connection in zip(made.network.connections, busiest, strict=True):
        per_nic[connection["src_proxy"]] += of_connection if connection["flows"] else 0
    taken_ns = duration_ns(made.run()).max()
    assert per_nic.max() / line(cluster) <= taken_ns <= 1.2 * per_nic.max() / line(cluster)


@pytest.mark.parametrize("factor", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("channels", [1, 4])
def test_a_slow_egress_stretches_the_ring_for_all_members_alike(factor: float, channels: int) -> None:
    cluster = Cluster(nodes=4, gpus=4, channels=channels)
    launches = [everyone(Kind.ALL_REDUCE, channels * 64 * MIB, 16)] * 4
    made = case(cluster, [all_gpus(cluster)], *launches)
    victim = made.network.flows["src_nic"][0]
    healthy = made.run()
    slow = made.run(changes((0, Target.LINK_FACTOR, made.fabric.egress(victim), factor)))
    # The first waits for nobody's host, and the last ends without a following one.
    for run, expected in ((healthy, 1.0), (slow, 1 / factor)):
        durations = duration_ns(run).reshape(16, 4)[:, 1:]
        assert np.ptp(durations, axis=0).max() <= 0.02 * durations.max()
        ideal_ns = 2 * 15 / 16 * 64 * MIB / line(cluster) * expected
        assert durations.mean() == pytest.approx(ideal_ns, rel=0.05)


@pytest.mark.parametrize("split", [False, True])
def test_the_slowest_of_several_queue_pairs_sets_the_pace(split: bool) -> None:
    """Slices overtake each other; their receiver takes them in order, and no more are under way than slots."""
    cluster = Cluster(nodes=2, gpus=1, channels=1, nodes_per_leaf=1, spines=8, qps_per_connection=4)
    size, factor = 64 * MIB, 0.02
    made = case(
        cluster, [[0, 1]], *[transfer(size // 4, 0, 1)] * 4, options=replace(TREE, split=split), seed=1
    )
    uplinks = made.network.flows["path"][:, 2]
    slow = next(uplink for uplink in uplinks if (uplinks == uplink).sum() == 1)
    result = made.run(changes((0, Target.LINK_FACTOR, slow, factor)))
    assert by_flow(result, made.network, 1).tolist() == [size // 4] * 4
    assert (result.call_times["end_ns"][result.moved["recv_call"]] > result.moved["last_rx_ns"]).all()
    taken_ns = result.call_times["end_ns"].max()
    assert taken_ns == pytest.approx(size / 4 / (factor * line(cluster)), rel=0.05)


# Shares


def max_min(wanted: Floats, capacity: Floats, over: NDArray[np.bool_]) -> Floats:
    """Max-min fair rates of flows that want `wanted` over links, `over` [flows, links], by bottleneck after
    bottleneck."""
    rate, open_ = np.zeros(len(wanted)), wanted > 0
    while open_.any():
        left = capacity - rate[~open_] @ over[~open_]
        share = np.full(len(capacity), np.inf)
        count = over[open_].sum(0)
        share[count > 0] = left[count > 0] / count[count > 0]
        of_flow = np.minimum(wanted, np.where(over, share, np.inf).min(1))
        least = of_flow[open_].min()
        settled = open_ & (of_flow <= least * (1 + 1e-12))
        rate[settled] = least
        open_ &= ~settled
    return rate


@st.composite
def tenants(draw: st.DrawFn) -> tuple[Case, list[int], Incident]:
    """Flows between NICs, on links of which some are slow."""
    cluster = Cluster(
        nodes=draw(st.integers(2, 6)),
        gpus=draw(st.integers(1, 2)),
        nodes_per_leaf=draw(st.integers(1, 3)),
        spines=draw(st.integers(1, 3)),
    )
    made, flows = programs(cluster), []
    nics = cluster.nodes * cluster.gpus
    for _ in range(draw(st.integers(1, 12))):
        src, away = draw(st.integers(0, nics - 1)), draw(st.integers(1, cluster.nodes - 1))
        dst = (src + away * cluster.gpus) % nics
        made, flow = made.with_tenant(src, dst, draw(st.integers(0xC000, 0xFFFF)))
        flows.append(flow)
    slow = draw(st.dictionaries(st.integers(0, len(made.network.links) - 1), st.floats(0.05, 1), max_size=4))
    rows = [(0.0, Target.LINK_FACTOR, link, factor) for link, factor in slow.items()]
    incident = background(*((flow, 1 << 30, 0, FOREVER_NS) for flow in flows))
    return made, flows, replace(incident, changes=changes(*rows).changes if rows else incident.changes)


@given(what=tenants())
@settings(max_examples=100)
def test_flows_get_their_max_min_fair_shares(what: tuple[Case, list[int], Incident]) -> None:
    """Before congestion control and full queues: what senders' links share out, then switches' ports."""
    made, flows, incident = what
    network = made.network
    from_ns, to_ns, bin_ns = 4_000, 12_000, 1_000
    result = made.run(incident, seconds=20e-6, bin_ns=bin_ns)
    capacity = network.links["gbps"] / 8 * 4096 / 4178
    capacity[incident.changes["target"]] *= incident.changes["value"]
    over = np.zeros((len(flows), len(capacity)), bool)
    for row, path in enumerate(network.flows["path"][flows]):
        over[row, path[path != NONE]] = True
    rates = np.full(len(flows), np.inf)
    for rx, stage in enumerate((Stage.SENDER, Stage.SWITCH)):
        rates = max_min(rates, capacity, over & (network.links["stage"] == stage))
        got = [bytes_in(result, flow, rx, bin_ns, from_ns, to_ns) / (to_ns - from_ns) for flow in flows]
        assert got == pytest.approx(rates, abs=2e-4 * len(flows))


def incast(senders: int, *, nodes: int = 8) -> tuple[Case, list[int]]:
    """Flows from the first nodes to the last but one, and one more from node 0 to the last."""
    cluster = Cluster(nodes=nodes, gpus=1, channels=1, nodes_per_leaf=nodes)
    made, flows = programs(cluster), []
    for sender in range(senders):
        made, flow = made.with_tenant(sender, nodes - 2)
        flows.append(flow)
    made, flow = made.with_tenant(0, nodes - 1)
    return made, [*flows, flow]


def test_congestion_control_shares_a_port_evenly_and_bounds_its_queue() -> None:
    made, flows = incast(4)
    incident = background(*((flow, MIB, 0, FOREVER_NS) for flow in flows[:4]))
    result = made.run(incident, 0.06, bin_ns=10_000)
    rate = line(made.cluster)
    assert by_flow(result, made.network, 1).sum() >= 0.95 * rate * 60 * MS
    shares = [bytes_in(result, flow, 1, 10_000, 20 * MS, 60 * MS) / (40 * MS * rate) for flow in flows[:4]]
    assert shares == pytest.approx([0.25] * 4, rel=0.1)
    assert set(seen(result, Seen.CNP)["nic"]) == set(range(4))
    counters = last_counters(result)
    assert counters["cnp_sent"][6] == counters["cnp_handled"].sum() == len(seen(result, Seen.CNP)) > 50

    rows = result.samples
    growth = np.bincount(rows["bin"], np.where(rows["rx"], -1.0, 1.0) * rows["bytes"])
    queue = growth.cumsum()[:-1]
    assert queue.max() <= FULL_BYTES + 1.01 * rate * 4 * 2300
    # It settles around where marking begins, far from full.
    assert MARKED_BYTES / 4 <= np.median(queue[2000:]) <= 2 * MARKED_BYTES


def test_a_flow_alone_gets_no_congestion_notifications() -> None:
    made, flows = incast(1)
    result = made.run(background((flows[0], MIB, 0, FOREVER_NS)), 0.01)
    assert not len(result.events)
    assert by_flow(result, made.network, 0)[flows[0]] == pytest.approx(line(made.cluster) * 10 * MS, abs=2)


def test_a_slow_receiver_holds_up_what_its_senders_send_to_others() -> None:
    """Flow control stops whole ports of senders: the victim is to another node, which takes all it gets."""
    made, flows = incast(2)
    victim, bin_ns = flows[-1], 1_000
    slow = changes((0, Target.LINK_FACTOR, made.fabric.pcie_write(6), 0.1)).changes
    for sent_to, held in ((6, True), (7, False)):
        given = background(*((flow, MIB, 0, FOREVER_NS) for flow in flows))
        moved = slow.copy()
        moved["target"] = made.fabric.pcie_write(sent_to) if held else made.fabric.pcie_write(5)
        result = made.run(replace(given, changes=moved), 2e-3, bin_ns=bin_ns)
        share = bytes_in(result, victim, 1, bin_ns, 50_000, 100_000) / 50_000 / line(made.cluster)
        counters = last_counters(result)
        if held:
            assert share < 0.2
            assert (counters["rx_pause_ns"][:2] > 10_000).all()
            assert not counters["rx_pause_ns"][2:].any()
            assert counters["tx_pause_ns"][6] > 0.5 * MS
            assert set(seen(result, Seen.PAUSE)["nic"]) == {0, 1}
        else:
            assert share > 0.45
            assert not counters["rx_pause_ns"][6:].any()
            assert not counters["tx_pause_ns"].any()


# Loss


@pytest.mark.parametrize("qps", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("loss", [3e-4, 3e-3, 3e-2])
def test_lost_packets_are_sent_again_with_all_after_them(loss: float, split: bool, qps: int) -> None:
    cluster = Cluster(nodes=2, gpus=1, channels=1, qps_per_connection=qps)
    size = 256 * MIB
    made = case(cluster, [[0, 1]], transfer(size, 0, 1), options=replace(TREE, split=split))
    # A short timer, that a lost last packet does not decide all.
    result = made.run(changes((0, Target.LINK_LOSS, made.fabric.egress(0), loss)), timeout=4)
    assert not np.isnan(result.call_times["end_ns"]).any()
    assert moved_by_connection(result, made.network).sum() == size
    sent, got = by_flow(result, made.network, 0), by_flow(result, made.network, 1)
    again = by_flow(result, made.network, 0, "retx_bytes")
    assert sent.sum() - again.sum() == pytest.approx(size, abs=2 * qps)
    lost = int(last_counters(result)["lost_packets"][0])
    noticed = len(seen(result, Seen.NAK)) + len(seen(result, Seen.TIMEOUT))
    assert lost == noticed
    assert sent.sum() - got.sum() == pytest.approx(lost * 4096, abs=qps * 4096)
    # Each costs a round trip of sending in vain, of packets that may themselves be lost.
    packets = sent.sum() / 4096
    in_vain = 2 * made.network.flows["latency_ns"][0] * line(cluster) / qps / 4096
    expected = packets * loss / (1 + in_vain * loss)
    assert abs(lost - expected) <= 5 * np.sqrt(expected) + 0.02 * expected
    assert again.sum() <= (lost + 1) * (in_vain + 2) * 4096
    repeated = by_flow(result, made.network, 1, "retx_bytes")
    assert (repeated <= again).all()
    # Whatever is lost and thrown away, each byte comes to the receiver's port for the first time once.
    assert got.sum() - repeated.sum() == pytest.approx(size, abs=2 * qps)


@given(size=st.integers(1, 300_000), loss=st.floats(0.001, 0.9), seed=st.integers(0, 1000))
@settings(max_examples=100)
def test_short_messages_survive_any_loss(size: int, loss: float, seed: int) -> None:
    cluster = Cluster(nodes=2, gpus=1, channels=1)
    made = case(cluster, [[0, 1]], *[transfer(size, 0, 1)] * 4)
    result = made.run(changes((0, Target.LINK_LOSS, made.fabric.ingress(1), loss)), timeout=2, seed=seed)
    assert not np.isnan(result.call_times["end_ns"]).any()
    volume = wire_bytes(made.network, made.calls)
    assert moved_by_connection(result, made.network).tolist() == volume.tolist()
    sent, again = by_flow(result, made.network, 0), by_flow(result, made.network, 0, "retx_bytes")
    assert (sent - again).tolist() == pytest.approx(volume.tolist(), abs=2)
    lost, got = last_counters(result)["lost_packets"][1], by_flow(result, made.network, 1)
    assert got.sum() >= volume.sum() - 1
    assert lost == len(seen(result, Seen.NAK)) + len(seen(result, Seen.TIMEOUT))


def test_the_packet_after_a_short_lost_one_tells_of_it() -> None:
    """Many messages of a packet each, one right after the other: no timer is needed but for the last."""
    made = case(Cluster(nodes=2, gpus=1), [[0, 1]], np.concatenate([transfer(100, 0, 1)] * 2000))
    result = made.run(changes((0, Target.LINK_LOSS, made.fabric.egress(0), 0.9)))
    assert len(seen(result, Seen.NAK)) > 30
    assert len(seen(result, Seen.TIMEOUT)) <= 1
    assert not np.isnan(result.call_times["end_ns"]).any()


def test_each_port_counts_the_packets_that_it_lost() -> None:
    cluster = Cluster(nodes=3, gpus=1, channels=1)
    made = case(cluster, [all_gpus(cluster)], transfer(512 * MIB, 0, 2))
    rows = [(made.fabric.egress(0), 1e-3), (made.fabric.ingress(2), 3e-3), (made.fabric.ingress(1), 0.5)]
    result = made.run(changes(*((0, Target.LINK_LOSS, link, loss) for link, loss in rows)), timeout=4)
    lost = last_counters(result)["lost_packets"].astype(int)
    assert lost.sum() == len(seen(result, Seen.NAK)) + len(seen(result, Seen.TIMEOUT))
    assert lost[1] == 0
    assert lost[2] / lost.sum() == pytest.approx(0.75, abs=0.1)
    assert last_counters(result)["rx_errors"].tolist() == [0, 0, lost[2]]


def test_a_lost_last_packet_waits_for_the_senders_timer() -> None:
    """Nothing comes after it, at which its receiver could notice."""
    cluster = Cluster(nodes=2, gpus=1, channels=1)
    size, timer_ns = 32 * 1024, 4096.0 * 2**8
    made = case(cluster, [[0, 1]], transfer(size, 0, 1))
    ended = []
    for seed in range(200):
        lossy = changes((0, Target.LINK_LOSS, made.fabric.egress(0), 0.05))
        result = made.run(lossy, timeout=8, seed=seed)
        ended.append(float(result.call_times["end_ns"].max()))
        late = ended[-1] > timer_ns
        assert late == (len(seen(result, Seen.TIMEOUT)) > 0)
        assert last_counters(result)["timeouts"][0] == len(seen(result, Seen.TIMEOUT))
    # One of the eight packets is the last one.
    assert 2 <= sum(end > timer_ns for end in ended) <= 30
    assert sum(MS * 0.012 < end < timer_ns for end in ended) >= 10


def test_only_what_passes_a_node_of_the_cluster_is_counted() -> None:
    made, into = programs(Cluster(nodes=2, gpus=1)).with_tenant(NONE, 1)
    made, out = made.with_tenant(0, NONE)
    result = made.run(background((into, MIB, 0, MS), (out, MIB, 0, MS)), 2e-3)
    ends = {(int(row["flow"]), int(row["rx"])) for row in result.samples}
    assert ends == {(into, 1), (out, 0)}
    counters = last_counters(result)
    assert len(counters) == 2
    assert counters["tx_bytes"].tolist() == [by_flow(result, made.network, 0)[out], 0]
    assert counters["rx_bytes"].tolist() == [0, by_flow(result, made.network, 1)[into]]
    assert MS * line(made.cluster) <= counters["tx_bytes"][0] <= MS * line(made.cluster) + MIB


# Links that break


@pytest.mark.parametrize("which", ["egress", "ingress", "uplink"])
def test_a_link_that_was_down_loses_what_was_under_way_and_resumes_after_the_timer(which: str) -> None:
    cluster = Cluster(nodes=3, gpus=1, channels=1, nodes_per_leaf=1, spines=1)
    size, timer_ns = 64 * MIB, 4096.0 * 2**9
    launch = np.concatenate([transfer(size, 0, 2), transfer(size, 1, 2)])
    made = case(cluster, [all_gpus(cluster)], launch)
    link = {
        "egress": made.fabric.egress(0),
        "ingress": made.fabric.ingress(2),
        "uplink": made.fabric.uplinks(made.fabric.leaf(0))[0],
    }[which]
    down_ns, up_ns = 0.04 * MS, 1.1 * MS
    flap = changes((down_ns, Target.LINK_DOWN, link, 1), (up_ns, Target.LINK_DOWN, link, 0))
    result = made.run(flap, timeout=9, bin_ns=10_000)
    assert not np.isnan(result.call_times["end_ns"]).any()
    sent, got = by_flow(result, made.network, 0), by_flow(result, made.network, 1)
    again = by_flow(result, made.network, 0, "retx_bytes")
    assert (moved_by_connection(result, made.network) == size).all()
    assert (sent - again).tolist() == pytest.approx([size] * 2, abs=2)
    # What was in the port's queue was lost, nothing else.
    assert got.tolist() == pytest.approx([size] * 2, abs=2)
    assert again.sum() <= FULL_BYTES + MIB
    if which == "ingress":
        assert again.sum() > 1e5
    hit = [0, 1] if which == "ingress" else [0]
    timeouts = seen(result, Seen.TIMEOUT)
    assert set(timeouts["flow"]) == set(hit)
    assert timeouts["t_ns"] == pytest.approx(np.full(len(hit), down_ns + timer_ns))
    for flow in hit:
        for rx in (0, 1):
            quiet = bytes_in(result, flow, rx, 10_000, down_ns + 10_000, down_ns + timer_ns)
            assert quiet == 0
        assert bytes_in(result, flow, 1, 10_000, 0, down_ns) > 0
        assert bytes_in(result, flow, 1, 10_000, down_ns + timer_ns, 100 * MS) > 0
    ports = result.events[np.isin(result.events["kind"], (Seen.PORT_DOWN, Seen.PORT_UP))]
    expected = {"egress": [0, 0], "ingress": [2, 2], "uplink": []}[which]
    assert ports["nic"].tolist() == expected


def test_a_link_that_stays_down_ends_the_connection_after_its_retries() -> None:
    cluster = Cluster(nodes=2, gpus=1, channels=1)
    made = case(cluster, [[0, 1]], *[transfer(64 * MIB, 0, 1)] * 3)
    rows = changes((MS, Target.LINK_DOWN, made.fabric.egress(0), 1), (40 * MS, Target.LINK_DOWN, 1, 0))
    result = made.run(rows, timeout=8, retry_count=3)
    timeouts = seen(result, Seen.TIMEOUT)
    assert timeouts["t_ns"] == pytest.approx(MS + 4096.0 * 2**8 * np.arange(1, 5))
    assert np.isnan(result.call_times["end_ns"]).any()
    assert bytes_in(result, 0, 0, 32_000, 2 * MS, 1000 * MS) == 0
    # With one retry left the link would have been up again.
    assert not np.isnan(made.run(rows, timeout=8, retry_count=50).call_times["end_ns"]).any()


def test_an_idle_connection_does_not_notice_a_flap() -> None:
    cluster = Cluster(nodes=2, gpus=1, channels=1)
    made = case(cluster, [[0, 1]], transfer(MIB, 0, 1), compute_ns=5 * MS)
    link = made.fabric.ingress(1)
    flap = changes((MS, Target.LINK_DOWN, link, 1), (2 * MS, Target.LINK_DOWN, link, 0))
    assert made.run(flap).call_times.tolist() == made.run().call_times.tolist()


# Ends of processes


def test_a_killed_process_sends_no_more_and_its_peers_time_out() -> None:
    cluster = Cluster(nodes=3, gpus=1, channels=1)
    made = case(cluster, [all_gpus(cluster)], *[everyone(Kind.ALL_REDUCE, 16 * MIB, 3)] * 30)
    made, tenant = made.with_tenant(1, 2)
    killed = replace(
        changes((5 * MS, Target.KILLED, 1, 1)), background=background((tenant, MIB, 0, FOREVER_NS)).background
    )
    result = made.run(killed, 0.1, timeout=8, bin_ns=10_000)
    assert np.isnan(result.call_times["end_ns"]).sum() >= 3
    source, target = (made.network.flows[end] for end in ("src_nic", "dst_nic"))
    own = np.flatnonzero(((source == 1) | (target == 1)) & (np.arange(len(source)) != tenant))
    for flow in own.tolist():
        assert bytes_in(result, flow, 0, 10_000, 0, 5 * MS) > 0
        assert bytes_in(result, flow, 0, 10_000, 5.01 * MS, 100 * MS) == 0
    # Its own queue pairs are gone with it; another process on its NIC goes on.
    assert set(seen(result, Seen.TIMEOUT)["nic"]) <= {0, 2}
    assert bytes_in(result, tenant, 1, 10_000, 20 * MS, 100 * MS) == pytest.approx(
        80 * MS * line(cluster), rel=0.01
    )


def test_ports_whose_queues_fill_one_after_the_other_do_not_stop_time(tmp_path: Path) -> None:
    """Holding back the senders of one full queue shifted flows to another one that was full as well."""
    output = tmp_path / "recording"
    simulate(
        "pcie-slow",
        output,
        seed=246922199,
        nodes=6,
        gpus=2,
        workload="dp-tree",
        severity=2.243,
        onset="late",
        seconds=0.84,
        source="diag+netlink",
        bin_us=1000,
        pxn=False,
    )
    assert json.loads((output / "truth.json").read_text())["faults"][0]["effect"] > 1.0
