"""Writes docs/scenarios.md: what each scenario was expected to look like, and what it does look like when simulated.

Needs matplotlib (in the dev extra). Takes about two minutes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from scenario_claims import Claim, Measured
from scenario_rows import ROWS, Row
from scenario_signatures import (
    BIN_NS,
    RECORD_NS,
    SECONDS,
    Run,
    Signature,
    after_stop,
    around,
    compared,
    curve,
    flow_of,
    inside,
    operators,
    signature,
    simulate,
)

from pulse_bpf.lab.sim.model import Seen
from pulse_bpf.lab.sim.scenarios import SCENARIOS, Scenario

DOCS = Path(__file__).parents[1] / "docs"
PLOTS = DOCS / "scenarios"

# The table that the scenarios were designed from: operators, the sender curve of x, the receiver curve and others.
EXPECTED = {
    "S1": (
        "x enters next op late; others' D long, x's D *short* (inversion)",
        "starts late, then normal R, G small",
        "credit absent until x enters; then normal. Every rank ACT normal",
    ),
    "S2": (
        "D long on all, little L",
        "bursts at R with gaps (reduce/copy kernel starved); gap with no WR outstanding",
        "bursts + gaps, credit-limited; y→.. starved gaps just after",
    ),
    "S3": (
        "D long on all, looks like network",
        "irregular 0.1-10 ms gaps (scheduler quantum), p95 = R, ACT normal",
        "both directions of x stall together (one proxy thread serves both)",
    ),
    "S4": (
        "D long on all",
        "flat low rate, no gaps, ACT high",
        "flat low too (DMA write bound), maybe pause/CNP from x: **both directions low**",
    ),
    "S5": (
        "one op per step late, random steps",
        "late start of first op after the pause, later ops normal",
        "as S1 but intermittent, CPU stack shows it",
    ),
    "S6": (
        "D long on all",
        "**flat, low p95, G ~ 0, ACT = D**",
        "bursts at R + gaps (credit-limited); downstream bursts + gaps (starved)",
    ),
    "S7": (
        "stall then burst or abort (error 12)",
        "rate to exact 0 for 0.1-10 s with WR outstanding; then O > 1 or end",
        "all QPs of that NIC stop at once, other NICs of x go on until dependency",
    ),
    "S8": (
        "D long, varies per op",
        "saw-tooth, RTO-sized holes (ms) with WR outstanding, **O > 1** (go-back-N)",
        "receiver bytes < sender bytes on that QP only",
    ),
    "S9": (
        "D long on all members of several groups",
        "low and *noisy* rate, CNP present, ACT high; p95 cut to fair share",
        "other flows crossing the same port drop at the same time, even other jobs",
    ),
    "S10": (
        "stable long D, same pair every step, no counter errors",
        "two flows ~R/2 each, constant, anti-correlated when one idles",
        "other QPs/channels of same NIC normal → path, not NIC",
    ),
    "S11": (
        "many groups long at once",
        "x's outgoing normal until starved; fan-in pattern = hot column",
        "all senders *to* x stop together, WR outstanding, no loss",
    ),
    "S12": (
        'no completion; all ranks same "running" op',
        "bytes stop; x has sent the **least**; no WR outstanding (proc)",
        "y stops one chunk later, next one chunk later ...; w stops after ≤ 8 slots of credit",
    ),
}

# Why a claim does not hold, and what is right.
OTHERWISE = {
    "gpu-slow": """
        The clock that is locked low is also that of the kernels that copy and reduce: at half the clock a
        channel moves less than the line takes, so x sends flat and below R once it has entered. What
        tells it from a slow NIC is the lag, and that all channels through x are slow, over whichever NIC
        they leave the node.
    """,
    "host-pause": """
        A pause shows as far as it outlasts what the host had enqueued ahead of the GPU: one that falls
        where the host is far ahead is shorter on the wire, or does not show at all.
    """,
    "nic-slow": """
        A victim's burst is one slice of 1 MiB, which a line of 392 Gbit/s carries in 21 µs: no bin of 32
        µs holds more than that slice, so the peak of the curve is 1 MiB a bin (262 Gbit/s) and not R.
        Only further away do slices bunch up. At half the rate the gap is 21 µs as well and hardly a bin
        stays empty.
    """,
    "nic-flap": """
        The outage on the wire is as long as the card's timer says, not as long as the port was down: 60
        ms down cost a first timeout of 67 ms. What is lost with the port is what was on its way, at most
        a round trip's worth: far below what O shows (and nothing in the simulator, whose fluid has no
        bytes on the wire). Other NICs go on to the end of the operator and wait there.
    """,
    "lossy-link": """
        Go-back-N answers a lost packet with a NAK within a round trip and sends some 60 packets again at
        full rate: x→y stays at R and even fills its gaps, and what is lost is goodput. Only the last
        packet of all that is queued can be lost without a NAK. That costs a timeout of 67 ms: rare, and
        hardly ever where operators follow each other back to back.
    """,
    "path-collision": """
        Two elephants overload the uplink as any congestion does: its queue marks, and both senders get
        CNPs. What tells it from congestion is that the flows that share the port are the job's own and
        always the same two, that nobody else's traffic has to be there, and that it is as steady as the
        job itself.
    """,
    "pause-storm": """
        The flows to x take much longer than the storms alone would make them: the queue that the pauses
        build up marks packets, and between two storms the senders' rates have no time to recover (CNPs on
        w→x).
    """,
    "hang-before": """
        The kernels that were enqueued run to their end, so the bytes stop some 80 ms after the host did.
        Then every node is ahead of x by what its eight GPUs hold, downstream and upstream: the fewest
        bytes are still at x, the most half a ring away.
    """,
    "hang-inside": """
        A stopped proxy neither posts nor grants: x→y and w→x stop within a slice of each other, and which
        has sent less is chance. From these two the bytes rise in both directions round the ring, by what
        the eight GPUs of a node hold, and the two slopes meet opposite to x.
    """,
    "nvlink-slow": """
        x also leaves each operator last, for it is inside its node that the data are late, and enters the next one
        late where that follows at once. A slow clock slows what is computed between them as well.
    """,
    "mismatch": """
        Nothing on the wire says which call a slice belongs to. The call after the skipped one takes its
        place, and the job goes on with wrong data, x one operator ahead of the others, until the sizes no
        longer fit (here about one iteration later). The volumes do not tell who it is; the calls do: x's
        n-th call on the communicator is not the others' n-th.
    """,
}

HEAD = """# Scenarios

Written by `.venv/bin/python scripts/describe_scenarios.py`, which simulates each scenario and measures it; only the
expectations and the reasons are typed in. Every claim is one of the design's table, made before there was a
simulator; ✗ marks what turned out otherwise, with the reason below it.

x is the rank, NIC or port at fault; the ring over nodes is … w → x → y → z …, "far" is the flow half the ring away and
"beside" another channel between the same two nodes. Curves are of payload in bins of {bin} µs, {seconds} s on 8 nodes
of 8 GPUs, over bins that lie wholly inside an operator of the flow. R is {line:.0f} Gbit/s, what a port of 400 Gbit/s
carries of payload. D is an operator's duration on a rank, L its start behind the median rank, ACT the bins with at
least a fifth of the flow's peak, O bytes sent over bytes needed.

"""


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scenarios", "font.size": 8})
    order = list(SCENARIOS)
    rows = sorted(ROWS, key=lambda row: order.index(row.name))
    parts = [HEAD.format(bin=BIN_NS // 1000, seconds=SECONDS, line=400 * 4096 / 4178), _list_of_all()]
    for row in rows:
        print(row.name, flush=True)
        parts.append(_section(row))
    parts.append(_healthy_section())
    (DOCS / "scenarios.md").write_text("\n".join(parts))


def _list_of_all() -> str:
    lines = ["| scenario | row | what is wrong | finding | onsets | severity |", "|---|---|---|---|---|---|"]
    for scenario in SCENARIOS.values():
        expected = ", ".join(
            f"{kind} ({scope})" for kind, scope in zip(scenario.kinds, scenario.scopes, strict=True)
        )
        onsets = ", ".join(scenario.onsets)
        low, high = scenario.severities
        severity = f"{scenario.severity:g} ({low:g} to {high:g}): {scenario.meaning}" if low < high else "-"
        lines.append(
            f"| {scenario.name} | {scenario.row} | {scenario.title} | {expected or '-'} | {onsets} | {severity} |"
        )
    return "\n".join(lines) + "\n"


def _section(row: Row) -> str:
    scenario = SCENARIOS[row.name]
    run, twin = simulate(row.name, row.workload, row.severity), simulate("healthy", row.workload, 1.0)
    roles = around(run, flow_of(run, run.prepared.faults[0], row.by_caller))
    measured = _measure(run, twin, roles)
    _plot(row, run, roles)
    lines = [
        f"## {scenario.row}: {row.name}, {scenario.title}",
        "",
        f"Workload {row.workload}, severity {row.severity:g}.",
    ]
    lines += [*_expectation(scenario), "", f"![curves](scenarios/{row.name}.svg)", ""]
    lines += ["| claim | measured | |", "|---|---|---|"]
    held = [_holds(claim, measured) for claim in row.claims]
    for claim, (value, good) in zip(row.claims, held, strict=True):
        lines.append(f"| {claim.text} | {_number(value)} | {'✓' if good else '✗'} |")
    if row.name in OTHERWISE:
        lines += ["", " ".join(OTHERWISE[row.name].split())]
    table = _stopping(measured) if scenario.meaning == "it stops" else _signatures(measured)
    return "\n".join([*lines, "", *table, ""])


def _measure(run: Run, twin: Run, roles: dict[str, int]) -> Measured:
    fault = run.prepared.faults[0]
    called = run.result.call_times["start_ns"]
    stop_ns = fault.start_ns if fault.call is None else float(called[fault.call])
    kinds = run.result.events["kind"]
    return Measured(
        run,
        {role: signature(run, flow) for role, flow in roles.items()},
        {role: signature(twin, flow) for role, flow in roles.items()},
        compared(run, twin, fault.gpu),
        {kind.name: int((kinds == kind).sum()) for kind in Seen},
        after_stop(run, roles["x→y"], max(stop_ns, RECORD_NS)),
        _together(run, roles),
    )


def _together(run: Run, roles: dict[str, int]) -> float:
    """Of the bins in which x→y is silent for 0.5 ms or more inside an operator, those in which w→x is too."""
    silent = (curve(run, roles["x→y"]) == 0) & inside(run, roles["x→y"])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], silent.astype(int), [0]])))
    long = np.zeros(len(silent), bool)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        long[start:end] = (end - start) * BIN_NS >= 0.5e6
    return float((curve(run, roles["w→x"])[long] == 0).mean()) if long.any() else float("nan")


def _holds(claim: Claim, measured: Measured) -> tuple[float, bool]:
    value = float(claim.value(measured))
    return value, claim.low <= value <= claim.high


def _number(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _expectation(scenario: Scenario) -> Sequence[str]:
    row = scenario.row.rstrip("abc")
    if row not in EXPECTED:
        return ()
    whole, sender, receiver = EXPECTED[row]
    return ("", f"Expected: operators: {whole}; x→y: {sender}; w→x and others: {receiver}.")


def _signatures(measured: Measured) -> list[str]:
    columns = (
        ("peak Gbit/s", "peak_gbps"),
        ("mean", "mean_gbps"),
        ("variation", "variation"),
        ("ACT", "active"),
        ("empty", "empty"),
        ("longest gap ms", "longest_gap_ms"),
        ("O", "sent_over_needed"),
        ("CNPs", "cnps"),
        ("NAKs", "naks"),
        ("timeouts", "timeouts"),
    )

    def line(label: str, of: Signature) -> str:
        return f"| {label} | " + " | ".join(_number(getattr(of, name)) for _, name in columns) + " |"

    lines = [
        "| flow | " + " | ".join(title for title, _ in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    lines += [line(role, of) for role, of in measured.flows.items() if not np.isnan(of.peak_gbps)]
    return [*lines, line("x→y, healthy", measured.healthy["x→y"])]


def _stopping(measured: Measured) -> list[str]:
    stopped = measured.stopped
    lines = ["| sent after the stop | " + " | ".join(f"x+{hop}" for hop in stopped["hop"]) + " |"]
    lines.append("|---" * (len(stopped) + 1) + "|")
    lines.append("| MiB | " + " | ".join(_number(mib) for mib in stopped["mib"]) + " |")
    lines.append("| last byte, ms | " + " | ".join(_number(us / 1e3) for us in stopped["last_us"]) + " |")
    return lines


def _plot(row: Row, run: Run, roles: dict[str, int]) -> None:
    first_ns = -(-int(RECORD_NS) // BIN_NS) * BIN_NS
    middle_ns = {"middle": (RECORD_NS + run.settings.end_ns) / 2, "start": run.prepared.faults[0].start_ns}
    if row.at == "gap":
        sent = np.where(inside(run, roles["x→y"]), curve(run, roles["x→y"]), 1)
        ends = np.flatnonzero(np.concatenate([[True], sent > 0, [True]]))
        widest = int(np.diff(ends).argmax())
        middle_ns["gap"] = first_ns + (ends[widest] + ends[widest + 1]) / 2 * BIN_NS
    count = int(row.window_ms * 1e6 / BIN_NS)
    start = max(0, int((middle_ns[row.at] - first_ns) / BIN_NS) - count // 2)
    figure, axes = plt.subplots(
        len(row.show), 1, figsize=(7, 0.75 * len(row.show) + 0.3), sharex=True, sharey=True
    )
    for axis, role in zip(axes, row.show, strict=True):
        rate = curve(run, roles[role])[start : start + count] * 8 / BIN_NS
        # Plots stay small: no more than 250 points, each the mean of some bins.
        wide = -(-len(rate) // 250)
        rate = rate[: len(rate) // wide * wide].reshape(-1, wide).mean(1)
        axis.step(np.arange(len(rate)) * wide * BIN_NS / 1e6, rate, where="post", linewidth=0.8)
        axis.set_ylabel(role)
        axis.set_ylim(0, 420)
    axes[-1].set_xlabel(f"ms; Gbit/s of payload, bins of {wide * BIN_NS // 1000} µs")
    figure.tight_layout(pad=0.3)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # A tenth of a point is all that shows, and half of the file.
    (PLOTS / f"{row.name}.svg").write_text(re.sub(r"(\d\.\d)\d+", r"\1", drawn.getvalue()))


def _healthy_section() -> str:
    lines = [
        "## Healthy runs",
        "",
        "What a run may look like though nothing is broken: over operators that ended, the time from the first rank's "
        "entering to the last one's, and the longest duration over the shortest.",
        "",
        "| scenario | workload | median spread of starts ms | largest ms | median longest over shortest D | CNPs |",
        "|---|---|---|---|---|---|",
    ]
    for scenario in SCENARIOS.values():
        if not scenario.name.startswith("healthy"):
            continue
        for workload in scenario.workloads:
            print(scenario.name, workload, flush=True)
            run = simulate(scenario.name, workload, scenario.severity)
            took = pl.col("end_ns") - pl.col("start_ns")
            found = (
                operators(run)
                .group_by("comm", "seq")
                .agg(
                    starts=(pl.col("start_ns").max() - pl.col("start_ns").min()) / 1e6,
                    spread=took.max() / took.min(),
                    ended=pl.col("end_ns").is_not_null().all(),
                )
                .filter("ended")
            )
            numbers = (found["starts"].median(), found["starts"].max(), found["spread"].median())
            shown = " | ".join(_number(float(x)) if isinstance(x, (int, float)) else "-" for x in numbers)
            cnps = int((run.result.events["kind"] == Seen.CNP).sum())
            lines.append(f"| {scenario.name} | {workload} | {shown} | {cnps} |")
            simulate.cache_clear()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
