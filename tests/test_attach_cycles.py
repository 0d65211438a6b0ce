"""A program that is probed and let go over and over, while it goes on calling NCCL."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from live import compiled, entry_bytes, probing, real_nccl, running

from pulse_bpf.attach import Program
from pulse_bpf.elf import Elf
from pulse_bpf.probes import BPF_DIRECTORY, nccl
from pulse_bpf.probes.identity import ACCESSORS, rank_offset

CALLS_PER_S = 2000
# What the caller may be behind when it is stopped: it makes up for being held off, but not at once.
BEHIND_S = 0.1
HIT_WITHIN_S = 10


@pytest.mark.bcc
@pytest.mark.parametrize(
    "cycles", [500, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_probes_that_come_and_go_cost_no_call(cycles: int, tmp_path: Path) -> None:
    library = real_nccl()
    with Elf(library) as elf:
        functions = elf.functions([*nccl.PROBES, *ACCESSORS])
        rank_at = rank_offset({name: elf.code(functions[name]) for name in ACCESSORS}, elf.machine)
    places = {functions[name].offset: 0 for name in nccl.PROBES if name in functions}
    caller = [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]
    with running(caller) as target:
        target.begin(f"0 {CALLS_PER_S}")
        for _ in range(cycles):
            # The smallest program on all places: what is tried is the kernel's coming and going, not the decoding.
            program = Program(BPF_DIRECTORY / "check.c", {"TGID": target.pid})
            try:
                assert program.attach_uprobes(library, places, "on_call") == {}
                wait_for_hit(program)
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


def wait_for_hit(program: Program) -> None:
    deadline = time.monotonic() + HIT_WITHIN_S
    while program.percpu_sum("hits", 0) == 0:
        assert time.monotonic() < deadline, "the probes see none of the calls"
