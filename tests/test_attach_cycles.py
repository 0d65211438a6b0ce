"""A program that is probed and let go over and over, while it goes on calling NCCL."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from live import compiled, entry_bytes, probing, real_nccl, running

from pulse_bpf.attach import Program
from pulse_bpf.elf import Elf
from pulse_bpf.libraries import examine
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.probes.events import NCCL_EVENT
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.ring import Ring
from pulse_bpf.targets import mapped_files

CALLS_PER_S = 2000
# What the caller may be behind when it is stopped: it makes up for being held off, but not at once.
BEHIND_S = 0.1
SEEN_WITHIN_S = 10


@pytest.mark.bcc
@pytest.mark.parametrize(
    "cycles", [500, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_probes_that_come_and_go_cost_no_call(cycles: int, tmp_path: Path) -> None:
    library = real_nccl()
    with Elf(library) as elf:
        functions = elf.functions(ACCESSORS)
        rank_at = rank_offset({name: elf.code(functions[name]) for name in functions}, elf.machine)
    caller = [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]
    with running(caller) as target:
        (file,) = (file for file in mapped_files(target.pid) if file.path == str(library))
        probed = examine(file, 0)
        assert probed
        target.begin(f"0 {CALLS_PER_S}")
        program = Program(BPF_DIRECTORY / "nccl.c", {"RING_BYTES": 1 << 20})
        try:
            ring = program.ring("events", NCCL_EVENT)
            program.set_hash("watched", (target.pid << 32).to_bytes(8, "little"), b"\1")
            for _ in range(cycles):
                attached = program.attach_uprobes(library, probed.cookies, "on_entry", probed.needs)
                assert attached.refused == {}
                assert probed.returns
                program.attach_session(library, *probed.returns, "on_group_end")
                wait_for_call(ring)
                program.detach_all()
        finally:
            program.close()
        in_memory, in_file = entry_bytes(target.pid, library)
        assert in_memory == in_file
        with probing() as probes:
            probes.add(target.pid, "node1")
            in_memory, in_file = entry_bytes(target.pid, library)
            assert in_memory != in_file
        in_memory, in_file = entry_bytes(target.pid, library)
        assert in_memory == in_file
        called, elapsed_ns, wrong = map(int, target.act().split())
        assert wrong == 0
        assert called == pytest.approx(elapsed_ns * CALLS_PER_S / 1e9, abs=BEHIND_S * CALLS_PER_S)
        assert target.end() == 0


def wait_for_call(ring: Ring) -> None:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while len(ring.read()) == 0:
        assert time.monotonic() < deadline, "the probes see none of the calls"
