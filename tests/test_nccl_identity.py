"""Finding the rank in struct ncclComm, in accessors the compiler makes and in the real library's."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from pulse_bpf.elf import Elf
from pulse_bpf.errors import AttachError, HostError
from pulse_bpf.lab import nccl as lab_nccl
from pulse_bpf.probes import nccl
from pulse_bpf.probes.identity import ACCESSORS, rank_offset

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() != "x86_64", reason="needs gcc on x86-64"
)

LIBRARY = """
struct ncclComm {{ void *magic; char before[{before}]; {fields} }};
int check(struct ncclComm *comm);
int ncclCommUserRank(struct ncclComm *comm, int *out) {{ if (!check(comm)) return 4; {rank} return 0; }}
int ncclCommCount(struct ncclComm *comm, int *out) {{ if (!check(comm)) return 4; *out = comm->nranks; return 0; }}
int ncclCommCuDevice(struct ncclComm *comm, int *out) {{ if (!check(comm)) return 4; *out = comm->gpu; return 0; }}
int check(struct ncclComm *comm) {{ return comm->magic != 0; }}
"""
IN_ORDER = "long hash; int rank; int nranks; int gpu; int other;"


def accessors(directory: Path, fields: str = IN_ORDER, rank: str = "*out = comm->rank;") -> dict[str, bytes]:
    source = directory / "comm.c"
    source.write_text(LIBRARY.format(before=0x4000, fields=fields, rank=rank))
    library = directory / "comm.so"
    # A frame pointer keeps the communicator out of rbp, which the matcher takes for the stack.
    flags = ["-O2", "-fno-inline", "-fno-omit-frame-pointer", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    with Elf(library) as elf:
        return {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}


def test_the_rank_is_found(tmp_path: Path) -> None:
    assert rank_offset(accessors(tmp_path), "x64") == 8 + 0x4000 + 8


def test_fields_in_another_order_are_refused(tmp_path: Path) -> None:
    code = accessors(tmp_path, fields="long hash; int nranks; int rank; int gpu;")
    with pytest.raises(AttachError, match="rank, size and device lie at"):
        rank_offset(code, "x64")


def test_an_accessor_with_two_candidates_is_refused(tmp_path: Path) -> None:
    code = accessors(tmp_path, rank="*out = comm->gpu; check(comm); *out = comm->rank;")
    with pytest.raises(AttachError, match="ncclCommUserRank has 2 places"):
        rank_offset(code, "x64")


def test_an_accessor_that_computes_its_answer_is_refused(tmp_path: Path) -> None:
    code = accessors(tmp_path, rank="*out = check(comm);")
    with pytest.raises(AttachError, match="ncclCommUserRank has 0 places"):
        rank_offset(code, "x64")


def test_a_library_without_an_accessor_is_refused(tmp_path: Path) -> None:
    code = accessors(tmp_path)
    del code["ncclCommCount"]
    with pytest.raises(AttachError, match="it has no ncclCommCount"):
        rank_offset(code, "x64")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="AArch64"):
        rank_offset(accessors(tmp_path), "AArch64")


def test_the_real_library() -> None:
    try:
        path = lab_nccl.library_path()
    except HostError as error:
        pytest.skip(str(error))
    with Elf(path) as elf:
        found = elf.functions([*nccl.PROBES, *ACCESSORS])
        code = {name: elf.code(found[name]) for name in ACCESSORS}
        # Both as disassembled by hand from this build.
        assert elf.build_id() == "466b18565ce024026b79a3c426714b8ebdd62cd8"
        assert rank_offset(code, elf.machine) == 0x24D8
        assert nccl.version(elf.section(".rodata")) == lab_nccl.VERSION
    later = {
        "ncclAlltoAll",
        "ncclGather",
        "ncclScatter",
        "ncclDevCommCreate",
        "ncclCommGrow",
        "ncclCommShrink",
    }
    later |= {"ncclCommInitRankScalable"} | {name for name in nccl.PROBES if name.endswith("duceConfig")}
    later |= {f"nccl{kind}Config" for kind in ("AllGather", "ReduceScatter", "Broadcast", "AlltoAll")}
    later |= {"ncclGatherConfig", "ncclScatterConfig"}
    assert found.keys() - set(ACCESSORS) == nccl.PROBES.keys() - later
