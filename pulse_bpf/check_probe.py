"""A probe tried from end to end on a process of our own: do hits arrive, what does one cost, is no trace left."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pulse_bpf.attach import Program
from pulse_bpf.errors import HostError
from pulse_bpf.probes import BPF_DIRECTORY

# A prime, so that a count that is right by accident is unlikely.
PROBED_CALLS = 997
_TIMED_CALLS = 10_000
_TIMED_ROUNDS = 3
# How long the kernel may take to give the instruction back.
_RESTORED_WITHIN_S = 1.0

# A function that returns 1 and begins as NCCL's do, with the push (arm64: the store) of the frame pointer.
_FUNCTION = {
    "x86_64": bytes.fromhex("55 4889e5 b801000000 5d c3"),
    "aarch64": bytes.fromhex("fd7bbfa9 20008052 fd7bc1a8 c0035fd6"),
}


@dataclass(frozen=True)
class Trial:
    """What became of a probe on a function of a child process.

    `seen` of `calls` arrived while it was attached, `seen_after` when as many were made after it was taken off. A call
    took `plain_ns` without and `probed_ns` with it (the least of a few rounds, taken in turns). `restored`: whether
    the function's instructions, changed while it was attached, were its own again; None where that could not be seen.
    `one_link`, `sessions`: whether this kernel has the links of Linux 6.6 and 6.13.
    """

    calls: int
    seen: int
    seen_after: int
    plain_ns: float
    probed_ns: float
    restored: bool | None
    one_link: bool
    sessions: bool


def try_probe() -> Trial:
    """Compiles and loads a program, attaches it to a function of a process started for this, and takes it off again.

    The function is in a file that nobody else maps, so no other process is touched. HostError when any of it is
    refused.
    """
    with _target() as target:
        program = Program(BPF_DIRECTORY / "check.c", {"TGID": target.pid})
        try:
            plain_ns, probed_ns = float("inf"), float("inf")
            for _ in range(_TIMED_ROUNDS):
                plain_ns = min(plain_ns, target.call(_TIMED_CALLS) / _TIMED_CALLS)
                _attach(program, target)
                probed_ns = min(probed_ns, target.call(_TIMED_CALLS) / _TIMED_CALLS)
                program.detach_all()
            one_link = _attach(program, target)
            before = program.percpu_sum("hits", 0)
            target.call(PROBED_CALLS)
            seen = program.percpu_sum("hits", 0) - before
            armed = target.first_bytes()
            sessions = program.attach_session(target.file, 0, 0, "on_call") is not None
            program.detach_all()
            # A function that was not seen to change proves nothing by being its own.
            restored = None if armed in (None, target.code) else target.wait_until_restored()
            target.call(PROBED_CALLS)
            seen_after = program.percpu_sum("hits", 0) - before - seen
        finally:
            program.close()
    return Trial(PROBED_CALLS, seen, seen_after, plain_ns, probed_ns, restored, one_link, sessions)


class _Target:
    """A running check_target.py: where its function lies, and how to have it called."""

    def __init__(self, process: subprocess.Popen[str], file: Path, code: bytes) -> None:
        self._process = process
        self.pid = process.pid
        self.file = file
        self.code = code
        self._address = self._answer()

    def call(self, calls: int) -> int:
        """Has the function called, and returns how many ns that took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        return self._answer()

    def first_bytes(self) -> bytes | None:
        """The function as the process has it in its memory now; None where that may not be read."""
        try:
            with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
                memory.seek(self._address)
                return memory.read(len(self.code))
        except OSError:
            return None

    def wait_until_restored(self) -> bool:
        """Whether the function becomes its own again within the time the kernel is given for it."""
        deadline = time.monotonic() + _RESTORED_WITHIN_S
        while self.first_bytes() != self.code:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            said = self._process.stderr.read().strip().splitlines()
            # A kernel that mishandles a breakpoint ends it with signal 5.
            why = said[-1] if said else f"it ended with status {self._process.wait()}"
            raise HostError("the process to try a probe on failed", why)
        return int(line)


@contextmanager
def _target() -> Iterator[_Target]:
    code = _FUNCTION.get(platform.machine())
    if code is None:
        raise HostError("cannot try a probe", f"Pulse has no code for {platform.machine()}")
    try:
        fd = os.memfd_create("pulse-check")
        os.write(fd, code)
        process = subprocess.Popen(
            [sys.executable, "-I", Path(__file__).with_name("check_target.py"), str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(fd,),
            text=True,
        )
    except OSError as error:
        raise HostError("cannot start a process to try a probe on", error.strerror or str(error)) from error
    with os.fdopen(fd), process:
        try:
            yield _Target(process, Path(f"/proc/self/fd/{fd}"), code)
        finally:
            process.kill()


def _attach(program: Program, target: _Target) -> bool:
    """Attaches to the target's function; whether by the kind of link that can hold many places."""
    refused = program.attach_uprobes(target.file, {0: 0}, "on_call").refused
    for error in refused.values():
        raise HostError(error.what, error.why) from error
    # Other kernels need a perf event beside the link.
    return program.links == 1
