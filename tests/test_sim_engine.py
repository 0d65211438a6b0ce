"""Any job on any cluster runs to its end in the engine, and its bytes, times and bins add up."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from program_runs import run as run_programs
from sim_networks import MIB, all_gpus, everyone, one
from sim_programs import (
    Case,
    by_flow,
    case,
    moved_by_connection,
)
from sim_volumes import FACTOR, wire_bytes

from pulse_bpf.lab.sim.model import (
    CHANGE,
    NONE,
    PAUSE,
    Algorithm,
    Cluster,
    Executor,
    Incident,
    Kind,
    Protocol,
    Result,
    Target,
)
from pulse_bpf.lab.sim.tuning import NcclOptions

SIZES = st.one_of(
    st.sampled_from([0, 1, 3, 16, 4095, 4096, 4097, 16 << 10, (16 << 10) + 1, MIB, MIB + 17]),
    st.integers(0, 12 * MIB),
)
COLLECTIVES = [
    Kind.ALL_REDUCE,
    Kind.ALL_GATHER,
    Kind.REDUCE_SCATTER,
    Kind.BROADCAST,
    Kind.REDUCE,
    Kind.ALL_TO_ALL,
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Some launches, over all GPUs or a part of them, on some cluster."""
    cluster = Cluster(
        nodes=draw(st.integers(2, 6)),
        gpus=draw(st.integers(1, 4)),
        channels=draw(st.integers(1, 4)),
        nodes_per_leaf=draw(st.integers(1, 4)),
        spines=draw(st.integers(1, 4)),
        qps_per_connection=draw(st.integers(1, 3)),
        pxn=draw(st.booleans()),
        path_mtu=draw(st.sampled_from([1024, 4096])),
    )
    world = draw(st.permutations(all_gpus(cluster)))
    part = world[: draw(st.integers(2, len(world)))]
    launches = []
    for _ in range(draw(st.integers(1, 4))):
        comm = draw(st.integers(0, 1))
        ranks = len((world, part)[comm])
        if draw(st.booleans()):
            kind, root = draw(st.sampled_from(COLLECTIVES)), draw(st.integers(0, ranks - 1))
            launches.append(everyone(kind, draw(SIZES), ranks, comm, root))
            continue
        pairs = draw(st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(1, ranks - 1)), max_size=8))
        calls = [np.zeros(0, everyone(Kind.SEND, 0, 0).dtype)]
        for a, distance in pairs:
            b, size = (a + distance) % ranks, draw(SIZES)
            calls += [one(Kind.SEND, size, a, b, comm), one(Kind.RECV, size, b, a, comm)]
        launches.append(np.concatenate(calls))
    options = NcclOptions(
        draw(st.sampled_from([None, Algorithm.RING, Algorithm.TREE])),
        draw(st.sampled_from([None, *Protocol])),
        draw(st.booleans()),
    )
    return case(cluster, [world, part], *launches, options=options, seed=draw(st.integers(0, 99)))


@given(made=cases())
@settings(max_examples=100)
def test_every_call_ends_and_every_byte_arrives(made: Case) -> None:
    result = made.run()
    assert not np.isnan(run_programs(made.job, made.cluster, 1)).any()
    times = result.call_times
    assert (times["call_ns"] <= times["start_ns"]).all()
    assert (times["start_ns"] <= times["end_ns"]).all()
    assert not np.isnan(result.task_times["end_ns"]).any()
    _holds_together(made, result)


def test_nothing_comes_out_of_a_queue_that_a_look_at_it_found_empty() -> None:
    """Two rings cross one spine; a clear-to-send comes in the moment in which a queue runs empty."""
    cluster = Cluster(nodes=6, gpus=4, channels=2, nodes_per_leaf=1, spines=1, path_mtu=1024, pxn=False)
    made = case(cluster, [[12, *range(1, 10)]], everyone(Kind.ALL_GATHER, MIB, 10))
    _holds_together(made, made.run())


def _holds_together(made: Case, result: Result) -> None:
    """What is true of a run in which nothing was lost and all calls ended."""
    network, cluster = made.network, made.cluster
    connections = network.connections
    sent, got = by_flow(result, network, 0), by_flow(result, network, 1)
    assert (np.abs(sent - got) <= 1).all()  # halves of a byte
    moved = moved_by_connection(result, network)
    far = connections["flows"] > 0
    assert not moved[~far].any()
    asked = by_flow(result, network, 0, "reverse_ctl")
    assert (asked == by_flow(result, network, 1, "reverse_ctl")).all()
    for rx in (0, 1):
        assert (asked == by_flow(result, network, rx, "reverse_acks")).all()
        assert not by_flow(result, network, rx, "retx_bytes").any()
    messages, bytes_sent = (
        np.bincount(network.flows["connection"], of_flows, len(connections)) for of_flows in (asked, sent)
    )
    # An empty slice is a packet all the same; parts of bytes are cut off.
    parts = np.where(connections["split"], connections["flows"], 1)
    assert (moved <= bytes_sent + messages).all()
    assert (bytes_sent <= moved + messages * (parts + 1)).all()
    packets = by_flow(result, network, 0, "packets")
    assert (packets == by_flow(result, network, 1, "packets")).all()
    assert (packets >= sent / cluster.path_mtu).all()
    assert (packets <= sent / cluster.path_mtu + np.where(connections["split"].any(), sent, asked) + 1).all()

    expected = wire_bytes(network, made.calls)
    allowed = messages + sum(
        32 * FACTOR[Protocol(call["protocol"])] * len(made.job.comm_members[call["comm"]])
        for call in made.calls
    )
    assert (np.abs(moved - expected)[far] <= allowed[far]).all()

    rows = result.moved
    assert (rows["recv_call"] != NONE).all()
    assert (made.calls["comm"][rows["call"]] == made.calls["comm"][rows["recv_call"]]).all()
    assert (rows["first_tx_ns"] <= rows["last_tx_ns"]).all()
    assert (rows["first_tx_ns"] < rows["first_rx_ns"]).all()
    assert (rows["last_tx_ns"] < rows["last_rx_ns"]).all()
    assert (rows["first_rx_ns"] < rows["last_rx_ns"]).all()
    assert (rows["last_rx_ns"] <= result.call_times["end_ns"][rows["recv_call"]]).all()
    assert (rows["first_tx_ns"] >= result.call_times["start_ns"][rows["call"]]).all()

    # Over one queue pair messages go in the order of the calls.
    alone = rows[connections["flows"][rows["connection"]] == 1]
    alone = alone[np.argsort(alone["connection"], kind="stable")]
    same = np.diff(alone["connection"]) == 0
    for name in ("call", "recv_call", "first_tx_ns", "last_tx_ns", "first_rx_ns", "last_rx_ns"):
        assert (np.diff(alone[name])[same] >= 0).all()
    latency_ns = network.flows["latency_ns"][connections["flow"][alone["connection"]]]
    free_ns = np.r_[0.0, np.where(same, alone["last_rx_ns"][:-1], 0)][: len(alone)]
    assert np.allclose(
        alone["first_rx_ns"], np.maximum(alone["first_tx_ns"] + latency_ns, free_ns), atol=1e-3
    )

    for rx, end in enumerate(("src_nic", "dst_nic")):
        samples = result.samples[result.samples["rx"] == rx]
        nic = network.flows[end][samples["flow"]]
        assert (
            np.diff(samples["bin"][np.argsort(samples["flow"], kind="stable")])[
                np.diff(np.sort(samples["flow"], kind="stable")) == 0
            ]
            > 0
        ).all()
        bins = samples["bin"] - samples["bin"].min(initial=0)
        in_bin = np.bincount(nic * (bins.max(initial=0) + 1) + bins, samples["bytes"])
        # What of a byte is over goes into the next bin, of each flow; and flows of unlike length come to a
        # receiver's port as if each had it for itself while they change over.
        spread_ns = rx * np.ptp(network.flows["latency_ns"]) if len(network.flows) else 0
        most = cluster.nic_gbps / 8 * cluster.path_mtu / (cluster.path_mtu + 82) * (32_000 + spread_ns)
        assert in_bin.max(initial=0) <= most + len(network.flows)
        last = result.counters[result.counters["t_ns"] == result.ended_ns]
        of_nic = np.bincount(network.flows[end], (sent, got)[rx], len(last))
        name = ("tx_bytes", "rx_bytes")[rx]
        assert np.abs(last[name].astype(float) - of_nic).max() <= len(network.flows)


@st.composite
def incidents(draw: st.DrawFn, made: Case) -> Incident:
    """Faults that pass, in the first milliseconds."""
    gpus, links = made.cluster.nodes * made.cluster.gpus, len(made.network.links)
    moment = st.integers(0, 3_000_000)
    rows: list[tuple[float, Target, int, float]] = []
    for _ in range(draw(st.integers(0, 4))):
        link = draw(st.integers(0, links - 1))
        what = draw(st.sampled_from([Target.LINK_FACTOR, Target.LINK_LOSS, Target.LINK_DOWN]))
        value = {
            Target.LINK_FACTOR: draw(st.floats(0, 1)),
            Target.LINK_LOSS: draw(st.floats(0, 0.05)),
            Target.LINK_DOWN: 1.0,
        }[what]
        begins, ends = sorted([draw(moment), draw(moment)])
        rows += [(begins, what, link, value), (ends, what, link, float(what == Target.LINK_FACTOR))]
    for _ in range(draw(st.integers(0, 3))):
        speed = draw(st.sampled_from([Target.GPU_SPEED, Target.NVLINK_FACTOR, Target.HOST_SPEED]))
        rows.append((draw(moment), speed, draw(st.integers(0, gpus - 1)), draw(st.floats(0.1, 1))))
    stops = []
    for executor in Executor:
        for gpu in draw(st.sets(st.integers(0, gpus - 1), max_size=2)):
            edges = sorted(draw(st.sets(moment, min_size=2, max_size=6)))
            stops += [(executor, gpu, a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    return Incident(
        changes=np.array(rows, CHANGE) if rows else np.zeros(0, CHANGE),
        pauses=np.array(sorted(stops), PAUSE) if stops else np.zeros(0, PAUSE),
    )


@given(data=st.data())
@settings(max_examples=100)
def test_faults_that_pass_change_times_but_not_what_arrives(data: st.DataObject) -> None:
    made = data.draw(cases())
    incident = data.draw(incidents(made))
    healthy = made.run()
    result = made.run(incident, timeout=3, retry_count=10**6)
    network = made.network
    assert not np.isnan(result.call_times["end_ns"]).any()
    assert moved_by_connection(result, network).tolist() == moved_by_connection(healthy, network).tolist()
    sent, again = (by_flow(result, network, 0, name) for name in ("bytes", "retx_bytes"))
    assert (np.abs(sent - again - by_flow(healthy, network, 0)) <= 2).all()
    come, repeated = (by_flow(result, network, 1, name) for name in ("bytes", "retx_bytes"))
    assert (np.abs(come - repeated - by_flow(healthy, network, 1)) <= 2).all()
    got = by_flow(result, network, 1)
    # To a receiver its lost packets are missing, nothing else; not what a broken link had in its queue, twice.
    assert (got <= sent + 1).all()
    assert (got >= by_flow(healthy, network, 1) - 2).all()
    for name in ("reverse_ctl", "reverse_acks"):
        asked = by_flow(healthy, network, 0, name)
        assert all((by_flow(result, network, rx, name) == asked).all() for rx in (0, 1))
    assert (result.moved["first_tx_ns"] <= result.moved["last_tx_ns"]).all()
    assert (result.moved["last_tx_ns"] < result.moved["last_rx_ns"]).all()
    assert (result.moved["first_rx_ns"] < result.moved["last_rx_ns"]).all()
