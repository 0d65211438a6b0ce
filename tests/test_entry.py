"""Where an entry probe goes and whether it is cheap, judged from bytes and measured on this kernel."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.attach import Program
from pulse_bpf.elf import Elf
from pulse_bpf.entry import entry_of
from pulse_bpf.errors import AttachError, HostError
from pulse_bpf.lab import nccl as lab_nccl
from pulse_bpf.probes import BPF_DIRECTORY, nccl

ENDBR64 = "f30f1efa"


@pytest.mark.parametrize(
    ("code", "emulated", "instruction"),
    [
        ("55", True, "push rbp"),
        ("4157", True, "push r15"),
        ("e900010000", True, "jmp 0x1105"),
        ("eb10", True, "jmp 0x1012"),
        ("e800000000", True, "call 0x1005"),
        ("7410", True, "je 0x1012"),
        ("0f8400010000", True, "je 0x1106"),
        ("4883ec08", False, "sub rsp, 8"),
        ("4881ec88000000", False, "sub rsp, 0x88"),
        ("6a05", False, "push 5"),
        ("ff7508", False, "push qword ptr [rbp + 8]"),
        ("48b81122334455667700", False, "movabs rax, 0x77665544332211"),
        ("4889f8", False, "mov rax, rdi"),
        ("4885ff", False, "test rdi, rdi"),
        ("31c0", False, "xor eax, eax"),
        ("488b0510000000", False, "mov rax, qword ptr [rip + 0x10]"),
        ("ffe0", False, "jmp rax"),
        ("c3", False, "ret"),
    ],
)
def test_the_first_instruction_is_judged(code: str, emulated: bool, instruction: str) -> None:
    entry = entry_of(bytes.fromhex(code + "c3"), 0x1000, "x64")
    assert (entry.offset, entry.emulated, entry.instruction) == (0x1000, emulated, instruction)


@pytest.mark.parametrize(
    ("before", "length"),
    [
        (ENDBR64, 4),
        ("90", 1),
        ("6690", 2),
        ("0f1f4000", 4),
        ("0f1f440000", 5),
        ("662e0f1f840000000000", 10),
        (ENDBR64 + "0f1f440000", 9),
    ],
)
def test_what_does_nothing_is_passed_over(before: str, length: int) -> None:
    entry = entry_of(bytes.fromhex(before + "4154" + "c3"), 0x1000, "x64")
    assert (entry.offset, entry.emulated, entry.instruction) == (0x1000 + length, True, "push r12")


@pytest.mark.parametrize("code", ["", "06", ENDBR64, "f30f1e"])
def test_what_is_no_code_is_refused(code: str) -> None:
    with pytest.raises(AttachError, match="no function begins at 0x1000"):
        entry_of(bytes.fromhex(code), 0x1000, "x64")


def test_other_machines_are_not_judged() -> None:
    assert entry_of(bytes.fromhex("3f2303d5"), 0x1000, "AArch64").offset == 0x1000


@given(st.binary(max_size=40))
def test_any_bytes_have_an_entry_or_are_refused(code: bytes) -> None:
    try:
        entry = entry_of(code, 0, "x64")
    except AttachError:
        return
    assert 0 <= entry.offset < len(code)
    assert entry.instruction


def test_every_operator_of_the_real_library_is_cheap_to_probe() -> None:
    try:
        library = lab_nccl.library_path()
    except HostError as error:
        pytest.skip(str(error))
    operators = ["ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclAllGather", "ncclReduceScatter"]
    operators += ["ncclSend", "ncclRecv", "ncclGroupStart", "ncclGroupEnd"]
    with Elf(library) as elf:
        functions = elf.functions({*operators, *nccl.PROBES})
        entries = {
            name: entry_of(elf.code(found), found.offset, elf.machine) for name, found in functions.items()
        }
    assert {name: entries[name].emulated for name in operators} == dict.fromkeys(operators, True)
    assert all(entry.offset == functions[name].offset for name, entry in entries.items())


INSTRUCTIONS = """
.text
.macro function name, insn, undo
.globl \\name
.type \\name, @function
\\name:
    \\insn
1:  \\undo
    ret
.size \\name, . - \\name
.endm
function push_rbx, "push %rbx", "pop %rbx"
function push_r12, "push %r12", "pop %r12"
function jump, "jmp 1f"
function branch, "jne 1f"
function endbr64_push, "endbr64; push %rbx", "pop %rbx"
function sub_rsp, "sub $8, %rsp", "add $8, %rsp"
function movabs, "movabs $5, %rax"
function test_rdi, "test %rdi, %rdi"
.section .note.GNU-stack, "", @progbits
"""
LOOP = "void loop(void (*call)(void), long times) { while (times--) call(); }"
CALLS = 2000


@pytest.mark.bcc
@pytest.mark.skipif(
    shutil.which("gcc") is None or os.uname().machine != "x86_64", reason="needs gcc on x86-64"
)
def test_the_kernel_emulates_what_is_said_to_be_emulated(tmp_path: Path) -> None:
    (tmp_path / "instructions.S").write_text(INSTRUCTIONS)
    (tmp_path / "loop.c").write_text(LOOP)
    path = tmp_path / "instructions.so"
    sources = [tmp_path / "instructions.S", tmp_path / "loop.c"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", path, *sources], check=True)
    library = ctypes.CDLL(str(path))
    names = ["push_rbx", "push_r12", "jump", "branch", "endbr64_push", "sub_rsp", "movabs", "test_rdi"]
    with Elf(path) as elf:
        entries = {
            name: entry_of(elf.code(found), found.offset, elf.machine)
            for name, found in elf.functions(names).items()
        }
    took_ns: dict[bool, list[float]] = {True: [], False: []}
    for name in names:
        program = Program(BPF_DIRECTORY / "check.c", {"TGID": os.getpid()})
        try:
            program.attach_uprobes(path, {entries[name].offset: 0}, "on_call")
            took_ns[entries[name].emulated].append(_cost_ns(library, name))
            assert program.percpu_sum("hits", 0) == 5 * CALLS
        finally:
            program.close()
    assert len(took_ns[True]) == 5
    assert len(took_ns[False]) == 3
    # Measured: 0.5 against 9.5 us. Both kinds suffer alike from what else runs.
    assert 2 * max(took_ns[True]) < min(took_ns[False]), took_ns


def _cost_ns(library: ctypes.CDLL, name: str) -> float:
    call = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    best = float("inf")
    for _ in range(5):
        before_ns = time.perf_counter_ns()
        library.loop(call, ctypes.c_long(CALLS))
        best = min(best, (time.perf_counter_ns() - before_ns) / CALLS)
    return best
