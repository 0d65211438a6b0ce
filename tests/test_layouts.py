"""Wherever a process has its NCCL from, what it calls is recorded: each layout is a program that really runs.

The library is a double, tests/targets/layout_nccl.c, built in different ways; layout.c says what it called of it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from layouts import SHARED, Recording, build, recording, said
from live import Target, probing, running

from pulse_bpf.elf import Elf
from pulse_bpf.errors import AttachError

pytestmark = [pytest.mark.bcc, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("program") / "layout", "layout.c")


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nccl") / "libnccl.so.2", "layout_nccl.c", *SHARED)


def check_recorded(command: list[str | Path], copies: int = 1, **environment: str) -> list[Path]:
    """That exactly what a program called is recorded; the paths of its NCCLs, sorted."""
    with running(command, **environment) as target, recording(target.pid) as record:
        assert record.look() == [target.pid]
        assert record.problems() == []
        called = said(target.act("call 100"))
        assert len(called) == 7 * copies
        assert record.calls() == {target.pid: called}
        libraries = record.probes.state()["libraries"]
        return sorted(Path(path) for path in libraries["path"])


BUILDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pip wheel": ("venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2", ()),
    "renamed": ("opt/my collectives (v2).bin", ()),
    "in a bigger library": ("torch/lib/libtorch_cuda.so", ("-DFILLER_BYTES=0x900000",)),
    "in a bigger library that does not export it": (
        "torch/lib/libtorch_cuda.so",
        ("-DFILLER_BYTES=0x900000", "-fvisibility=hidden"),
    ),
    "in a library that exports a part of it": ("lib.so", ("-DHALF_HIDDEN",)),
    "stripped": ("libnccl.so.2", ("-s",)),
    "with endbr64 at every entry": ("libnccl.so.2", ("-fcf-protection=full",)),
    "addresses that are not offsets": ("libnccl.so.2", ("-Wl,--section-start=.text=0x400000",)),
    "one segment for code and data": ("libnccl.so.2", ("-Wl,-z,noseparate-code",)),
    "linked by gold": ("libnccl.so.2", ("-fuse-ld=gold",)),
    "linked by lld": ("libnccl.so.2", ("-fuse-ld=lld",)),
}


@pytest.mark.parametrize("layout", BUILDS)
def test_a_library_is_recorded_however_it_was_built(layout: str, program: Path, tmp_path: Path) -> None:
    name, flags = BUILDS[layout]
    linker = next((flag.partition("=")[2] for flag in flags if flag.startswith("-fuse-ld")), "ld")
    if shutil.which(f"ld.{linker}") is None and linker != "ld":
        pytest.skip(f"needs {linker}")
    if "-fcf-protection=full" in flags and platform.machine() != "x86_64":
        pytest.skip("needs x86-64")
    library = build(tmp_path / name, "layout_nccl.c", *SHARED, *flags)
    assert check_recorded([program, library]) == [library]


def test_the_builds_are_what_they_are_called(tmp_path: Path) -> None:
    def exports(layout: str) -> set[str]:
        library = build(tmp_path / layout, "layout_nccl.c", *SHARED, *BUILDS[layout][1])
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
        )
        return {line.split()[-1] for line in symbols.stdout.splitlines()}

    markers = {"ncclAllReduce", "ncclGroupEnd"}
    assert exports("pip wheel") >= markers
    assert exports("stripped") >= markers
    assert exports("in a library that exports a part of it") & markers == {"ncclAllReduce"}
    assert not exports("in a bigger library that does not export it") & markers
    assert exports("addresses that are not offsets") >= markers
    with Elf(tmp_path / "stripped") as elf:
        assert elf.section(".symtab") == b""
    with Elf(tmp_path / "addresses that are not offsets") as elf:
        function = elf.functions(["ncclAllReduce"])["ncclAllReduce"]
        assert function.vaddr != function.offset


@pytest.mark.parametrize(
    "flags",
    [
        ("-no-pie", "-fno-pie"),
        ("-no-pie", "-fno-pie", "-rdynamic"),
        ("-pie", "-fPIE"),
        ("-static", "-DSTATIC"),
    ],
    ids=" ".join,
)
def test_a_program_that_nccl_is_linked_into_is_recorded(flags: tuple[str, ...], tmp_path: Path) -> None:
    trainer = build(tmp_path / "trainer", "both", "-DLINKED", *flags)
    assert check_recorded([trainer]) == [trainer]


def test_the_system_library_is_recorded_though_a_wheel_is_installed(program: Path, tmp_path: Path) -> None:
    """Which of several a process uses is told by what it maps, not by what is installed."""
    system = build(tmp_path / "usr/lib/libnccl.so.2.98.1", "layout_nccl.c", *SHARED, '-DVERSION="2.98.1"')
    system.with_name("libnccl.so.2").symlink_to(system.name)
    build(tmp_path / "site-packages/nvidia/nccl/lib/libnccl.so.2", "layout_nccl.c", *SHARED)
    environment = {"LD_LIBRARY_PATH": str(system.parent)}
    with running([program, "libnccl.so.2"], **environment) as target, recording(target.pid) as record:
        assert record.look() == [target.pid]
        (library,) = record.probes.state()["libraries"].to_dicts()
        assert (library["path"], library["version"]) == (str(system), "2.98.1")
        called = said(target.act("call 1"))
        assert record.calls() == {target.pid: called}


def test_two_copies_in_one_process_are_both_recorded(program: Path, nccl: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "libtorch.so", "layout_nccl.c", *SHARED, '-DVERSION="2.98.1"')
    assert check_recorded([program, nccl, other], copies=2) == sorted([nccl, other])


def test_one_file_in_two_link_namespaces_is_recorded_once_per_call(program: Path, nccl: Path) -> None:
    with running([program, nccl]) as target, recording(target.pid) as record:
        assert target.act(f"again {nccl}") == "done"
        assert record.look() == [target.pid]
        called = said(target.act("call 1"))
        assert len(called) == 14
        assert record.calls() == {target.pid: called}


def test_a_library_that_is_in_no_directory_is_recorded(program: Path, nccl: Path) -> None:
    with running([program]) as target, recording(target.pid) as record:
        assert target.act(f"memory {nccl}") == "done"
        assert record.look() == [target.pid]
        called = said(target.act("call 1"))
        assert record.calls() == {target.pid: called}


def test_a_library_that_was_deleted_is_recorded(program: Path, nccl: Path, tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    shutil.copy(nccl, library)
    with running([program, library]) as target, recording(target.pid) as record:
        library.unlink()
        assert record.look() == [target.pid]
        called = said(target.act("call 1"))
        assert record.calls() == {target.pid: called}


def test_a_library_that_was_replaced_is_recorded_in_old_and_new_processes(
    program: Path, nccl: Path, tmp_path: Path
) -> None:
    """An upgrade renames a new file over the old one, which processes that run keep."""
    library = tmp_path / "libnccl.so.2"
    shutil.copy(nccl, library)
    with running([program, library]) as old:
        new_file = build(tmp_path / "new", "layout_nccl.c", *SHARED, "-DFILLER_BYTES=0x3000")
        new_file.rename(library)
        with running([program, library]) as new, recording(old.pid, new.pid) as record:
            assert record.look() == sorted([old.pid, new.pid])
            called = {old.pid: said(old.act("call 1")), new.pid: said(new.act("call 50"))}
            assert record.calls() == called


def test_a_library_that_is_opened_while_recording_is_recorded(program: Path, nccl: Path) -> None:
    with running([program]) as target, recording(target.pid) as record:
        assert record.look() == []
        (error,) = record.refused
        assert "has no NCCL to probe" in str(error)
        target.act(f"open {nccl}")
        assert record.look() == [target.pid]
        called = said(target.act("call 1"))
        assert record.calls() == {target.pid: called}


def test_a_second_copy_that_is_opened_while_recording_is_recorded(
    program: Path, nccl: Path, tmp_path: Path
) -> None:
    other = build(tmp_path / "other.so", "layout_nccl.c", *SHARED, "-DFILLER_BYTES=0x3000")
    with running([program, nccl]) as target, recording(target.pid) as record:
        assert record.look() == [target.pid]
        target.act(f"open {other}")
        assert record.look() == [target.pid]
        called = said(target.act("call 1"))
        assert len(called) == 14
        assert record.calls() == {target.pid: called}


def test_a_child_is_recorded_after_fork_and_after_exec(program: Path, nccl: Path) -> None:
    with running([program, nccl]) as target, recording(target.pid) as record:
        assert record.look() == [target.pid]
        assert target.act("fork") == "done"
        (child,) = record.look()
        assert child == int(target.act("pid")) != target.pid
        called = said(target.act("call 1"))
        assert record.calls() == {child: called}
        assert target.act("exec") == "ready"
        assert record.look() == [child]
        called = said(target.act("call 20"))
        assert record.calls() == {child: called}


def test_a_wrapper_that_executes_the_program_is_recorded(program: Path, nccl: Path) -> None:
    script = 'echo ready; read line; "$0" "$1"; exit $?'
    with running(["sh", "-c", script, program, nccl]) as target, recording(target.pid) as record:
        assert record.look() == []
        # The wrapper's answer is that of the program it starts.
        assert target.act() == "ready"
        (child,) = record.look()
        assert child != target.pid
        called = said(target.act("call 1"))
        assert record.calls() == {child: called}
        target.end()


def test_a_process_that_starts_while_recording_is_recorded(program: Path, nccl: Path) -> None:
    with running([program, nccl]) as early, recording(everything=True) as record:
        assert early.pid in record.look()
        with running([program, nccl]) as late:
            assert late.pid in record.look()
            called = {early.pid: said(early.act("call 1")), late.pid: said(late.act("call 50"))}
            assert {pid: calls for pid, calls in record.calls().items() if pid in called} == called


CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]


@contextmanager
def contained(script: str, *arguments: str | Path) -> Iterator[Target]:
    """The program with its library, in a mount and a pid namespace of its own, started by a shell script."""
    with running([*CONTAINER, script, "sh", *arguments]) as target:
        yield target


def inner(record: Recording) -> int:
    """The one process that is recorded of a container."""
    (pid,) = record.look()
    return pid


needs_unshare = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")


@needs_unshare
def test_a_container_with_a_file_system_of_its_own_is_recorded(
    program: Path, nccl: Path, tmp_path: Path
) -> None:
    """What its path names is another file here, and its pid is 1 there."""
    mount = tmp_path / "mount"
    mount.mkdir()
    decoy = build(mount / "libnccl.so.2", "layout_nccl.c", *SHARED, '-DVERSION="2.1.1"')
    script = 'cp "$2" /dev/shm/n.$$; mount -t tmpfs none "$3"; mv /dev/shm/n.$$ "$3/libnccl.so.2"; '
    script += 'exec "$1" "$3/libnccl.so.2"'
    with contained(script, program, nccl, mount) as target, recording(target.pid) as record:
        pid = inner(record)
        assert target.act("pid") == "1"
        called = said(target.act("call 1"))
        assert record.calls() == {pid: called}
        (library,) = record.probes.state()["libraries"].to_dicts()
        # Seen from a changed root, the path begins further up.
        assert library["path"].endswith(str(decoy))
        assert library["version"] == "2.99.0"


OVERLAY = (
    'mount -t tmpfs none "$4"; mkdir "$4/upper" "$4/work" "$4/merged"; '
    'mount -t overlay none -o "lowerdir=$3,upperdir=$4/upper,workdir=$4/work" "$4/merged"; '
    'exec "$1" "$4/merged/$2"'
)


@needs_unshare
def test_containers_that_share_a_layer_are_recorded_once_each(
    program: Path, nccl: Path, tmp_path: Path
) -> None:
    """Their library is one file to the kernel and two to stat: overlay filesystems show a device of their own."""
    layer = tmp_path / "layer"
    layer.mkdir()
    shutil.copy(nccl, layer)
    arguments = [program, nccl.name, layer]
    mounts = [tmp_path / "one", tmp_path / "two"]
    for mount in mounts:
        mount.mkdir()
    if not _overlay_works(layer, mounts[0]):
        pytest.skip("this host mounts no overlay filesystem")
    with (
        contained(OVERLAY, *arguments, mounts[0]) as one,
        contained(OVERLAY, *arguments, mounts[1]) as two,
        recording(one.pid) as first,
        recording(one.pid, two.pid) as record,
    ):
        one_pid = inner(first)
        (two_pid,) = set(record.look()) - {one_pid}
        called = {one_pid: said(one.act("call 1")), two_pid: said(two.act("call 50"))}
        assert first.calls() == {one_pid: called[one_pid]}
        assert record.calls() == called


def _overlay_works(layer: Path, mount: Path) -> bool:
    return subprocess.run([*CONTAINER, OVERLAY, "sh", "true", "", layer, mount]).returncode == 0


def test_code_that_was_moved_to_other_memory_is_refused_and_not_idle(program: Path, nccl: Path) -> None:
    with running([program, nccl]) as target, recording(target.pid) as record:
        assert target.act("move") == "done"
        assert record.look() == []
        (error,) = record.refused
        assert "not observable" in str(error)
        assert str(nccl) in str(error)


def test_code_moved_in_one_process_is_recorded_in_another(program: Path, nccl: Path) -> None:
    with running([program, nccl]) as sound, running([program, nccl]) as moved:
        moved.act("move")
        for pids in ([sound.pid, moved.pid], [moved.pid, sound.pid]):
            with probing() as probes:
                for pid in pids:
                    if pid == moved.pid:
                        with pytest.raises(AttachError, match="not observable"):
                            probes.add(pid, "node1")
                    else:
                        probes.add(pid, "node1")
                called = said(sound.act("call 1"))
                said(moved.act("call 1"))
                ops = probes.read()["ops"]
                assert set(ops["pid"]) == {sound.pid}
                assert ops["count"].to_list() == [count for _, count, _, _ in called]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_a_hot_function_that_would_be_single_stepped_is_not_probed(program: Path, tmp_path: Path) -> None:
    library = build(tmp_path / "libnccl.so.2", "layout_nccl.c", *SHARED, "-DSLOW_ENTRY")
    with running([program, library]) as target, recording(target.pid) as record:
        assert record.look() == []
        (error,) = record.refused
        assert re.search(r"begins with 'sub rsp, 0x[0-9a-f]+'", str(error))
        assert _armed(target.pid, library) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_a_probe_is_put_behind_endbr64(program: Path, tmp_path: Path) -> None:
    library = build(tmp_path / "libnccl.so.2", "layout_nccl.c", *SHARED, "-fcf-protection=full")
    with running([program, library]) as target, recording(target.pid) as record:
        record.look()
        target.act("call 1")
        assert _armed(target.pid, library) == [4]


def _armed(pid: int, library: Path) -> list[int]:
    """How far behind the beginning of ncclAllReduce its code in memory differs from the file's."""
    with Elf(library) as elf:
        function = elf.functions(["ncclAllReduce"])["ncclAllReduce"]
        code = elf.code(function)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, permissions, offset, _, _, *path = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        place = start + function.offset - int(offset, 16)
        if "x" in permissions and path == [str(library)] and start <= place < end:
            with open(f"/proc/{pid}/mem", "rb") as memory:
                memory.seek(place)
                running_code = memory.read(len(code))
            return [
                at for at, (one, other) in enumerate(zip(code, running_code, strict=True)) if one != other
            ]
    raise AssertionError(f"{library} is not mapped in {pid}: {os.listdir(f'/proc/{pid}')}")
