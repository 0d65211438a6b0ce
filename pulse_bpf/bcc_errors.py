"""Why BCC failed, in words an admin can act on: it explains itself only on file descriptor 2."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pulse_bpf.errors import HostError

T = TypeVar("T")


@contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """While it lasts, C code's writes to file descriptor 2 go where only the function it gives reads them."""
    saved = os.dup(2)
    with os.fdopen(os.memfd_create("stderr"), "r+b") as said:
        os.dup2(said.fileno(), 2)

        def text() -> str:
            said.seek(0)
            return said.read().decode(errors="replace")

        try:
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def explained(action: Callable[[], T], what: str) -> T:
    """What `action` returns; HostError saying why BCC failed, taken from what it printed."""
    with captured_stderr() as said:
        try:
            return action()
        except Exception as error:
            raise load_error(what, said() or str(error)) from error


def load_error(what: str, said: str) -> HostError:
    """The error for a program that BCC could not compile or load, from what it printed before it failed."""
    kernel = platform.release()
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    if re.search(r"^processed \d+ insns", said, re.MULTILINE):
        # The verifier refuses a program with the errno of a missing privilege.
        before = next(i for i, line in enumerate(lines) if line.startswith("processed "))
        errors = [lines[max(before - 1, 0)]]
        said = ""
    if "Operation not permitted" in said or "Permission denied" in said:
        lockdown = _first_line("/sys/kernel/security/lockdown")
        detail = f"; kernel lockdown is {lockdown}" if lockdown else ""
        return HostError(
            what, f"not permitted{detail}", "Run as root, or with CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN"
        )
    if "Cannot allocate memory" in said:
        return HostError(what, "the limit of locked memory is too low", "Raise it: ulimit -l unlimited")
    if errors:
        return HostError(
            what, errors[0].strip(), f"This is a fault of Pulse with kernel {kernel}: please report it"
        )
    return HostError(what, lines[-1].strip() if lines else "no reason given", f"The kernel is {kernel}")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""
