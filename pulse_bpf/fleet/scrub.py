"""What an agent leaves on its node when it ends, however it ends: nothing. Run as a script, this is its guard."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from pulse_bpf.nic.guard import Guard, wait_for_owner

# A recording lets go within a second, and has this long on a busy machine.
ENDS_WITHIN_S = 8.0


class Scrub:
    """Guards the private directory of an agent, and the process that it lets work in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._guard = Guard(__file__)
        self._guard.tell(f"directory {directory}")

    def watch(self, pid: int) -> None:
        """One more process, the first of a group of its own."""
        self._guard.tell(f"group {pid} {_start_ticks(pid)}")

    def close(self) -> None:
        """Ends the processes and removes the directory, now."""
        if not self._guard.close():
            undo([f"directory {self._directory}"])


def undo(lines: list[str]) -> None:
    """Ends the groups that `lines` name, gently first, and removes the directories, once nobody writes there."""
    named = [line.split(" ", 2) for line in lines]
    groups = [
        int(words[1]) for words in named if words[0] == "group" and _start_ticks(int(words[1])) == words[2]
    ]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)
        until = time.monotonic() + ENDS_WITHIN_S
        while any(map(_lives, groups)) and time.monotonic() < until:
            time.sleep(0.02)
    for words in named:
        if words[0] == "directory":
            shutil.rmtree(words[1], ignore_errors=True)


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return _state(group) != "Z"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _start_ticks(pid: int) -> str:
    """When a process began, which with its id tells it from all others; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


if __name__ == "__main__":
    undo(wait_for_owner())
