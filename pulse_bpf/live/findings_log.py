"""What was found while jobs ran: findings that open, change and close, one for as long as a fault lasts."""

from __future__ import annotations

import json
import os
import secrets
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from pulse_bpf.analysis.localize import MIN_CONFIDENCE
from pulse_bpf.errors import HostError
from pulse_bpf.store import write_file

# A finding opens when two of the last verdicts name it: one alone may be a coincidence of its window. As successive
# verdicts are mostly about the same operators, it takes three while these are fewer than so many.
OPEN_SEEN, OPEN_SEEN_FEW, OPEN_OF = 2, 3, 4
FEW_OPERATORS = 10
# It closes when it was absent for as long, which is longer than faults that come and go pause.
CLOSE_AFTER_NS = 30_000_000_000
# Between two verdicts that are further apart nobody looked; a clock that jumped is no time that passed either.
LONGEST_STEP_NS = 5_000_000_000
# What is written of a finding that is open already: changes as large as these, and not more often.
SLOWDOWN_CHANGE, CONFIDENCE_CHANGE = 0.2, 0.1
UPDATE_AFTER_NS = 5_000_000_000
# A log that is longer is put aside, as one file, and begun anew with what is open.
LONGEST_LOG_BYTES = 64 * 1024 * 1024


# What is said of a fault whose kind the operators do not tell (yet).
UNKNOWN = "unknown"


class Event(TypedDict):
    """A finding that opened, changed or closed. `id` is its own for as long as it lasts, `opened_ns` when it opened."""

    state: Literal["opened", "updated", "closed"]
    id: str
    job: str
    at_ns: int
    opened_ns: int
    finding: dict[str, Any]


Identity = tuple[str, ...]


@dataclass
class _Job:
    """What the verdicts on one job said so far."""

    last_ns: int | None = None
    open: dict[Identity, Event] = field(default_factory=dict)
    absent_ns: dict[Identity, int] = field(default_factory=dict)
    # Of what is not open: in which of the last verdicts it was.
    seen: dict[Identity, deque[bool]] = field(default_factory=dict)


class FindingsLog:
    """The findings on any number of jobs, one JSON object a line in `path`, where they are found again after a crash.

    A fault is the same as long as its kind and the part that it names are, also when that is narrowed down from several
    machines to one, or to a part of it, or its kind becomes known; for which as many verdicts are needed as for a
    finding to open. Lines that cannot be read are skipped and counted in `skipped`. HostError when the file cannot be
    read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: dict[str, _Job] = {}
        self.skipped = 0
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise _refused(path, error) from error
        *lines, torn = content.split(b"\n")
        self.skipped += bool(torn)
        self._bytes = len(content) - len(torn)
        for line in lines:
            event = _event(line)
            if event is None:
                self.skipped += 1
            else:
                self._apply(event)

    def update(
        self,
        job: str,
        findings: Sequence[Mapping[str, Any]],
        at_ns: int,
        seen: Collection[str] | None = None,
    ) -> list[Event]:
        """What changes by a verdict on `job` that names `findings` (as in the JSON of findings), taken at `at_ns`.

        `seen` are the nodes of which the verdict had operators, None: all that matter. What says nothing of a finding's
        nodes does not close it: assumes that a verdict is only taken to this log where operators were judged at all.
        A stop (hang, crash, mismatch) opens at once, since nothing comes after it that could repeat it.
        The events are on disk when they are returned; HostError when they cannot be written, and nothing has changed.
        """
        known = self._jobs.setdefault(job, _Job())
        named = _named(known, findings)
        passed_ns = 0 if known.last_ns is None else min(max(at_ns - known.last_ns, 0), LONGEST_STEP_NS)
        known.last_ns = at_ns

        events = []
        for identity, (before, finding) in named.items():
            certain = identity in known.open or self._repeated(known, identity, finding)
            if before in known.open:
                known.absent_ns[before] = 0
                event = known.open[before]
                lately = 0 <= at_ns - event["at_ns"] < UPDATE_AFTER_NS
                told = before[0] == UNKNOWN and identity[0] != UNKNOWN
                forgot = before[0] != UNKNOWN and identity[0] == UNKNOWN
                if certain and (told or not (lately or forgot)) and _differs(event["finding"], finding):
                    events.append(_changed(event, "updated", at_ns, finding))
            elif certain:
                events.append(
                    Event(
                        state="opened",
                        id=secrets.token_hex(8),
                        job=job,
                        at_ns=at_ns,
                        opened_ns=at_ns,
                        finding=finding,
                    )
                )
        held = {before for before, _ in named.values()}
        for identity, event in known.open.items():
            if identity not in held and _was_looked_at(event["finding"], seen):
                known.absent_ns[identity] = known.absent_ns.get(identity, 0) + passed_ns
                if known.absent_ns[identity] >= CLOSE_AFTER_NS:
                    events.append(_changed(event, "closed", at_ns, event["finding"]))
        self._forget(known, named)
        self._write(events)
        return events

    def end(self, job: str, at_ns: int) -> list[Event]:
        """Closes what is open of a job that has ended. HostError as for update."""
        known = self._jobs.get(job, _Job())
        events = [_changed(event, "closed", at_ns, event["finding"]) for event in known.open.values()]
        self._write(events)
        self._jobs.pop(job, None)
        return events

    def open(self, job: str | None = None) -> list[Event]:
        """The last event of each finding that is open, of `job` or of all jobs, oldest first."""
        jobs = self._jobs.values() if job is None else [self._jobs.get(job, _Job())]
        return sorted(
            (event for known in jobs for event in known.open.values()), key=lambda event: event["opened_ns"]
        )

    @staticmethod
    def _repeated(known: _Job, identity: Identity, finding: Mapping[str, Any]) -> bool:
        """Notes that a verdict names `identity`, which is not open; whether enough of the last ones did."""
        sure = finding["confidence"] >= MIN_CONFIDENCE
        verdicts = known.seen.setdefault(identity, deque(maxlen=OPEN_OF))
        verdicts.append(sure)
        # Counters of a port rest on no operator.
        few = 0 < max((each["operators"] for each in finding["evidence"]), default=0) < FEW_OPERATORS
        needed = OPEN_SEEN_FEW if few else OPEN_SEEN
        return sure and (finding["cause"] == "stop" or sum(verdicts) >= needed)

    @staticmethod
    def _forget(known: _Job, named: Collection[Identity]) -> None:
        """Notes what a verdict did not name, and forgets what none of the last ones did."""
        for identity, verdicts in list(known.seen.items()):
            if identity not in named:
                verdicts.append(False)
                if not any(verdicts):
                    del known.seen[identity]

    def _apply(self, event: Event) -> None:
        """Takes `event` into what is known; also where events before it are missing."""
        known = self._jobs.setdefault(event["job"], _Job())
        identity = _identity(event["finding"])
        former = [key for key, other in known.open.items() if other["id"] == event["id"] or key == identity]
        for key in former:
            del known.open[key]
            known.absent_ns.pop(key, None)
        known.seen.pop(identity, None)
        if event["state"] != "closed":
            known.open[identity] = event

    def _write(self, events: Sequence[Event]) -> None:
        """Appends `events`, all or none of them, and takes them into what is known."""
        if not events:
            return
        lines = _lines(events)
        if self._bytes + len(lines) > LONGEST_LOG_BYTES:
            self._begin_anew()
        try:
            with self._path.open("r+b" if self._path.exists() else "w+b", buffering=0) as file:
                file.truncate(self._bytes)  # what a crash, or a full disk, left of a line
                file.seek(self._bytes)
                written = file.write(lines)
                if written != len(lines):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
        except OSError as error:
            raise _refused(self._path, error) from error
        self._bytes += len(lines)
        for event in events:
            self._apply(event)

    def _begin_anew(self) -> None:
        aside = self._path.with_name(self._path.name + ".1")
        lines = _lines(self.open())
        try:
            aside.unlink(missing_ok=True)
            os.link(self._path, aside)
        except OSError as error:
            raise _refused(self._path, error) from error
        write_file(self._path, lambda path: path.write_bytes(lines))
        self._bytes = len(lines)


def _named(
    known: _Job, findings: Iterable[Mapping[str, Any]]
) -> dict[Identity, tuple[Identity, dict[str, Any]]]:
    """By identity: the identity under which it is open already, else its own, and the most probable finding of it."""
    named: dict[Identity, tuple[Identity, dict[str, Any]]] = {}
    taken: set[Identity] = set()
    for finding in sorted(findings, key=lambda finding: _identity(finding) not in known.open):
        identity = _identity(finding)
        before = _open_as(known, identity, finding)
        if identity not in named and before not in taken:
            named[identity] = before, dict(finding)
            taken.add(before)
    return named


def _identity(finding: Mapping[str, Any]) -> Identity:
    """Kind and culprit. A link is the same from both ends, a GPU whichever of its ranks shows it."""
    scope = finding["scope"]
    if scope == "link":
        ends = [
            (finding.get("node"), finding.get("nic")),
            (finding.get("peer_node"), finding.get("peer_nic")),
        ]
        part = [name for end in sorted(ends, key=str) for name in end]
    elif scope == "group":
        part = sorted(finding.get("nodes") or ())
    elif scope == "gpu" and finding.get("gpu") is None:
        part = [finding.get("node"), f"rank {finding.get('rank')}"]
    else:
        names = {"gpu": ("node", "gpu"), "nic": ("node", "nic"), "node": ("node",)}
        part = [finding.get(name) for name in names.get(scope, ())]
    return (finding["kind"], scope, *map(str, part))


def _open_as(known: _Job, identity: Identity, finding: Mapping[str, Any]) -> Identity:
    """As what `finding` is open already: suspects, a machine and its part are one fault as they are narrowed down, and
    so is one of a kind that is not known yet."""
    if identity not in known.open:
        for other, event in known.open.items():
            unknown = UNKNOWN in (identity[0], other[0])
            alike = unknown or (identity[0] == other[0] and {identity[1], other[1]} & {"group", "node"})
            if alike and _machines(event["finding"]) & _machines(finding):
                return other
    return identity


def _machines(finding: Mapping[str, Any]) -> set[str]:
    names = (finding.get("node"), finding.get("peer_node"), *(finding.get("nodes") or ()))
    return {name for name in names if name is not None}


def _was_looked_at(finding: Mapping[str, Any], seen: Collection[str] | None) -> bool:
    """Whether operators of all machines that `finding` names were seen."""
    return seen is None or (len(seen) > 0 and _machines(finding) <= set(seen))


def _differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a person would want to know: severity, confidence, or what the finding rests on and names."""
    metrics = [{evidence["metric"] for evidence in finding["evidence"]} for finding in (before, now)]
    return (
        abs(now["slowdown"] - before["slowdown"]) > SLOWDOWN_CHANGE * before["slowdown"]
        or abs(now["confidence"] - before["confidence"]) > CONFIDENCE_CHANGE
        or metrics[0] != metrics[1]
        or _identity(before) != _identity(now)
    )


def _changed(event: Event, state: Literal["updated", "closed"], at_ns: int, finding: dict[str, Any]) -> Event:
    return Event(
        state=state,
        id=event["id"],
        job=event["job"],
        at_ns=at_ns,
        opened_ns=event["opened_ns"],
        finding=finding,
    )


def _lines(events: Iterable[Event]) -> bytes:
    return b"".join(json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in events)


def _event(line: bytes) -> Event | None:
    """The event in a line of the log, None where it is damaged."""
    try:
        event: Event = json.loads(line)
        _identity(event["finding"])
        complete = event["state"] in ("opened", "updated", "closed") and all(
            isinstance(event[name], kind)  # type: ignore[literal-required]
            for name, kind in (("id", str), ("job", str), ("at_ns", int), ("opened_ns", int))
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return event if complete else None


def _refused(path: Path, error: OSError) -> HostError:
    return HostError(
        f"cannot keep the findings in {path}",
        error.strerror or str(error),
        "Free some space, or choose another directory",
    )
