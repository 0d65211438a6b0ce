"""What can go wrong, in the words of an admin: what failed, why, and the next command."""

from __future__ import annotations

OK = 0
PARTIAL = 1
USAGE = 2
HOST = 3
NO_DATA = 4
ANOMALY = 10


class PulseError(Exception):
    """Base of every error shown to the user: `what` failed, `why`, and the command that comes `next_step`."""

    exit_status = PARTIAL

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        super().__init__(what, why, next_step)
        self.what = what
        self.why = why
        self.next_step = next_step

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}. {self.next_step}" if self.next_step else text


class UsageError(PulseError):
    """The command line asks for something that makes no sense."""

    exit_status = USAGE


class HostError(PulseError):
    """This host lacks something: a privilege, a package, a kernel feature, disk space."""

    exit_status = HOST


class AttachError(PulseError):
    """A process or library cannot be probed: there is nothing to observe in it."""

    exit_status = NO_DATA


class NoNcclError(AttachError):
    """A process maps no NCCL: there is nothing wrong with it, and nothing to record."""


class EndedError(AttachError):
    """A process has ended, or never was."""


class NotPermittedError(AttachError):
    """A process may not be looked at: it is not the process that lacks something."""

    exit_status = HOST


class DataError(PulseError):
    """A recording, a part of one, or an input file is unusable."""

    exit_status = NO_DATA
