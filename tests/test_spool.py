"""The spool: in order, once, through kills and full disks, and never more than it may hold."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.errors import HostError
from pulse_bpf.live.spool import Spool
from pulse_bpf.store import write_file


def deliver(spool: Spool) -> list[bytes]:
    """All that waits, in the order in which it is sent."""
    found, order = [], -1
    while (entry := spool.after(order)) is not None:
        found.append(spool.content(entry))
        order = entry.order
    return found  # type: ignore[return-value]


def test_what_is_put_comes_out_in_order_until_it_is_delivered(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1000, 1000)
    for number in range(3):
        spool.put(b"%d" % number)
    assert deliver(spool) == [b"0", b"1", b"2"]
    assert spool.oldest(spool.name) == 0
    assert spool.delivered(spool.name, 1) == (2, 2)
    assert deliver(spool) == [b"2"]
    assert (spool.oldest(spool.name), spool.next_sequence) == (2, 3)
    assert [path.name for path in tmp_path.iterdir()] == [f"{spool.name}-000000000002.step"]


def test_an_agent_that_was_killed_leaves_what_it_had_to_the_next(tmp_path: Path) -> None:
    first = Spool(tmp_path, 1000, 1000)
    first.put(b"old 0")
    first.put(b"old 1")
    (tmp_path / f"{first.name}-000000000002.step.tmp").write_bytes(b"torn")
    (tmp_path / "notes").write_bytes(b"somebody else's")
    second = Spool(tmp_path, 1000, 1000)
    second.put(b"new 0")
    assert deliver(second) == [b"old 0", b"old 1", b"new 0"]
    assert second.name != first.name
    assert second.next_sequence == 1
    second.delivered(first.name, 1)
    assert deliver(second) == [b"new 0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{second.name}-000000000000.step", "notes"]


def test_it_holds_no_more_than_it_may_and_says_what_it_dropped(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10, 10)
    for number in range(5):
        spool.put(b"%04d" % number)
    assert deliver(spool) == [b"0003", b"0004"]
    assert (spool.dropped, spool.size_bytes) == (3, 8)
    assert spool.oldest(spool.name) == 3


def test_a_full_disk_is_bridged_in_memory(tmp_path: Path) -> None:
    full = True

    def write(path: Path, content: object) -> None:
        if full:
            raise HostError("cannot write", "No space left on device")
        write_file(path, content)  # type: ignore[arg-type]

    spool = Spool(tmp_path, 100, 8, write)
    for number in range(3):
        spool.put(b"%04d" % number)
    assert spool.refused == "cannot write: No space left on device"
    assert (deliver(spool), spool.dropped) == ([b"0001", b"0002"], 1)
    full = False
    spool.put(b"0003")
    assert (deliver(spool), spool.refused) == ([b"0001", b"0002", b"0003"], None)


def test_a_file_that_went_away_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1000, 1000)
    spool.put(b"0")
    spool.put(b"1")
    entry = spool.after(-1)
    assert entry is not None
    entry.path.unlink()
    assert (spool.content(entry), spool.dropped, deliver(spool)) == (None, 1, [b"1"])


@given(st.lists(st.one_of(st.just("put"), st.just("restart"), st.integers(0, 6)), max_size=30))
def test_nothing_is_lost_or_doubled_whatever_happens(steps: list[str | int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        spool = Spool(Path(directory), 10**6, 10**6)
        put, got = [], {}
        for step in steps:
            if step == "put":
                put.append((spool.name, spool.next_sequence))
                spool.put(f"{spool.name} {spool.next_sequence}".encode())
            elif step == "restart":
                spool = Spool(Path(directory), 10**6, 10**6)
            else:
                for content in deliver(spool)[: int(step)]:
                    name, number = content.decode().split()
                    got.setdefault((name, int(number)), 0)
                    got[name, int(number)] += 1
                    spool.delivered(name, int(number))
        for content in deliver(spool):
            name, number = content.decode().split()
            got[name, int(number)] = got.get((name, int(number)), 0) + 1
        assert got == dict.fromkeys(put, 1)
