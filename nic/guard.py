"""A child process that undoes what the kernel would otherwise keep, however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from pulse_bpf.errors import HostError

_TIMEOUT_S = 10


class Guard:
    """Runs the Python file `script`, which calls `wait_for_owner` and then undoes what its lines name.

    Once this returns, the owner may die at any moment. The guard starts with the privilege that the owner has now and
    keeps it. HostError when it does not start.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as ready:
            if not ready.read(1):
                self._process.wait()
                raise HostError("the process that cleans up after a crash does not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        """Names one more thing to undo; told before it is done, so that no moment is left unguarded."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> bool:
        """Has everything undone now; False when the guard failed or is gone, and the owner must do it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            return self._process.wait(_TIMEOUT_S) == 0
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
            return False


def wait_for_owner() -> list[str]:
    """In the guard: the lines that its owner told, once its end of the pipe closed, by its will or its death."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b".")
    os.close(1)
    return [line.rstrip("\n") for line in sys.stdin]
