"""Machine code that is kept between runs: when it is used again, and what happens where it cannot be kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from pulse_bpf import analysis

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
