"""Which process belongs to which host: the hosts file and --tap."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pulse_bpf.errors import UsageError
from pulse_bpf.hosts import Device, Host, read_hosts, this_host
from pulse_bpf.watch import Selection


def test_a_hosts_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    entry = {"node": "host1", "pids": [7], "devices": [{"nic": "rxe1", "netdev": "p1", "side": "switch"}]}
    file.write_text(json.dumps([entry]))
    assert read_hosts(file) == [Host("host1", Selection((7,)), (Device("rxe1", "p1", "switch"),))]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[1]",
        '[{"pids": [1]}]',
        '[{"node": "a", "pids": ["x"]}]',
        '[{"node": "a", "pids": [1]}, {"node": "a", "pids": [2]}]',
        '[{"node": "a", "pids": [1]}, {"node": "b", "pids": [1]}]',
        '[{"node": "a", "pids": [1], "devices": [{"nic": "rxe1", "side": "left"}]}]',
        '[{"node": "a", "pids": [1], "devices": [{"nic": "rxe1", "netdev": 5}]}]',
        '[{"node": "a", "pids": [1], "devices": 7}]',
        '[{"node": "a", "pids": "12"}]',
        '[{"node": "a", "pids": []}]',
        '[{"node": null, "pids": [1]}]',
        '[{"node": "a\\nb", "pids": [1]}]',
    ],
)
def test_a_bad_hosts_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"hosts\.json"):
        read_hosts(file)


def test_taps_on_the_command_line() -> None:
    host = this_host(Selection((1,)), ["mlx5_0=eth0", "rxe1=p1:switch"])
    assert host.node == socket.gethostname()
    assert host.devices == (Device("mlx5_0", "eth0", "device"), Device("rxe1", "p1", "switch"))
    assert this_host(Selection((1,)), []).devices is None


@pytest.mark.parametrize("text", ["eth0", "=eth0", "mlx5_0=", "mlx5_0=eth0:up"])
def test_a_bad_tap_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--tap"):
        this_host(Selection((1,)), [text])
