"""The packet meter against a slow reference, on frames that no card would send too. No interface is involved."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count as numbers
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from roce_frames import (
    AUTHENTICATION,
    EXTENDED_BYTES,
    FRAGMENT,
    HOPS,
    NAK,
    OPTIONS,
    RNR,
    ROUTING,
    Packet,
    Reference,
    mutated,
)
from run_frames import run_frames

from pulse_bpf.attach import Program
from pulse_bpf.nic.identity import gid_text
from pulse_bpf.nic.packets import BIN, COUNT_COLUMNS, COUNTED, KINDS, LOST_BINS, LOST_PACKETS, SET
from pulse_bpf.probes import BPF_DIRECTORY

pytestmark = pytest.mark.bcc

Counts = dict[tuple[str, str, int], Counter[str]]
# A tc program is run on frames only that hold an IPv6 header.
MIN_BYTES = {"roce_ingress": 54, "roce_xdp": 14}
UNTOUCHED = {"roce_ingress": 2**32 - 1, "roce_xdp": 2}  # TC_ACT_UNSPEC, XDP_PASS


class Meter:
    """One loaded meter, by the hook whose program is run. Few bins are open, so that flows displace each other."""

    def __init__(self, hook: str, **defines: int) -> None:
        self.hook = hook
        self.program = Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": 10_000, "FLOW_SETS": 4, **defines})
        load = self.program.load_xdp if hook == "roce_xdp" else self.program.load_tc
        self._fd = load(hook)
        self._ring = self.program.ring("closed_bins", BIN)

    def add(self, frames: list[bytes]) -> None:
        returned, _ = run_frames(self._fd, frames)
        assert returned <= {UNTOUCHED[self.hook]}

    def flows(self) -> Counts:
        """What closed since the last call, and all that is open."""
        _, sets = self.program.read_percpu("open_bins", np.dtype("<u4"), SET)
        bins = np.concatenate([self._ring.read(), sets["bins"].reshape(-1)])
        flows: Counts = {}
        for flow, counts in zip(bins["flow"].tolist(), bins["counts"].tolist(), strict=True):
            source, target = (gid_text(ipaddress.IPv6Address(np.uint64(half).tobytes())) for half in flow[4:])
            found = flows.setdefault((source, target, flow[0]), Counter())
            found.update(dict(zip(COUNT_COLUMNS, counts, strict=True)))
        return {flow: +counts for flow, counts in flows.items() if counts["packets"]}

    def totals(self) -> Counter[str]:
        total = self.program.percpu_sum
        assert total("totals", LOST_PACKETS) == 0
        kinds = {kind: total("totals", index) for index, kind in enumerate(KINDS, LOST_BINS + 1)}
        return +Counter({"counted": total("totals", COUNTED), **kinds})


@pytest.fixture(scope="module", params=list(UNTOUCHED))
def meter(request: pytest.FixtureRequest) -> Iterator[Meter]:
    loaded = Meter(request.param)
    yield loaded
    loaded.program.close()


@pytest.fixture
def fresh_meter() -> Iterator[Callable[..., Meter]]:
    loaded: list[Meter] = []

    def load(hook: str, **defines: int) -> Meter:
        loaded.append(Meter(hook, **defines))
        return loaded[-1]

    yield load
    for one in loaded:
        one.program.close()


def expected(frames: list[bytes]) -> tuple[Counts, Counter[str]]:
    reference = Reference()
    reference.add(frames)
    return {flow: +counts for flow, counts in reference.flows.items()}, +reference.totals


@pytest.mark.parametrize("addresses", [("10.1.0.1", "10.1.0.2"), ("2001:db8::1", "fe80::2:3")])
@pytest.mark.parametrize("hook", list(UNTOUCHED))
def test_every_kind_of_packet_counts_as_what_it_is(
    fresh_meter: Callable[..., Meter], addresses: tuple[str, str], hook: str
) -> None:
    meter = fresh_meter(hook)
    frames = [
        Packet(kind, *addresses, qpn=opcode, psn=1, payload=101).frame()
        for kind, (opcode, _) in EXTENDED_BYTES.items()
    ]
    meter.add(frames)
    flows = {flow[2]: counts for flow, counts in meter.flows().items()}
    data = {"packets": 1, "bytes": 101}
    apart = {
        10: {"packets": 1, "ctl_packets": 1},
        17: {"packets": 1, "ack_packets": 1},
        18: {"packets": 1, "ack_packets": 1},
        0x81: {"packets": 1, "cnps": 1},
    }
    counted = [*range(21), 22, 23, 0x81]
    assert flows == {opcode: apart.get(opcode, data) for opcode in counted}
    assert meter.totals() == {"counted": 24, "uc": 1, "rd": 1, "ud": 1, "xrc": 1, "reserved": 3}


def test_a_flow_is_never_turned_away(fresh_meter: Callable[..., Meter]) -> None:
    # Long recordings with many short-lived queue pairs: "flows full" for ever.
    meter = fresh_meter("roce_ingress", FLOW_SETS=1, BIN_NS=10_000_000)
    few, many = [Packet("SEND_ONLY", "10.1.0.1", "10.1.0.2", qpn, 1, 64).frame() for qpn in (1, 2)], 5000
    frames = []
    for qpn in range(10, 10 + many):
        frames += [Packet("SEND_ONLY", "10.1.0.1", "10.1.0.2", qpn, 1, payload=100).frame(), *few]
    meter.add(frames)
    sums = {flow[2]: counts["packets"] for flow, counts in meter.flows().items()}
    assert sums == {1: many, 2: many, **dict.fromkeys(range(10, 10 + many), 1)}
    assert meter.totals() == {"counted": 3 * many}


def test_the_longest_idle_flow_makes_room(fresh_meter: Callable[..., Meter]) -> None:
    # In one bin, much longer than the test, four flows fit: a fifth closes one, those four again none.
    meter = fresh_meter("roce_ingress", FLOW_SETS=1, BIN_NS=10**10)
    frames = [Packet("SEND_ONLY", "10.1.0.1", "10.1.0.2", qpn, 1, payload=8).frame() for qpn in range(5)]
    meter.add(frames[:4] * 3)
    assert len(meter._ring.read()) == 0
    meter.add(frames[4:])
    assert meter._ring.read()["counts"]["packets"].tolist() == [3]


# Sequence numbers close to each other, on both sides of the wrap and of what is remembered, and far away.
sequence_numbers = st.one_of(
    st.integers(-70, 70), st.integers(2040, 2060), st.integers(-66_000, -65_000), st.integers(0, 2**24 - 1)
).map(lambda number: number % 2**24)
packet_fields = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["WRITE_MIDDLE", "READ_MIDDLE", "ACK", *EXTENDED_BYTES]),
        "qpn": st.integers(1, 2),
        "psn": sequence_numbers,
        "payload": st.sampled_from([0, 1, 30, 512, 513, 1024]),
        "direct": st.sampled_from([None, 0, 512, 513, 2**32 - 1]),
        "syndrome": st.sampled_from([0x1F, RNR, NAK, 0x7F, 0xE0]),
        "vlans": st.integers(0, 3),
    }
)
only_v4 = st.fixed_dictionaries(
    {"options": st.sampled_from([0, 0, 1, 10]), "fragment": st.sampled_from([0, 0x4000, 0x8000, 0x2000, 1])}
)
only_v6 = st.fixed_dictionaries(
    {
        "extensions": st.lists(
            st.sampled_from([HOPS, ROUTING, FRAGMENT, AUTHENTICATION, OPTIONS]), max_size=7
        ).map(tuple),
        "fragment": st.sampled_from([0, 0, 1, 8]),
    }
)
packets = st.one_of(
    st.tuples(packet_fields, only_v4, st.just(4)), st.tuples(packet_fields, only_v6, st.just(6))
)
cuts = st.sampled_from([0, 0, 0, 0, 1, 4, 16, 20, 30, 40, 60])
examples = numbers(1)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(packets, cuts), max_size=40))
def test_any_packets_count_as_in_the_reference(
    meter: Meter, drawn: list[tuple[tuple[dict[str, Any], dict[str, Any], int], int]]
) -> None:
    # Each example has addresses of its own, for what was seen before is remembered.
    example = next(examples)
    own = {4: str(ipaddress.IPv4Address(example)), 6: str(ipaddress.IPv6Address(2**120 + example))}
    frames = []
    for (fields, version_fields, version), cut in drawn:
        frame = Packet(source=own[version], target=own[version], **fields, **version_fields).frame()
        frames.append(frame[: max(MIN_BYTES[meter.hook], len(frame) - cut)])
    before = meter.totals()
    meter.add(frames)
    flows, totals = expected(frames)
    names = {f"::ffff:{own[4]}", own[6]}
    assert {flow: counts for flow, counts in meter.flows().items() if flow[0] in names} == flows
    assert meter.totals() - before == totals


@pytest.mark.parametrize(
    "many", [20_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("hook", list(UNTOUCHED))
def test_mutated_frames_count_as_in_the_reference(
    fresh_meter: Callable[..., Meter], hook: str, many: int
) -> None:
    malformed = 0
    for seed in range(0, many, 20_000):
        meter = fresh_meter(hook, FLOW_SETS=1024)
        frames = list(mutated(seed, 20_000, MIN_BYTES[hook]))
        meter.add(frames)
        flows, totals = expected(frames)
        assert meter.totals() == totals, f"seed {seed}"
        assert meter.flows() == flows, f"seed {seed}"
        meter.program.close()
        malformed += totals["malformed"]
    assert malformed > many / 100
