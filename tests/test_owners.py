"""Attribution beside the truth of simulated recordings, and where several processes may have called."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_bpf.analysis import attribute, measure
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.lab.owners import Owners, compare
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.schema import conform, empty

BIN_NS = 10_000
CALL_NS = [1_000_000 * number for number in range(1, 9)]


def told(directory: Path, workload: str, source: str, conditions: tuple[str, ...]) -> Owners:
    """What is said of the owners of a healthy job's bytes, against the truth."""
    simulate(
        "healthy",
        directory,
        seed=5,
        nodes=4,
        gpus=4,
        workload=workload,
        seconds=0.3,
        source=source,
        conditions=conditions,
    )
    return compared(directory)


def compared(directory: Path) -> Owners:
    """The attribution of the recording in `directory` beside its truth."""
    recording = load([directory])
    truth = pl.read_parquet(directory / "truth_operators.parquet")
    return compare(recording, attribute.flows(recording), truth)


@pytest.mark.parametrize("layout", [True, False])
def test_rings_are_told_by_what_their_channels_carry(layout: bool, tmp_path: Path) -> None:
    """Bytes read every 10 ms show no bursts, so that a queue pair may serve any call between its ends.

    Here a pair carries by chance what a ring of one channel would carry.
    """
    simulate("healthy", tmp_path, seed=5, nodes=8, gpus=2, workload="moe", seconds=0.2, source="diag+netlink")
    if not layout:
        (tmp_path / "channels.parquet").unlink()
    owners = compared(tmp_path)
    assert owners.right >= 0.98
    assert owners.wrong == 0
    assert owners.caller_wrong == 0


@pytest.mark.parametrize(("bin_us", "seconds"), [(1000, 1.0), (100, 0.3)])
def test_what_is_no_channel_of_a_ring_that_is_whole_serves_the_exchanges_beside_it(
    bin_us: int, seconds: float, tmp_path: Path
) -> None:
    """In bins wider than an exchange some calls of the ring make up any burst; and in a short recording more is carried
    than was called."""
    simulate(
        "healthy",
        tmp_path,
        seed=1,
        gpus=4,
        workload="context",
        bin_us=bin_us,
        seconds=seconds,
        source="pcc",
        qps_per_connection=4,
    )
    owners = compared(tmp_path)
    assert owners.right >= 0.98
    assert owners.wrong < 1e-3


def test_who_sends_for_the_neighbour_in_a_ring_is_no_stranger_to_it(tmp_path: Path) -> None:
    """The ring of all ranks crosses rails, so that with PXN a queue pair lies between two that are not beside each
    other, and it carries a few bytes where a pipeline's pair carries all others."""
    simulate("healthy", tmp_path, seed=1, nodes=2, gpus=2, workload="megatron", seconds=0.2)
    owners = compared(tmp_path)
    assert owners.right > 0.999
    assert owners.wrong == 0


@pytest.mark.parametrize(
    ("workload", "source", "conditions", "least"),
    [
        ("moe", "packets", (), 0.999),
        ("moe-alltoall", "packets", ("late-attach",), 0.98),
        ("context", "packets", ("netlink-only", "same-qpns"), 0.98),
        ("megatron", "packets", ("late-attach", "lost-samples"), 0.98),
        ("moe", "pcc", ("late-attach",), 0.98),
        ("moe", "packets", ("missing-agent", "qpn-reuse"), 0.98),
        ("megatron-graph", "packets", (), 0.999),
        ("megatron", "pcc", ("late-attach", "same-qpns"), 0.98),
        ("moe-alltoall", "pcc", ("netlink-only", "same-qpns"), 0.98),
        ("moe-skew", "diag+netlink", ("late-attach",), 0.98),
    ],
)
def test_bytes_go_to_the_true_communicator_and_peer(
    workload: str, source: str, conditions: tuple[str, ...], least: float, tmp_path: Path
) -> None:
    owners = told(tmp_path, workload, source, conditions)
    assert owners.bytes > 10**9
    assert owners.right >= least
    assert owners.wrong == 0
    assert owners.caller >= least
    assert owners.caller_wrong == 0


@pytest.mark.parametrize(
    ("workload", "source", "conditions"),
    [
        ("dp", "pcc", ("late-attach", "same-qpns")),
        ("context", "pcc", ("late-attach", "same-qpns", "missing-agent")),
        ("moe-skew", "diag+netlink", ()),
    ],
)
def test_what_cannot_be_told_is_not_told_wrongly(
    workload: str, source: str, conditions: tuple[str, ...], tmp_path: Path
) -> None:
    owners = told(tmp_path, workload, source, conditions)
    assert owners.right + owners.unpaired > 0.6
    assert owners.wrong < 1e-4
    assert owners.caller_wrong < 1e-4


def test_another_tenants_traffic_is_listed(tmp_path: Path) -> None:
    simulate("congestion", tmp_path, seed=5, nodes=4, gpus=2, seconds=0.2)
    owners = compared(tmp_path)
    assert owners.right >= 0.999
    assert owners.foreign == 0


def _handed_over(
    sizes: tuple[int, int], comms: tuple[str, ...] = ("c-4",), captured: bool = False
) -> pl.DataFrame:
    """FLOWS of two QPs of rank 0 to rank 2: one carries its own calls, the other those of rank 1 beside it."""
    flows = attribute.flows(Recording(_frames(sizes, comms, captured)))
    return flows.filter(pl.col("node") == "node0").sort("qpn")


def _frames(sizes: tuple[int, int], comms: tuple[str, ...], captured: bool) -> dict[str, pl.DataFrame]:
    ranks = [(comm, rank) for comm in comms for rank in range(4)]
    nodes = [f"node{rank // 2}" for _, rank in ranks]
    frames = {
        "comms": pl.DataFrame(
            {
                "node": nodes,
                "pid": [100 + rank for _, rank in ranks],
                "comm_id": [comm for comm, _ in ranks],
                "rank": [rank for _, rank in ranks],
                "nranks": 4,
            }
        ),
        "ops": pl.DataFrame(
            [
                {"node": "node0", "pid": 100 + rank, "comm_id": "c-4", "rank": rank, "nranks": 4}
                | {"kind": "Send", "peer": 2, "bytes": sizes[rank], "call_ns": call_ns}
                | {"origin": "capture" if captured else "call"}
                for rank in (0, 1)
                for call_ns in (CALL_NS[:1] if captured else CALL_NS)
            ]
        ),
        "qps": pl.DataFrame(
            {"node": ["node0", "node0", "node1", "node1"], "nic": "mlx5_0", "port": 1, "qpn": [7, 8, 7, 8]}
            | {"peer_qpn": [8, 7, 8, 7], "peer_gid": ["::2", "::2", "::1", "::1"]}
            | {"pid": [100, 100, 102, 102], "origin": "netlink"}
        ),
        "nics": pl.DataFrame(
            {"node": ["node0", "node1"], "nic": "mlx5_0", "port": 1, "rail": 0, "gids": [["::1"], ["::2"]]}
        ),
        "samples": pl.DataFrame(
            [
                {"node": "node0", "nic": "mlx5_0", "port": 1, "qpn": 7 + rank, "direction": "tx"}
                | {"t_ns": call_ns + 100_000 + BIN_NS * part, "bin_ns": BIN_NS, "bytes": sizes[rank] // 4}
                for rank in (0, 1)
                for call_ns in CALL_NS
                for part in range(4)
            ]
        ),
    }
    return {name: conform(frame, name) for name, frame in frames.items()} | {
        name: empty(name) for name in ("coverage", "nodes", "channels")
    }


def test_who_handed_its_data_to_a_neighbour_shows_in_the_volumes() -> None:
    flows = _handed_over((400_000, 720_000))
    assert flows["owner_pid"].to_list() == [100, 100]
    assert flows["rank"].to_list() == [0, 1]
    assert flows["pid"].to_list() == [100, 101]
    assert flows["peer_rank"].to_list() == [2, 2]
    assert flows["use"].to_list() == ["pairs", "pairs"]


def test_callers_of_equal_volumes_are_all_named() -> None:
    flows = _handed_over((400_000, 400_000))
    assert flows["comm_id"].to_list() == ["c-4", "c-4"]
    assert flows["ranks"].to_list() == [[0, 1], [0, 1]]
    assert flows["rank"].null_count() == flows["pid"].null_count() == 2
    assert flows["peer_rank"].to_list() == [2, 2]


def test_a_communicator_without_calls_does_not_take_the_traffic_of_another() -> None:
    flows = _handed_over((400_000, 720_000), ("c-4", "quiet-4"))
    assert flows["comm_id"].to_list() == ["c-4", "c-4"]
    assert set(flows["evidence"]) == {"volumes of its bursts"}
    assert flows["confidence"].min() > 0.9


def test_what_a_graph_captured_may_be_replayed_any_number_of_times() -> None:
    assert _handed_over((400_000, 720_000), captured=True)["rank"].to_list() == [0, 1]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("recorded") / "moe"
    simulate("healthy", path, seed=5, nodes=2, gpus=4, workload="moe", seconds=0.05, bin_us=200)
    return load([path])


@settings(max_examples=25)
@given(data=st.data())
def test_bytes_in_are_bytes_attributed_and_bytes_listed(data: st.DataObject, exchanged: Recording) -> None:
    """Whatever rows are missing: each flow has one row, and what the operators table attributes and lists is all there
    is."""
    frames = exchanged.tables | {table: exchanged[table] for table in ("ops", "samples")}
    for table in ("qps", "comms", "nics", "ops", "samples"):
        share = data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.0]), table)
        frames[table] = frames[table].sample(fraction=share, seed=data.draw(st.integers(0, 99)))
    recording = Recording(frames)
    operators, flows = measure(recording)
    assert not flows["flow"].is_duplicated().any()
    assert (flows["comm_id"].is_null() == flows["reason"].is_not_null()).all()
    assert flows.filter(pl.col("comm_id").is_not_null())["evidence"].null_count() == 0
    counted = operators.filter(pl.col("level").is_in(["flow", "traffic", "unattributed"]))
    for count in ("bytes", "retx_bytes"):
        assert counted[count].sum() == frames["samples"][count].sum()
    listed = counted.filter(pl.col("level") == "unattributed")["bytes"].sum()
    owned = frames["samples"].join(flows.filter(pl.col("comm_id").is_not_null()), on="flow", how="semi")
    assert listed == frames["samples"]["bytes"].sum() - owned["bytes"].sum()


def _in_flight(world_bytes: int) -> dict[str, object]:
    """FLOWS of a QP that carries what was called before the recording, between members of two communicators.

    "big-2" is known to send, though not over this QP; "world-4" reduces `world_bytes` eight times.
    """
    calls = [
        {"node": "node0", "pid": 100, "comm_id": "world-4", "rank": 0, "nranks": 4, "kind": "AllReduce"}
        | {"bytes": world_bytes, "call_ns": call_ns}
        for call_ns in CALL_NS
    ]
    calls.append(
        {"node": "node0", "pid": 101, "comm_id": "big-2", "rank": 1, "nranks": 4, "kind": "Send"}
        | {"peer": 3, "bytes": 1000, "call_ns": 1}
    )
    frames = _frames((400_000, 720_000), ("world-4", "big-2"), captured=False)
    frames["ops"] = conform(pl.DataFrame(calls, infer_schema_length=None), "ops")
    flows = attribute.flows(Recording(frames))
    return flows.filter(pl.col("node") == "node0").sort("qpn").row(0, named=True)


def test_calls_of_a_few_bytes_cannot_have_carried_millions() -> None:
    flow = _in_flight(world_bytes=4)
    assert (flow["comm_id"], flow["use"], flow["evidence"]) == ("big-2", None, "what is left")
    assert flow["confidence"] == 0.5


def test_where_both_could_have_carried_it_neither_is_taken() -> None:
    flow = _in_flight(world_bytes=90_000_000)
    assert flow["comm_id"] is None
    assert flow["reason"] == "several communicators could use it"
