"""`pulse record --detail` on processes that really run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from live import TARGETS, calling, compiled, probing, real_nccl, running
from test_nccl_releases import IN_CI, RANK_AT

pytestmark = pytest.mark.bcc
ROW = ("seq", "channel", "algorithm", "protocol", "bytes")
ROWS = [
    (0, 4, "Ring", "Simple", 2000),
    (0, 5, "Ring", "Simple", 2000),
    (2, 0, "Tree", "LL", 80),
    (1, 0, "P2P", "Simple", 12),
    (6, 7, "Ring", "Simple", 40),
]
# Two operators of a group that look the same, and one launched by another thread.
UNDECIDED = 3
CALLS = 8


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("proxy_saver.c", tmp_path_factory.mktemp("saver"), "-pthread")


def test_each_operator_says_how_it_is_carried_out(program: Path) -> None:
    with running([program]) as target, probing(detail=True) as probes:
        assert probes.add(target.pid, "node1") == []
        for turn in range(3):
            assert target.act() == "done"
            tables = probes.read()
            assert tables["ops"]["seq"].to_list() == list(range(turn * CALLS, (turn + 1) * CALLS))
            assert tables["op_details"].select(ROW).rows() == [
                (turn * CALLS + seq, *rest) for seq, *rest in ROWS
            ]
            assert probes.summary()["undecided_details"] == (turn + 1) * UNDECIDED
        assert set(tables["op_details"]["comm_id"]) == set(tables["ops"]["comm_id"]) == {"0000000000005eed-4"}
        assert probes.lost == 0
        (unseen,) = probes.coverage(0)["unseen"]
        assert not any("detail" in text for text in unseen)


def test_nothing_is_probed_for_it_unless_asked(program: Path) -> None:
    with running([program]) as target, probing() as probes:
        probes.add(target.pid, "node1")
        target.act()
        assert probes.read().keys() == {"ops"}


def test_a_stripped_library_is_recorded_without_detail_and_said_so(program: Path, tmp_path: Path) -> None:
    # Its exports stay, as in a library.
    stripped = tmp_path / "stripped"
    subprocess.run(
        ["gcc", "-O2", "-rdynamic", "-s", "-pthread", "-o", stripped, TARGETS / "proxy_saver.c"], check=True
    )
    with running([stripped]) as target, probing(detail=True) as probes:
        probes.add(target.pid, "node1")
        target.act()
        tables = probes.read()
        assert (tables["ops"].height, tables["op_details"].height) == (CALLS - 1, 0)
        (unseen,) = probes.coverage(0)["unseen"]
        assert any("the detail of operators" in text for text in unseen)


def test_a_recording_has_the_table(program: Path, tmp_path: Path) -> None:
    record = [sys.executable, "-m", "pulse_bpf", "record", "--detail", "-o", tmp_path / "rec"]
    with running([program]) as target:
        command = [*record, "-p", str(target.pid), "-d", "60"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as recorder:
            assert recorder.stderr is not None
            try:
                while "processes attached" not in (line := recorder.stderr.readline()):
                    assert line
                target.act()
                target.end()
                recorder.communicate(timeout=60)
            finally:
                recorder.kill()
    rows = pl.read_parquet(tmp_path / "rec" / "op_details" / "*.parquet")
    assert rows.select(ROW).rows() == ROWS


@pytest.mark.parametrize(
    "release",
    [pytest.param(release, marks=[] if release in IN_CI else [pytest.mark.long]) for release in RANK_AT],
)
def test_every_release_of_nccl_has_the_place_for_it(release: str) -> None:
    library = real_nccl(release)
    with calling(library, loops=1) as target, probing(detail=True) as probes:
        assert probes.add(target.pid, "node1") == []
        target.act()
        tables = probes.read()
        # Without a GPU nothing is launched.
        assert tables["ops"].height > 0
        assert tables["op_details"].is_empty()
        (unseen,) = probes.coverage(0)["unseen"]
        assert not any("detail" in text for text in unseen)
        assert probes.lost == 0
