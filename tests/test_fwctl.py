"""Diagnostic counters through fwctl, against a card behind ioctl that answers in golden bytes."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from pulse_bpf.errors import HostError
from pulse_bpf.nic.diag_samples import DataId
from pulse_bpf.nic.fwctl import ENTRY, PUBLIC_IDS, FwctlReader, behind_newest, decode, decode_capability
from pulse_bpf.nic.fwctl_device import find_device

SECOND = 1_000_000_000
WALL = 1_800_000_000 * SECOND
# A clock of 156.25 MHz, as of a ConnectX: 2^14 of its ticks are 104858 ns, the shortest period of at least 100 us.
KHZ = 156_250
PERIOD_CLOCKS = 1 << 14
PERIOD = 104_858
RX, STALL = PUBLIC_IDS[4], PUBLIC_IDS[1]
IDS = (RX, STALL)


class Card:
    """The firmware of a card: its parameters as they are set, and a ring of entries that the test fills."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "fwctl0"
        self.path.touch()
        self.now_ns = 5 * SECOND
        self.kind = 1
        self.frequency_khz = KHZ
        self.log_max_samples = 20
        self.ids: tuple[int, ...] = (0x0402, 0x1001, 0x2006)
        self.has_debug = 1
        self.parameters = struct.pack(">HxBI16x", 0, 0, 0)
        self.log_period_taken: int | None = None
        self.entries: list[tuple[int, int, int, int]] = []
        self.first_slot = 0
        self.commands: list[tuple[int, int]] = []
        self.errno: dict[int, int] = {}
        self.status: dict[int, tuple[int, int]] = {}
        self.cut: dict[int, int] = {}

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> int:
        os.fstat(descriptor)
        if request == 0x9A00:
            assert struct.unpack("=IIIIQ", argument)[:2] == (24, 0)
            struct.pack_into("=I", argument, 8, self.kind)
            return 0
        assert request == 0x9A01
        size, scope, in_length, out_length, source, target = struct.unpack("=IIIIQQ", argument)
        assert size == len(argument) == 32
        message = ctypes.string_at(source, in_length)
        opcode, uid, op_mod = struct.unpack(">HHxxH", message[:8])
        assert uid == 0
        self.commands.append((opcode, scope))
        if opcode in self.errno:
            raise OSError(self.errno[opcode], os.strerror(self.errno[opcode]))
        status, syndrome = self.status.get(opcode, (0, 0))
        answer = struct.pack(">B3xI", status, syndrome) + (
            b"" if status else self.answer(opcode, op_mod, message)
        )
        answer = answer[: self.cut.get(opcode, out_length)][:out_length]
        ctypes.memmove(target, answer, len(answer))
        struct.pack_into("=I", argument, 12, len(answer))
        return 0

    def answer(self, opcode: int, op_mod: int, message: bytes) -> bytes:
        if opcode == 0x100:
            assert len(message) == 16
            capability = bytearray(4096)
            if op_mod == 1:
                struct.pack_into(">I", capability, 0x30, self.has_debug << 28)
                struct.pack_into(">I", capability, 0x50, len(self.ids) << 16)
                struct.pack_into(">I", capability, 0x9C, self.frequency_khz)
            else:
                assert op_mod == 13 << 1 | 1
                struct.pack_into(">II", capability, 0, self.log_max_samples, 3 << 30 | 8)
                struct.pack_into(
                    f">{len(self.ids)}I", capability, 0x40, *(1 << 31 | number for number in self.ids)
                )
            return bytes(8) + bytes(capability)
        if opcode == 0x820:
            count = struct.unpack_from(">H", message, 8)[0]
            assert len(message) == 32 + 4 * count
            self.parameters = message[8:]
            if self.log_period_taken is not None and self.parameters[4] & 4:
                self.parameters = self.parameters[:7] + bytes([self.log_period_taken]) + self.parameters[8:]
            return bytes(8)
        if opcode == 0x819:
            return self.parameters
        assert opcode == 0x821
        samples, index = struct.unpack_from(">HH", message, 8)
        count, log_samples = struct.unpack_from(">HxB", self.parameters)
        assert (samples, index, len(message)) == (1 << log_samples, 0, 16)
        ring = np.zeros(count << log_samples, ENTRY)
        filled = self.entries[-len(ring) :]
        ring[: len(filled)] = np.array(filled, ENTRY)
        return bytes(8) + np.roll(ring, self.first_slot).tobytes()

    def sample(self, number: int, clocks: int, packets: int, stalled: int = 0) -> None:
        """Both counters' entries of one sample, the second a tick after the first."""
        self.entries.append((RX.number, number % 2**16, clocks % 2**32, packets))
        self.entries.append((STALL.number, number % 2**16, (clocks + 1) % 2**32, stalled))

    def reader(
        self, ids: tuple[DataId, ...] = IDS, period_ns: int = 100_000, force: bool = False
    ) -> FwctlReader:
        return FwctlReader(
            "host1", "mlx5_0", WALL, self.path, ids, period_ns, force, self.ioctl, lambda: self.now_ns
        )


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path)


def test_golden_parameters(card: Card) -> None:
    reader = card.reader()
    reader.start()
    # 2 counters; 2 s of samples each 105 us are 19073, and half a turn of the clock holds 2^16; repetitive, enabled.
    assert card.parameters.hex() == (
        "0002" "00" "0f" "4400000e" + "00" * 16 + "00001001" + "00000402"
    )  # fmt: skip
    assert "mlx5_0 samples every 104858 ns; 100000 ns were asked for" in reader.notes
    assert any("taints the kernel" in note for note in reader.notes)
    assert reader.source.bin_ns == PERIOD
    assert card.commands == [(0x100, 1), (0x100, 1), (0x819, 1), (0x820, 2), (0x819, 1)]


def test_golden_samples_in_the_order_of_their_times(card: Card) -> None:
    reader = card.reader()
    reader.start()
    for number in range(4):
        card.sample(number, 10**6 + number * PERIOD_CLOCKS, 100 + number * 7, 5)
    card.first_slot = -3
    card.now_ns += SECOND
    tables = reader.read()
    rows = tables["port_counters"].filter(counter="rx_packets")
    assert rows["value"].to_list() == [100, 107, 114, 121]
    assert rows["t_ns"].diff().drop_nulls().unique().to_list() in ([104_857], [104_858], [104_857, 104_858])
    assert rows["t_ns"][-1] == pytest.approx(WALL + 6 * SECOND - PERIOD // 2, abs=10)
    assert set(rows["port"]) == {0}
    assert tables["port_counters"].filter(counter="stalled_pcie_read_clocks").is_empty()
    assert tables["port_counters"].filter(counter="stalled_pcie_write_clocks")["value"].to_list() == [5]
    assert tables["port_samples"].is_empty()
    assert reader.coverage()["lost"].to_list() == [0]


def test_what_the_ring_still_holds_is_not_taken_twice(card: Card) -> None:
    reader = card.reader()
    reader.start()
    rows = []
    for number in range(0, 9, 3):
        for step in range(3):
            card.sample(number + step, (number + step) * PERIOD_CLOCKS, number + step)
        card.now_ns += SECOND
        rows += reader.read()["port_counters"].filter(counter="rx_packets")["value"].to_list()
    assert rows == list(range(9))


def test_the_ring_is_read_when_a_quarter_of_it_is_new(card: Card) -> None:
    reader = card.reader()
    reader.start()
    reader.drain()
    queries = len(card.commands)
    card.now_ns += 100_000_000
    reader.drain()
    assert len(card.commands) == queries
    card.now_ns += PERIOD * 2**15 // 4
    reader.drain()
    assert len(card.commands) == queries + 1


def test_sample_ids_of_16_bits_and_times_of_32_wrap(card: Card) -> None:
    reader = card.reader()
    reader.start()
    for number in range(4):
        card.sample(65534 + number, 2**32 - 2 * PERIOD_CLOCKS + number * PERIOD_CLOCKS, number)
    card.now_ns += SECOND
    rows = reader.read()["port_counters"].filter(counter="rx_packets")
    assert rows["value"].to_list() == [0, 1, 2, 3]
    assert reader.coverage()["lost"].to_list() == [0]
    # 30 s without a query: the clock went around once, the ids four times, and the ring holds none of the old ones.
    card.entries.clear()
    later = 30 * KHZ * 1000 // PERIOD_CLOCKS
    card.sample(65537 + later, 2**32 + PERIOD_CLOCKS + later * PERIOD_CLOCKS, 9)
    card.now_ns += 30 * SECOND
    rows = reader.read()["port_counters"].filter(counter="rx_packets")
    assert rows["t_ns"][0] == pytest.approx(WALL + 36 * SECOND, abs=2 * PERIOD)
    assert reader.coverage()["lost"].to_list() == [later - 1]


def test_lost_samples_are_counted(card: Card) -> None:
    reader = card.reader()
    reader.start()
    for number in (0, 1, 4):
        card.sample(number, number * PERIOD_CLOCKS, number)
    card.now_ns += SECOND
    reader.drain()
    assert reader.coverage()["lost"].to_list() == [2]


def test_bytes_of_a_port_from_a_list_of_counters_become_port_samples(card: Card) -> None:
    ids = (DataId(RX.number, "port_rx_bytes", 1, "rx", "bytes"), STALL)
    reader = card.reader(ids)
    reader.start()
    for number in range(3):
        card.sample(number, number * PERIOD_CLOCKS, number * 4096)
    card.now_ns += SECOND
    rows = reader.read()["port_samples"]
    assert rows.select("port", "source", "direction", "bytes").rows() == [(1, "fwctl-diag", "rx", 4096)] * 2
    assert all(bin_ns in (PERIOD, PERIOD - 1) for bin_ns in rows["bin_ns"])


def test_stopping_disables_the_sampling(card: Card) -> None:
    reader = card.reader()
    reader.start()
    for number in range(2):
        card.sample(number, number * PERIOD_CLOCKS, number)
    assert reader.stop()["port_counters"].height == 3
    assert struct.unpack_from(">I", card.parameters, 4) == (0,)
    assert reader.stop() == {}


def test_counters_that_another_tool_samples_are_left_alone(card: Card) -> None:
    used = card.parameters = struct.pack(">HxBI16x", 1, 4, 1 << 26 | 20)
    with pytest.raises(HostError, match="in use"):
        card.reader().start()
    assert card.parameters == used
    card.reader(force=True).start()


@pytest.mark.parametrize(
    ("opcode", "code", "why"),
    [
        (0x820, errno.EPERM, "refuses SET_DIAGNOSTIC_PARAMS: needs root"),
        (0x820, errno.EBADMSG, "SET_DIAGNOSTIC_PARAMS: the kernel does not pass this command on"),
        (0x100, errno.EIO, "refuses QUERY_HCA_CAP: Input/output error"),
    ],
)
def test_a_command_that_the_kernel_refuses_is_named(card: Card, opcode: int, code: int, why: str) -> None:
    card.errno[opcode] = code
    with pytest.raises(HostError, match=why):
        card.reader().start()


@pytest.mark.parametrize("opcode", [0x100, 0x819, 0x820])
def test_status_and_syndrome_of_the_firmware_are_reported(card: Card, opcode: int) -> None:
    card.status[opcode] = 3, 0x1A2B3C
    with pytest.raises(HostError, match="bad parameter, syndrome 0x1a2b3c"):
        card.reader().start()


@pytest.mark.parametrize(("opcode", "length"), [(0x100, 100), (0x819, 12), (0x820, 4)])
def test_an_answer_of_the_wrong_size_is_reported(card: Card, opcode: int, length: int) -> None:
    card.cut[opcode] = length
    with pytest.raises(HostError, match=f"with {length} bytes"):
        card.reader().start()


def test_a_query_that_fails_ends_the_source_and_not_the_recording(card: Card) -> None:
    reader = card.reader()
    reader.start()
    card.status[0x821] = 6, 7
    reader.drain()
    card.now_ns += SECOND
    reader.drain()
    assert reader.notes[-1:] == [
        "mlx5_0 is sampled no longer: mlx5_0 refuses QUERY_DIAGNOSTIC_COUNTERS: busy, syndrome 0x7"
    ]
    assert card.commands.count((0x821, 1)) == 1
    reader.stop()
    assert struct.unpack_from(">I", card.parameters, 4) == (0,)


def test_a_period_that_the_card_did_not_take_is_not_claimed(card: Card) -> None:
    card.log_period_taken = 20
    with pytest.raises(HostError, match=r"2\^20 clocks"):
        card.reader().start()
    assert struct.unpack_from(">I", card.parameters, 4) == (0,)


def test_a_counter_that_the_card_lacks_is_left_out_and_named(card: Card) -> None:
    reader = card.reader((*IDS, DataId(0x0409, "read_stalls")))
    reader.start()
    assert "mlx5_0 does not sample read_stalls (0x409)" in reader.notes
    with pytest.raises(HostError, match="none of the counters asked for"):
        card.reader((DataId(0x0409, "read_stalls"),)).start()


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("kind", 4, "not of an mlx5 card"),
        ("has_debug", 0, "no diagnostic counters"),
        ("ids", (), "no diagnostic"),
    ],
)
def test_a_card_that_cannot_sample_says_why(card: Card, attribute: str, value: object, why: str) -> None:
    setattr(card, attribute, value)
    with pytest.raises(HostError, match=why):
        card.reader().start()


@pytest.mark.parametrize(
    ("frequency_khz", "log_max_samples", "log_samples", "is_short"),
    # The card holds 2^12 entries, 2^11 of each of two counters; or half a turn of its clock is 2^13 periods, 1.07 s.
    [(KHZ, 12, 11, True), (1_000_000, 20, 13, False)],
)
def test_a_ring_that_the_card_or_its_clock_limits(
    card: Card, frequency_khz: int, log_max_samples: int, log_samples: int, is_short: bool
) -> None:
    card.frequency_khz, card.log_max_samples = frequency_khz, log_max_samples
    reader = card.reader()
    reader.start()
    assert card.parameters[3] == log_samples
    note = "the ring of mlx5_0 is short for this period: samples may be lost"
    assert (note in reader.notes) == is_short


def test_entries_not_written_yet_are_no_malformed_ones() -> None:
    entries = np.array([(0x1001, 1, 5, 7), (0, 0, 0, 0), (0x2006, 1, 6, 8)], ENTRY)
    found, unasked = decode(bytes(16) + entries.tobytes(), [0x1001])
    assert (found["value"].tolist(), unasked) == ([7], 1)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot be opened"):
        FwctlReader("host1", "mlx5_0", WALL, tmp_path / "fwctl9").start()


def test_a_file_that_is_no_fwctl_device(card: Card) -> None:
    with pytest.raises(HostError, match="does not answer: it is no fwctl device"):
        FwctlReader("host1", "mlx5_0", WALL, card.path).start()


def test_the_fwctl_device_of_a_card_is_found_by_its_pci_function(tmp_path: Path) -> None:
    for number, function in enumerate(("0000:3b:00.0", "0000:5e:00.0")):
        device = tmp_path / "devices" / function
        device.mkdir(parents=True)
        for link in (f"class/infiniband/mlx5_{number}", f"class/fwctl/fwctl{1 - number}"):
            (tmp_path / link).mkdir(parents=True)
            (tmp_path / link / "device").symlink_to(device)
    assert find_device("mlx5_0", tmp_path) == Path("/dev/fwctl/fwctl1")
    with pytest.raises(HostError, match="mlx5_9 has no fwctl device"):
        find_device("mlx5_9", tmp_path)


def _mutate_answers(cases: int) -> None:
    random = np.random.default_rng(13)
    counters = bytes(16) + np.array([(0x1001, n, n * PERIOD_CLOCKS, n) for n in range(6)], ENTRY).tobytes()
    general, debug = bytearray(16 + 0xA0), bytearray(16 + 0x60)
    struct.pack_into(">I", general, 16 + 0x30, 1 << 28)
    struct.pack_into(">I", general, 16 + 0x50, 8 << 16)
    struct.pack_into(">I", general, 16 + 0x9C, KHZ)
    struct.pack_into(">II", debug, 16, 20, 1 << 30)

    def mutate(golden: bytes | bytearray) -> bytes:
        mutated = bytearray(golden[: len(golden) - max(random.integers(-40, 40), 0)])
        for place in random.integers(len(mutated), size=3):
            mutated[place] = random.integers(256)
        return bytes(mutated)

    for _ in range(cases // 2):
        entries, unasked = decode(mutate(counters), [0x1001])
        assert len(entries) + unasked <= 6
        if len(entries):
            assert behind_newest(entries["time"].astype(np.int64)).min() == 0
        capability = decode_capability(mutate(general), mutate(debug))
        assert capability is None or len(capability.counters) <= 8


def test_mutated_answers() -> None:
    _mutate_answers(20_000)


@pytest.mark.long
def test_a_million_mutated_answers() -> None:
    _mutate_answers(1_000_000)
