"""DOCA Telemetry Diag against a stand-in library (tests/targets/doca_diag.c) that hands out golden bytes."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from live import compiled

from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.nic.diag import PUBLIC_IDS, DiagReader, decode
from pulse_bpf.nic.diag_samples import CardClock, CardSamples, DataId, Series, read_ids

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

SECOND = 1_000_000_000
WALL = 1_800_000_000 * SECOND
PERIOD = 100_000
BYTES, PACKETS, MISSES = PUBLIC_IDS[2], PUBLIC_IDS[3], PUBLIC_IDS[6]
IDS = (BYTES, PACKETS, MISSES)
Format = Literal[0, 1, 2]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("doca_diag.c", tmp_path_factory.mktemp("doca"), "-shared", "-fPIC")


def packed(
    output_format: Format, sample_id: int, card_ns: int, values: list[int], real_time: bool = True
) -> bytes:
    """One sample as the header lays it out, its values 200 ns apart around `card_ns` in the formats with one time."""
    unit = SECOND if real_time else 2**32
    if output_format == 0:
        entries = [
            struct.pack("=QIIQ", data_id.number, card_ns // unit, card_ns % unit, value)
            for data_id, value in zip(IDS, values, strict=True)
        ]
        return struct.pack("=II", sample_id, 0) + b"".join(entries)
    first, last = card_ns - 100, card_ns + 100
    head = struct.pack("=IIII", sample_id, first // unit, first % unit, last % unit)
    return head + struct.pack(f"={len(values)}{'Q' if output_format == 1 else 'I'}", *values)


class Card:
    """What the stand-in library reads and notes, and a monotonic clock that stands still unless moved."""

    def __init__(self, directory: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.library = library
        self.now_ns = 5 * SECOND
        self.set(sample_size=16 + 8 * 3)
        (directory / "samples").write_bytes(b"")
        monkeypatch.setenv("DOCA_DIAG_SCRIPT", str(directory))

    def set(self, **settings: int) -> None:
        with open(self.directory / "settings", "a") as file:
            file.writelines(f"{name} {value}\n" for name, value in settings.items())

    def append(self, *samples: bytes) -> None:
        with open(self.directory / "samples", "ab") as file:
            file.write(b"".join(samples))

    def calls(self) -> list[tuple[str, int]]:
        lines = (self.directory / "calls").read_text().splitlines()
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    def reader(
        self,
        output_format: Format = 1,
        timestamps: Literal["rtc", "frc"] = "rtc",
        ids: tuple[DataId, ...] = IDS,
        nic: str = "mlx5_0",
        force: bool = False,
    ) -> DiagReader:
        library = str(self.library)
        return DiagReader(
            "host1", nic, WALL, ids, PERIOD, library, output_format, timestamps, force, lambda: self.now_ns
        )


@pytest.fixture
def card(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(tmp_path, library, monkeypatch)


@pytest.mark.parametrize(("output_format", "size"), [(0, 8 + 24 * 3), (1, 16 + 8 * 3), (2, 16 + 4 * 3)])
@pytest.mark.parametrize("timestamps", ["rtc", "frc"])
def test_golden_samples(
    card: Card, output_format: Format, size: int, timestamps: Literal["rtc", "frc"]
) -> None:
    card.set(sample_size=size)
    reader = card.reader(output_format, timestamps)
    reader.start()
    # A free-running clock of 7 s, at the end of a turn of its low word or not; a real-time one that is right.
    base = WALL + card.now_ns if timestamps == "rtc" else (3 << 32) - PERIOD
    values = [[1000, 10, 5], [1000 + 9000, 14, 5], [1000 + 9000, 14, 6]]
    real_time = timestamps == "rtc"
    rows = [packed(output_format, 40 + n, base + n * PERIOD, row, real_time) for n, row in enumerate(values)]
    assert {len(row) for row in rows} == {size}
    card.append(*rows)
    card.now_ns += 3 * PERIOD
    tables = reader.read()
    # Real time is taken as it is; free-running time is anchored: the last sample is at most one period old.
    t_ns = WALL + 5 * SECOND + (0 if real_time else PERIOD // 2)
    sample = ("host1", "mlx5_0", 1, "doca-diag", "tx", t_ns, PERIOD, 9000, 4)
    assert tables["port_samples"].rows() == [sample]
    key = ("host1", "mlx5_0", 0, "doca-diag", "icmc_miss")
    assert tables["port_counters"].rows() == [(*key, t_ns, 5, True), (*key, t_ns + 2 * PERIOD, 6, True)]
    assert tables["clocks"].rows() == [
        (
            "host1",
            "rtc" if real_time else "hca",
            base + 2 * PERIOD,
            WALL + card.now_ns - PERIOD // 2,
            PERIOD // 2,
        )
    ]
    assert reader.period_ns() == (PERIOD, PERIOD)
    coverage = reader.coverage().select("port", "direction", "first_ns", "last_ns", "lost").rows()
    assert coverage == [(0, None, t_ns, t_ns + 2 * PERIOD, 0), (1, "tx", t_ns, t_ns + 2 * PERIOD, 0)]


def test_what_is_asked_of_the_library_and_in_which_order(card: Card) -> None:
    reader = card.reader()
    reader.start()
    reader.stop()
    assert reader.stop() == {}
    names = [name for name, _ in card.calls()]
    assert names[-4:] == ["stop", "destroy", "dev_close", "destroy_list"]
    assert [value for _, value in card.calls()[-4:]] == [1, 1, 1, 1]
    order = [
        "cap_is_supported",
        "create",
        "set_sample_period",
        "apply_config",
        "apply_ids",
        "get_sample_period",
    ]
    assert [name for name in names if name in order] == order
    asked = dict(card.calls())
    # 2 s of samples each 100 us are 20000, and 2^15 hold them; REPETITIVE is 1, NO_SYNC 0, RTC 1.
    assert asked["set_log_max_num_samples"] == 15
    assert (asked["set_sample_mode"], asked["set_sync_mode"], asked["set_data_clear"]) == (1, 0, 0)
    assert (asked["set_data_timestamp_source"], asked["set_output_format"], asked["create"]) == (1, 1, 0)
    assert [value for name, value in card.calls() if name == "id"] == [data_id.number for data_id in IDS]
    assert names.index("get_sample_size") > names.index("start")


def test_setting_it_up_says_that_it_taints_the_kernel_and_which_period_is_real(card: Card) -> None:
    card.set(period=131_072, log_max_num_samples=10)
    reader = card.reader()
    reader.start()
    assert "mlx5_0 samples every 131072 ns; 100000 ns were asked for" in reader.notes
    assert any("taints the kernel" in note for note in reader.notes)
    assert any("ring of mlx5_0 is short" in note for note in reader.notes)
    assert reader.source.bin_ns == 131_072
    assert not reader.source.per_qp


def test_lost_samples_are_counted_by_their_ids_and_their_bytes_kept(card: Card) -> None:
    reader = card.reader()
    reader.start()
    base = WALL + card.now_ns
    card.append(*(packed(1, n, base + n * PERIOD, [n * 100, n, 0]) for n in (0, 1, 5, 6)))
    card.now_ns += 6 * PERIOD
    card.set(fail_query=30)
    rows = reader.read()["port_samples"]
    assert rows["bytes"].to_list() == [100, 400, 100]
    assert rows["bin_ns"].to_list() == [PERIOD, 4 * PERIOD, PERIOD]
    assert reader.coverage()["lost"].to_list() == [3, 3]
    assert reader.skips == 1


def test_sample_ids_of_16_bits_in_a_field_of_32_wrap(card: Card) -> None:
    reader = card.reader()
    reader.start()
    base = WALL + card.now_ns
    ids = [65534, 65535, 0, 1]
    card.append(*(packed(1, number, base + n * PERIOD, [n, n, 0]) for n, number in enumerate(ids)))
    card.now_ns += 3 * PERIOD
    assert reader.read()["port_samples"].height == 3
    assert reader.coverage()["lost"].to_list() == [0, 0]


def test_32_bit_values_wrap_from_one_query_to_the_next(card: Card) -> None:
    card.set(sample_size=16 + 4 * 3)
    reader = card.reader(2)
    reader.start()
    base = WALL + card.now_ns
    card.append(packed(2, 0, base, [2**32 - 100, 1, 2**32 - 1]))
    reader.drain()
    card.append(packed(2, 1, base + PERIOD, [50, 2, 3]), packed(2, 2, base + 2 * PERIOD, [60, 3, 3]))
    card.now_ns += 2 * PERIOD
    tables = reader.read()
    assert tables["port_samples"]["bytes"].to_list() == [150, 10]
    assert tables["port_counters"]["value"].to_list() == [2**32 - 1, 2**32 + 3]
    card.append(packed(2, 3, base + 3 * PERIOD, [70, 4, 9]))
    card.now_ns += PERIOD
    assert reader.read()["port_counters"]["value"].to_list() == [2**32 + 9]


def test_a_64_bit_value_that_goes_back_was_reset(card: Card) -> None:
    reader = card.reader()
    reader.start()
    base = WALL + card.now_ns
    values = [2**33, 2**33 + 8, 3, 5]
    card.append(*(packed(1, n, base + n * PERIOD, [value, n, 0]) for n, value in enumerate(values)))
    card.now_ns += 3 * PERIOD
    assert reader.read()["port_samples"]["bytes"].to_list() == [8, 2]
    assert reader.coverage()["lost"].to_list() == [1, 1]


def test_a_card_whose_clock_is_not_set_is_anchored_to_the_systems(card: Card) -> None:
    reader = card.reader()
    reader.start()
    base = WALL + card.now_ns - 37 * SECOND
    card.append(*(packed(1, n, base + n * PERIOD, [n, n, 0]) for n in range(2)))
    card.now_ns += PERIOD
    rows = reader.read()["port_samples"]
    assert rows["t_ns"].to_list() == [WALL + 5 * SECOND - PERIOD // 2]
    assert any("37.000 s behind the system's" in note for note in reader.notes)


def test_a_card_without_a_real_time_clock_gives_free_running_times(card: Card) -> None:
    card.set(has_clock=0)
    reader = card.reader()
    reader.start()
    assert ("set_data_timestamp_source", 0) in card.calls()
    card.append(packed(1, 0, 5_000_000_000, [1, 1, 1], real_time=False))
    assert reader.read()["clocks"].select("domain", "raw").rows() == [("hca", 5_000_000_000)]


def test_samples_that_are_not_a_period_apart_are_doubted(card: Card) -> None:
    reader = card.reader(1, "frc")
    reader.start()
    card.append(*(packed(1, n, 10**9 + n * 15_625, [n, n, 0], real_time=False) for n in range(20)))
    reader.stop()
    assert any("15625 ns apart where 100000 ns were set" in note for note in reader.notes)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sample_size": 48}, "samples of 48 bytes: format 1 with 3 counters has 40"),
        ({"sample_size": 0}, "samples of 0 bytes"),
        ({"fail_create": 3}, "create failed with DOCA_ERROR_IN_USE"),
        ({"fail_apply_config": 21}, "apply_config failed with DOCA_ERROR_DRIVER"),
        ({"fail_start": 21}, "start failed with DOCA_ERROR_DRIVER"),
        ({"fail_cap_is_supported": 16}, "it has no fwctl device"),
        ({"fail_cap_is_supported": 20}, "needs root"),
        ({"fail_apply_ids": 21}, f"DOCA_ERROR_DRIVER because of {MISSES.number:#x}"),
        ({"period": 0}, "get_sample_period returned 0"),
    ],
)
def test_a_call_that_fails_is_named_and_nothing_stays_set_up(
    card: Card, settings: dict[str, int], why: str
) -> None:
    card.set(**settings)
    with pytest.raises(HostError, match=why):
        card.reader().start()
    made = [name for name, _ in card.calls() if "fail_" + name not in settings]
    for begin, end in (
        ("create_list", "destroy_list"),
        ("dev_open", "dev_close"),
        ("create", "destroy"),
        ("start", "stop"),
    ):
        assert made.count(begin) == made.count(end), begin


def test_a_counter_that_the_card_lacks_is_left_out_and_named(card: Card) -> None:
    card.set(unknown_id=PACKETS.number, sample_size=16 + 8 * 2)
    reader = card.reader()
    reader.start()
    assert "mlx5_0 does not sample port0_tx_packets (0x1140000300000000)" in reader.notes
    base = WALL + card.now_ns
    card.append(*(packed(1, n, base + n * PERIOD, [n * 64, 0]) for n in range(2)))
    card.now_ns += PERIOD
    assert reader.read()["port_samples"].select("bytes", "packets").rows() == [(64, None)]


def test_a_query_that_fails_ends_the_source_and_not_the_recording(card: Card) -> None:
    reader = card.reader()
    reader.start()
    base = WALL + card.now_ns
    card.append(*(packed(1, n, base + n * PERIOD, [n, n, 0]) for n in range(2)))
    reader.drain()
    card.set(fail_query=21)
    reader.drain()
    reader.drain()
    assert reader.notes[-1:] == ["mlx5_0 is sampled no longer: query_counters failed with DOCA_ERROR_DRIVER"]
    assert reader.stop()["port_samples"].height == 1
    assert reader.coverage()["last_ns"].to_list() == [base + PERIOD] * 2


def test_another_owner_is_only_overruled_when_told_so(card: Card) -> None:
    card.reader(force=True).start()
    assert ("create", 1) in card.calls()


def test_a_device_that_doca_does_not_know(card: Card) -> None:
    with pytest.raises(HostError, match="no device mlx5_7: it lists mlx5_1, mlx5_0"):
        card.reader(nic="mlx5_7").start()


def test_a_library_that_is_missing_or_of_another_version(card: Card, tmp_path: Path) -> None:
    card.library = tmp_path / "nowhere.so"
    with pytest.raises(HostError, match=r"nowhere\.so cannot be loaded"):
        card.reader().start()
    card.library = compiled("doca_diag.c", tmp_path, "-shared", "-fPIC", "-DWITHOUT_QUERY")
    with pytest.raises(HostError, match="lacks doca_telemetry_diag_query_counters"):
        card.reader().start()


def test_format_0_samples_are_put_in_the_order_asked_for() -> None:
    numbers = np.array([9, 2, 5], np.uint64)
    entries = b"".join(struct.pack("=QIIQ", number, 1, number, number * 10) for number in (5, 9, 2))
    ids, t_ns, values, malformed = decode(struct.pack("=II", 3, 0) + entries, 0, numbers, True)
    assert (ids.tolist(), values.tolist(), malformed) == ([3], [[90, 20, 50]], 0)
    assert t_ns.tolist() == [[SECOND + 9, SECOND + 2, SECOND + 5]]
    assert decode(struct.pack("=II", 3, 0) + entries, 0, numbers + np.uint64(1), True)[3] == 1


@pytest.mark.parametrize(
    ("real_time", "middle_ns"),
    [(True, 8 * SECOND + 0), (False, 8 * 2**32 + (0 - 2**32 + SECOND - 10 + 10) // 2)],
)
def test_the_latest_time_of_a_sample_may_be_in_the_next_second(real_time: bool, middle_ns: int) -> None:
    raw = struct.pack("=IIIIQ", 1, 7, SECOND - 10, 10, 1)
    assert decode(raw, 1, np.array([1], np.uint64), real_time)[1].tolist() == [[middle_ns]]


def test_lists_of_counters(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    entries = [
        {"id": "0x1020000100000001", "name": "port1_rx_bytes", "port": 2, "direction": "rx", "unit": "bytes"}
    ]
    file.write_text(json.dumps([*entries, {"id": "0x402", "name": "stalled"}]))
    assert read_ids(file) == (
        DataId(0x1020000100000001, "port1_rx_bytes", 2, "rx", "bytes"),
        DataId(0x402, "stalled"),
    )


@pytest.mark.parametrize(
    "entry",
    [
        {"id": 7, "name": "a"},
        {"id": "x", "name": "a"},
        {"id": "0x1"},
        {"id": "1", "name": "a", "port": -1},
        [],
        {"id": "1", "name": "a", "direction": "up"},
        {"id": "1", "name": "a", "why": 1},
        {"id": "-1", "name": "a"},
    ],
)
def test_a_wrong_entry_in_a_list_of_counters_is_named(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([{"id": "0x402", "name": "stalled"}, entry]))
    with pytest.raises(UsageError, match=r"entry 1 of .*ids\.json is no counter"):
        read_ids(file)


def test_a_list_of_counters_that_is_none(tmp_path: Path) -> None:
    for text in ("{", "{}", "[]"):
        (tmp_path / "ids.json").write_text(text)
        with pytest.raises(UsageError, match=r"ids\.json"):
            read_ids(tmp_path / "ids.json")


def test_a_time_from_the_future_does_not_hide_what_comes_after_it() -> None:
    samples = CardSamples(
        "doca-diag", "host1", "mlx5_0", [MISSES], CardClock("host1", "hca", []), 32, 64, PERIOD, []
    )
    for number, t_ns in enumerate((10**9, 10**9 + PERIOD, 10**15, 10**9 + 3 * PERIOD)):
        one = np.array([number]), np.array([t_ns]), np.array([number], np.uint64)
        samples.add([one], WALL + number * PERIOD, WALL + number * PERIOD)
    assert samples.take()["port_counters"]["value"].to_list() == [0, 1, 3]
    assert samples.malformed == 1
    assert samples.coverage()["lost"].to_list() == [1]


def test_an_id_that_went_around_while_nobody_looked_is_found_by_the_time() -> None:
    series = Series(MISSES, 16, 64)
    for number, t_ns in ((5, 0), (9, (65536 + 4) * PERIOD)):
        series.extend(np.array([number]), np.array([t_ns + 1]), np.array([1], np.uint64), PERIOD)
    assert series.lost == 65536 + 3


def _mutate_samples(cases: int) -> None:
    random = np.random.default_rng(11)
    numbers = np.array([data_id.number for data_id in IDS], np.uint64)
    for output_format in (0, 1, 2):
        base = WALL + 5 * SECOND
        golden = b"".join(packed(output_format, n, base + n * PERIOD, [n, n, n]) for n in range(4))
        samples = CardSamples(
            "doca-diag", "host1", "mlx5_0", IDS, CardClock("host1", "rtc", []), 32, 64, PERIOD, []
        )
        for case in range(cases // 3 + 1):
            mutated = bytearray(golden[: random.integers(len(golden) + 1)])
            for place in random.integers(len(mutated) or 1, size=4)[: len(mutated)]:
                mutated[place] = random.integers(256)
            ids, t_ns, values, malformed = decode(bytes(mutated), output_format, numbers, True)
            assert len(ids) + malformed <= 4
            if case % 50 == 0:
                samples.add([(ids, t_ns[:, n], values[:, n]) for n in range(3)], base, base + 4 * PERIOD)
                for table in samples.take().values():
                    assert table.height <= 12


@pytest.mark.filterwarnings("error")
def test_mutated_samples() -> None:
    _mutate_samples(20_000)


@pytest.mark.long
def test_a_million_mutated_samples() -> None:
    _mutate_samples(1_000_000)


def test_the_default_counters_are_the_public_ones() -> None:
    port_ids = [(data_id.number >> 32, data_id.port) for data_id in PUBLIC_IDS]
    traffic = [(0x10200001, 1), (0x10200003, 1), (0x11400001, 1), (0x11400003, 1)]
    assert port_ids == [*traffic, (0x11800001, 0), (0x11800002, 0), (0x11800003, 0)]
