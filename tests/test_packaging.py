"""What a user gets from the wheel: one importable name, with the C sources inside."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    source = tmp_path_factory.mktemp("source")
    subprocess.run(
        f"git -C {ROOT} ls-files -z | tar -C {ROOT} --null -T - -c | tar -x -C {source}",
        shell=True,
        check=True,
    )
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    subprocess.run(command, check=True, timeout=240)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_only_top_level_name_is_pulse_bpf(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pulse_bpf"}


def test_the_wheel_holds_every_module_and_c_source(wheel_names: list[str]) -> None:
    for folder, package in (
        ("probes", "pulse_bpf/probes"),
        ("nic", "pulse_bpf/nic"),
        ("analysis", "pulse_bpf/analysis"),
        ("pulse_bpf", "pulse_bpf"),
    ):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".c", ".h", ".html", ".css", ".js") and "__pycache__" not in path.parts:
                assert f"{package}/{path.relative_to(ROOT / folder)}" in wheel_names


def test_a_stray_module_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    for name in ("analysis", "nic", "probes"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray file was imported')\n")
    code = "import pulse_bpf.analysis, pulse_bpf.nic, pulse_bpf.probes"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_the_command_line_is_understood_without_what_only_some_verbs_need() -> None:
    """A recording begins at once, also on a slow host: what analyzes and draws takes seconds to import."""
    heavy = "{'numba', 'numpy', 'perfetto', 'plotly', 'polars'}"
    script = (
        f"import sys; from pulse_bpf.cli import parser; parser(); sys.exit(str({heavy} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stderr.strip() == "set()"
