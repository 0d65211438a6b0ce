"""Probes on processes that really run: complete, alone, and gone without a trace."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from live import TARGETS, calling, compiled, entry_bytes, probing, real_nccl, running

from pulse_bpf.attach import Program
from pulse_bpf.elf import Elf
from pulse_bpf.errors import AttachError, HostError
from pulse_bpf.probes import BPF_DIRECTORY, nccl
from pulse_bpf.probes.events import NCCL_EVENT
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.watch import Selection, Watch

LOOPS = 300


@pytest.fixture(scope="session")
def library() -> Path:
    return real_nccl()


@pytest.mark.bcc
def test_an_attach_in_mid_run_continues_the_numbers_over_reads(library: Path) -> None:
    with calling(library, loops=5) as target, probing() as probes:
        probes.add(target.pid, "node1")
        batches = []
        for _ in range(3):
            target.act()
            batches.append(probes.read()["ops"])
        for (_,), calls in pl.concat(batches).group_by("comm_ptr", maintain_order=True):
            assert calls["seq"].to_list() == list(range(calls.height))


GROUPS = """
import sys
from pathlib import Path
from pulse_bpf.lab.nccl import NcclLibrary
library = NcclLibrary(Path(sys.argv[1]))
comm = library.communicator(rank=1, nranks=4, comm_hash=5, gpu=1)
library.call("GroupStart")
library.call("GroupStart")
print("ready", flush=True)
sys.stdin.readline()
steps = {
    "(": lambda: library.call("GroupStart"),
    ")": lambda: library.call("GroupEnd"),
    "d": lambda: library.call("CommDestroy", comm),
    "s": lambda: library.call("Send", comm, count=1, dtype=7, peer=0),
}
for step in "s)s)s(s(s)s)s(s)sdds":
    steps[step]()
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.bcc
def test_groups_are_outermost_and_a_destroyed_communicator_is_gone(library: Path) -> None:
    with running([sys.executable, "-c", GROUPS, library]) as target, probing() as probes:
        probes.add(target.pid, "node1")
        assert target.act() == "done"
        ops = probes.read()["ops"]
        groups = ops["group"].to_list()
        first, second = groups[3], groups[7]
        assert len({None, first, second}) == 3
        # The group that was open when the probes came is none.
        assert groups == [None, None, None, first, first, first, None, second, None, None]
        assert ops["seq"].to_list() == [*range(9), 0]
        gone_ns = probes.state()["comms"]["gone_ns"].to_list()
        assert ops["call_ns"][8] < gone_ns[0] < ops["call_ns"][9]
        assert gone_ns[1:] == [None]


@pytest.mark.bcc
def test_only_processes_that_were_added_are_recorded(library: Path) -> None:
    with calling(library, 3) as one, calling(library, 3) as other, probing() as probes:
        assert {one.pid, other.pid} <= set(Watch(Selection(everything=True)).changed())
        probes.add(one.pid, "node1")
        one.act()
        other.act()
        assert set(probes.read()["ops"]["pid"]) == {one.pid}
        probes.add(other.pid, "node1")
        one.act()
        other.act()
        assert set(probes.read()["ops"]["pid"]) == {one.pid, other.pid}


@pytest.mark.bcc
def test_adding_a_process_again_misses_none_of_its_calls(library: Path, tmp_path: Path) -> None:
    with Elf(library) as elf:
        code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
        rank_at = rank_offset(code, elf.machine)
    caller = [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]
    with running(caller) as target, probing() as probes:
        probes.add(target.pid, "node1")
        target.begin("200000 0")
        recorded = 0
        for _ in range(30):
            probes.add(target.pid, "node1")
            recorded += probes.read()["ops"].height
        called = int(target.answer().split()[0])
        assert recorded + probes.read()["ops"].height + probes.lost == called


@pytest.mark.bcc
def test_a_library_replaced_on_disk_is_still_probed(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / "libnccl.so.2"
    shutil.copy(library, copy)
    with calling(copy, 3) as target, probing() as probes:
        copy.unlink()
        probes.add(target.pid, "node1")
        assert probes.read()["ops"].is_empty()
        assert len(json.loads(target.act())) == probes.read()["ops"].height


@pytest.mark.bcc
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_an_interposed_library_does_not_count_calls_twice(library: Path, tmp_path: Path) -> None:
    shim = tmp_path / "libshim.so"
    source = tmp_path / "shim.c"
    source.write_text("int ncclAllReduce(void) { return 0; } int ncclGroupEnd(void) { return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, source], check=True)
    with calling(library, 3, LD_PRELOAD=str(shim)) as target, probing() as probes:
        probes.add(target.pid, "node1")
        problems = {Path(file["path"]): file["problems"] for file in probes.summary()["files"]}
        assert "not NCCL itself" in problems[shim][0]
        assert problems[library] == []
        assert len(json.loads(target.act())) == probes.read()["ops"].height


@pytest.mark.bcc
def test_a_process_that_ends_is_noted_with_its_communicators(library: Path) -> None:
    with calling(library, 3) as target, probing() as probes:
        probes.add(target.pid, "node1")
        target.act()
        probes.read()
        assert probes.state()["processes"]["gone_ns"].to_list() == [None]
        assert target.end() == 0
        state = probes.state()
        assert state["processes"]["gone_ns"].null_count() == 0
        assert state["comms"]["gone_ns"].null_count() == 0
        assert probes.state()["processes"].equals(state["processes"])


@pytest.mark.bcc
def test_the_last_calls_of_a_process_are_read_after_its_end_was_seen(library: Path) -> None:
    with calling(library, 3) as target, probing() as probes:
        probes.add(target.pid, "node1")
        before_ns = time.monotonic_ns()
        calls = len(json.loads(target.act()))
        assert target.end() == 0
        probes.drain()
        assert probes.read(before_ns)["ops"].is_empty()
        ops = probes.read()["ops"]
        assert ops.height == calls
        for (_,), calls_of_one in ops.group_by("comm_ptr"):
            assert calls_of_one["seq"].to_list() == list(range(calls_of_one.height))
        comms = probes.state()["comms"]
        assert comms.height == comms["comm_ptr"].n_unique()
        assert (comms["gone_ns"] >= comms["first_seen_ns"]).all()
        assert comms["gone_ns"].null_count() == 0


@pytest.mark.bcc
def test_processes_with_nothing_to_probe_are_refused() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        with probing() as probes, pytest.raises(AttachError, match="has no NCCL to probe"):
            probes.add(idle.pid, "node1")
        idle.kill()
        idle.wait()
        with probing() as probes, pytest.raises(AttachError, match="it has ended"):
            probes.add(idle.pid, "node1")


@pytest.mark.bcc
def test_a_closed_probe_set_leaves_the_process_as_it_was(library: Path) -> None:
    with calling(library, 3) as target, probing() as probes:
        probes.add(target.pid, "node1")
        target.act()
        in_memory, in_file = entry_bytes(target.pid, library)
        assert in_memory != in_file
        probes.close()
        in_memory, in_file = entry_bytes(target.pid, library)
        assert in_memory == in_file
        probes.close()
        assert target.act()
        assert probes.read()["ops"].is_empty()
        assert target.end() == 0


@pytest.mark.bcc
def test_a_kernel_without_links_of_many_places_takes_perf_events(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("pulse_bpf.attach.link_uprobes", refuse)
    with calling(library, 3) as target, probing() as probes:
        probes.add(target.pid, "node1")
        (file,) = probes.summary()["files"]
        assert (file["attached"], file["returns"], file["problems"]) == (file["wanted"], False, [])
        log = json.loads(target.act())
        ops = probes.read()["ops"]
        for (tid,), calls in ops.group_by("tid"):
            assert calls["count"].to_list() == [call["count"] for call in log if call["tid"] == tid]
        assert ops["group"].null_count() == sum(call["group"] == 0 for call in log)
        probes.close()
        in_memory, in_file = entry_bytes(target.pid, library)
        assert in_memory == in_file


@pytest.mark.bcc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_tracer_leaves_the_process_as_it_was(library: Path, number: signal.Signals) -> None:
    tracer = (
        "import sys; from pulse_bpf.probe_set import ProbeSet; probes = ProbeSet(0);"
        "probes.add(int(sys.argv[1]), 'node1'); print('ready', flush=True); input()"
    )
    with calling(library, 3) as target:
        with running([sys.executable, "-c", tracer, str(target.pid)]) as attached:
            target.act()
            in_memory, in_file = entry_bytes(target.pid, library)
            assert in_memory != in_file
            os.kill(attached.pid, number)
            os.waitid(os.P_PID, attached.pid, os.WEXITED | os.WNOWAIT)
            in_memory, in_file = entry_bytes(target.pid, library)
            assert in_memory == in_file
        assert target.act()
        assert target.end() == 0


@pytest.mark.bcc
def test_a_full_ring_is_counted(library: Path) -> None:
    # One page holds fewer records than one act makes.
    program = Program(BPF_DIRECTORY / "nccl.c", {"RING_BYTES": 4096})
    try:
        ring = program.ring("events", NCCL_EVENT)
        with calling(library, LOOPS) as target:
            key = (target.pid << 32).to_bytes(8, "little")
            program.set_hash("watched", key, b"\1")
            with Elf(library) as elf:
                found = elf.functions(nccl.PROBES)
            places = {place.offset: nccl.cookie(nccl.PROBES[name], 0, 0) for name, place in found.items()}
            assert program.attach_uprobes(library, places, "on_entry").refused == {}
            calls = len(json.loads(target.act()))
            first = ring.read()
            assert 0 < len(first) < calls
            assert len(first) + program.percpu_sum("dropped", 0) == calls
            assert (first["comm_hash"] == 0).all()
            target.act()
            assert len(ring.read()) == len(first)
            program.delete_hash("watched", key)
            target.act()
            assert len(ring.read()) == 0
            assert len(first) * 2 + program.percpu_sum("dropped", 0) == calls * 2
    finally:
        program.close()


@pytest.mark.bcc
@pytest.mark.skipif(
    shutil.which("gcc") is None or not Path("/usr/include/infiniband/verbs.h").exists(),
    reason="needs gcc and libibverbs-dev",
)
def test_queue_pairs_are_seen_through_the_real_libibverbs(library: Path, tmp_path: Path) -> None:
    program = tmp_path / "qp_caller"
    subprocess.run(["gcc", "-O1", "-o", program, TARGETS / "qp_caller.c", "-libverbs"], check=True)
    # Only what uses NCCL is recorded.
    with running([program], LD_PRELOAD=str(library)) as target, probing() as probes:
        probes.add(target.pid, "node1")
        target.act()
        frame = probes.qp_events()
        assert frame["t_ns"].is_sorted()
        assert frame.drop("t_ns").with_columns(pl.col("pid") == target.pid).unique("pid")["pid"].all()
        same = {"node": "node1", "nic": "mlx5_7", "qpn": 0x1234}
        nothing = dict.fromkeys(set(frame.columns) - {"t_ns", "pid"})
        expected = [
            {"port": 2, "state": 1},
            {
                "port": 2,
                "state": 2,
                "path_mtu": 4096,
                "peer_qpn": 0x5678,
                "peer_gid": "::ffff:10.9.0.2",
                "local_gid_index": 5,
                "service_level": 3,
            },
            {"state": 3, "timeout": 18, "retry_count": 7},
            {"destroyed": True},
        ]
        assert frame.drop("t_ns", "pid").to_dicts() == [
            {**nothing, "destroyed": False, **same, **row} for row in expected
        ]
        probes.look_closer({target.pid})
        transports = {row["transport"] for row in probes.state()["libraries"].to_dicts()}
        assert transports == {None, "verbs"}
        assert probes.lost == 0
        assert probes.qp_events().is_empty()


VERSIONED = """
int first(void) { return 1; }
int second(void) { return 2; }
__asm__(".symver first, call@V1");
__asm__(".symver second, call@@V2");
"""


@pytest.mark.bcc
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_version_that_programs_call_is_the_one_probed(tmp_path: Path) -> None:
    import ctypes

    path = tmp_path / "versioned.so"
    (tmp_path / "versioned.c").write_text(VERSIONED)
    (tmp_path / "map").write_text("V1 { global: first; }; V2 { global: second; } V1;")
    flags = ["-shared", "-fPIC", f"-Wl,--version-script={tmp_path / 'map'}"]
    subprocess.run(["gcc", *flags, "-o", path, tmp_path / "versioned.c"], check=True)
    with Elf(path) as elf:
        place = elf.functions(["call"])["call"]
    program = Program(BPF_DIRECTORY / "check.c", {"TGID": os.getpid()})
    try:
        program.attach_uprobes(path, {place.offset: 0}, "on_call")
        loaded = ctypes.CDLL(str(path))
        assert loaded.first() == 1
        assert program.percpu_sum("hits", 0) == 0
        assert loaded.call() == 2
        assert program.percpu_sum("hits", 0) == 1
    finally:
        program.close()


@pytest.mark.bcc
def test_a_place_that_is_no_code_is_refused(tmp_path: Path) -> None:
    program = Program(BPF_DIRECTORY / "check.c", {"TGID": os.getpid()})
    try:
        refused = program.attach_uprobes(tmp_path / "missing", {0: 0}, "on_call").refused
        assert "No such file" in str(refused[0])
        empty = tmp_path / "empty"
        empty.write_bytes(b"")
        places = {0x1000: 0, 0x2000: 0}
        refused = program.attach_uprobes(empty, places, "on_call", {0x1000: 0x2000}).refused
        assert "Invalid argument" in str(refused[0x2000])
        assert refused[0x1000] is refused[0x2000]
    finally:
        program.close()


@pytest.mark.bcc
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("int on_call(struct pt_regs *ctx) { return undeclared; }", "undeclared"),
        ("#include <linux/fs.h>\nint on_call(struct pt_regs *ctx) { return 0; }", "linux/fs.h"),
    ],
)
def test_a_compiler_error_is_passed_on(
    tmp_path: Path, source: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.c").write_text(source)
    with pytest.raises(HostError, match=why):
        Program(tmp_path / "wrong.c", {})
    assert capfd.readouterr() == ("", "")


@pytest.mark.bcc
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_programs_load_where_no_kernel_headers_are() -> None:
    hide = "for d in /lib/modules /usr/src; do [ ! -d $d ] || mount -t tmpfs none $d; done"
    load = (
        "from pulse_bpf.attach import Program; from pulse_bpf.probes import BPF_DIRECTORY;"
        "import os; assert not any(os.path.isdir(d) and os.listdir(d) for d in ('/lib/modules', '/usr/src'));"
        "Program(BPF_DIRECTORY / 'nccl.c', {'RING_BYTES': 4096}).close();"
        "Program(BPF_DIRECTORY / 'verbs.c', {'RING_BYTES': 4096}).close()"
    )
    command = f'{hide}; exec "{sys.executable}" -c "{load}"'
    environment = {name: value for name, value in os.environ.items() if name != "BCC_KERNEL_SOURCE"}
    result = subprocess.run(
        ["unshare", "-m", "sh", "-ec", command], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
