"""Getting the real NCCL, and what it does with communicators that are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pulse_bpf.errors import HostError
from pulse_bpf.lab import nccl
from pulse_bpf.lab.nccl import library_path


def test_a_failed_download_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "CACHE", tmp_path / "pulse")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(HostError, match="cannot download nvidia-nccl-cu12"):
        library_path()
    assert list((tmp_path / "pulse").iterdir()) == []


def test_a_library_that_is_there_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "CACHE", tmp_path / "pulse")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "pulse/nccl-2.19.3").mkdir(parents=True)
    (tmp_path / "pulse/nccl-2.19.3/libnccl.so.2").touch()
    assert library_path() == tmp_path / "pulse/nccl-2.19.3/libnccl.so.2"


CALLS = """
import sys
from pathlib import Path
from pulse_bpf.lab.nccl import NcclLibrary
library = NcclLibrary(Path(sys.argv[1]))
comm = library.communicator(rank=1, nranks=4, comm_hash=5, gpu=1)
refused = set()
for _ in range(5000):
    refused |= {
        library.all_reduce(comm, 8, 7), library.all_gather(comm, 8, 7), library.reduce_scatter(comm, 8, 7),
        library.broadcast(comm, 8, 7, root=1), library.reduce(comm, 8, 7, root=1),
        library.send(comm, 8, 7, peer=1), library.recv(comm, 8, 7, peer=1),
    }
    assert library.group_start() == 0
    refused |= {library.send(comm, 8, 7, peer=2), library.recv(comm, 8, 7, peer=2), library.group_end()}
assert len(refused) == 1 and 0 not in refused, refused
"""


def test_every_call_is_refused_and_none_crashes() -> None:
    try:
        library = library_path()
    except HostError as error:
        pytest.skip(str(error))
    result = subprocess.run([sys.executable, "-c", CALLS, library], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
