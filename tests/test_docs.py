"""What the documentation says of commands and columns is what there is."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import pytest

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.cli import parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_column_of_the_operators_is_explained_once() -> None:
    text = (ROOT / "docs/metrics.md").read_text().partition("## Whose")[2]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = Counter(name for row in rows for name in re.findall(r"`(\w+)`", row))
    assert named == Counter(OPERATORS.names())


def verbs_of(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The verbs below a parser."""
    return {
        name: verb
        for action in of._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, verb in action.choices.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    text = (
        re.sub(r"(?<![\n`])\n(?!\n)", " ", page.read_text()) if page.name != "README.md" else page.read_text()
    )
    for command in re.findall(r"(?:`|^    (?:\S*/)?)(pulse [^`#\n|;]*)", text, re.MULTILINE):
        words = command.split()[1:]
        known = parser()
        while words and words[0] in verbs_of(known):
            known = verbs_of(known)[words.pop(0)]
        assert known.prog != "pulse" or (words and words[0].startswith("-")), command
        options = {option for action in known._actions for option in action.option_strings}
        for word in words:
            option = word.partition("=")[0]
            assert not re.fullmatch(r"--?[a-z][-a-z]*", option) or option in options, f"{option} in {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
