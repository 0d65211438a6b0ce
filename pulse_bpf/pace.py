"""How a recording goes on and what came of it, in lines of less than 100 columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.text import Text


class Pace:
    """What is recorded, how much a second, and what was lost; of `seconds`, or until Ctrl-C where that is None."""

    def __init__(self, seconds: float | None) -> None:
        self._of = "" if seconds is None else f" of {seconds:.0f}"
        self._before: tuple[float, Mapping[str, int]] = (0.0, {})

    def line(self, elapsed_s: float, rows: Mapping[str, int], lost: int) -> Text:
        """The state after `elapsed_s`; the rates are those since the line before."""
        before_s, before = self._before
        self._before = (elapsed_s, dict(rows))
        parts = [f"{elapsed_s:.0f}{self._of} s"]
        for table, name in (("ops", "operators"), ("samples", "samples")):
            count = rows.get(table, 0)
            rate = (count - before.get(table, 0)) / max(elapsed_s - before_s, 1e-3)
            parts.append(f"{_short(count)} {name} ({_short(round(rate))}/s)")
        return Text("  ".join(parts)).append("  ").append_text(_lost(lost))


def summary(seconds: float, rows: Mapping[str, int], lost: int, directory: Path) -> list[Text]:
    """What was recorded, and the command that comes next."""
    counted = Text(
        f"recorded {seconds:.1f} s: {rows.get('ops', 0):,} operators, {rows.get('samples', 0):,} samples, "
    )
    return [counted.append_text(_lost(lost, " events")), Text(f"next: pulse analyze {directory}")]


def _lost(count: int, what: str = "") -> Text:
    return Text(f"{count:,}{what} lost", "bold yellow" if count else "")


def _short(count: int) -> str:
    """A count in few characters."""
    size, units = float(count), ["", " k", " M", " G", " T"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.1f}{units[0]}" if units[0] else str(count)
