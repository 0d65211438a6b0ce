"""What is made of BCC's own words when it fails."""

from __future__ import annotations

import os

import pytest

from pulse_bpf.bcc_errors import captured_stderr, explained, load_error
from pulse_bpf.errors import HostError


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


VERIFIER = """
201: (79) r1 = *(u64 *)(r3 +0)
dereference of modified ctx ptr R3 off=88 disallowed
processed 274 insns (limit 1000000) max_states_per_insn 0 total_states 22 peak_states 22 mark_read 0

bpf: Failed to load program: Permission denied
"""


def test_a_program_that_the_verifier_refuses_is_not_taken_for_a_missing_privilege() -> None:
    text = str(load_error("cannot load", VERIFIER))
    assert "dereference of modified ctx" in text
    assert "fault of Pulse" in text


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
