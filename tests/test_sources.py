"""The sources of a recording together: what a host lacks is said once and stops nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import polars as pl
import pytest

from pulse_bpf.errors import UsageError
from pulse_bpf.nic.diag_samples import TAINT
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.schema import COVERAGE, NICS
from pulse_bpf.sources import Sources, Wanted

PLAIN = Wanted(1_000_000, False, False, False, None, 100_000, False, {})


@pytest.fixture
def veth() -> Iterator[str]:
    subprocess.run(["ip", "link", "add", "pulset0", "type", "veth", "peer", "name", "pulset1"], check=True)
    yield "pulset0"
    subprocess.run(["ip", "link", "del", "pulset0"], check=True)


def nics(netdev: str) -> pl.DataFrame:
    row = dict.fromkeys(NICS) | {"node": "n", "nic": "absent0", "port": 1, "gids": [], "netdev": netdev}
    return pl.DataFrame([row], NICS)


def test_a_host_without_a_card_has_no_source() -> None:
    none = pl.DataFrame(schema=NICS)
    with ExitStack() as cleanup:
        sources = Sources([], none, QpTable(none), PLAIN, 0, cleanup)
        assert sources.manifest() == []
        assert sources.coverage().schema == COVERAGE
        assert [name for tables in sources.read() for name in tables] == ["clocks"]
        assert sources.take_notices() == []


@pytest.mark.root
def test_what_is_not_there_is_said_once_and_what_is_there_is_read(veth: str) -> None:
    wanted = Wanted(1_000_000, False, True, True, None, 100_000, False, {})
    with ExitStack() as cleanup:
        sources = Sources([], nics(veth), QpTable(nics(veth)), wanted, 0, cleanup)
        told = sources.take_notices()
        # Nothing was set up that taints.
        assert TAINT not in told
        assert any("telemetry_diag" in text for text in sources.missing)
        assert any("RDMA" in text or "absent0" in text for text in sources.missing)
        assert sources.take_notices() == []
        sources.drain()
        assert [source["name"] for source in sources.manifest()] == ["ethtool"]
        counters = pl.concat(
            tables["port_counters"] for tables in sources.read() if "port_counters" in tables
        )
        assert set(counters["nic"]) == {"absent0"}
        sources.stop()
        assert sources.coverage()["source"].unique().to_list() == ["ethtool"]


@pytest.mark.root
def test_what_a_card_counted_is_read_beside_the_others(veth: str, tmp_path: Path) -> None:
    pipe = tmp_path / "absent0.pcc"
    os.mkfifo(pipe)
    wanted = dataclasses.replace(PLAIN, pcc={"absent0": pipe})
    with ExitStack() as cleanup:
        sources = Sources([], nics(veth), QpTable(nics(veth)), wanted, 0, cleanup)
        assert "pcc" in [source["name"] for source in sources.manifest()]
        sources.drain()
        sources.stop()
    for nic, path in (("other0", pipe), ("absent0", tmp_path / "missing")):
        wanted = dataclasses.replace(PLAIN, pcc={nic: path})
        with ExitStack() as cleanup, pytest.raises(UsageError, match=nic):
            Sources([], nics(veth), QpTable(nics(veth)), wanted, 0, cleanup)
