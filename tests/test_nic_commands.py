"""`pulse nic list` and `pulse nic qps` on made hosts, and on recordings."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rdma_peer import Kernel, Pair, Peer
from rich.console import Console
from test_identity import make_function, make_rdma, write
from test_qpc import context, dump

from pulse_bpf import nic_cli, nic_list, nic_qps
from pulse_bpf.errors import HOST, HostError
from pulse_bpf.nic.nldev import Nldev
from pulse_bpf.schema import COMMS, NICS, PROCESSES, QPS, SAMPLES, empty
from pulse_bpf.store import RecordingWriter


def printed(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=400)
    for part in parts:
        console.print(part, markup=False, highlight=False)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three cards with mlx5, the second of which has no RDMA device here."""
    sys = tmp_path / "sys"
    cards = [make_function(sys, f"0000:{bus}:00.0", f"no_such_{bus}") for bus in ("3b", "5e", "86")]
    for index in (0, 2):
        device = make_rdma(sys, f"mlx5_{index}", cards[index], f"b859:9f03:0001:000{index}")
        write(device / "ports/1/counters/port_xmit_data", "1000")
        write(device / "ports/1/state", "4: ACTIVE")
    write(cards[2] / "device", "0xa2dc")
    return tmp_path


def sources(listed: dict[str, Any], index: int = 0) -> dict[str, dict[str, Any]]:
    return {answer["source"]: answer for answer in listed["ports"][index]["sources"]}


class TestList:
    def test_every_source_is_there_with_resolution_and_a_reason_where_it_is_not_available(
        self, root: Path
    ) -> None:
        raw = dump(0x11, context(0x21))
        kernel = Kernel(
            {"mlx5_0": {0x11: Pair(0x21, raw=raw)}, "mlx5_2": {}}, netdevs={"mlx5_0": "no_such_3b"}
        )
        with Peer(kernel) as peer:
            listed = nic_list.list_ports("a", root, lambda: Nldev(peer.connect))
        assert json.loads(json.dumps(listed)) == listed
        found = sources(listed)
        assert list(found) == [name for name, *_ in nic_list.SOURCES]
        assert all(
            answer["resolution"] and answer["available"] is not bool(answer["why"])
            for answer in found.values()
        )
        assert [name for name, answer in found.items() if answer["available"]] == [
            "netlink",
            "qp-context",
            "sysfs",
        ]
        assert "by-passes" in found["packets"]["why"]
        assert "rdma_tx_bytes" in found["qp-counters"]["why"]
        assert "BlueField-3" in found["pcc"]["why"]
        assert "observer" in sources(listed, 1)["pcc"]["why"]
        assert "fwctl" in found["fwctl-diag"]["why"]

    def test_an_unseen_rail_is_said_not_to_be_idle(self, root: Path) -> None:
        """G10."""
        with Peer(Kernel({"mlx5_0": {}, "mlx5_2": {}})) as peer:
            listed = nic_list.list_ports("a", root, lambda: Nldev(peer.connect))
        assert listed["rails_unseen"] == [{"rail": 1, "function": ["0000:5e:00.0"]}]
        text = printed(*nic_list.render(listed))
        assert "Rail 1 (0000:5e:00.0) has no RDMA device here: unseen, which is not idle." in text
        assert "mlx5_2/1  2 " in text

    def test_hidden_namespaces_are_told(self, root: Path) -> None:
        """G7."""
        with Peer(Kernel({}, shared=False)) as peer:
            text = printed(*nic_list.render(nic_list.list_ports("a", root, lambda: Nldev(peer.connect))))
        assert "those of others are hidden" in text

    def test_without_rdma_in_the_kernel_each_reason_says_so(self, root: Path) -> None:
        def refuse() -> Nldev:
            raise HostError("this kernel has no RDMA")

        found = sources(nic_list.list_ports("a", root, refuse))
        for name in ("netlink", "qp-context", "qp-counters"):
            assert found[name]["why"] == "this kernel has no RDMA"

    def test_a_host_without_ports(self, tmp_path: Path) -> None:
        with Peer(Kernel({})) as peer:
            listed = nic_list.list_ports("a", tmp_path, lambda: Nldev(peer.connect))
        assert listed["ports"] == []
        assert "no RDMA port" in printed(*nic_list.render(listed))


class TestLive:
    def look(self, kernel: Kernel, root: Path) -> tuple[pl.DataFrame, str]:
        with Peer(kernel) as peer:
            return nic_qps.live("a", root, lambda: Nldev(peer.connect), 0)

    def test_process_peer_and_what_is_stuck(self, root: Path) -> None:
        write(root / "proc/4242/comm", "python3")
        kernel = Kernel(
            {
                "mlx5_0": {
                    0x11: Pair(0x21, raw=dump(0x11, context(0x21, left=4))),
                    0x12: Pair(0x22, 77, raw=dump(0x12, context(0x22))),
                }
            }
        )
        frame, missing = self.look(kernel, root)
        assert missing == ""
        assert list(frame.select("qpn", "pid", "process", "peer_gid", "udp_sport", "note").iter_rows()) == [
            (0x11, 4242, "python3", "::ffff:10.0.0.2", 49321, "stuck: 10 packets unanswered after 3 repeats"),
            (0x12, 77, None, "::ffff:10.0.0.2", 49321, None),
        ]
        assert "gpu" not in printed(nic_qps.render(frame)), "nothing is known of GPUs"

    def test_queue_pairs_unevenly_spread_over_the_cables_of_a_bond_show_it(self, root: Path) -> None:
        """F12: seven of eight on one port."""
        ports = {0x11 + index: 2 if index == 5 else 1 for index in range(8)}
        pairs = {qpn: Pair(0x21, raw=dump(qpn, context(0x21, lag_port=port))) for qpn, port in ports.items()}
        frame, _ = self.look(Kernel({"mlx5_0": pairs}), root)
        assert dict(frame.select("qpn", "bond_port").iter_rows()) == ports

    def test_why_peers_are_missing_is_told_once(self, root: Path) -> None:
        frame, missing = self.look(Kernel({"mlx5_0": {0x11: Pair(0x21)}}), root)
        assert frame["peer_qpn"].to_list() == [0x21]
        assert missing.count("does not tell the contexts") == 1

    def test_contexts_that_are_not_as_expected_are_counted(self, root: Path) -> None:
        kernel = Kernel({"mlx5_0": {0x11: Pair(0x21, raw=dump(0x11, context(0x99)))}})
        frame, missing = self.look(kernel, root)
        assert frame["peer_gid"].to_list() == [None]
        assert missing == "1 contexts of mlx5_0 are not as expected"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    nics = [
        {"node": node, "nic": "mlx5_0", "port": 1, "gids": [gid]}
        for node, gid in (("a", "::a"), ("b", "::b"))
    ]
    pairs = [
        {"node": "a", "qpn": 0x11, "peer_qpn": 0x21, "peer_gid": "::b", "pid": 7, "origin": "uprobe"},
        {"node": "b", "qpn": 0x21, "peer_qpn": 0x11, "peer_gid": "::a", "pid": 8, "origin": "netlink"},
        # Made by a GPU's own driver: its packets are seen, and nothing else.
        {"node": "a", "qpn": 0x99, "peer_gid": "::b", "origin": "capture"},
    ]
    ranks = [
        {
            "node": node,
            "pid": pid,
            "comm_ptr": 1,
            "comm_id": "c-2",
            "rank": rank,
            "nranks": 2,
            "gpu": 4 + rank,
        }
        for rank, (node, pid) in enumerate((("a", 7), ("b", 8)))
    ]
    tables = {
        "nics": pl.DataFrame(nics, schema=NICS),
        "qps": pl.DataFrame([{"nic": "mlx5_0", "port": 1, **pair} for pair in pairs], schema=QPS),
        "comms": pl.DataFrame(ranks, schema=COMMS),
        "processes": pl.DataFrame([{"node": "a", "pid": 7, "exe": "/usr/bin/train"}], schema=PROCESSES),
    }
    writer = RecordingWriter(tmp_path / "rec")
    for name in ("nodes", "ops", "samples"):
        tables[name] = empty(name)
    assert tables["samples"].schema == SAMPLES
    for name, frame in tables.items():
        writer.replace(name, frame)
    writer.manifest([], {})
    writer.close()
    return tmp_path / "rec"


def test_a_recording_knows_gpu_communicator_and_peer(recording: Path) -> None:
    frame = nic_qps.recorded([recording]).filter(pl.col("qpn") == 0x11)
    known = frame.select("node", "pid", "process", "gpu", "comm_id", "rank", "peer_node", "note")
    assert list(known.iter_rows()) == [("a", 7, "/usr/bin/train", 4, "c-2", 0, "b", None)]


def test_a_queue_pair_made_past_the_verbs_library_is_listed_as_one(recording: Path) -> None:
    """C17: GPU-driven queue pairs come from DEVX; no call makes them and no listing has them."""
    notes = nic_qps.recorded([recording]).sort("qpn")["note"].to_list()
    assert notes[:2] == [None, None]
    assert "past the verbs library" in notes[2]
    qps = recording / "qps.parquet"
    pl.read_parquet(qps).filter(pl.col("origin") == "capture").write_parquet(qps)
    (alone,) = nic_qps.recorded([recording])["note"]
    assert alone is None or "verbs library" not in alone, "of captures alone nobody knows"


def test_the_verbs(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    nic_cli.add_commands(parser.add_subparsers())
    arguments = parser.parse_args(["nic", "qps", str(recording), "--json"])
    assert arguments.func(arguments) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    arguments = parser.parse_args(["nic", "qps", str(recording)])
    assert arguments.func(arguments) == 0
    assert "train" in capsys.readouterr().out
    arguments = parser.parse_args(["nic", "list", "--json"])
    status = arguments.func(arguments)
    listed = json.loads(capsys.readouterr().out)
    assert status == (0 if listed["ports"] else HOST)
