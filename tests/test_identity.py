"""RDMA ports as sysfs shows them, on a made tree."""

from __future__ import annotations

from pathlib import Path

from pulse_bpf.nic.identity import read_nics
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
            None,
            "eth5",
            1,
            "0000:3b:00.1",
        ),
        ("a", "rxe1", 1, 10.0, ["::ffff:10.9.0.1"], None, "h1", None, None),
    ]
    assert read_nics("a", root=tmp_path, devices=["rxe1"])["nic"].to_list() == ["rxe1"]
    assert read_nics("a", root=tmp_path, devices=[]).is_empty()


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
