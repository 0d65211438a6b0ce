"""Port counters in sysfs, over a tree of files and a clock that the test moves."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_bpf.errors import HostError
from pulse_bpf.nic.counter_log import CounterLog
from pulse_bpf.nic.counters import CounterReader

SECOND = 1_000_000_000
WALL = 1_800_000_000 * SECOND
PORT = ("host1", "mlx5_0", 1)


class Host:
    """A sysfs tree below `root`, and a monotonic clock that stands still unless moved."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_ns = 5 * SECOND

    def monotonic_ns(self) -> int:
        return self.now_ns

    def write(self, path: str, value: int | str, nic: str = "mlx5_0") -> None:
        file = self.root / "class/infiniband" / nic / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    def reader(self, *ports: tuple[str, str, int], period_ns: int = SECOND) -> CounterReader:
        nics = pl.DataFrame(ports or [PORT], schema=["node", "nic", "port"], orient="row")
        return CounterReader(nics, WALL, self.root, period_ns, self.monotonic_ns)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.write("ports/1/counters/port_xmit_data", 5000)
    host.write("ports/1/counters/port_xmit_packets", 10)
    host.write("ports/1/state", "4: ACTIVE")
    return host


def after(host: Host, reader: CounterReader, seconds: float) -> dict[str, pl.DataFrame]:
    host.now_ns += round(seconds * SECOND)
    return reader.read()


@pytest.mark.parametrize("rate", ["25 Gb/sec (1X EDR)", "50 Gb/sec (2X HDR)", "100 Gb/sec (4X EDR)"])
def test_port_xmit_data_is_four_bytes_a_word_at_any_link_width(host: Host, rate: str) -> None:
    host.write("ports/1/rate", rate)
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/port_xmit_data", 6000)
    host.write("ports/1/counters/port_xmit_packets", 14)
    rows = after(host, reader, 1)["port_samples"]
    assert rows.rows() == [(*PORT, "sysfs", "tx", WALL + 5 * SECOND, SECOND, 4000, 4)]


def test_a_driver_without_byte_counters_gives_no_bytes_instead_of_zero(host: Host) -> None:
    (host.root / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data").unlink()
    host.write("ports/1/counters/port_rcv_data", "N/A (not supported)")
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/port_xmit_packets", 20)
    tables = after(host, reader, 1)
    assert tables["port_samples"].is_empty()
    assert "port_rcv_data" not in set(tables["port_counters"]["counter"])
    assert reader.coverage()["direction"].to_list() == [None]
    assert reader.notes == ["mlx5_0/1 count no bytes in sysfs, so there are no bytes per port of them"]


def test_counters_of_an_efa_device_keep_their_own_names(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.write("ports/1/state", "4: ACTIVE", "efa_0")
    for name, value in {"tx_bytes": 100, "rx_bytes": 7, "rdma_read_bytes": 5, "a_counter_of_2031": 1}.items():
        host.write(f"ports/1/hw_counters/{name}", value, "efa_0")
    reader = host.reader(("host1", "efa_0", 1))
    reader.start()
    host.write("ports/1/hw_counters/tx_bytes", 350, "efa_0")
    tables = after(host, reader, 1)
    names = {"tx_bytes", "rx_bytes", "rdma_read_bytes", "a_counter_of_2031", "state"}
    assert set(tables["port_counters"]["counter"]) == names
    assert tables["port_samples"].select("direction", "bytes", "packets").rows() == [("tx", 250, None)]


def test_lifespan_is_a_cache_time_and_hw_counters_are_not_read_faster(host: Host) -> None:
    host.write("ports/1/hw_counters/lifespan", 12)
    host.write("ports/1/hw_counters/np_cnp_sent", 1)
    reader = host.reader(period_ns=1_000_000)
    reader.start()
    seen = []
    for step in range(1, 25):
        host.write("ports/1/hw_counters/np_cnp_sent", 1 + step)
        host.write("ports/1/counters/port_xmit_packets", 10 + step)
        seen.append(after(host, reader, 0.001)["port_counters"])
    rows = pl.concat(seen)
    assert "lifespan" not in set(rows["counter"])
    times = ((rows.filter(counter="np_cnp_sent")["t_ns"] - WALL - 5 * SECOND) // 1_000_000).to_list()
    assert times == [0, 12, 24]
    assert rows.filter(counter="port_xmit_packets").height == 25


def test_repeated_equal_readings_give_one_row_and_no_sample(host: Host) -> None:
    reader = host.reader()
    reader.start()
    tables = [after(host, reader, 1) for _ in range(5)]
    assert [table["port_counters"].height for table in tables] == [3, 0, 0, 0, 0]
    assert sum(table["port_samples"].height for table in tables) == 0
    assert reader.coverage()["last_ns"].to_list() == [WALL + 10 * SECOND]


@pytest.mark.parametrize("device_id", ["0x1017", "0x1021"])
def test_port_xmit_wait_is_kept_in_the_ticks_of_the_card(host: Host, device_id: str) -> None:
    host.write("device/device", device_id)
    host.write("ports/1/counters/port_xmit_wait", 123_456_789)
    reader = host.reader()
    reader.start()
    rows = reader.read()["port_counters"].filter(counter="port_xmit_wait")
    assert rows["value"].to_list() == [123_456_789]


def test_a_counter_whose_name_has_a_comma(host: Host) -> None:
    host.write("ports/1/hw_counters/SwLinkUp,32", 4)
    reader = host.reader()
    reader.start()
    assert "SwLinkUp,32" in reader.read()["port_counters"]["counter"].to_list()


def test_a_32_bit_counter_that_wraps_goes_on(host: Host) -> None:
    host.write("ports/1/hw_counters/out_of_sequence", 2**32 - 10)
    reader = host.reader()
    reader.start()
    host.write("ports/1/hw_counters/out_of_sequence", 20)
    after(host, reader, 1)
    host.write("ports/1/hw_counters/out_of_sequence", 21)
    rows = after(host, reader, 1)["port_counters"]
    assert rows["value"].to_list() == [2**32 + 21]
    assert reader.coverage()["lost"].to_list() == [0]


def test_a_reset_counts_no_bytes_and_is_counted_as_lost(host: Host) -> None:
    host.write("ports/1/hw_counters/out_of_sequence", 3_000_000_000)
    host.write("ports/1/counters/port_xmit_data", 3_000_000_000)
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/port_xmit_data", 100)
    host.write("ports/1/hw_counters/out_of_sequence", 0)
    tables = after(host, reader, 1)
    assert tables["port_samples"].is_empty()
    assert tables["port_counters"].filter(counter="port_xmit_data")["value"].to_list() == [3_000_000_000, 100]
    assert reader.coverage()["lost"].to_list() == [2]
    host.write("ports/1/counters/port_xmit_data", 101)
    assert after(host, reader, 1)["port_samples"]["bytes"].to_list() == [4]


def test_a_64_bit_counter_does_not_wrap_at_2_to_the_32(host: Host) -> None:
    host.write("ports/1/counters/port_xmit_data", 2**32 - 10)
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/port_xmit_data", 20)
    assert after(host, reader, 1)["port_samples"].is_empty()
    assert reader.coverage()["lost"].to_list() == [1]


def test_a_64_bit_counter_passes_2_to_the_32(host: Host) -> None:
    host.write("ports/1/counters/port_xmit_data", 2**32 - 2)
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/port_xmit_data", 2**32 + 2)
    assert after(host, reader, 1)["port_samples"]["bytes"].to_list() == [16]


def test_an_old_data_counter_that_stopped_at_its_end_is_absent(host: Host) -> None:
    host.write("ports/1/counters/port_xmit_data", 2**32 - 1)
    reader = host.reader()
    reader.start()
    assert reader.coverage()["direction"].to_list() == [None]


def test_the_bin_is_as_long_as_the_readings_were_apart(host: Host) -> None:
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/port_xmit_data", 5010)
    rows = after(host, reader, 1.37)["port_samples"]
    assert rows["bin_ns"].to_list() == [1_370_000_000]
    assert reader.period_ns() == (1_370_000_000, 1_370_000_000)
    host.write("ports/1/counters/port_xmit_data", 5020)
    assert after(host, reader, 0.5)["port_samples"].is_empty()
    assert reader.stop()["port_samples"]["bin_ns"].to_list() == [500_000_000]
    assert reader.stop() == {}


def test_a_gap_too_long_for_a_bin_gives_no_sample(host: Host) -> None:
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/port_xmit_data", 5010)
    assert after(host, reader, 5)["port_samples"].is_empty()


def test_a_link_that_goes_down_and_comes_back(host: Host) -> None:
    host.write("ports/1/counters/link_downed", 3)
    reader = host.reader()
    reader.start()
    host.write("ports/1/state", "1: DOWN")
    host.write("ports/1/counters/link_downed", 4)
    down = after(host, reader, 1)["events"]
    host.write("ports/1/state", "4: ACTIVE")
    up = after(host, reader, 1)["events"]
    t_ns = WALL + 6 * SECOND
    assert down.rows() == [(*PORT, None, t_ns, "port_down", 1)]
    assert up.rows() == [(*PORT, None, t_ns + SECOND, "port_up", 1)]


def test_a_link_that_flaps_between_two_readings(host: Host) -> None:
    host.write("ports/1/counters/link_downed", 3)
    reader = host.reader()
    reader.start()
    host.write("ports/1/counters/link_downed", 5)
    events = after(host, reader, 1)["events"]
    assert events.select("kind", "value").rows() == [("port_down", 2), ("port_up", 1)]


def test_one_of_eight_rails_is_invisible(host: Host) -> None:
    for rail in range(7):
        host.write("ports/1/counters/port_xmit_data", 1, f"mlx5_{rail}")
    reader = host.reader(*[("host1", f"mlx5_{rail}", 1) for rail in range(8)])
    reader.start()
    assert reader.notes == ["no counters can be read of mlx5_7/1"]
    assert reader.coverage()["nic"].to_list() == [f"mlx5_{rail}" for rail in range(7)]


def test_a_host_without_counters_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="mlx5_0/1"):
        Host(tmp_path).reader().start()


def test_a_device_that_disappears_is_covered_until_then(host: Host) -> None:
    reader = host.reader()
    reader.start()
    after(host, reader, 1)
    (host.root / "class/infiniband/mlx5_0").rename(host.root / "gone")
    after(host, reader, 1)
    assert reader.coverage()["last_ns"].to_list() == [WALL + 6 * SECOND]


def test_device_wide_counters_have_port_0(host: Host) -> None:
    host.write("hw_counters/alloc_ucontext", 9)
    reader = host.reader()
    reader.start()
    rows = reader.read()["port_counters"].filter(counter="alloc_ucontext")
    assert rows["port"].to_list() == [0]


@given(st.lists(st.integers(0, 90_000_000), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_an_unwrapped_counter_is_the_sum_of_what_happened(steps: list[int], start: int) -> None:
    log, total, counted = CounterLog("sysfs"), start, 0
    log.add(PORT, "out_of_buffer", 0, start)
    for second, step in enumerate(steps, 1):
        total += step
        change = log.add(PORT, "out_of_buffer", second * SECOND, total % 2**32)
        assert change is not None
        assert change.count is not None
        counted += change.count
    assert counted == sum(steps)
    assert log.take()["value"][-1] == total


@given(st.binary(max_size=80))
@settings(max_examples=300)
def test_no_text_in_a_file_of_a_driver_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    host = Host(tmp_path_factory.getbasetemp() / "any_text")
    host.write("ports/1/counters/port_xmit_packets", 1)
    (host.root / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data").write_bytes(text)
    reader = host.reader()
    reader.start()
    assert reader.stop()["port_samples"].is_empty()
