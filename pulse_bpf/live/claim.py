"""The directory in which an agent or a collector keeps its state: its own, and of one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pulse_bpf.errors import HostError, UsageError


@contextmanager
def claimed(root: Path, role: Literal["agent", "collector"]) -> Iterator[None]:
    """Holds `root` for this process, and makes it where there is none.

    What is old in it will be deleted, so it must be new or empty, or the one of an earlier process of that role, which
    its lock file tells (UsageError). HostError where another process holds it, or the file system refuses.
    """
    lock = root / f"{role}.lock"
    try:
        root.mkdir(parents=True, exist_ok=True)
        others = [path.name for path in root.iterdir() if path.name != "lost+found"]
        if others and not lock.exists():
            raise UsageError(
                f"{root} holds something else than the state of a {role}",
                f"for example {min(others)[:80]!r}",
                "Choose a new directory with --state: what is old in it is deleted",
            )
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _refused(root, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            next_step = "End it first, or choose another directory with --state"
            raise HostError(f"another {role} uses {root}", "", next_step) from error
        except OSError as error:
            raise _refused(root, error) from error
        yield
    finally:
        os.close(descriptor)


def _refused(root: Path, error: OSError) -> HostError:
    return HostError(
        f"cannot keep anything in {root}",
        error.strerror or str(error),
        "Choose another directory with --state",
    )
