"""The lab's data path as far as it runs without RDMA: how operators are cut into slices, and its compilation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.errors import HostError
from pulse_bpf.lab import datapath

SLICE_BYTES = 16384
SIZES = st.integers(0, 5_000_000)
RANKS = st.integers(2, 16)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiles before the property tests, each example of which has a deadline."""
    datapath.library_path()


def sent_lengths(size_bytes: int, chunks: int, rank: int, steps: int) -> list[int]:
    """What `rank` sends, slice by slice, in a ring of `steps` steps over `chunks` chunks."""
    library = datapath.load()
    slices = library.ring_slices(size_bytes, chunks, SLICE_BYTES)
    return [
        library.ring_sent_length(size_bytes, chunks, slices, rank, index) for index in range(steps * slices)
    ]


@given(RANKS, SIZES, st.data())
def test_all_gather_and_reduce_scatter_send_every_part_but_one(
    nranks: int, per_rank_bytes: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, nranks - 1))
    lengths = sent_lengths(nranks * per_rank_bytes, nranks, rank, nranks - 1)
    assert sum(lengths) == (nranks - 1) * per_rank_bytes


@given(RANKS, SIZES)
def test_all_reduce_sends_two_rounds_over_all_ranks_together(nranks: int, size_bytes: int) -> None:
    sums = [sum(sent_lengths(size_bytes, nranks, rank, 2 * (nranks - 1))) for rank in range(nranks)]
    assert sum(sums) == 2 * (nranks - 1) * size_bytes
    # Chunks differ by at most a byte, so ranks by at most one per step.
    assert max(sums) - min(sums) <= 2 * (nranks - 1)


@given(SIZES, st.integers(0, 15))
def test_an_exchange_sends_all_bytes_to_a_peer(size_bytes: int, rank: int) -> None:
    lengths = sent_lengths(size_bytes, 1, rank, 1)
    assert sum(lengths) == size_bytes
    assert len(lengths) == max(1, -(-size_bytes // SLICE_BYTES))


@given(RANKS, SIZES, st.integers(0, 15))
def test_no_slice_is_larger_than_a_slot_and_none_is_needlessly_small(
    nranks: int, size_bytes: int, rank: int
) -> None:
    lengths = sent_lengths(size_bytes, nranks, rank % nranks, nranks)
    assert max(lengths) <= SLICE_BYTES
    assert max(lengths) - min(lengths) <= 2


@given(RANKS, SIZES, st.integers(0, 15))
def test_a_rank_forwards_what_arrived_one_step_before(nranks: int, size_bytes: int, rank: int) -> None:
    steps = 2 * (nranks - 1)
    before = sent_lengths(size_bytes, nranks, (rank - 1) % nranks, steps)
    own = sent_lengths(size_bytes, nranks, rank % nranks, steps)
    slices = len(own) // steps
    assert own[slices:] == before[:-slices]


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(HostError, match="no RDMA device plr99"):
        datapath.Ring("plr99", rank=0, nranks=2)


def test_more_ranks_than_a_ring_holds_are_refused() -> None:
    with pytest.raises(HostError, match="2 to 16 ranks"):
        datapath.Ring("plr99", rank=0, nranks=17)


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datapath, "CACHE", tmp_path / "new")
    library = datapath.library_path()
    monkeypatch.setenv("PATH", "")
    assert datapath.library_path() == library
    assert list((tmp_path / "new").iterdir()) == [library]


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datapath, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HostError, match="apt-get install gcc libibverbs-dev"):
        datapath.library_path()
    assert list(tmp_path.iterdir()) == []


def test_a_compile_error_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "ring.c"
    source.write_text("#include <infiniband/no_such_header.h>\n")
    monkeypatch.setattr(datapath, "SOURCE", source)
    monkeypatch.setattr(datapath, "CACHE", tmp_path / "cache")
    with pytest.raises(HostError, match="no_such_header"):
        datapath.library_path()
