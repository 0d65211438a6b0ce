"""Why BCC failed, in words an admin can act on: it explains itself only on file descriptor 2."""

from __future__ import annotations

import errno
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pulse_bpf.errors import AttachError, HostError

T = TypeVar("T")


def captured_stderr(action: Callable[[], T]) -> tuple[T, str]:
    """What `action` returns, and what C code under it wrote to file descriptor 2 meanwhile."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            result = action()
        except Exception as error:
            said.seek(0)
            error.args = (*error.args, said.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        said.seek(0)
        return result, said.read().decode(errors="replace")


def explained(action: Callable[[], T], what: str) -> T:
    """What `action` returns; HostError saying why BCC failed, taken from what it printed."""
    try:
        return captured_stderr(action)[0]
    except Exception as error:
        said = str(error.args[-1])
        raise _classified(what, said) from error


def _classified(what: str, said: str) -> HostError:
    """The HostError for what BCC printed before it failed, with the versions that matter."""
    kernel = platform.release()
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
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


def attach_error(what: str, number: int, said: str) -> AttachError | HostError:
    why = os.strerror(number) if number else said.strip()
    if number in (errno.EPERM, errno.EACCES):
        paranoid = _first_line("/proc/sys/kernel/perf_event_paranoid")
        return HostError(
            what,
            f"{why} (perf_event_paranoid is {paranoid})",
            "Run as root, or with CAP_PERFMON and CAP_SYS_ADMIN",
        )
    if number == errno.EBUSY:
        return AttachError(what, f"{why}: another tool may hold this place")
    return AttachError(what, why)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""
