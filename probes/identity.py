"""Where a communicator keeps who it is: found in the library's own code, not in a table of versions.

ncclCommUserRank, ncclCommCount and ncclCommCuDevice each load one 32-bit field of struct ncclComm and store it
through the caller's pointer. In every release from 2.18.1 on, these fields lie side by side and the 64-bit
commHash, equal on all ranks, directly precedes them: hash at R-8, rank at R, nranks at R+4, CUDA device at R+8.
"""

from __future__ import annotations

from collections.abc import Mapping

import capstone
from capstone import x86

from pulse_bpf.errors import AttachError

# What is read of a communicator, in the order of the fields.
ACCESSORS = ("ncclCommUserRank", "ncclCommCount", "ncclCommCuDevice")
# Smaller displacements belong to other objects than a communicator, whose rank lies kilobytes in.
_LEAST_DISPLACEMENT = 0x80
# How far behind the load its value is stored.
_STORE_WITHIN = 4
_OTHER_BASES = (x86.X86_REG_RIP, x86.X86_REG_RBP, x86.X86_REG_RSP, x86.X86_REG_INVALID)


def rank_offset(accessors: Mapping[str, bytes], machine: str) -> int:
    """The offset of `rank` in struct ncclComm, from the code of the three accessor functions.

    Assumes each accessor has exactly one load whose value is stored through a plain pointer shortly after, and
    that the three offsets are R, R+4, R+8. AttachError, with the reason, when any of this does not hold: then
    the library's calls can be counted, but not said to belong to a rank.
    """
    what = "cannot find a communicator's rank in this NCCL"
    if machine != "x64":
        raise AttachError(what, f"its code for {machine} is not understood")
    offsets = []
    for name in ACCESSORS:
        if name not in accessors:
            raise AttachError(what, f"it has no {name}")
        candidates = _returned_fields(accessors[name])
        if len(candidates) != 1:
            raise AttachError(what, f"{name} has {len(candidates)} places that could be it")
        offsets.append(candidates.pop())
    rank, count, device = offsets
    if count != rank + 4 or device != rank + 8:
        raise AttachError(what, f"rank, size and device lie at {rank:#x}, {count:#x}, {device:#x}")
    return rank


def _returned_fields(code: bytes) -> set[int]:
    """Displacements of 32-bit loads whose register is stored to a bare [register] within a few instructions."""
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder.detail = True
    instructions = list(decoder.disasm(code, 0))
    found = set()
    for position, load in enumerate(instructions):
        if load.id != x86.X86_INS_MOV or len(load.operands) != 2:
            continue
        target, source = load.operands
        if target.type != x86.X86_OP_REG or source.type != x86.X86_OP_MEM or target.size != 4:
            continue
        if source.mem.disp <= _LEAST_DISPLACEMENT or source.mem.base in _OTHER_BASES or source.mem.index:
            continue
        following = instructions[position + 1 : position + 1 + _STORE_WITHIN]
        if any(_stores_to_pointer(instruction, target.reg) for instruction in following):
            found.add(source.mem.disp)
    return found


def _stores_to_pointer(instruction: capstone.CsInsn, register: int) -> bool:
    if instruction.id != x86.X86_INS_MOV or len(instruction.operands) != 2:
        return False
    target, source = instruction.operands
    return bool(
        target.type == x86.X86_OP_MEM
        and target.mem.disp == 0
        and target.mem.index == 0
        and target.mem.base not in _OTHER_BASES
        and source.type == x86.X86_OP_REG
        and source.reg == register
    )
