"""A double of NCCL that programs map in any way, and what is recorded of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from live import TARGETS, probing

from pulse_bpf.errors import AttachError
from pulse_bpf.probe_set import ProbeSet
from pulse_bpf.watch import Selection, Watch

SHARED = ("-shared", "-fPIC")
# Call, in the order and the words of the program.
Call = tuple[str, int, int, int]


def build(path: Path, source: str, *flags: str | Path) -> Path:
    """One of the two sources, or both with -DLINKED, built as `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = ["layout_nccl.c", "layout.c"] if source == "both" else [source]
    command = ["gcc", "-O2", "-pthread", *flags, "-o", path, *(TARGETS / name for name in sources), "-ldl"]
    subprocess.run(command, check=True)
    return path


class Recording:
    """What is recorded of a selection, each time something may have changed."""

    def __init__(self, probes: ProbeSet, selection: Selection) -> None:
        self.probes = probes
        self.refused: list[AttachError] = []
        self._watch = Watch(selection)

    def look(self) -> list[int]:
        """Adds what is new; the pids that can be recorded."""
        added = []
        for pid in self._watch.changed():
            try:
                self.probes.add(pid, "node1")
                added.append(pid)
            except AttachError as error:
                self.refused.append(error)
        return added

    def calls(self) -> dict[int, list[Call]]:
        """The operators recorded since the last time, by process, in order."""
        ops = self.probes.read()["ops"]
        assert self.probes.lost == 0
        calls: dict[int, list[Call]] = {}
        for pid, *call in ops.select("pid", "kind", "count", "comm_ptr", "rank").iter_rows():
            calls.setdefault(pid, []).append(tuple(call))
        return calls

    def problems(self) -> list[str]:
        """All that was said to be unobservable."""
        files = self.probes.summary()["files"]
        return [problem for file in files for problem in file["problems"]]


@contextmanager
def recording(*pids: int, everything: bool = False) -> Iterator[Recording]:
    with probing() as probes:
        yield Recording(probes, Selection(pids, everything))


def said(answer: str) -> list[Call]:
    """What a program says it called."""
    calls = [call.split(",") for call in answer.split()]
    assert calls
    return [(kind, int(count), int(comm), int(rank)) for kind, count, comm, rank in calls]
