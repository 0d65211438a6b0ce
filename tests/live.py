"""Programs that really run, and probes on them, for the tests that need both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pulse_bpf.elf import Elf
from pulse_bpf.errors import HostError
from pulse_bpf.lab import nccl as lab_nccl
from pulse_bpf.probe_set import ProbeSet
from pulse_bpf.probes import nccl
from pulse_bpf.targets import mapped_files

TARGETS = Path(__file__).with_name("targets")


def real_nccl(version: str = lab_nccl.VERSION) -> Path:
    """The libnccl.so.2 of a release; skips the test where it can neither be found nor downloaded."""
    try:
        return lab_nccl.library_path(version)
    except HostError as error:
        pytest.skip(str(error))


class Target:
    """A running program of tests/targets, which acts once for each line it is given."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        assert self.answer() == "ready"

    def act(self, command: str = "") -> str:
        """Lets it act once; what it says when it is done."""
        self.begin(command)
        return self.answer()

    def begin(self, command: str) -> None:
        """Lets it act, without waiting until it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def end(self) -> int:
        """Lets it run to its end; its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(30)

    def answer(self) -> str:
        """What it says next."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip()


@contextmanager
def running(command: list[str | Path], **environment: str) -> Iterator[Target]:
    """A program of tests/targets, killed at the end."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as process:
        try:
            yield Target(process)
        finally:
            process.kill()


def calling(library: Path, loops: int, threads: int = 2, **environment: str) -> Any:
    """A running tests/targets/nccl_caller.py."""
    command = [sys.executable, TARGETS / "nccl_caller.py", library, str(loops), str(threads)]
    return running(command, **environment)


@contextmanager
def probing(detail: bool = False) -> Iterator[ProbeSet]:
    """An empty set of probes, closed at the end."""
    probes = ProbeSet(time.time_ns() - time.monotonic_ns(), detail)
    try:
        yield probes
    finally:
        probes.close()


def entry_bytes(pid: int, library: Path) -> tuple[bytes, bytes]:
    """The first bytes of every probed function of `library`: in the process, and in the file."""
    (file,) = (file for file in mapped_files(pid) if file.path == str(library))
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mappings = [fields for fields in lines if fields[-1] == file.path and "x" in fields[1]]
    in_memory, in_file = b"", b""
    with Elf(library) as elf, open(f"/proc/{pid}/mem", "rb") as memory:
        for function in elf.functions(nccl.PROBES).values():
            for span, _, offset, *_ in mappings:
                start, end = (int(bound, 16) for bound in span.split("-"))
                if 0 <= function.offset - int(offset, 16) < end - start:
                    memory.seek(start + function.offset - int(offset, 16))
                    in_memory += memory.read(16)
                    in_file += elf.code(function)[:16]
    assert in_file
    return in_memory, in_file


def compiled(source: str, directory: Path, *flags: str) -> Path:
    """The program of tests/targets/`source`, compiled into `directory`; skips the test where there is no gcc."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    program = directory / Path(source).stem
    subprocess.run(["gcc", "-O2", "-o", program, TARGETS / source, *flags], check=True)
    return program
