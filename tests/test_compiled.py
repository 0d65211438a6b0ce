"""Machine code that is kept between runs: when it is used again, and what happens where it cannot be kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import event

from pulse_bpf import analysis
from pulse_bpf.analysis.compiled import when_compiling

CALLER = """
from helper import two
from compiled import compiled

@compiled
def four():
    return two() + two()
"""
HELPER = """
from compiled import compiled

@compiled
def two():
    return VALUE
"""

TOLD = """
from caller import four
from compiled import when_compiling

with when_compiling(lambda: print("compiling")):
    print(four())
print(four())
"""


def run(folder: Path, **environment: str) -> str:
    command = [
        sys.executable,
        "-c",
        "from caller import four; print(four(), sum(four.stats.cache_hits.values()))",
    ]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return result.stdout.strip()


def test_that_something_is_compiled_is_told_once_and_only_then(tmp_path: Path) -> None:
    folder = package(tmp_path)
    for expected in ("compiling\n4\n4\n", "4\n4\n"):
        done = subprocess.run(
            [sys.executable, "-c", TOLD], cwd=folder, capture_output=True, text=True, check=True
        )
        assert done.stdout == expected


def test_ctrl_c_waits_for_the_end_of_what_would_swallow_it() -> None:
    steps = []

    def interrupted() -> None:
        with when_compiling(lambda: None):
            event.start_event("numba:llvm_lock")
            event.start_event("numba:llvm_lock")
            signal.raise_signal(signal.SIGINT)
            steps.append("inside")
            event.end_event("numba:llvm_lock")
            steps.append("still inside")
            event.end_event("numba:llvm_lock")
            steps.append("beyond")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["inside", "still inside"]


def package(folder: Path) -> Path:
    shutil.copy(Path(analysis.__file__).parent / "compiled.py", folder)
    (folder / "caller.py").write_text(CALLER)
    (folder / "helper.py").write_text(HELPER.replace("VALUE", "2"))
    return folder


def test_code_is_kept_until_anything_it_may_call_changes(tmp_path: Path) -> None:
    folder = package(tmp_path)
    assert run(folder) == "4 0"
    assert run(folder) == "4 1"
    (folder / "helper.py").write_text(HELPER.replace("VALUE", "21"))
    assert run(folder) == "42 0"


def test_code_that_cannot_be_kept_runs_all_the_same(tmp_path: Path) -> None:
    folder = package(tmp_path)
    # Neither is a folder, whoever looks.
    (folder / "__pycache__").write_text("")
    (folder / "home").write_text("")
    home = str(folder / "home")
    where = {"HOME": home, "XDG_CACHE_HOME": home, "PYTHONDONTWRITEBYTECODE": "1"}
    assert run(folder, **where) == "4 0"
    assert run(folder, **where) == "4 0"
