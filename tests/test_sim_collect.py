"""What collectors record of a simulated run: by source, by condition, and the truth beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sim_runs import (
    BIN_NS,
    PERIOD_NS,
    Run,
    ring_loop,
    table,
    with_events,
)

from pulse_bpf.analysis import analyze
from pulse_bpf.analysis.pairing import queue_pairs
from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.clocks import EPOCH_NS, wall_ns
from pulse_bpf.lab.sim.model import (
    CHANGE,
    CONNECTION,
    FLOW,
    NONE,
    SAMPLE,
    Incident,
    Seen,
    Target,
)
from pulse_bpf.lab.sim.options import CONDITIONS, Options, options
from pulse_bpf.lab.sim.traffic import CTL_BYTES, HEADER_BYTES, QP_PERIOD_NS
from pulse_bpf.schema import TABLES


@pytest.fixture(scope="module")
def run() -> Run:
    return ring_loop()


@pytest.fixture(scope="module")
def plain(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run.write(tmp_path_factory.mktemp("plain") / "r")


@pytest.mark.parametrize("source", ["packets", "pcc", "diag+netlink"])
def test_every_source_makes_a_recording_that_the_analysis_takes(
    run: Run, tmp_path: Path, source: str
) -> None:
    directory = run.write(tmp_path / "r", options(source, []))
    findings = analyze([directory])
    assert findings.verdict != "anomaly"
    coverage = findings.coverage
    assert coverage["queue_pairs_unattributed"] == 0
    assert coverage["damaged_parts"] == []
    assert coverage["operators"] == 40 * 8
    for name in TABLES:
        if (directory / f"{name}.parquet").exists() or (directory / name).exists():
            assert table(directory, name).columns == TABLES[name].names()


@pytest.mark.parametrize("condition", CONDITIONS)
def test_no_condition_makes_a_healthy_run_look_broken(tmp_path: Path, condition: str) -> None:
    chosen = options("packets", [condition])
    run = ring_loop(clock=chosen, record_ns=52e6 if chosen.late_attach else 0.0)
    assert analyze([run.write(tmp_path / "r", chosen)]).verdict != "anomaly"


def test_packets_show_all_bytes_at_both_ends_and_control_the_other_way(run: Run, plain: Path) -> None:
    samples, made = table(plain, "samples"), run.result.samples
    for direction, rx in (("tx", 0), ("rx", 1)):
        mine = samples.filter(pl.col("direction") == direction)
        assert mine["bytes"].sum() == made["bytes"][made["rx"] == rx].sum()
        # Credits and acknowledgements for what is sent come in as received, and the other way round.
        assert mine["ctl_packets"].sum() == made["reverse_ctl"][made["rx"] != rx].sum()
        assert mine["ack_packets"].sum() == made["reverse_acks"][made["rx"] != rx].sum()
    assert samples.filter((pl.col("bytes") > 0) & (pl.col("ctl_packets") > 0)).is_empty()
    data = pl.col("packets") - pl.col("ctl_packets") - pl.col("ack_packets")
    assert samples.select((data > 0).eq(pl.col("bytes") > 0).all()).item()


def test_rows_of_a_flow_are_in_order_of_time_in_each_part(plain: Path, tmp_path: Path) -> None:
    for source in ("packets", "pcc", "diag+netlink"):
        directory = ring_loop(seconds=2.2, nodes=2).write(tmp_path / source, options(source, []))
        parts = sorted((directory / "samples").iterdir())
        assert len(parts) >= 2
        for part in parts:
            rows = pl.read_parquet(part)
            later = rows.select(pl.col("t_ns").diff().over("flow", "direction").drop_nulls() > 0)
            assert later.to_series().all()


def test_samples_belong_to_the_queue_pairs_listed(plain: Path) -> None:
    samples, qps = table(plain, "samples"), table(plain, "qps")
    key = ["node", "nic", "port", "qpn", "flow"]
    assert samples.join(qps, on=key, how="anti").is_empty()
    homes = table(plain, "nics").explode("gids")
    peers = qps.join(homes, left_on="peer_gid", right_on="gids", suffix="_peer").join(
        qps, left_on=["node_peer", "nic_peer", "peer_qpn"], right_on=["node", "nic", "qpn"], suffix="_other"
    )
    assert peers.height == qps.height
    assert peers["qpn"].to_list() == peers["peer_qpn_other"].to_list()
    # The sender's end and the receiver's carry the same bytes.
    carried = samples.group_by("flow").agg(pl.col("bytes").sum())
    both = peers.join(carried, on="flow").join(carried, left_on="flow_other", right_on="flow")
    assert both["bytes"].to_list() == both["bytes_right"].to_list()


def test_a_card_sees_only_what_it_sends_in_units_with_headers(run: Run, tmp_path: Path) -> None:
    directory = run.write(tmp_path / "r", options("pcc", []))
    samples, made = table(directory, "samples"), run.result.samples
    assert set(samples["direction"]) == {"tx"}
    assert samples.select(pl.col("bytes") % 32 == 0).to_series().all()
    assert (
        samples[["retx_bytes", "packets", "ctl_packets", "ack_packets"]].null_count().row(0)
        == (samples.height,) * 4
    )
    sent, received = made[made["rx"] == 0], made[made["rx"] == 1]
    payload, packets = sent["bytes"].sum(), sent["packets"].sum()
    wire = payload + HEADER_BYTES * packets + CTL_BYTES * int(received["reverse_ctl"].sum())
    assert wire <= samples["bytes"].sum() <= wire + 32 * samples.height
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["sources"][0]["bytes_are"] == "wire"
    assert manifest["sources"][0]["bin_ns"] == BIN_NS


def test_port_samples_are_narrow_and_queue_pairs_wide_and_both_are_all_bytes(
    run: Run, tmp_path: Path
) -> None:
    directory = run.write(tmp_path / "r", options("diag+netlink", []))
    ports = table(directory, "port_samples").filter(pl.col("source") == "doca-diag")
    pairs = table(directory, "samples")
    assert set(ports["bin_ns"]) == {BIN_NS}
    assert set(pairs["bin_ns"]) == {QP_PERIOD_NS}
    assert ports.select("nic", "node", "direction", "t_ns").is_unique().all()
    by_port = ports.group_by("node", "nic", "direction").agg(pl.col("bytes").sum(), pl.col("packets").sum())
    by_pair = pairs.group_by("node", "nic", "direction").agg(pl.col("bytes").sum(), pl.col("packets").sum())
    both = by_port.join(by_pair, on=["node", "nic", "direction"])
    assert both.height == 16
    acks = (both["packets"] - both["packets_right"]).sum()
    assert acks == 2 * len(run.result.samples)
    assert (both["bytes"] - both["bytes_right"]).sum() == acks * 66
    made = run.result.samples
    payload = int(made["bytes"].sum()) + HEADER_BYTES * int(made["packets"].sum())
    assert both["bytes_right"].sum() == payload + CTL_BYTES * int(made["reverse_ctl"].sum())


def test_late_attach_knows_neither_beginnings_nor_earlier_calls(tmp_path: Path) -> None:
    run = ring_loop(record_ns=52e6)
    directory = run.write(tmp_path / "r", options("packets", ["late-attach"]))
    begin_ns = EPOCH_NS + 52_000_000
    ops, qps, comms = (table(directory, name) for name in ("ops", "qps", "comms"))
    assert ops["call_ns"].min() >= begin_ns
    assert ops["nccl_seq"].null_count() == ops.height
    # The operator of 50 ms was called before, and its traffic is there.
    assert ops.filter(pl.col("seq") == 0)["call_ns"].max() < begin_ns + PERIOD_NS
    assert table(directory, "samples")["t_ns"].min() < begin_ns + 1e6
    assert qps["created_ns"].null_count() == qps.height
    assert set(qps["origin"]) == {"netlink"}
    assert (
        comms["first_seen_ns"].to_list()
        == ops.group_by("comm_id", "rank").agg(pl.col("call_ns").min()).sort("rank")["call_ns"].to_list()
    )
    assert not (directory / "channels.parquet").exists() or table(directory, "channels").is_empty()
    truth = table(directory, "truth_operators")
    assert truth.filter(pl.col("op_seq").is_null())["start_ns"].max() < begin_ns
    assert truth.filter(pl.col("op_seq") == 0)["start_ns"].min() > begin_ns


def test_ncclnumbers_count_from_the_jobs_start_where_memory_is_read(tmp_path: Path) -> None:
    run = ring_loop(record_ns=52e6)
    ops = table(run.write(tmp_path / "r", Options(late_attach=True)), "ops")
    assert ops.select((pl.col("nccl_seq") - pl.col("seq")).unique()).to_series().to_list() == [11]


def test_lost_rows_are_missing_and_counted(tmp_path: Path, run: Run, plain: Path) -> None:
    directory = run.write(tmp_path / "r", Options(lost_samples=0.2, lost_calls=0.2))
    coverage = table(directory, "coverage").group_by("source", "node").agg(pl.col("lost").max())
    lost = dict(coverage.group_by("source").agg(pl.col("lost").sum()).iter_rows())
    all_ops, ops = table(plain, "ops"), table(directory, "ops")
    assert 0 < lost["uprobe"] == all_ops.height - ops.height
    # One sample of the engine is two rows here, data and control.
    assert 0 < 2 * lost["packets"] == table(plain, "samples").height - table(directory, "samples").height
    per_rank = ops.sort("rank", "call_ns").group_by("rank", maintain_order=True).agg("seq", "nccl_seq")
    for seq, own in per_rank.select("seq", "nccl_seq").iter_rows():
        assert seq == list(range(len(seq)))
        assert len(set(own)) == len(own)
    assert any(own != seq for seq, own in per_rank.select("seq", "nccl_seq").iter_rows())


def test_each_node_tells_time_by_its_own_clock(tmp_path: Path) -> None:
    kept = ring_loop()
    chosen = options("packets", ["no-clock-sync"])
    run = ring_loop(clock=chosen)
    true, shown = table(kept.write(tmp_path / "a"), "ops"), table(run.write(tmp_path / "b", chosen), "ops")
    both = true.join(shown, on=["node", "pid", "seq"])
    off = (
        both.group_by("node")
        .agg((pl.col("call_ns_right") - pl.col("call_ns")).first().alias("off"))
        .sort("node")
    )
    clock = run.settings.clocks
    assert np.allclose(off["off"], clock["offset_ns"], atol=200e6 * 1e-4)
    assert np.abs(clock["offset_ns"]).max() > 10e6
    # Bins begin at the node's own phase.
    for node in range(4):
        mine = table(tmp_path / "b", "samples").filter(pl.col("node") == f"node{node}")
        assert set((mine["t_ns"] - EPOCH_NS) % BIN_NS) == {int(clock["phase_ns"][node]) % BIN_NS}
    assert table(tmp_path / "b", "nodes")["clock_error_ns"].null_count() == 4
    assert set(table(tmp_path / "a", "nodes")["clock_error_ns"]) == {1000}


def test_identical_nodes_number_their_queue_pairs_alike_on_request(
    tmp_path: Path, run: Run, plain: Path
) -> None:
    alike = table(run.write(tmp_path / "r", Options(same_qpns=True)), "qps")
    of_nic = [sorted(part["qpn"]) for part in alike.partition_by("node", "nic")]
    assert all(numbers == of_nic[0] for numbers in of_nic)
    others = [sorted(part["qpn"]) for part in table(plain, "qps").partition_by("node", "nic")]
    assert len({tuple(numbers) for numbers in others}) == len(others)


def test_a_number_used_again_has_two_lives(tmp_path: Path, run: Run, plain: Path) -> None:
    directory = run.write(tmp_path / "r", Options(qpn_reuse=1.0))
    qps = table(directory, "qps")
    lives = queue_pairs(qps)
    assert lives.height == qps.height == 32
    old = qps.filter(pl.col("gone_ns").is_not_null())
    assert old.height == 16
    carried = set(table(directory, "samples")["flow"])
    assert not carried & set(old["flow"])
    again, once = analyze([directory]), analyze([plain])
    assert (again.verdict, again.findings, again.missing) == (once.verdict, [], once.missing)


def test_netlink_tells_less(tmp_path: Path, run: Run) -> None:
    for source, addresses in (("packets", 0), ("pcc", 16)):
        qps = table(run.write(tmp_path / source, Options(source=source, netlink_only=1.0)), "qps")
        assert set(qps["origin"]) == {"netlink"}
        assert qps["peer_gid"].null_count() == addresses
        assert qps["pid"].null_count() == 0
        assert qps["path_mtu"].null_count() == 16


def test_a_node_without_agent_is_in_no_table(tmp_path: Path, run: Run) -> None:
    directory = run.write(tmp_path / "r", Options(missing_agents=1))
    (missing,) = json.loads((directory / "truth.json").read_text())["missing_nodes"]
    for name in TABLES:
        frame = table(directory, name) if list(directory.glob(f"{name}*")) else None
        if frame is not None and "node" in frame.columns:
            assert missing not in set(frame["node"]), name
    assert missing in set(table(directory, "truth_operators")["node"])


def test_a_tenants_queue_pair_belongs_to_another_process(tmp_path: Path, run: Run) -> None:
    connection, flow = np.zeros(1, CONNECTION), np.zeros(1, FLOW)
    for name in ("comm", "channel", "src", "dst", "src_proxy", "dst_proxy"):
        connection[name] = NONE
    connection["flow"], connection["flows"] = len(run.network.flows), 1
    flow["connection"], flow["src_nic"], flow["dst_nic"] = len(run.network.connections), 8, 3
    sample = np.zeros(1, SAMPLE)
    sample["flow"], sample["rx"], sample["bin"], sample["bytes"], sample["packets"] = (
        len(run.network.flows),
        1,
        50,
        10**6,
        250,
    )
    network = replace(
        run.network,
        flows=np.concatenate([run.network.flows, flow]),
        connections=np.concatenate([run.network.connections, connection]),
    )
    result = replace(run.result, samples=np.concatenate([run.result.samples, sample]))
    directory = replace(run, network=network, result=result).write(tmp_path / "r")
    pids = set(table(directory, "processes")["pid"])
    foreign = table(directory, "qps").filter(~pl.col("pid").is_in(pids))
    assert foreign.select("node", "nic", "origin").rows() == [("node1", "mlx5_1", "netlink")]
    assert foreign["peer_gid"][0] not in set(table(directory, "nics").explode("gids")["gids"])
    assert table(directory, "samples").filter(pl.col("flow") == foreign["flow"][0])["bytes"].to_list() == [
        10**6
    ]
    assert (
        table(directory, "truth_operators").height
        == table(run.write(tmp_path / "o"), "truth_operators").height
    )


def test_graph_replays_show_no_calls_but_those_captured(tmp_path: Path, run: Run) -> None:
    graph = replace(run, job=replace(run.job, graph=True))
    directory = graph.write(tmp_path / "r")
    ops = table(directory, "ops")
    assert set(ops["origin"]) == {"capture"}
    assert ops["call_ns"].max() < table(directory, "coverage")["first_ns"].min()
    assert ops.height == int((run.job.tasks["iteration"] == run.job.tasks["iteration"].min()).sum())
    truth = table(directory, "truth_operators")
    assert truth["op_seq"].null_count() == truth.height > 0
    assert table(graph.write(tmp_path / "l", Options(late_attach=True)), "ops").is_empty()


def test_events_name_the_end_that_saw_them_and_the_bin(tmp_path: Path, run: Run) -> None:
    flow = run.network.flows[4]
    seen = [
        (1_234_567.0, int(flow[name]), 4, int(kind), 1)
        for name, kind in (("src_nic", Seen.NAK), ("dst_nic", Seen.CNP), ("dst_nic", Seen.CNP))
    ]
    down = (20e6, 2, NONE, int(Seen.PORT_DOWN), 1)
    timeout = (30e6, int(flow["src_nic"]), 4, int(Seen.TIMEOUT), 1)
    directory = with_events(run, *seen, down, down, timeout).write(tmp_path / "r")
    events = table(directory, "events")
    qps = table(directory, "qps")
    assert sorted(events["kind"]) == ["cnp", "nak", "port_down"]
    for kind, nic, count in (("nak", flow["src_nic"], 1), ("cnp", flow["dst_nic"], 2)):
        (row,) = events.filter(pl.col("kind") == kind).iter_rows(named=True)
        assert (row["node"], row["nic"]) == (f"node{nic // 2}", f"mlx5_{nic % 2}")
        assert (row["value"], row["t_ns"]) == (count, EPOCH_NS + 1_200_000)
        assert not qps.filter(node=row["node"], nic=row["nic"], qpn=row["qpn"]).is_empty()
    # What only a port's counters show has the time of their reading.
    (row,) = events.filter(pl.col("kind") == "port_down").iter_rows(named=True)
    assert (row["node"], row["nic"], row["t_ns"]) == ("node1", "mlx5_0", EPOCH_NS + 100_000_000)
    assert row["value"] == 1
    other = with_events(run, *seen).write(tmp_path / "p", options("pcc", []))
    assert set(table(other, "events")["t_ns"]) == {EPOCH_NS}
    assert not (
        with_events(run, *seen).write(tmp_path / "d", options("diag+netlink", [])) / "events"
    ).exists()


def test_a_card_that_only_received_sent_nothing(tmp_path: Path, run: Run) -> None:
    """Parts of a recording without a row of what their node sent."""
    samples = run.result.samples[run.result.samples["rx"] == 1].copy()
    samples["reverse_ctl"] = samples["reverse_acks"] = 0
    directory = replace(run, result=replace(run.result, samples=samples)).write(
        tmp_path / "r", options("pcc", [])
    )
    assert analyze([directory]).verdict == "undecided"


def test_pauses_are_frames_in_the_counters(tmp_path: Path, run: Run) -> None:
    counters = run.result.counters.copy()
    counters["rx_pause_ns"][(counters["nic"] == 5) & (counters["t_ns"] > 50e6)] = 1_000_000
    directory = replace(run, result=replace(run.result, counters=counters)).write(tmp_path / "r")
    (event,) = table(directory, "events").iter_rows(named=True)
    # 65,535 * 512 bits at 400 Gbit/s are 84 us.
    assert (event["node"], event["nic"], event["kind"], event["value"]) == ("node2", "mlx5_1", "pause", 12)
    values = table(directory, "port_counters").filter(
        counter="rx_prio3_pause_duration", node="node2", nic="mlx5_1"
    )
    assert values["value"].to_list() == [0, 1000]
    sent = table(directory, "port_counters").filter(counter="port_xmit_data", node="node0", nic="mlx5_0")[
        "value"
    ]
    assert sent[1] == int(1e9 * (1 + HEADER_BYTES / 4096)) // 4


def test_a_killed_process_is_gone(tmp_path: Path, run: Run) -> None:
    changes = np.array([(70e6, int(Target.KILLED), 5, 1.0)], CHANGE)
    processes = table(run.write(tmp_path / "r", incident=Incident(changes=changes)), "processes")
    gone = processes.drop_nulls("gone_ns")
    assert gone.select("node", "gone_ns").rows() == [("node2", EPOCH_NS + 70_000_000)]


def test_one_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    chosen = options("packets", ["ntp", "lost-samples", "lost-calls", "qpn-reuse", "netlink-only"])
    for name in "ab":
        ring_loop(clock=chosen).write(tmp_path / name, chosen)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) >= 15
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_one_condition_more_leaves_the_rest_as_it_was(tmp_path: Path, run: Run, plain: Path) -> None:
    other = run.write(tmp_path / "r", Options(lost_calls=0.2, netlink_only=0.5))
    assert table(other, "samples").equals(table(plain, "samples"))
    assert table(other, "qps")["qpn"].to_list() == table(plain, "qps")["qpn"].to_list()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="late-attach"):
        options("packets", ["late"])
    with pytest.raises(UsageError, match=r"diag\+netlink"):
        options("tcpdump", [])
    both = options("pcc", ["late-attach", "ntp"])
    assert (both.source, both.late_attach, both.clock) == ("pcc", True, "ntp")


def test_clocks_stay_within_what_nodes_state() -> None:
    for name, error_ns in (("ptp", 1_000), ("ntp", 5_000_000)):
        run = ring_loop(nodes=40, gpus=1, seconds=0.01, clock=Options(clock=name))  # type: ignore[arg-type]
        off_ns = (
            wall_ns(run.settings, np.arange(40), run.settings.end_ns) - EPOCH_NS - int(run.settings.end_ns)
        )
        assert 0 < np.abs(off_ns).max() <= error_ns


def test_channels_are_rings_and_places_are_told_where_memory_is_read(
    tmp_path: Path, run: Run, plain: Path
) -> None:
    channels = table(plain, "channels")
    assert channels.height == 8 * 2
    turned = channels.select("channel", rank="ring_next", ring_prev="rank")
    assert turned.join(channels, on=["channel", "rank", "ring_prev"]).height == channels.height
    comms = table(plain, "comms").sort("rank")
    assert comms["local_rank"].to_list() == [0, 1] * 4
    assert comms["node_index"].to_list() == [0, 0, 1, 1, 2, 2, 3, 3]
    unread = run.write(tmp_path / "r", options("packets", ["no-comm-memory"]))
    assert table(unread, "channels").is_empty()
    assert table(unread, "comms")["local_rank"].null_count() == 8
    assert table(unread, "ops")["nccl_seq"].null_count() == 8 * 40
