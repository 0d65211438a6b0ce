"""Queue pairs that are made while Pulse watches, on real soft-RoCE devices; in a guest where they must be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from pulse_bpf.lab import CACHE, network, vm
from pulse_bpf.lab.nccl import library_path
from pulse_bpf.nic.identity import read_nics
from pulse_bpf.nic.nldev import Nldev
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.probe_set import ProbeSet

TARGET = Path(__file__).with_name("targets") / "verbs_connect.py"


@pytest.mark.rxe
def test_queue_pairs_made_while_recording_are_seen_with_their_peers_and_their_end(tmp_path: Path) -> None:
    library = library_path()
    if network.has_soft_roce():
        _watch(library)
        return
    again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    assert vm.run(["env", f"XDG_CACHE_HOME={CACHE.parent}", *again], tmp_path, 280) == 0


def _watch(library: Path) -> None:
    settings = network.up(2)
    devices = [network.rdma_device(1), network.rdma_device(2)]
    command = [sys.executable, str(TARGET), str(library), *devices]
    target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert target.stdin is not None
    assert target.stdout is not None
    probes = ProbeSet(0)
    try:
        assert target.stdout.readline() == "ready\n"
        table = QpTable(read_nics("here"))
        probes.add(target.pid, "here")
        target.stdin.write("connect\n")
        target.stdin.flush()
        numbers = json.loads(target.stdout.readline())
        table.observe_uprobe(probes.qp_events())
        made = table.frame().filter(pid=target.pid)
        listed = Nldev().queue_pairs().filter(pid=target.pid)
        assert made.height == 2
        for device, mine, other, address in zip(devices, numbers, reversed(numbers), (2, 1), strict=True):
            (row,) = made.filter(nic=device).rows(named=True)
            assert (row["qpn"], row["peer_qpn"]) == (mine, other)
            assert row["peer_gid"] == f"::ffff:10.9.0.{address}"
            assert (row["origin"], row["path_mtu"], row["timeout"], row["retry_count"]) == (
                "uprobe",
                1024,
                14,
                6,
            )
            assert row["created_ns"] is not None
            assert row["gone_ns"] is None
            # RDMA netlink, which knows nothing of the probes, says the same.
            (other_view,) = listed.filter(pl.col("nic") == device).rows(named=True)
            assert (other_view["qpn"], other_view["peer_qpn"]) == (mine, other)
        target.stdin.write("destroy\n")
        target.stdin.flush()
        assert target.stdout.readline() == "destroyed\n"
        table.observe_uprobe(probes.qp_events())
        assert table.frame().filter(pid=target.pid)["gone_ns"].null_count() == 0
        assert probes.lost == 0
    finally:
        probes.close()
        target.kill()
        target.communicate()
        network.down(settings)
