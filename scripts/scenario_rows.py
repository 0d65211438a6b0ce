"""What was expected of each scenario (the design's table, derived from how NCCL works), as claims to be measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from scenario_claims import (
    BESIDE,
    FULL_RATE,
    IN,
    INFINITE,
    LINE_GBPS,
    NEXT,
    OUT,
    Claim,
    agreeing,
    fewest,
    of,
    over_line,
    step,
    stretched,
    unfinished,
    varies,
)


@dataclass(frozen=True)
class Row:
    """How a scenario is run and shown, and what is claimed of it. `by_caller`: x is the GPU that calls, not the
    proxy that posts."""

    name: str
    workload: str
    severity: float
    claims: tuple[Claim, ...]
    by_caller: bool = False
    window_ms: float = 3.0
    at: str = "middle"  # of the recording; "start" of the fault; "gap": the longest one of x→y
    show: tuple[str, ...] = field(default=("x→y", "w→x", "far"))


ROWS = (
    Row(
        "gpu-slow",
        "fsdp",
        2.0,
        (
            Claim("x enters the next operator late: ms", lambda m: m.median("lag_ms"), 1, INFINITE),
            Claim("the others' D long, times", lambda m: m.median("stretch"), 1.5, INFINITE),
            Claim("x's D short (inversion), share of the others'", lambda m: m.median("share"), 0, 0.8),
            Claim("x→y then at R: peak Gbit/s", of(OUT, "peak_gbps"), *FULL_RATE),
            Claim("x→y without gaps: empty bins", of(OUT, "empty"), 0, 0.05),
            Claim("w→x waits for credit until x enters: empty bins", of(IN, "empty"), 0.3, 1),
        ),
        by_caller=True,
        window_ms=25,
    ),
    Row(
        "gpu-contended",
        "loops",
        2.0,
        (
            stretched(1.5, 3),
            Claim("little L: median lag over D", lambda m: m.median("late"), -0.1, 0.1),
            Claim("x→y bursts at R: peak Gbit/s", of(OUT, "peak_gbps"), *FULL_RATE),
            Claim("x→y with gaps: empty bins", of(OUT, "empty"), 0.1, 1),
            Claim("w→x bursts and gaps: empty bins", of(IN, "empty"), 0.1, 1),
            Claim("y→z starved just after: empty bins", of(NEXT, "empty"), 0.1, 1),
        ),
        by_caller=True,
    ),
    Row(
        "host-cpu",
        "loops",
        2.0,
        (
            stretched(1.3, 3),
            Claim("irregular gaps of 0.1 to 10 ms: longest ms", of(OUT, "longest_gap_ms"), 0.1, 12),
            Claim("p95 at R: peak Gbit/s", of(OUT, "peak_gbps"), *FULL_RATE),
            Claim(
                "both directions of x stall together: of the time that x→y stalls",
                lambda m: m.together,
                0.8,
                1,
            ),
        ),
        window_ms=20,
        at="gap",
    ),
    Row(
        "pcie-slow",
        "loops",
        4.0,
        (
            stretched(3, 6),
            Claim("x→y flat: variation", of(OUT, "variation"), 0, 0.25),
            Claim("x→y low: peak over R", over_line(OUT, "peak_gbps"), 0, 0.3),
            Claim("x→y without gaps: empty bins", of(OUT, "empty"), 0, 0.02),
            Claim("w→x flat: variation", of(IN, "variation"), 0, 0.25),
            Claim("w→x low: peak over R", over_line(IN, "peak_gbps"), 0, 0.35),
            Claim("maybe pause or CNP from x: CNPs on w→x", of(IN, "cnps"), 1, INFINITE),
        ),
    ),
    Row(
        "host-pause",
        "fsdp",
        3.0,
        (
            Claim("a few operators late: largest lag ms", lambda m: m.most("lag_ms"), 5, INFINITE),
            Claim("all others on time: median lag ms", lambda m: m.median("lag_ms"), -1, 0.5),
            Claim("x→y normal after that: peak Gbit/s", of(OUT, "peak_gbps"), *FULL_RATE),
        ),
        by_caller=True,
        window_ms=80,
        at="gap",
    ),
    Row(
        "nic-slow",
        "loops",
        4.0,
        (
            stretched(3.8, 4.2),
            agreeing(),
            Claim("x→y flat: variation", of(OUT, "variation"), 0, 0.05),
            Claim("x→y low: peak over R", over_line(OUT, "peak_gbps"), 0, 0.26),
            Claim("ACT = D: active bins of x→y", of(OUT, "active"), 0.98, 1),
            Claim("w→x bursts at R: peak Gbit/s", of(IN, "peak_gbps"), *FULL_RATE),
            Claim("w→x with gaps: empty bins", of(IN, "empty"), 0.2, 1),
            Claim("downstream bursts and gaps: empty bins", of(NEXT, "empty"), 0.2, 1),
        ),
    ),
    Row(
        "nic-flap",
        "loops",
        3.0,
        (
            Claim("x→y at exactly 0 for 0.1 to 10 s: ms", of(OUT, "longest_gap_ms"), 20, 10e3),
            Claim("with WR outstanding: timeouts of x→y", of(OUT, "timeouts"), 1, INFINITE),
            Claim("then O > 1", of(OUT, "sent_over_needed"), 1 + 1e-9, INFINITE),
            Claim("all QPs of that NIC at once: gap of w→x ms", of(IN, "longest_gap_ms"), 20, 10e3),
            Claim("other NICs go on: longest gap ms", of(BESIDE, "longest_gap_ms"), 0, 5),
        ),
        window_ms=150,
        at="gap",
        show=(OUT, IN, BESIDE),
    ),
    Row(
        "nic-down",
        "loops",
        1.0,
        (
            Claim("x→y stops: MiB after the stop", lambda m: float(m.stopped["mib"][0]), 0, 2),
            Claim("with WR outstanding: timeouts of x→y", of(OUT, "timeouts"), 1, INFINITE),
            Claim("w→x stops as well: MiB", lambda m: float(m.stopped["mib"][-1]), 0, 2),
        ),
        at="start",
    ),
    Row(
        "lossy-link",
        "fsdp",
        3.0,
        (
            stretched(1.05, INFINITE),
            Claim("saw-tooth: variation of x→y over that of the healthy one", varies, 1.5, INFINITE),
            Claim(
                "holes of a retransmission timeout: longest gap ms", of(OUT, "longest_gap_ms"), 1, INFINITE
            ),
            Claim("with WR outstanding: timeouts", of(OUT, "timeouts"), 1, INFINITE),
            Claim("O > 1", of(OUT, "sent_over_needed"), 1.01, INFINITE),
            Claim("the receiver counts fewer bytes: share", of(OUT, "received_over_sent"), 0, 0.999),
        ),
        window_ms=100,
        at="gap",
    ),
    Row(
        "congestion",
        "loops",
        2.0,
        (
            stretched(1.5, 3),
            Claim("x→y low: mean over R", over_line(OUT, "mean_gbps"), 0.3, 0.6),
            Claim("noisy: variation", of(OUT, "variation"), 0.05, INFINITE),
            Claim("CNP present", of(OUT, "cnps"), 1, INFINITE),
            Claim("ACT high: active bins", of(OUT, "active"), 0.95, 1),
            Claim(
                "p95 cut to the fair share: peak over half of R",
                lambda m: 2 * m.flows[OUT].peak_gbps / LINE_GBPS,
                0.9,
                1.2,
            ),
            Claim(
                "other flows of the job through other ports are not: CNPs beside", of(BESIDE, "cnps"), 0, 0
            ),
        ),
    ),
    Row(
        "path-collision",
        "loops",
        2.0,
        (
            stretched(1.8, 3),
            Claim("about R/2: mean over R", over_line(OUT, "mean_gbps"), 0.4, 0.55),
            Claim("constant: variation", of(OUT, "variation"), 0, 0.15),
            Claim(
                "no counter errors: NAKs and timeouts", lambda m: m.events["NAK"] + m.events["TIMEOUT"], 0, 0
            ),
            Claim("no CNP", of(OUT, "cnps"), 0, 0),
            Claim(
                "other channels between the same nodes normal: peak Gbit/s",
                of(BESIDE, "peak_gbps"),
                *FULL_RATE,
            ),
        ),
        show=(OUT, BESIDE, "far"),
    ),
    Row(
        "pause-storm",
        "loops",
        3.0,
        (
            stretched(2, INFINITE),
            Claim(
                "senders to x stop: bins of w→x below a fifth of the peak",
                lambda m: 1 - m.flows[IN].active,
                0.3,
                1,
            ),
            Claim("no loss: O of w→x", of(IN, "sent_over_needed"), 1, 1),
            Claim("pause frames: events", lambda m: m.events["PAUSE"], 1, INFINITE),
            Claim("x's outgoing starved: empty bins", of(OUT, "empty"), 0.3, 1),
        ),
        window_ms=10,
    ),
    Row(
        "hang-before",
        "loops",
        1.0,
        (
            Claim("bytes stop: operators that never ended", lambda m: float(unfinished(m)), 1, INFINITE),
            Claim("x has sent the least: hop of the fewest bytes", fewest, 0, 0),
            Claim("one step more per hop downstream: MiB more at y", lambda m: step(m, 1), 1, 100),
            Claim("w stops within 8 slots: MiB more than x", lambda m: step(m, 7), 0, 100),
        ),
        by_caller=True,
        window_ms=160,
        at="start",
    ),
    Row(
        "hang-inside",
        "loops",
        1.0,
        (
            Claim("bytes stop: operators that never ended", lambda m: float(unfinished(m)), 1, INFINITE),
            Claim("x stops at once: ms", lambda m: float(m.stopped["last_us"][0]) / 1e3, 0, 0.3),
            Claim("x has sent the least: hop of the fewest bytes", fewest, 0, 0),
            Claim("y stops one chunk later: MiB more", lambda m: step(m, 1), 1, 100),
            Claim("the next one chunk later: MiB more than y", lambda m: step(m, 2) - step(m, 1), 1, 100),
            Claim("w stops within 8 slots: MiB after the stop", lambda m: float(m.stopped["mib"][-1]), 0, 8),
        ),
        at="start",
    ),
    Row(
        "hang-kernel",
        "loops",
        1.0,
        (
            Claim("x stops at once: ms", lambda m: float(m.stopped["last_us"][0]) / 1e3, 0, 0.3),
            Claim("x has sent the least: hop of the fewest bytes", fewest, 0, 0),
            Claim(
                "w goes on into free slots: MiB after the stop", lambda m: float(m.stopped["mib"][-1]), 1, 100
            ),
        ),
        by_caller=True,
        at="start",
    ),
    Row(
        "crash",
        "loops",
        1.0,
        (
            Claim("x stops at once: ms", lambda m: float(m.stopped["last_us"][0]) / 1e3, 0, 0.1),
            Claim("x has sent the least: hop of the fewest bytes", fewest, 0, 0),
            Claim("WR outstanding of its peers: timeouts of w→x", of(IN, "timeouts"), 1, INFINITE),
        ),
        at="start",
    ),
    Row(
        "mismatch",
        "fsdp",
        1.0,
        (
            Claim("no completion: operators that never ended", lambda m: float(unfinished(m)), 1, INFINITE),
            Claim("x has sent the least: hop of the fewest bytes", fewest, 0, 0),
        ),
        by_caller=True,
        window_ms=200,
        at="start",
    ),
    Row(
        "ingress-slow",
        "loops",
        4.0,
        (
            stretched(3.5, 6),
            Claim("x→y, into the port, low: mean over R", over_line(OUT, "mean_gbps"), 0, 0.26),
            Claim("CNPs on x→y, unlike with a slow egress", of(OUT, "cnps"), 1, INFINITE),
            Claim("y→z starved: empty bins", of(NEXT, "empty"), 0.2, 1),
        ),
    ),
    Row(
        "nvlink-slow",
        "fsdp",
        4.0,
        (
            Claim("little L: median lag over D", lambda m: m.median("late"), -0.1, 0.1),
            stretched(1.3, INFINITE),
            Claim("x→y below R: peak over R", over_line(OUT, "peak_gbps"), 0, 0.7),
        ),
        by_caller=True,
    ),
    Row(
        "memory-pressure",
        "fsdp",
        2.0,
        (
            Claim("gaps of 1 to 20 ms: longest ms", of(OUT, "longest_gap_ms"), 1, 25),
            Claim("p95 at R: peak Gbit/s", of(OUT, "peak_gbps"), *FULL_RATE),
        ),
        window_ms=40,
        at="gap",
    ),
    Row(
        "far-socket",
        "loops",
        2.0,
        (
            stretched(1.8, 2.6),
            Claim(
                "both directions low, as with a slow slot: x→y over R",
                over_line(OUT, "peak_gbps"),
                0,
                0.55,
            ),
            Claim("w→x over R", over_line(IN, "mean_gbps"), 0, 0.55),
        ),
    ),
    Row(
        "two-nics",
        "loops",
        4.0,
        (
            stretched(3.8, 4.2),
            Claim("x→y as with one: active bins", of(OUT, "active"), 0.98, 1),
        ),
    ),
)
