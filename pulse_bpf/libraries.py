"""What there is to probe in a file that a process maps: an NCCL or a libibverbs, and where its functions are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pulse_bpf.elf import Elf, Function
from pulse_bpf.entry import entry_of
from pulse_bpf.errors import AttachError
from pulse_bpf.probes import detail, nccl, verbs
from pulse_bpf.probes.events import NcclCall
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.probes.layouts import Layout, layout_of
from pulse_bpf.targets import NCCL_MARKERS, MappedFile

Kind = Literal["nccl", "verbs"]


@dataclass(frozen=True)
class Library:
    """A file with something to probe.

    `cookies` has the file offset of every place to probe at its entry, with what the probe is told; a place in `needs`
    only if the one it maps to is probed too. `returns` is the one function whose return is worth a look, its offset and
    cookie. `rank_at` is where a communicator has its rank, 0 when that could not be found, `layout` what is known of
    its release. `detail` is where the proxy is told what to do, offset and cookie, where that can be understood.
    `problems` says what cannot be observed.
    """

    kind: Kind
    build_id: str | None
    version: str | None
    rank_at: int
    layout: Layout | None
    cookies: Mapping[int, int]
    needs: Mapping[int, int]
    returns: tuple[int, int] | None
    problems: tuple[str, ...]
    detail: tuple[int, int] | None = None

    @property
    def makes_device_comms(self) -> bool:
        """Whether kernels can be given communicators of their own, and are seen when they are."""
        return self._has(NcclCall.DEVICE_COMM)

    @property
    def shows_graphs(self) -> bool:
        """Whether captures into CUDA graphs and their replays are seen."""
        return self._has(NcclCall.REPLAY)

    def _has(self, call: NcclCall) -> bool:
        return any(cookie & 0xFF == call for cookie in self.cookies.values())


def examine(file: MappedFile, number: int) -> Library | None:
    """What `file` has to probe, its cookies marked with `number`; None when that is nothing, or it cannot be read."""
    try:
        with Elf(file.opened_by) as elf:
            functions = elf.functions([*nccl.PROBES, *verbs.PROBES, *verbs.RETURNS, *ACCESSORS])
            if functions.keys() >= NCCL_MARKERS:
                return _nccl(file, elf, functions, number)
            if functions.keys() & verbs.PROBES.keys():
                return _verbs(file, elf, functions, number)
    except AttachError:
        pass
    return None


def _nccl(file: MappedFile, elf: Elf, functions: Mapping[str, Function], number: int) -> Library:
    version = nccl.version(elf.section(".rodata"))
    if version is None:
        # Each of its calls will arrive once more at the NCCL behind it.
        problem = f"{file.path} defines NCCL's calls but states no version: not NCCL itself"
        return Library("nccl", elf.build_id(), None, 0, None, {}, {}, None, (problem,))
    problems = []
    try:
        code = {name: elf.code(functions[name]) for name in ACCESSORS if name in functions}
        rank_at = rank_offset(code, elf.machine)
    except AttachError as error:
        rank_at = 0
        problems.append(str(error))
    layout = layout_of(version, rank_at)
    places, unfit = _places(file, elf, {name: functions[name] for name in nccl.PROBES if name in functions})
    cookies: dict[int, int] = {}
    # Two names of one function would count each call twice.
    for name, offset in places.items():
        call = nccl.PROBES[name]
        seq_at = layout.seq_at if layout and call <= NcclCall.RECV else 0
        cookies.setdefault(offset, nccl.cookie(call, number, rank_at, seq_at))
    inner = elf.cpp_functions([nccl.CAPTURE, nccl.REPLAY, nccl.SAVE]) if layout else {}
    inner_places, _ = _places(file, elf, inner)
    save = inner_places.pop(nccl.SAVE, None)
    if layout:
        cookies |= _graph_cookies(inner_places, number, layout)
    start, end = places.get(nccl.GROUP_START), places.get(nccl.GROUP_END)
    needs = {start: end} if start is not None and end is not None else {}
    if start is not None and end is None:
        # Every later call would seem to be in that group.
        del cookies[start]
    returns = None if end is None else (end, nccl.cookie(NcclCall.LAUNCH, number, 0))
    shown = None if save is None or not layout else (save, detail.cookie(number, layout))
    told = (*problems, *unfit)
    return Library("nccl", elf.build_id(), version, rank_at, layout, cookies, needs, returns, told, shown)


def _graph_cookies(places: Mapping[str, int], number: int, layout: Layout) -> dict[int, int]:
    """The places that tell of CUDA graphs: both, or none where the library is stripped."""
    if len(places) < 2:
        return {}
    capture = NcclCall.CAPTURE_ON_STACK if layout.graph_on_stack else NcclCall.CAPTURE
    calls = {nccl.CAPTURE: capture, nccl.REPLAY: NcclCall.REPLAY}
    return {
        offset: nccl.cookie(calls[name], number, layout.rank_at, layout.plan_comm_at)
        for name, offset in places.items()
    }


def _verbs(file: MappedFile, elf: Elf, functions: Mapping[str, Function], number: int) -> Library:
    calls = verbs.PROBES | verbs.RETURNS
    places, problems = _places(file, elf, {name: functions[name] for name in calls if name in functions})
    cookies = {places[name]: call | number << 8 for name, call in verbs.PROBES.items() if name in places}
    returns = [(places[name], call | number << 8) for name, call in verbs.RETURNS.items() if name in places]
    return Library(
        "verbs", elf.build_id(), None, 0, None, cookies, {}, returns[0] if returns else None, tuple(problems)
    )


def _places(
    file: MappedFile, elf: Elf, functions: Mapping[str, Function]
) -> tuple[dict[str, int], list[str]]:
    """The file offset for an entry probe on each function, and why some are left out."""
    places, problems = {}, []
    for name, function in functions.items():
        try:
            entry = entry_of(elf.code(function), function.offset, elf.machine)
        except AttachError as error:
            problems.append(f"{name} of {file.path} cannot be probed: {error}")
            continue
        if name in nccl.HOT and not entry.emulated:
            problems.append(
                f"{name} of {file.path} is not probed: it begins with '{entry.instruction}', which the kernel would "
                "single-step at every call"
            )
        else:
            places[name] = entry.offset
    return places, problems
