"""Writes the manual page pulse(8) and the completions of bash and zsh below PREFIX/share, from the command line itself.

Nothing of it is kept in the repository: it is what `pulse --help` says, of the version that is installed.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from pulse_bpf import __version__
from pulse_bpf.cli import parser

# How a shell completes an argument, by what stands for it in the help.
_COMPLETED = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("prefix", type=Path, metavar="PREFIX", help="such as /usr/local")
    share = arguments.parse_args().prefix / "share"
    os.environ["COLUMNS"] = "72"  # of the usage lines, wherever this runs; man indents them
    for path, text in (
        ("man/man8/pulse.8", manual_page()),
        ("bash-completion/completions/pulse", completion("bash")),
        ("zsh/site-functions/_pulse", completion("zsh")),
    ):
        (share / path).parent.mkdir(parents=True, exist_ok=True)
        (share / path).write_text(text)
        print(share / path)


def manual_page() -> str:
    pulse = parser()
    page = Manpage(pulse, format="single-commands-section")
    page.section, page.manual, page.source = 8, "System Administration", f"Pulse {__version__}"
    description = (pulse.description or "").rstrip(".")
    page.description = description[:1].lower() + description[1:]
    text = str(page)
    # Lines that argparse laid out stay as they are, and what it has last has sections of its own.
    text = re.sub(r"^usage: .*?(?=\n\n)", r".nf\n\g<0>\n.fi", text, flags=re.MULTILINE | re.DOTALL)
    text = text.replace(".SH COMMENTS\nexamples:\n", ".SH EXAMPLES\n.nf\n")
    return text.replace("\n\nexit status:\n", "\n.SH EXIT STATUS\n.nf\n")


def completion(shell: str) -> str:
    pulse = parser()
    for action in _actions(pulse):
        if action.metavar in _COMPLETED:
            action.complete = _COMPLETED[str(action.metavar)]  # type: ignore[attr-defined]
    # What shtab writes for one or more of an argument lets zsh complete the first of them only.
    return re.sub(r'"\(\*\)::?', '"*:', str(shtab.complete(pulse, shell)))


def _actions(of: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All arguments of a parser and of the verbs below it."""
    for action in of._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)


if __name__ == "__main__":
    main()
