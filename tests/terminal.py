"""What a program writes to a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    command: Sequence[str | Path],
    columns: int = 100,
    typed: tuple[str, bytes] | None = None,
    **environment: str,
) -> tuple[int, str]:
    """The exit status of `command`, and all that it writes to the terminal that it is started on.

    `typed`: a text, and the keys that are pressed once it was written.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    with subprocess.Popen(
        list(map(str, command)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**inherited, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not part:
                break
            written += part
            if typed is not None and typed[0].encode() in written:
                os.write(ours, typed[1])
                typed = None
    os.close(ours)
    return process.returncode, written.decode()


def lines(written: str) -> list[str]:
    """The lines as they were once on the screen, those that were overwritten too."""
    return re.split(r"[\r\n]+", _CONTROL.sub("", written))
