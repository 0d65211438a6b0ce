"""pyverbs where it is there, by a module that answers as Debian's does; a clear word where it is not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulse_bpf.errors import HostError
from pulse_bpf.nic.verbs_info import VERBS, cycle_anchor, load, read_verbs


class PyverbsError(Exception):
    pass


class Context:
    """A ConnectX with two ports, of which one is InfiniBand."""

    cycles = 1000

    def __init__(self, name: str) -> None:
        if name != "mlx5_0":
            raise PyverbsError("Failed to get devices list")

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query_device_ex(self) -> Any:
        attributes = SimpleNamespace(phys_port_cnt=2, fw_version="28.43.1000")
        return SimpleNamespace(orig_attr=attributes, hca_core_clock=156250)

    def query_port(self, port: int) -> Any:
        return SimpleNamespace(link_layer=3 - port, active_mtu={1: 5, 2: 77}[port])

    def query_gid_table(self, most: int) -> list[Any]:
        if most * 32 > 65535:  # as the kernel does: an argument of its ioctl has a 16-bit length
            raise PyverbsError("Failed to query gid tables of the device. Errno: -22, Unknown error -22")
        return [
            SimpleNamespace(
                port_num=1, gid_type=2, gid_str=lambda: "0000:0000:0000:0000:0000:ffff:0a00:0001"
            ),
            SimpleNamespace(
                port_num=1, gid_type=1, gid_str=lambda: "fe80:0000:0000:0000:0000:0000:0000:0001"
            ),
            SimpleNamespace(
                port_num=2, gid_type=0, gid_str=lambda: "fe80:0000:0000:0000:0000:0000:0000:0002"
            ),
        ]

    def query_rt_values_ex(self) -> tuple[int, int]:
        Context.cycles += 7
        return 0, Context.cycles


VERBS_MODULE = SimpleNamespace(Context=Context, PyverbsError=PyverbsError)


def test_what_a_device_says_of_itself() -> None:
    frame = read_verbs("mlx5_0", VERBS_MODULE)
    assert frame.schema == VERBS
    assert list(frame.iter_rows()) == [
        ("mlx5_0", 1, "28.43.1000", 156250, "Ethernet", 4096, ["::ffff:10.0.0.1"]),
        ("mlx5_0", 2, "28.43.1000", 156250, "InfiniBand", None, []),
    ]


def test_its_cycle_counter_is_no_time_in_ns() -> None:
    row = cycle_anchor("a", "mlx5_0", VERBS_MODULE).row(0, named=True)
    assert row["domain"] == "hca/mlx5_0"
    assert 1000 < row["raw"] < 2000
    assert row["wall_ns"] > 10**18


def test_a_device_that_is_not_there_is_named() -> None:
    for ask in (
        lambda: read_verbs("mlx5_9", VERBS_MODULE),
        lambda: cycle_anchor("a", "mlx5_9", VERBS_MODULE),
    ):
        with pytest.raises(HostError, match="mlx5_9"):
            ask()


def test_without_pyverbs_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    with pytest.raises(HostError, match="python3-pyverbs"):
        load()


@pytest.mark.skipif(
    not Path("/usr/lib/python3/dist-packages/pyverbs").exists(), reason="python3-pyverbs is not installed"
)
def test_the_distributions_pyverbs_has_what_is_used() -> None:
    try:
        module = importlib.import_module("pyverbs.device")
    except ImportError as error:
        pytest.skip(f"made for another Python: {error}")
    used = {"query_device_ex", "query_port", "query_gid_table", "query_rt_values_ex", "__enter__"}
    assert used <= set(dir(module.Context))
    assert {"port_num", "gid_type", "gid_str"} <= set(dir(module.GIDEntry))
    assert {"phys_port_cnt", "fw_version"} <= set(dir(module.DeviceAttr))
    assert {"link_layer", "active_mtu"} <= set(dir(module.PortAttr))
    with pytest.raises(HostError, match="no_such_0"):
        read_verbs("no_such_0", load())
