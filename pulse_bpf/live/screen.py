"""The terminal screen of `pulse watch`: all jobs, and what is known of the one that is chosen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from pulse_bpf.analysis.text import printable
from pulse_bpf.errors import PulseError
from pulse_bpf.live.status_text import COLUMNS, job_row, job_text


class Screen(App[None]):
    """Shows what `ask` answers, a status document, again every `seconds`, until q, Ctrl-C or SIGTERM.

    `ask` may take long or raise PulseError: the last answer stays, with its age and why there is no newer one. The
    chosen job stays chosen while others come and go; at first it is the one with most findings that are open.
    """

    TITLE = "pulse watch"
    CSS = """
    #head { height: auto; text-style: reverse; }
    #jobs { height: auto; max-height: 40%; }
    #job { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("r", "ask", "Ask now"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, ask: Callable[[], Mapping[str, Any]], source: str, seconds: float) -> None:
        super().__init__()
        self._ask = ask
        self._source = source
        self._seconds = seconds
        self._asking = False
        self._status: Mapping[str, Any] | None = None
        self._trouble = ""
        self._names: list[str] = []
        self._chosen: str | None = None
        # Held, as sizes and answers may come before they are on the screen, and after.
        self._head, self._body = Static(id="head"), Static(id="job")
        self._table: DataTable[Text] = DataTable(id="jobs", cursor_type="row", zebra_stripes=True)

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._table
        with VerticalScroll():
            yield self._body
        yield Footer()

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self._table.add_columns(*COLUMNS)
        self._draw()
        self.action_ask()
        self.set_interval(self._seconds, self.action_ask)

    def action_ask(self) -> None:
        """Asks in a thread of its own, unless an answer is still waited for."""
        if not self._asking:
            self._asking = True
            self.run_worker(self._answer, thread=True, exit_on_error=True)

    def _answer(self) -> None:
        status, trouble = self._status, ""
        try:
            status = self._ask()
        except PulseError as error:
            trouble = printable(str(error))
        self.call_from_thread(self._take, status, trouble)

    def _take(self, status: Mapping[str, Any] | None, trouble: str) -> None:
        self._asking = False
        self._status, self._trouble = status, trouble
        jobs = [] if status is None else status["jobs"]
        self._names = [job["job"] for job in jobs]
        if self._chosen not in self._names:
            self._chosen = max(jobs, key=lambda job: len(job["open"]))["job"] if jobs else None
        table = self._table
        with self.prevent(DataTable.RowHighlighted):
            table.clear()
            for job in jobs:
                table.add_row(*job_row(job))
            if self._chosen is not None:
                table.move_cursor(row=self._names.index(self._chosen))
        self._draw()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another job is chosen with the arrow keys or the mouse."""
        self._chosen = self._names[event.cursor_row]
        self._draw()

    def on_resize(self) -> None:
        """Curves are as wide as the screen."""
        self._draw()

    def _draw(self) -> None:
        status = self._status
        head = f"pulse watch  {printable(self._source)}  "
        if status is None:
            head += self._trouble or "asking ..."
            body = Text()
        else:
            at = datetime.fromtimestamp(status["now_ns"] / 1e9).strftime("%H:%M:%S")
            head += f"{len(status['jobs'])} jobs at {at}"
            head += f"; no newer answer: {self._trouble}" if self._trouble else ""
            chosen = [job for job in status["jobs"] if job["job"] == self._chosen]
            columns = max(self.size.width - 3, 1)  # beside a scrollbar
            body = job_text(chosen[0], status["now_ns"], columns) if chosen else Text("No job reports here")
        self._head.update(Text(head))
        self._body.update(body)
