"""The card's counting core: the same bins on x86-64, on RISC-V and in Python, in few instructions and little memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from pcc_stream import PCC, ROOT, WARNINGS, build_relay, compiler, generate, mutate, relay

from pulse_bpf.nic.pcc.dump import DumpDecoder
from pulse_bpf.nic.pcc.events import (
    BINS,
    COUNTED,
    EPOCH,
    EPOCH_BINS,
    EVENT,
    FRAME,
    RESPONSE,
    SPREAD_BINS,
    TX,
    EventDecoder,
)

BIN_SHIFT = 15
READINGS = ("sum", "cumulative")
AMPLE = ("-DPCC_WORKERS=4", "-DPCC_WORKER_BYTES=(32<<20)", "-DPCC_FLOW_BITS=12")
CORE_FLAGS = ["-std=c11", "-O2", "-ffreestanding", "-fno-tree-loop-distribute-patterns", *WARNINGS]
MI = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pcc")


@pytest.fixture(scope="module")
def native(folder: Path) -> list[str]:
    return [str(build_relay(folder, "relay", *AMPLE))]


@pytest.fixture(scope="module")
def checked(folder: Path) -> list[str]:
    """The same with every memory access and undefined operation checked."""
    options = (
        "-UPCC_FLOW_BITS",
        "-DPCC_FLOW_BITS=16",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    )
    return [str(build_relay(folder, "checked", *AMPLE, *options))]


@pytest.fixture(scope="module")
def riscv(folder: Path) -> list[str]:
    program = build_relay(folder, "riscv", *AMPLE, compile_with="riscv64-linux-gnu-gcc")
    return [compiler("qemu-riscv64"), str(program)]


def on_card_clock(bins: pl.DataFrame) -> pl.DataFrame:
    """Sums per flow and bin, whose times are the 32 bits that the card knows."""
    low = bins.with_columns(pl.col("start_ns") % 2**32)
    return low.group_by("flow_tag", "queue_pair", "start_ns").agg(pl.col("units").sum()).sort(pl.all())


def per_flow(feedback: pl.DataFrame) -> pl.DataFrame:
    counted = feedback.filter(pl.col("kind") != "rtt")
    return counted.group_by("flow_tag", "queue_pair", "kind").agg(pl.col("value").sum()).sort(pl.all())


def assert_agreement(
    program: list[str], events: NDArray[np.void], folder: Path, reading: str, poll_ms: int = 100
) -> None:
    decoder = EventDecoder(BIN_SHIFT, reading == "cumulative")
    # In batches of odd sizes: what is known of a flow must outlive one.
    parts = [decoder.decode(part) for part in np.array_split(events, 7)]
    bins, feedback = (pl.concat(tables) for tables in zip(*parts, strict=True))
    dump = DumpDecoder(1 << BIN_SHIFT)
    batch = dump.decode(bytearray(relay(program, events, folder, reading, poll_ms)))
    assert dump.undecoded == 0
    assert dump.lost() == 0
    assert on_card_clock(batch.bins).equals(on_card_clock(bins))
    from_card, decoded, clipped = per_flow(batch.feedback), per_flow(feedback), dump.counters()["clipped"]
    assert from_card.drop("value").equals(decoded.drop("value"))
    assert clipped or from_card.equals(decoded)
    assert from_card["value"].sum() + clipped == decoded["value"].sum()
    assert dump.counters() == {**decoder.counters, "clipped": clipped}
    assert len(bins) > len(events) // 10


@pytest.mark.parametrize("reading", READINGS)
def test_c_and_python_agree_on_a_million_events(native: list[str], folder: Path, reading: str) -> None:
    assert_agreement(native, generate(1_000_000, 500, 1, reading == "cumulative"), folder, reading)


@pytest.mark.parametrize("reading", READINGS)
def test_riscv_and_python_agree_on_a_million_events(riscv: list[str], folder: Path, reading: str) -> None:
    assert_agreement(riscv, generate(1_000_000, 500, 2, reading == "cumulative"), folder, reading)


def mutated(count: int, seed: int, cumulative: bool) -> NDArray[np.void]:
    """Mutated events of a new flow every fifth: of flows with one tag the card holds 16 only."""
    events = generate(count, 50, seed, cumulative)
    events["flow_tag"] = np.arange(count) // 5 * 0x9E3779B1
    events["extra"] = np.arange(count) // 5 + 1
    return mutate(events, seed + 1)


@pytest.mark.parametrize("reading", READINGS)
def test_mutated_events_are_counted_alike_and_touch_no_foreign_memory(
    checked: list[str], folder: Path, reading: str
) -> None:
    # Polls so rare that no flow, in a time that jumps about, is taken for one that has gone.
    assert_agreement(checked, mutated(20_000, 3, reading == "cumulative"), folder, reading, 2000)


@pytest.mark.long
def test_a_million_mutated_events(checked: list[str], folder: Path) -> None:
    for seed in range(50):
        assert_agreement(
            checked, mutated(20_000, 100 + seed, bool(seed % 2)), folder, READINGS[seed % 2], 2000
        )


def test_decoded_bins_hold_every_unit_of_every_burst() -> None:
    events = generate(100_000, 100, 5)
    bins, _ = EventDecoder(BIN_SHIFT, False).decode(events)
    sent = events["attributes"].astype(np.uint32) & 0xFF == TX
    assert bins.schema == BINS
    assert bins["units"].sum() == int((events["counters"].astype(np.uint32) & 0xFFFF)[sent].sum())


def test_a_long_burst_is_spread_evenly_and_a_short_one_counts_where_it_ended() -> None:
    bin_ns = 1 << BIN_SHIFT
    events = np.zeros(2, EVENT)
    events["attributes"], events["extra"], events["flow_tag"] = TX, 7, 9
    events["timestamp_ns"] = [4 * bin_ns + bin_ns // 2, 10 * bin_ns + 10]
    events["first_timestamp_ns"] = [2 * bin_ns + bin_ns // 2, 10 * bin_ns - 10]
    events["counters"] = [1600, 50]
    bins, _ = EventDecoder(BIN_SHIFT, False).decode(events)
    counted = dict(bins.sort("start_ns").select("start_ns", "units").iter_rows())
    # 17 eighths of a bin: the last one began, so it is part of the burst.
    assert counted == {
        2 * bin_ns: 376,
        3 * bin_ns: 752,
        4 * bin_ns: 472,
        10 * bin_ns: 50,
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gcc", []),
        ("riscv64-unknown-elf-gcc", ["-march=rv64imac", "-mabi=lp64", "-mcmodel=medany"]),
        ("riscv64-linux-gnu-gcc", []),
    ],
)
def test_the_core_needs_no_library(name: str, options: list[str], tmp_path: Path) -> None:
    path = compiler(name)
    built = tmp_path / "core.o"
    subprocess.run([path, *CORE_FLAGS, *options, "-c", str(PCC / "core.c"), "-o", str(built)], check=True)
    tools = path.removesuffix("gcc")
    listed = subprocess.run([f"{tools}nm", "-u", str(built)], check=True, capture_output=True, text=True)
    assert listed.stdout == ""
    code = subprocess.run([f"{tools}objdump", "-d", str(built)], check=True, capture_output=True, text=True)
    functions = re.findall(r"^[0-9a-f]+ <(\w+)>:\n((?:.+\n)+)", code.stdout, re.MULTILINE)
    dividing = {symbol for symbol, body in functions if re.search(r"\t(i?div|rem)", body)}
    assert dividing <= {"pcc_create", "pcc_answer"}
    assert len(functions) > 4


@pytest.mark.parametrize("reading", READINGS)
def test_an_event_takes_at_most_60_instructions(reading: str, tmp_path: Path) -> None:
    program = build(tmp_path, "pcc_count.c", "riscv64-linux-gnu-gcc", "-static")
    cumulative = reading == "cumulative"
    for mix, events in (("healthy", healthy(cumulative)), ("rough", generate(3000, 50, 7, cumulative))):
        instructions = instructions_per_event(program, events, tmp_path, reading)
        print(f"{mix}, {reading}: {instructions:.1f} rv64 instructions per event")
        assert 20 < instructions <= 60


def healthy(cumulative: bool) -> NDArray[np.void]:
    """What a card in good health says: bursts of up to 30 us, now and then a CNP or an RTT, flows in their order."""
    events = generate(3000, 50, 7, cumulative)
    rng = np.random.default_rng(8)
    sent = rng.random(len(events)) < 0.92
    events["attributes"] = np.where(sent, TX, rng.choice([2, 5, 6], len(events), p=[0.4, 0.1, 0.5]))
    events["extra"] = np.where(sent, events["flow_tag"].astype(np.uint32) % 2**24 | 1, 1)
    bursts = rng.integers(0, 30_000, len(events))
    stamps = events["timestamp_ns"].astype(np.uint32)
    events["first_timestamp_ns"] = stamps - bursts.astype(np.uint32)
    units = rng.integers(16, 4000, len(events))
    if cumulative:
        units = np.cumsum(np.where(sent, 500, 0)) & 0xFFFF
    events["counters"] = units
    return events


def instructions_per_event(program: Path, events: NDArray[np.void], folder: Path, reading: str) -> float:
    """Instructions executed outside of main, by the slope between two numbers of events: all else cancels out."""
    path = folder / "counted"
    events.tofile(path)
    first, last = 1500, 3000
    totals = []
    for count in (first, last):
        command = [compiler("qemu-riscv64"), "-singlestep", "-d", "nochain,exec", str(program), str(path)]
        command += [str(count), *(["cumulative"] if reading == "cumulative" else [])]
        traced = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert traced.stderr is not None
        total = 0
        while chunk := traced.stderr.read(2**22) + traced.stderr.readline():
            # A line of qemu's trace per instruction, at whose end is the function.
            total += chunk.count(b"Trace ") - chunk.count(b" main\n")
        totals.append(total)
        assert traced.wait() == 0
    return (totals[1] - totals[0]) / (last - first)


def build(folder: Path, source: str, compile_with: str, *options: str) -> Path:
    program = folder / source.removesuffix(".c")
    sources = [str(ROOT / "tests/targets" / source), str(PCC / "core.c")]
    command = [compiler(compile_with), "-std=c11", "-O2", *WARNINGS, *options, f"-I{PCC}", *sources]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


# Bytes, log2 of the table of flows, flows, of which active at a time, for how many bins, bins in all.
EVERY_BIN = (12, 2000, 2000, 1, 34_000)
TAKING_TURNS = (14, 10_000, 16, 48, 100_000)


@pytest.fixture(scope="module")
def load(folder: Path) -> Path:
    return build(folder, "pcc_load.c", "gcc")


def run_load(program: Path, size: int, load: tuple[int, ...]) -> tuple[int, int, int, bool]:
    command = [str(program), str(size), *map(str, load)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    sent, received, lost, same = map(int, printed.split())
    return sent, received, lost, bool(same)


@pytest.mark.parametrize(("size", "work"), [(128 * MI, EVERY_BIN), (4 * MI, TAKING_TURNS)])
def test_nothing_is_lost_in_the_memory_that_is_promised(load: Path, size: int, work: tuple[int, ...]) -> None:
    sent, received, lost, same = run_load(load, size, work)
    assert lost == 0
    assert received == sent
    assert same


@pytest.mark.parametrize(("size", "work"), [(64 * MI, EVERY_BIN), (2 * MI, TAKING_TURNS)])
def test_what_does_not_fit_is_counted_to_the_unit(load: Path, size: int, work: tuple[int, ...]) -> None:
    sent, received, lost, same = run_load(load, size, work)
    assert lost > 0
    assert received + lost == sent
    assert not same


def test_memory_is_as_the_formula_says(folder: Path) -> None:
    source = folder / "bytes.c"
    source.write_text(
        '#include <stdio.h>\n#include "core.h"\n'
        'int main(void) { printf("%zu %zu %zu %zu", sizeof(struct pcc_epoch), sizeof(struct pcc_response),'
        " (size_t)pcc_bytes(1, 0), (size_t)pcc_bytes(12, 1000)); }\n"
    )
    program = folder / "bytes"
    subprocess.run(
        [compiler("gcc"), f"-I{PCC}", str(source), str(PCC / "core.c"), "-o", str(program)], check=True
    )
    epoch, response, fixed, whole = map(int, subprocess.check_output([program]).split())
    assert epoch == EPOCH.itemsize == 272
    assert response == RESPONSE.itemsize
    assert abs((whole - fixed) - (17 * (2**12 - 2) + 272 * 1000)) < 8


def test_python_knows_the_constants_of_the_c() -> None:
    header = (PCC / "core.h").read_text()
    for name, value in (("PCC_EPOCH_BINS", EPOCH_BINS), ("PCC_SPREAD_BINS", SPREAD_BINS), ("PCC_TX", TX)):
        assert re.search(rf"{name} = {value}\b", header)
    counters = re.search(r"struct pcc_counters \{(.*?)\};", header, re.DOTALL)
    assert counters
    assert tuple(re.findall(r"uint64_t (\w+)", counters[1])) == ("events", *COUNTED)


def test_two_to_the_24_queue_pairs_come_and_go_in_a_small_table(folder: Path) -> None:
    """A thousand new ones every poll, each gone thereafter: the places of those that are gone are used again."""
    source = folder / "churn.c"
    source.write_text(CHURN)
    program = folder / "churn"
    command = [compiler("gcc"), "-O2", f"-I{PCC}", str(source), str(PCC / "core.c"), "-o", str(program)]
    subprocess.run(command, check=True)
    lost_flows, sent, received = map(int, subprocess.check_output([program], timeout=120).split())
    assert lost_flows == 0
    assert sent == received == 2**24 - 1


CHURN = """
#include <stdio.h>
#include <stdlib.h>
#include "core.h"
static union { struct pcc_response response; char room[1 << 20]; } answer;
int main(void) {
    uint64_t bytes = pcc_bytes(14, 8192), received = 0, sent = 0;
    struct pcc *pcc = pcc_create(calloc(1, bytes), bytes, 14, 0);
    uint32_t acknowledged = 0, poll = 0;
    for (uint32_t qpn = 1; qpn < 1 << 24; qpn++) {
        struct pcc_event event = {.key = (uint64_t)qpn << 32 | qpn * 40503u, .count = 1, .type = PCC_TX};
        pcc_event(pcc, &event);
        sent++;
        if (qpn % 1024 == 0 || qpn == (1 << 24) - 1) {
            poll++;
            do {
                struct pcc_request request = {PCC_MAGIC, 0, poll, acknowledged, 0};
                if (!pcc_answer(pcc, &request, &answer.response, sizeof(answer))) return 1;
                for (uint32_t n = 0; n < answer.response.epochs; n++)
                    for (int bin = 0; bin < PCC_EPOCH_BINS; bin++)
                        received += answer.response.epoch[n].units[bin];
                acknowledged = answer.response.first + answer.response.epochs;
            } while (answer.response.waiting);
        }
    }
    printf("%llu %llu %llu", (unsigned long long)answer.response.counters.lost_flows,
           (unsigned long long)sent, (unsigned long long)received);
}
"""


def test_frames_are_as_the_relay_writes_them() -> None:
    assert FRAME.itemsize == 24
    assert EVENT.itemsize == 44
