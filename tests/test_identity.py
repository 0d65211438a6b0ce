"""RDMA ports as sysfs shows them, on a made tree."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from pulse_bpf.nic import identity
from pulse_bpf.nic.identity import read_nics, read_ports, read_rails
from pulse_bpf.schema import TABLES

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_device(root: Path, name: str, gids: dict[int, str], rate: str = "10 Gb/sec (1X QDR)") -> Path:
    device = root / "class/infiniband" / name
    write(device / "ports/1/rate", rate)
    for index in range(12):
        write(device / f"ports/1/gids/{index}", gids.get(index, ZERO))
    return device


def make_card(root: Path, device: Path, pci: str, numa: str, netdev: str | None) -> None:
    card = root / "devices/pci0000:3a" / pci
    write(card / "numa_node", numa)
    if netdev:
        (card / "net" / netdev).mkdir(parents=True)
    (root / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "bus/pci/devices" / pci).symlink_to(card)
    (device / "device").symlink_to(card)


def test_a_card_and_a_software_device(tmp_path: Path) -> None:
    gids = {0: "fe80:0000:0000:0000:0a94:efff:fe00:0001", 10: "0000:0000:0000:0000:0000:ffff:0a00:0001"}
    card = make_device(tmp_path, "mlx5_0", gids, "400 Gb/sec (4X NDR)")
    make_card(tmp_path, card, "0000:3b:00.1", "1", "eth7")
    write(card / "ports/1/gid_attrs/ndevs/0", "eth5")
    soft = make_device(tmp_path, "rxe1", {1: "0000:0000:0000:0000:0000:ffff:0a09:0001"})
    write(soft / "parent", "h1")

    frame = read_nics("a", root=tmp_path)
    assert dict(frame.schema) == dict(TABLES["nics"])
    assert list(frame.iter_rows()) == [
        (
            "a",
            "mlx5_0",
            1,
            400.0,
            ["fe80::a94:efff:fe00:1", "::ffff:10.0.0.1"],
            0,
            "eth5",
            1,
            "0000:3b:00.1",
        ),
        ("a", "rxe1", 1, 10.0, ["::ffff:10.9.0.1"], None, "h1", None, None),
    ]
    for nic in ("mlx5_0", "rxe1"):
        assert read_nics("a", root=tmp_path, devices=[nic]).equals(frame.filter(pl.col("nic") == nic))
    assert read_nics("a", root=tmp_path, devices=[]).is_empty()


def test_a_table_of_a_thousand_gids_is_read_once_and_only_of_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rxe1", "rxe2"):
        device = make_device(tmp_path, name, {})
        for index in range(1024):
            write(device / f"ports/1/gids/{index}", ZERO)
            write(device / f"ports/1/gid_attrs/ndevs/{index}", "h1" if index == 1 else "")
    read: list[Path] = []
    text = identity._text
    monkeypatch.setattr(identity, "_text", lambda file: (read.append(file), text(file))[1])
    assert read_nics("a", root=tmp_path, devices=["rxe1"])["netdev"].to_list() == ["h1"]
    assert len([file for file in read if file.parent.name == "gids"]) == 1024
    assert len([file for file in read if file.parent.name == "ndevs"]) == 2


def test_the_only_netdev_of_a_card_is_its_port_s_where_the_gids_name_none(tmp_path: Path) -> None:
    device = make_device(tmp_path, "mlx5_0", {}, "unknown")
    make_card(tmp_path, device, "0000:3b:00.0", "-1", "eth7")
    row = read_nics("a", root=tmp_path).row(0, named=True)
    assert row["netdev"] == "eth7"
    assert row["numa"] is None, "no NUMA node is -1 in sysfs"
    assert row["link_gbps"] is None
    assert row["gids"] == []
    (tmp_path / "bus/pci/devices/0000:3b:00.0/net/eth8").mkdir()
    assert read_nics("a", root=tmp_path)["netdev"].to_list() == [None], "of two netdevs none is guessed"


def test_an_infiniband_device_and_a_missing_tree(tmp_path: Path) -> None:
    assert read_nics("a", root=tmp_path).is_empty()
    make_device(tmp_path, "mlx5_0", {0: "fe80:0000:0000:0000:0a94:efff:fe00:0001"})
    row = read_nics("a", root=tmp_path).row(0, named=True)
    assert (row["netdev"], row["numa"], row["pci"]) == (None, None, None)


def make_function(
    root: Path, pci: str, netdev: str | None = None, driver: str = "mlx5_core", pci_class: str = "0x020000"
) -> Path:
    """A PCI function, without an RDMA device of its own."""
    card = root / "devices/pci0000:3a" / pci
    write(card / "class", pci_class)
    write(card / "numa_node", "0")
    if netdev:
        (card / "net" / netdev).mkdir(parents=True)
        (root / "class/net" / netdev).mkdir(parents=True)
    (root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    (card / "driver").symlink_to(root / "bus/pci/drivers" / driver)
    (root / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "bus/pci/devices" / pci).symlink_to(card)
    return card


def make_rdma(root: Path, name: str, card: Path, guid: str = "b859:9f03:0001:0000") -> Path:
    device = make_device(root, name, {})
    (device / "device").symlink_to(card)
    write(device / "node_guid", guid)
    return device


def test_a_card_and_its_virtual_function_seen_in_one_container_are_no_dual_port_card(tmp_path: Path) -> None:
    """F15."""
    first, second = (make_function(tmp_path, f"0000:3b:00.{number}", f"eth{number}") for number in range(2))
    virtual = make_function(tmp_path, "0000:3b:00.2", "eth9")
    (virtual / "physfn").symlink_to(first)
    make_rdma(tmp_path, "mlx5_0", first, "b859:9f03:0001:0000")
    make_rdma(tmp_path, "mlx5_1", second, "b859:9f03:0001:0001")
    make_rdma(tmp_path, "mlx5_2", virtual, "0000:0000:0000:0000")
    seen = read_ports("a", tmp_path).select("nic", "pci", "function", "virtual", "rail")
    assert list(seen.iter_rows()) == [
        ("mlx5_0", "0000:3b:00.0", "0000:3b:00.0", False, 0),
        ("mlx5_1", "0000:3b:00.1", "0000:3b:00.1", False, 1),
        ("mlx5_2", "0000:3b:00.2", "0000:3b:00.0", True, 0),
    ]
    assert read_rails(tmp_path)["function"].to_list() == ["0000:3b:00.0", "0000:3b:00.1"]


def test_two_devices_of_one_node_guid_are_one_card(tmp_path: Path) -> None:
    """F15, where the link from the virtual function to its card is hidden."""
    make_rdma(tmp_path, "mlx5_0", make_function(tmp_path, "0000:3b:00.0"))
    make_rdma(tmp_path, "mlx5_1", make_function(tmp_path, "0000:3b:00.2"))
    assert read_ports("a", tmp_path)["function"].to_list() == ["0000:3b:00.0"] * 2


def test_an_invisible_rail_shifts_no_other(tmp_path: Path) -> None:
    """G10: eight rails, one of them given to a virtual machine or another namespace."""
    cards = [make_function(tmp_path, f"0000:{bus:02x}:00.0", f"eth{bus}") for bus in (0x9, 0x10, 0x8A, 0xB0)]
    make_function(tmp_path, "0000:05:00.0", "mgmt", driver="igb")
    make_function(tmp_path, "0000:06:00.0", driver="mlx5_core", pci_class="0x088000")
    for index in (0, 1, 3):
        make_rdma(tmp_path, f"mlx5_{index}", cards[index], f"b859:9f03:0001:000{index}")
    assert read_ports("a", tmp_path)["rail"].to_list() == [0, 1, 3]
    rails = list(read_rails(tmp_path).iter_rows())
    assert rails == [(0, "0000:09:00.0"), (1, "0000:10:00.0"), (2, "0000:8a:00.0"), (3, "0000:b0:00.0")]


def test_both_members_of_a_bond_are_one_rail(tmp_path: Path) -> None:
    """F11, F12: the RDMA device of a bond sits on its first member and uses both cables."""
    cards = [make_function(tmp_path, f"0000:3b:00.{number}", f"eth{number}") for number in (0, 1)]
    other = make_function(tmp_path, "0000:5e:00.0", "eth2")
    bond = tmp_path / "class/net/bond0"
    (bond / "bonding").mkdir(parents=True)
    for number in (0, 1):
        (tmp_path / f"class/net/eth{number}/master").symlink_to(bond)
    device = make_rdma(tmp_path, "mlx5_bond_0", cards[0])
    write(device / "ports/1/gid_attrs/ndevs/0", "bond0")
    make_rdma(tmp_path, "mlx5_2", other, "b859:9f03:0002:0000")
    seen = read_ports("a", tmp_path).select("nic", "netdev", "bond", "rail")
    assert list(seen.iter_rows()) == [("mlx5_2", "eth2", None, 1), ("mlx5_bond_0", "bond0", "bond0", 0)]


def test_each_port_of_a_device_has_its_own_interface_and_no_guessed_rail(tmp_path: Path) -> None:
    """G11: sysfs names interfaces per device, GIDs name them per port."""
    card = make_function(tmp_path, "0000:3b:00.0", "eth0")
    (card / "net/eth1").mkdir()
    device = make_rdma(tmp_path, "mlx4_0", card)
    write(device / "ports/2/rate", "40 Gb/sec")
    for port in (1, 2):
        write(device / f"ports/{port}/gid_attrs/ndevs/0", f"eth{port - 1}")
    seen = read_ports("a", tmp_path).select("port", "netdev", "rail")
    assert list(seen.iter_rows()) == [(1, "eth0", None), (2, "eth1", None)]
