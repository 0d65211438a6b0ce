"""Getting the real NCCL, and what it does with communicators that are none."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from live import real_nccl

from pulse_bpf.errors import HostError
from pulse_bpf.lab import nccl
from pulse_bpf.lab.nccl import VERSION, library_path


@pytest.mark.parametrize(("version", "cuda"), [("2.27.5", 12), ("2.27.7", 13)])
def test_a_failed_download_says_why_and_leaves_nothing(
    version: str, cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "CACHE", tmp_path / "pulse")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(HostError, match=f"cannot download nvidia-nccl-cu{cuda}=={version}"):
        library_path(version)
    assert list((tmp_path / "pulse").iterdir()) == []


def test_nothing_is_downloaded_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "CACHE", tmp_path / "pulse")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(HostError, match="less than 1280 MiB of room"):
        library_path("2.27.7")
    assert list((tmp_path / "pulse").iterdir()) == []


def test_a_download_that_is_no_wheel_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "nvidia_nccl_cu12-2.1.1-py3-none-any.whl", "w") as wheel:
        info = "nvidia_nccl_cu12-2.1.1.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.1.1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(nccl, "CACHE", tmp_path / "pulse")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(HostError, match=r"cannot keep nvidia-nccl-cu12==2\.1\.1 .*libnccl"):
        library_path("2.1.1")
    assert list((tmp_path / "pulse").iterdir()) == []


def test_a_library_that_is_there_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "CACHE", tmp_path / "pulse")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "pulse/nccl-2.19.3").mkdir(parents=True)
    (tmp_path / "pulse/nccl-2.19.3/libnccl.so.2").touch()
    assert library_path() == tmp_path / "pulse/nccl-2.19.3/libnccl.so.2"


CALLS = """
import sys
import zipfile
from pathlib import Path
from pulse_bpf.lab.nccl import NcclLibrary
library = NcclLibrary(Path(sys.argv[1]))
comm = library.communicator(rank=1, nranks=4, comm_hash=5, gpu=1)
operators = [name for name in library.calls if not name.startswith(("Comm", "Group"))]
assert len(operators) >= 8, operators
refused = set()
for _ in range(2000):
    refused |= {library.call(name, comm, count=8, dtype=7, peer=1) for name in operators}
    assert library.call("GroupStart") == 0
    refused |= {library.call(name, comm, count=8, dtype=7, peer=2) for name in ("Send", "Recv")}
    refused.add(library.call("GroupEnd"))
assert len(refused) == 1 and 0 not in refused, refused
made = library.communicator(rank=0, nranks=2, comm_hash=6, gpu=0)
for _ in range(20):
    (address,) = library.create("CommInitRankConfig", [made], nranks=2, rank=0)
    assert address == made.address
    for name in {"CommFinalize", "CommDestroy", "CommAbort"} & library.calls:
        library.call(name, library.communicator(rank=1, nranks=4, comm_hash=5, gpu=1))
"""


@pytest.mark.parametrize("version", [VERSION, "2.32.3"])
def test_every_call_is_refused_and_none_crashes(version: str) -> None:
    result = subprocess.run([sys.executable, "-c", CALLS, real_nccl(version)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
