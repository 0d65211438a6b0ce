"""The manual page and the completions of shells say what the command line takes."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulse_bpf.cli import parser

SCRIPT = Path(__file__).parents[1] / "scripts/manual.py"


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("prefix")
    subprocess.run([sys.executable, SCRIPT, prefix], check=True, capture_output=True)
    return prefix / "share"


def verbs(of: argparse.ArgumentParser, name: str = "pulse") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, of
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, parser_of_verb in action.choices.items():
                yield from verbs(parser_of_verb, f"{name} {verb}")


def test_the_manual_page_has_every_verb_and_option(share: Path) -> None:
    page = (share / "man/man8/pulse.8").read_text()
    assert page.startswith('.TH PULSE "8"')
    plain = re.sub(r"\\f.|\\,|\\/", "", page).replace("\\-", "-")
    sections = dict(re.findall(r"^\.SS (.*?)$(.*?)(?=^\.S[SH]|\Z)", plain, re.MULTILINE | re.DOTALL))
    for name, parser_of_verb in verbs(parser()):
        text = plain if name == "pulse" else sections[name]
        for action in parser_of_verb._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            for text_of_action in (*action.option_strings, action.help or ""):
                assert text_of_action in text, f"{action.dest} of {name}"
    for section in ("NAME", "SYNOPSIS", "EXAMPLES", "EXIT STATUS"):
        assert f"\n.SH {section}\n" in plain


def test_the_manual_page_is_clean_for_man(share: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff, which man uses, is not installed")
    command = ["groff", "-man", "-ww", "-z", "-Kutf8", share / "man/man8/pulse.8"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""


def completed(share: Path, words: str, where: Path) -> set[str]:
    """What bash offers for the last of `words`."""
    script = f"""
        source {share}/bash-completion/completions/pulse
        COMP_LINE={words!r}; COMP_POINT=${{#COMP_LINE}}
        COMP_WORDS=($COMP_LINE); [[ $COMP_LINE == *' ' ]] && COMP_WORDS+=('')
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _shtab_pulse; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    result = subprocess.run(["bash", "-c", script], cwd=where, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_bash_completes_verbs_options_and_directories(share: Path, tmp_path: Path) -> None:
    (tmp_path / "rec-1").mkdir()
    (tmp_path / "notes").touch()
    assert completed(share, "pulse ana", tmp_path) == {"analyze"}
    assert completed(share, "pulse nic ", tmp_path) >= {"import", "list", "qps"}
    assert completed(share, "pulse analyze --e", tmp_path) == {"--engine", "--explain", "--exit-code"}
    assert completed(share, "pulse export rec --format p", tmp_path) == {"perfetto", "parquet"}
    found = completed(share, "pulse analyze ", tmp_path)
    assert "rec-1" in found or "rec-1/" in found
    assert "notes" not in found


def test_zsh_knows_every_verb(share: Path) -> None:
    text = (share / "zsh/site-functions/_pulse").read_text()
    assert text.startswith("#compdef pulse\n")
    for name, _ in verbs(parser()):
        assert f"_shtab_{name.replace(' ', '_')}_options=" in text


# A shell on a terminal of its own, in which `pulse` says what it was called with.
ZSH = """
    zmodload zsh/zpty
    zpty shell zsh -f -i
    zpty -w shell "fpath=($1/zsh/site-functions \\$fpath); autoload -Uz compinit && compinit -u -D"
    zpty -w shell 'pulse() { print -r -- "called<$*>" }'
    zpty -w shell "$2"$'\\t'
    zpty -r -m shell shown $'*called<[^$]*>\\r\\n*'
    print -r -- "$shown"
"""


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("ana", "analyze"),
        ("nic im", "nic import"),
        ("analyze --exi", "analyze --exit-code"),
        ("export rec-1 --format pe", "export rec-1 --format perfetto"),
        ("analyze rec-1 rec-2", "analyze rec-1 rec-2-of-node"),
    ],
)
def test_zsh_completes(share: Path, tmp_path: Path, typed: str, called: str) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    for directory in ("rec-1", "rec-2-of-node"):
        (tmp_path / directory).mkdir()
    (tmp_path / "rec-2.html").touch()
    command = ["zsh", "-f", "-c", ZSH, "zsh", share, f"pulse {typed}"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert re.findall(r"called<([^$]*?)>\s*$", shown.stdout, re.MULTILINE) == [called]
