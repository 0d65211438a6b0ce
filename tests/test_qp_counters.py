"""Counters bound to queue pairs, on a kernel that answers as mlx5's does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from rdma_peer import AUTO, NONE, Kernel, Pair, Peer

from pulse_bpf.errors import HostError
from pulse_bpf.nic import bound_counters
from pulse_bpf.nic.bound_counters import BYTE_COUNTERS, check, undo
from pulse_bpf.nic.guard import Guard
from pulse_bpf.nic.nldev import Nldev
from pulse_bpf.nic.qp_counters import SOURCE_NAME, QpCounterReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.schema import NICS, TABLES

NICS_ROWS = pl.DataFrame([{"node": "a", "nic": "mlx5_0", "port": 1, "gids": []}], schema=NICS)
PERIOD_NS = 5_000_000
WALL_NS = 10**18
NAMES = [name for pair in BYTE_COUNTERS.values() for name in pair]

# A guard that writes down what it was told instead of asking a kernel that is not there.
NOTING = """
from pathlib import Path
from pulse_bpf.nic.guard import wait_for_owner
Path({!r}).write_text("\\n".join(wait_for_owner()))
"""


class Traffic:
    """Counters that grow by each reading, differently for each."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], int] = {}
        self.lock = threading.Lock()

    def __call__(self, qpn: int, name: str) -> int:
        with self.lock:
            step = qpn * (1000 if "bytes" in name else 1)
            self.values[qpn, name] = self.values.get((qpn, name), 10**12) + step
            return self.values[qpn, name]


def kernel(**more: object) -> Kernel:
    pairs = {0x11: Pair(0x21), 0x12: Pair(0x22), 0x13: Pair(state=1)}
    given: dict[str, object] = {"optional": dict.fromkeys([*NAMES, "cc_rx_cnp_pkts"], False)} | more
    return Kernel({"mlx5_0": pairs}, **given)  # type: ignore[arg-type]


@pytest.fixture
def noting_guard(tmp_path: Path) -> tuple[str, Path]:
    told, script = tmp_path / "told", tmp_path / "guard.py"
    script.write_text(NOTING.format(str(told)))
    return str(script), told


@pytest.fixture
def failing_guard(tmp_path: Path) -> str:
    script = tmp_path / "guard.py"
    script.write_text(
        "import sys\nfrom pulse_bpf.nic.guard import wait_for_owner\nwait_for_owner()\nsys.exit(1)\n"
    )
    return str(script)


def reader(peer: Peer, guard: str) -> QpCounterReader:
    qps = QpTable(NICS_ROWS)
    qps.observe_netlink(Nldev(peer.connect).queue_pairs(), WALL_NS)
    return QpCounterReader(NICS_ROWS, qps, WALL_NS, PERIOD_NS, lambda: Nldev(peer.connect), guard)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_bytes_in_are_bytes_out(failing_guard: str) -> None:
    traffic = Traffic()
    with Peer(kernel(counters=traffic)) as peer:
        counting = reader(peer, failing_guard)
        counting.start()
        wait(lambda: traffic.values.get((0x11, "rdma_tx_bytes"), 0) >= 10**12 + 20 * 0x11 * 1000)
        first = counting.read()["samples"]
        samples = pl.concat([first, counting.stop()["samples"]])
        assert first.height > 0
        assert samples.schema == TABLES["samples"]
        assert peer.kernel.bound == {}
        assert not any(peer.kernel.optional.values())
    sums = samples.group_by("qpn", "direction").agg(pl.col("bytes", "packets").sum()).sort("qpn", "direction")
    expected = [
        # The first reading is only compared with.
        (
            qpn,
            direction,
            traffic.values[qpn, f"rdma_{direction}_bytes"] - 10**12 - qpn * 1000,
            traffic.values[qpn, f"rdma_{direction}_packets"] - 10**12 - qpn,
        )
        for qpn in (0x11, 0x12)
        for direction in ("rx", "tx")
    ]
    assert list(sums.iter_rows()) == expected
    assert set(samples["source"]) == {SOURCE_NAME}
    assert samples["flow"].null_count() == 0
    # Bins lie on one grid and do not overlap.
    assert ((samples["t_ns"] - WALL_NS) % PERIOD_NS).eq(0).all()
    assert (samples["bin_ns"] % PERIOD_NS).eq(0).all()
    one = samples.filter(pl.col("qpn") == 0x11, pl.col("direction") == "tx")
    assert (one["t_ns"].diff().drop_nulls() >= one["bin_ns"][:-1]).mean() > 0.9
    p50_ns, p99_ns = counting.period_ns() or (0, 0)
    assert 0 < p50_ns <= p99_ns
    assert counting.coverage().select("lost").to_series().to_list() == [0, 0]


def test_another_tools_counters_stay_as_they_were(failing_guard: str) -> None:
    theirs = {"optional": {**dict.fromkeys(NAMES, False), "cc_rx_cnp_pkts": True}, "bound": {9: 0x12}}
    with Peer(kernel(**theirs)) as peer:
        counting = reader(peer, failing_guard)
        counting.start()
        assert set(peer.kernel.bound.values()) == {0x11, 0x12}
        assert all(peer.kernel.optional.values())
        assert counting.notes == []
        counting.stop()
        assert peer.kernel.bound == {9: 0x12}
        assert [name for name, on in peer.kernel.optional.items() if on] == ["cc_rx_cnp_pkts"]


def test_a_new_queue_pair_is_followed(failing_guard: str) -> None:
    with Peer(kernel()) as peer:
        counting = reader(peer, failing_guard)
        counting.start()
        peer.kernel.devices["mlx5_0"][0x13] = Pair(0x23)
        listed = Nldev(peer.connect).queue_pairs()
        counting.follow(listed)
        assert set(peer.kernel.bound.values()) == {0x11, 0x12, 0x13}
        counting.stop()


def test_when_the_sets_of_counters_run_out_it_says_so(failing_guard: str) -> None:
    with Peer(kernel(most_counters=1)) as peer:
        counting = reader(peer, failing_guard)
        counting.start()
        assert any("only 1 queue pairs of mlx5_0" in note for note in counting.notes)
        counting.stop()
        assert peer.kernel.bound == {}


def test_a_mode_that_another_tool_set_is_not_touched() -> None:
    """G8: switching it off is global."""
    with Peer(kernel(mode=AUTO)) as peer:
        with pytest.raises(HostError, match=r"another tool.*auto off"):
            check(Nldev(peer.connect), "mlx5_0", 1)
        assert peer.kernel.mode == AUTO


@pytest.mark.parametrize(
    ("more", "why"),
    [({"optional": {}}, "no counter rdma_tx_bytes"), ({"may_admin": False}, "CAP_NET_ADMIN")],
)
def test_why_nothing_can_be_counted(more: dict[str, object], why: str, failing_guard: str) -> None:
    """G3: a kernel without byte counters gives no bytes, not zero bytes."""
    with Peer(kernel(**more)) as peer:
        counting = reader(peer, failing_guard)
        with pytest.raises(HostError, match=why):
            counting.start()
        assert peer.kernel.bound == {}
        assert counting.stop()["samples"].is_empty()
        assert counting.coverage().is_empty()


CRASHING = """
import sys, os
sys.path.insert(0, {tests!r})
from test_qp_counters import Peer, kernel, reader
peer = Peer(kernel())
reader(peer, {guard!r}).start()
print(sorted(peer.kernel.bound.values()), flush=True)
sys.stdin.read()
"""


def test_after_a_crash_the_guard_knows_what_to_take_back(noting_guard: tuple[str, Path]) -> None:
    guard, told = noting_guard
    code = CRASHING.format(tests=str(Path(__file__).parent), guard=guard)
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"[17, 18]\n"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait(told.exists)
    wait(lambda: "bound mlx5_0 1 18" in told.read_text())
    # What the killed one left in the kernel.
    left = kernel(bound={1: 0x11, 2: 0x12}, mode=2, optional=dict.fromkeys(NAMES, True))
    with Peer(left) as peer:
        undo(Nldev(peer.connect), told.read_text().splitlines())
    assert left.bound == {}
    assert left.mode == NONE
    assert not any(left.optional.values())


def test_the_guard_itself_starts_and_ends_where_nothing_is_to_be_taken_back() -> None:
    assert Guard(bound_counters.__file__).close()


def test_a_crash_before_the_kernels_answer_was_told_is_taken_back_too() -> None:
    left = kernel(bound={7: 0x11, 8: 0x12}, mode=2)
    with Peer(left) as peer:
        undo(
            Nldev(peer.connect),
            ["binding mlx5_0 1 18", "refused mlx5_0 1 18", "binding mlx5_0 1 17", "binding gone_0 1 5"],
        )
    assert left.bound == {8: 0x12}
