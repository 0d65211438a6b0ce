"""Verdicts in processes of their own: what is received never waits for them, and they keep to a share of a core."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

from pulse_bpf.errors import HostError
from pulse_bpf.live import judging


class Judge:
    """Makes the verdicts of judging.judge in a process, for one thread; starts another when that one is ended.

    It uses no more than `share` of a core, if its thread lets it `rest` after each.
    """

    def __init__(self, share: float) -> None:
        self._share, self._rested_s = share, 0.0
        self._start()

    def __call__(self, case: judging.Case) -> judging.Verdict:
        """The verdict on `case`; HostError when the process was ended meanwhile."""
        if not self._process.is_alive():
            self._start()
        began_s = time.monotonic()
        try:
            self._pipe.send(case)
            verdict, cpu_s = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise HostError("there is no verdict", "the process that judges was ended") from error
        self._rested_s = began_s + cpu_s / self._share
        return verdict  # type: ignore[no-any-return]

    def rest(self, stop: Callable[[], object]) -> None:
        """Waits until the last verdict's CPU time is no more than its share, or until `stop` says something."""
        while not stop() and (left_s := self._rested_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.1))

    def close(self) -> None:
        """Ends the process, also while a thread waits for it."""
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection) -> None:
    # Ctrl-C and systemd signal all of a service's processes: this one ends with its pipe.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The first verdict has to pay for the start.
    spent_s = 0.0
    with suppress(EOFError, OSError):
        while True:
            case = pipe.recv()
            try:
                answer = judging.judge(case)
            except Exception as error:
                answer = judging.failed(error)
            before_s, spent_s = spent_s, time.process_time()
            pipe.send((answer, spent_s - before_s))
