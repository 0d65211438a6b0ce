"""What is made of BCC's own words when it fails."""

from __future__ import annotations

import errno
import os

import pytest

from pulse_bpf.bcc_errors import attach_error, captured_stderr, explained, load_error
from pulse_bpf.errors import AttachError, HostError


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("could not open bpf map: watched, error: Operation not permitted\n", "not permitted"),
        ("bpf: Failed to load program: Permission denied\n", "CAP_BPF"),
        ("could not open bpf map: events, error: Cannot allocate memory\n", "ulimit -l"),
        (
            "In file included from <built-in>:2:\n/virtual/main.c:7:3: error: use of undeclared identifier 'x'\n"
            "1 error generated.\n",
            "undeclared identifier 'x'",
        ),
        ("something new\n", "something new"),
        ("", "no reason given"),
    ],
)
def test_the_reason_is_told(said: str, told: str) -> None:
    error = load_error("cannot compile nccl.c", said)
    assert told in str(error)
    assert str(error).startswith("cannot compile nccl.c: ")


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.EPERM, HostError, "perf_event_paranoid"),
        (errno.EACCES, HostError, "CAP_PERFMON"),
        (errno.EBUSY, AttachError, "another tool"),
        (errno.EINVAL, AttachError, "Invalid argument"),
        (0, AttachError, "as it said"),
    ],
)
def test_a_refused_probe_blames_the_host_or_the_place(number: int, kind: type[Exception], told: str) -> None:
    error = attach_error("cannot probe", number, "as it said\n")
    assert isinstance(error, kind)
    assert told in str(error)


def test_what_c_code_prints_is_captured_and_only_that(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        os.write(2, b"error: from C\n")
        raise ValueError("from Python")

    os.write(2, b"before\n")
    with pytest.raises(HostError, match="error: from C") as caught:
        explained(fail, "cannot do it")
    assert isinstance(caught.value.__cause__, ValueError)
    with captured_stderr() as said:
        os.write(2, b"hidden\n")
        assert said() == "hidden\n"
        os.write(2, b"as well\n")
        assert said() == "hidden\nas well\n"
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"
