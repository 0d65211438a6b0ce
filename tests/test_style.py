"""The house style that a machine can check: ruff, mypy --strict, clang-format, and what may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
FOLDERS = ("pulse_bpf", "probes", "nic", "analysis", "tests", "scripts", "benchmarks")


@pytest.mark.parametrize("arguments", [["check", "."], ["format", "--check", "."]])
def test_ruff(arguments: list[str]) -> None:
    result = subprocess.run([BIN / "ruff", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_mypy_strict() -> None:
    result = subprocess.run([ROOT / "scripts/typecheck.sh"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_clang_format() -> None:
    sources = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.[ch]"))
        if "include" not in path.parts
    ]
    assert sources
    result = subprocess.run(
        [BIN / "clang-format", "--dry-run", "-Werror", *sources], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", ["probes", "nic", "analysis"])
def test_a_lower_layer_imports_only_itself_the_errors_and_the_schema(folder: str) -> None:
    allowed = ("pulse_bpf.errors", "pulse_bpf.schema", f"pulse_bpf.{folder}")
    for path in (ROOT / folder).rglob("*.py"):
        for name in _imports(path):
            assert name != "bcc", path
            if name.startswith("pulse_bpf"):
                assert name == "pulse_bpf" or name.startswith(allowed), f"{path} imports {name}"


def test_the_simulation_knows_nothing_of_the_analysis_that_it_measures() -> None:
    of_lab = ("pulse_bpf.lab.compiled", "pulse_bpf.lab.sim")
    allowed = ("pulse_bpf.errors", "pulse_bpf.schema", "pulse_bpf.store", *of_lab)
    paths = list((ROOT / "pulse_bpf/lab/sim").rglob("*.py"))
    assert paths
    for path in paths:
        for name in _imports(path):
            if name.startswith("pulse_bpf") and name not in ("pulse_bpf", "pulse_bpf.lab"):
                assert name.startswith(allowed), f"{path} imports {name}"


def test_bcc_is_imported_in_one_place() -> None:
    users = [
        str(path.relative_to(ROOT))
        for folder in ("pulse_bpf", "probes", "nic", "analysis")
        for path in (ROOT / folder).rglob("*.py")
        if any(name.split(".")[0] == "bcc" for name in _imports(path))
    ]
    assert users == ["pulse_bpf/attach.py"]


def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
            names.extend(f"{node.module}.{alias.name}" for alias in node.names if node.module == "pulse_bpf")
    return names
