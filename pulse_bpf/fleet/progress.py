"""How far each node of an investigation is, on a terminal; in lines where there is none."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pulse_bpf.fleet.sessions import Node

# So many nodes are shown, the ones that fail or lag first.
SHOWN, REFRESH_S = 20, 0.25


class Board:
    """Shows nodes on the terminal behind `console`, and says what goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # For what has progress of its own: there is room for one.
        self.quiet = Console(stderr=True, quiet=True)
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._shown = 0.0
        self._said = ""

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """What is done now."""
        self._said = text
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, nodes: Collection[Node]) -> None:
        """Where all nodes are, not more often than is seen."""
        if not self._console.is_terminal or time.monotonic() - self._shown < REFRESH_S:
            return
        self._shown = time.monotonic()
        counts = Counter(node.phase for node in nodes)
        table = Table(box=None, show_header=False, pad_edge=False)
        order = sorted(nodes, key=lambda node: (node.reason is None, counts[node.phase], node.name))
        for node in order[:SHOWN]:
            what = Text(node.reason, "yellow") if node.reason else Text(node.note, "dim")
            table.add_row(
                Text(node.name), Text(node.phase), Text(f"{node.received_bytes / 1e6:.1f} MB"), what
            )
        told = ", ".join(f"{count} {phase}" for phase, count in counts.most_common())
        self._live.update(Group(Text(f"{self._said}  ({told})"), table), refresh=True)
