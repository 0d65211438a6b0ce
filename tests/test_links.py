"""Links that the kernel refuses; those it makes are tested by what arrives through them."""

from __future__ import annotations

import errno
import os

import pytest

from pulse_bpf.errors import AttachError, HostError
from pulse_bpf.links import refusal


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.EPERM, HostError, "perf_event_paranoid"),
        (errno.EACCES, HostError, "CAP_PERFMON"),
        (errno.EBUSY, AttachError, "another tool"),
        (errno.EINVAL, AttachError, "Invalid argument"),
    ],
)
def test_a_refused_probe_blames_the_host_or_the_place(number: int, kind: type[Exception], told: str) -> None:
    error = refusal("cannot probe", OSError(number, os.strerror(number)))
    assert isinstance(error, kind)
    assert told in str(error)
