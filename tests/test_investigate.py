"""`pulse investigate` through real sshds: all nodes, nodes that fail in every way, and an end in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from live import compiled, entry_bytes, real_nccl
from live import running as running_program
from polars.testing import assert_frame_equal
from ssh_nodes import PULSE, Cluster, cluster

from pulse_bpf import analysis
from pulse_bpf.analysis.load import load
from pulse_bpf.elf import Elf
from pulse_bpf.errors import NO_DATA, OK, PARTIAL
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.probes.identity import ACCESSORS, rank_offset

pytestmark = pytest.mark.root

NODES = [f"node{number}" for number in range(8)]
SLOW = "node1"
# Everything undone: agents have seconds for it, and machines that run tests are busy.
CLEAN_WITHIN_S = 30
# The kernel takes a breakpoint out of a process's memory a moment after the last of its users has let go.
RESTORED_WITHIN_S = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What eight nodes with a GPU each would record of a job, one of whose NICs is slow."""
    directory = tmp_path_factory.mktemp("job") / "recording"
    simulate("nic-slow", directory, seed=5, nodes=8, gpus=1, seconds=1.0, bin_us=100)
    truth = json.loads((directory / "truth.json").read_text())
    assert [fault["node"] for fault in truth["faults"]] == [SLOW]
    # What the analysis compiles once, nodes would all compile at the same time.
    analysis.measure(load([directory]))
    return directory


def command(nodes: Cluster, output: Path, *arguments: str | Path) -> list[str]:
    options = ["--ssh-config", nodes.config, "-o", output, "--json", "--patience", "250"]
    return [str(PULSE), "investigate", *map(str, options), *map(str, arguments)]


# A rehearsal on nodes that are checked nevertheless.
_CHECKED = """
import dataclasses, sys
from pulse_bpf import cli
from pulse_bpf.fleet import investigate
as_planned = investigate.investigate
investigate.investigate = lambda plan, *rest: as_planned(dataclasses.replace(plan, checks=True), *rest)
sys.exit(cli.main(sys.argv[1:]))
"""


@contextmanager
def running(*arguments: Any, checked: bool = False) -> Iterator[subprocess.Popen[str]]:
    program, *rest = command(*arguments)
    with subprocess.Popen(
        [*([sys.executable, "-c", _CHECKED] if checked else [program]), *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def await_(condition: Callable[[], object], process: subprocess.Popen[str], what: str) -> None:
    until = time.monotonic() + 250
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, f"not within 250 s: {what}"
        time.sleep(0.05)


def doing(nodes: Cluster, name: str, *words: str) -> list[int]:
    """The processes of a node with these words in their command lines."""
    found = []
    for pid in nodes.pids(name):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if all(word.encode() in line for word in words):
            found.append(pid)
    return found


def recorded(nodes: Cluster, name: str) -> list[Path]:
    """What a node has recorded by now of calls."""
    return list(nodes.nodes[name].tmp.glob("**/pulse-agent-*/recording/ops/*.parquet"))


def without_privilege(directory: Path) -> Path:
    """A `pulse` that has no capability, as an ordinary user's."""
    weak = directory / "weak-pulse"
    weak.write_text(f'#!/bin/sh\nexec setpriv --bounding-set=-all --inh-caps=-all {PULSE} "$@"\n')
    weak.chmod(0o755)
    return weak


def others_attached() -> bool:
    """Whether any process holds a probe."""
    for directory in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            for path in directory.iterdir():
                with suppress(OSError):
                    if re.search("bpf_link|perf_event", os.readlink(path)):
                        return True
    return False


def test_the_slow_node_is_named_by_one_command(tmp_path: Path, job: Path) -> None:
    output = tmp_path / "out"
    with cluster(tmp_path, NODES) as nodes:
        arguments = command(nodes, output, "-w", "node[0-7]", "--rehearse", job, "-d", "2")
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.returncode == OK, done.stderr
        assert nodes.clean_within(CLEAN_WITHIN_S) == []
    findings = json.loads(done.stdout)
    assert findings["verdict"] == "anomaly"
    assert [(item["kind"], item["node"]) for item in findings["findings"]] == [("nic-slow", SLOW)]
    assert findings["coverage"]["nodes"] == NODES
    assert findings["coverage"]["nodes_missing"] == []
    report = (output / "report.html").read_text()
    assert SLOW in report
    assert not list(output.rglob("*.tmp"))
    assert not (output / "incoming").exists()

    # Samples of the suspect and of those beside it, not of all.
    sampled = {path.stem for path in (output / "samples").iterdir()}
    assert SLOW in sampled
    assert len(sampled) < len(NODES)

    # What the nodes cut themselves is what one machine would have cut out of all their samples.
    operators, flows = analysis.measure(load([output]))
    whole, owners = analysis.measure(load([job]))
    shift_ns = int(operators["call_ns"].min()) - int(whole["call_ns"].min())  # type: ignore[arg-type]
    moments = [name for name in whole.columns if name in ("call_ns", "start_ns", "end_ns", "prev_end_ns")]
    moments += ["first_gap_ns", "first_stall_ns", "last_byte_ns", "byte_mean_ns", "credit_mean_ns"]
    key = [name for name in whole.columns if name != "flows"]
    moved = whole.with_columns(pl.col(moments) + shift_ns)
    assert_frame_equal(operators.sort(key), moved.sort(key))
    assert_frame_equal(flows.sort("flow"), owners.with_columns(pl.col("created_ns") + shift_ns).sort("flow"))

    audit = json.loads((output / "manifest.json").read_text())["investigation"]["nodes"]
    assert [row["name"] for row in audit] == NODES
    assert all(row["undone"] and row["failed"] is None for row in audit)
    assert len({row["start_ns"] for row in audit}) == 1, "they begin at one moment, as their clocks are one"

    again = subprocess.run([PULSE, "analyze", output, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == findings


@pytest.mark.bcc
def test_nodes_that_fail_cost_their_own_data_and_are_named(tmp_path: Path, job: Path) -> None:
    old = tmp_path / "old-pulse"
    old.write_text("#!/bin/sh\necho \"pulse: error: argument VERB: invalid choice: 'node'\" >&2\nexit 2\n")
    old.chmod(0o755)
    weak = without_privilege(tmp_path)
    output = tmp_path / "out"
    up = [name for name in NODES if name != "node0"]
    with cluster(tmp_path, up, {"node3": old, "node7": weak}) as nodes:
        nodes.add_down("node0")
        os.kill(nodes.nodes["node2"].sshd.pid, signal.SIGSTOP)
        full = nodes.nodes["node5"].tmp
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=True)
        try:
            arguments = (nodes, output, "-w", "node[0-7]", "--rehearse", job, "-d", "2")
            with running(*arguments, checked=True) as process:
                await_(lambda: recorded(nodes, "node6"), process, "node6 records")
                for pid in doing(nodes, "node6", "pulse\0node"):
                    os.kill(pid, signal.SIGKILL)
                stdout, stderr = process.communicate()
            assert process.returncode == PARTIAL, stderr
            assert nodes.clean_within(CLEAN_WITHIN_S) == []
        finally:
            subprocess.run(["umount", full], check=True)
    findings = json.loads(stdout)
    reasons = {row["node"]: row["reason"] for row in findings["coverage"]["nodes_missing"]}
    assert sorted(reasons) == ["node0", "node2", "node3", "node5", "node6", "node7"]
    assert "cannot be reached" in reasons["node0"]
    assert "refused" in reasons["node0"]
    assert "cannot be reached" in reasons["node2"]
    assert "timed out" in reasons["node2"]
    assert "too old" in reasons["node3"]
    assert "No space left" in reasons["node5"]
    assert "ended while recording" in reasons["node6"]
    assert "its check fails: capabilities" in reasons["node7"]
    for node, reason in reasons.items():
        assert f"{node}: {reason}" in stderr
    # Of eight that go round in a ring, six say nothing: who is at fault is not for the other two to say.
    accused = {item["node"] for item in findings["findings"]}
    assert accused <= {SLOW}
    if findings["verdict"] == "undecided":
        assert any("node6 was not recorded" in line for line in findings["coverage"]["missing"])
    else:
        assert max(item["confidence"] for item in findings["findings"]) <= 0.8


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_on_a_node_when_it_ends_in_the_middle(
    tmp_path: Path, job: Path, how: signal.Signals
) -> None:
    output = tmp_path / "out"
    with cluster(tmp_path, NODES[:2]) as nodes:
        arguments = (nodes, output, "-w", "node[0-1]", "--rehearse", job, "-d", "100")
        with running(*arguments) as process:
            for name in NODES[:2]:
                await_(lambda name=name: recorded(nodes, name), process, "it records")  # type: ignore[misc]
            process.send_signal(how)
            _, stderr = process.communicate()
        if how != signal.SIGKILL:
            assert process.returncode == PARTIAL
            assert "interrupted" in stderr
            assert nodes.left() == [], "what was begun is undone before it ends"
            audit = json.loads((output / "manifest.json").read_text())["investigation"]["nodes"]
            assert all(row["undone"] for row in audit)
        else:
            assert nodes.clean_within(CLEAN_WITHIN_S) == []


def test_nothing_is_left_after_ctrl_c_while_agents_start(tmp_path: Path, job: Path) -> None:
    slow = tmp_path / "slow-pulse"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec {PULSE} "$@"\n')
    slow.chmod(0o755)
    with cluster(tmp_path, NODES[:1], {NODES[0]: slow}) as nodes:
        with running(nodes, tmp_path / "out", "-w", "node0", "--rehearse", job) as process:
            await_(lambda: nodes.pids("node0"), process, "it is about to start")
            process.send_signal(signal.SIGINT)
            process.communicate()
        assert nodes.left() == []


@pytest.mark.bcc
@pytest.mark.parametrize(
    "end", ["in time", "Ctrl-C", pytest.param("in time, and Pulse is sent", marks=pytest.mark.long)]
)
def test_a_running_process_is_recorded_and_let_go(tmp_path: Path, end: str) -> None:
    """Two nodes that share this kernel both record the one process that calls NCCL: each attaches, and lets go."""
    library = real_nccl()
    with Elf(library) as elf:
        code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
        rank_at = rank_offset(code, elf.machine)
    caller = [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]
    output = tmp_path / "out"

    def armed() -> bool:
        in_memory, in_file = entry_bytes(target.pid, library)
        return in_memory != in_file

    sent = ["--bootstrap"] if end.endswith("sent") else []
    programs = dict.fromkeys(NODES[:2], tmp_path / "none") if sent else None
    with running_program(caller) as target, cluster(tmp_path, NODES[:2], programs) as nodes:
        target.begin("0 2000")
        seconds = "100" if end == "Ctrl-C" else "3"
        with running(nodes, output, "-w", "node[0-1]", "-d", seconds, *sent) as process:
            await_(
                lambda: armed() and recorded(nodes, "node0") and recorded(nodes, "node1"),
                process,
                "both record",
            )
            if end == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate()
        restored_by = time.monotonic() + RESTORED_WITHIN_S
        # Others on this kernel that record everything hold the same places.
        while armed() and not others_attached():
            assert time.monotonic() < restored_by
        assert nodes.clean_within(CLEAN_WITHIN_S) == []
        _, _, wrong = map(int, target.act().split())
        assert wrong == 0
    assert process.returncode == (PARTIAL if end == "Ctrl-C" else OK), stderr
    if end != "Ctrl-C":
        findings = json.loads(stdout)
        assert findings["verdict"] == "undecided", "there is no traffic to judge"
        ops = pl.read_parquet(output / "ops/*.parquet")
        assert sorted(ops["node"].unique()) == NODES[:2]
        starts_ns = ops.group_by("node").agg(pl.col("call_ns").min())["call_ns"]
        assert starts_ns.max() - starts_ns.min() < 0.1e9  # type: ignore[operator]


@pytest.mark.long
def test_pulse_is_sent_to_nodes_that_lack_it(tmp_path: Path, job: Path) -> None:
    """One has it taken away in the middle, one has no room; what an earlier run left is removed."""
    output = tmp_path / "out"
    with cluster(tmp_path, NODES[:3], dict.fromkeys(NODES[:3], tmp_path / "none")) as nodes:
        left = nodes.nodes["node0"].tmp / "pulse-bootstrap-left"
        left.mkdir()
        full = nodes.nodes["node1"].tmp
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", full], check=True)
        try:
            arguments = ("--bootstrap", "-w", "node[0-2]", "--rehearse", job, "-d", "2")
            with running(nodes, output, *arguments) as process:
                await_(lambda: recorded(nodes, "node2"), process, "node2 records")
                for pid in doing(nodes, "node2", "python3\0-c"):
                    os.kill(pid, signal.SIGTERM)
                stdout, stderr = process.communicate()
            assert process.returncode == PARTIAL, stderr
            assert nodes.clean_within(CLEAN_WITHIN_S) == []
        finally:
            subprocess.run(["umount", full], check=True)
    reasons = {row["node"]: row["reason"] for row in json.loads(stdout)["coverage"]["nodes_missing"]}
    assert sorted(reasons) == ["node1", "node2"]
    assert "MB are needed in" in reasons["node1"]
    assert "ended while recording" in reasons["node2"]
    audit = json.loads((output / "manifest.json").read_text())["investigation"]["nodes"]
    assert [row["undone"] for row in audit] == [True, None, True], "of which one had begun nothing"
    sent = [row["bootstrap"] for row in audit]
    assert [row["taken_bytes"] == row["bytes"] for row in sent] == [True, False, True]
    assert "/usr/bin/python3 -c" in audit[0]["command"][-1]


def test_nothing_is_left_after_ctrl_c_while_pulse_is_sent(tmp_path: Path, job: Path) -> None:
    with cluster(tmp_path, NODES[:1], {NODES[0]: tmp_path / "none"}) as nodes:
        arguments = ("--bootstrap", "-w", "node0", "--rehearse", job)
        with running(nodes, tmp_path / "out", *arguments) as process:
            await_(lambda: list(nodes.nodes["node0"].tmp.glob("*/archive")), process, "it is sent")
            process.send_signal(signal.SIGINT)
            process.communicate()
        assert nodes.left() == []


def test_where_nothing_began_the_same_command_can_be_given_again(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with cluster(tmp_path, []) as nodes:
        nodes.add_down("node0")
        for _ in range(2):
            done = subprocess.run(command(nodes, output, "-w", "node0"), capture_output=True, text=True)
            assert done.returncode == NO_DATA
            assert "node0: it cannot be reached" in done.stderr
    assert not list(output.iterdir())


def test_a_node_without_privilege_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    with cluster(tmp_path, ["node0"], {"node0": without_privilege(tmp_path)}) as nodes:
        arguments = command(nodes, tmp_path / "out", "-w", "node0")
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert nodes.clean_within(CLEAN_WITHIN_S) == []
    assert done.returncode == NO_DATA
    assert "its check fails: capabilities" in done.stderr


# What both do for this: they run what follows their options, on the node that is named, as a host of that name.
_ON_NODE = """unshare --uts env TMPDIR={tmp} sh -c 'hostname "$0"; exec "$@"' "$node" "$@" """
_SRUN = """#!/bin/sh
for argument; do
    case $1 in
        --nodelist=*) node=${1#--nodelist=} ;;
        --jobid=4711|--overlap|--nodes=1|--ntasks=1|--unbuffered|--quiet|--input=0) ;;
        -*) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
        *) break ;;
    esac
    shift
done
"""
_SQUEUE = "#!/bin/sh\necho 'node[0-1]'\n"
_KUBECTL = """#!/bin/sh
[ "$1" = get ] && exec cat {pods}
[ "$1 $2 $3" = "exec -i --namespace=ops" ] || exit 1
node=node${{4#pulse-}}
shift 5
"""


@pytest.mark.parametrize("worker", ["slurm", "k8s"])
def test_nodes_are_reached_by_what_a_cluster_has(
    tmp_path: Path, job: Path, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through doubles of the programs of Slurm and Kubernetes, which take just the options that are documented."""
    tmp, output = tmp_path / "tmp", tmp_path / "out"
    tmp.mkdir()
    pods = [
        {"metadata": {"name": f"pulse-{n}"}, "spec": {"nodeName": f"node{n}"}, "status": {"phase": "Running"}}
        for n in (0, 1)
    ]
    (tmp_path / "pods").write_text(json.dumps({"items": pods}))
    on_node = _ON_NODE.format(tmp=tmp)
    for name, text in (
        ("srun", _SRUN + on_node),
        ("squeue", _SQUEUE),
        ("kubectl", _KUBECTL.format(pods=tmp_path / "pods") + on_node),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = ["--job", "4711"] if worker == "slurm" else ["--label", "app=pulse", "--namespace", "ops"]
    options = ["--worker", worker, "--pulse", PULSE, "-o", output, "--json", "--patience", "250", "-d", "1"]
    arguments = [PULSE, "investigate", *given, *options, "--rehearse", job]
    planned = subprocess.run([*arguments, "--dry-run"], capture_output=True, text=True, check=True)
    assert planned.stdout.count("setsid") == 2
    assert not output.exists()
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == OK, done.stderr
    findings = json.loads(done.stdout)
    assert findings["verdict"] != "healthy", "six of its eight nodes were not seen"
    assert findings["coverage"]["nodes"] == ["node0", "node1"]
    assert not list(tmp.iterdir())
