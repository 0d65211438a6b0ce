"""Which nodes: node sets and names as they are typed, and as a cluster's programs tell them."""

from __future__ import annotations

import json
import re
import shlex
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, OK, USAGE, HostError, UsageError
from pulse_bpf.fleet.nodes import is_name, node_set, nodes_of_job, pods_of_label
from pulse_bpf.fleet.workers import Way

HOSTILE = [
    "$(touch /tmp/x)",
    "`id`",
    "a;b",
    "a b",
    "a|b",
    "../a",
    "a/../b",
    "..",
    "a\nb",
    "a\0b",
    "-oProxyCommand=id",
    "a" * 300,
    "a'b",
    'a"b',
    "a\\b",
    "ä",
    "",
    "a>b",
    "{a,b}",
    "~root",
    "user@a",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_is_no_node(text: str) -> None:
    assert not is_name(text)
    with pytest.raises(UsageError) as refused:
        node_set(text)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("gpu[001-003]", ["gpu001", "gpu002", "gpu003"]),
        ("a,b,a", ["a", "b"]),
        ("gpu[1-4]!gpu[2-3]", ["gpu1", "gpu4"]),
        ("gpu[1-4]&gpu[3-9]", ["gpu3", "gpu4"]),
        ("r[1-2]n[1-2].site.org", ["r1n1.site.org", "r1n2.site.org", "r2n1.site.org", "r2n2.site.org"]),
    ],
)
def test_node_sets(text: str, nodes: list[str]) -> None:
    assert node_set(text) == nodes


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n]", "@", "@no-such-group", "n[2-1]", "a!a", "a[1-2"])
def test_what_is_no_node_set_says_so(text: str) -> None:
    with pytest.raises(UsageError):
        node_set(text)


@pytest.mark.parametrize(
    "text",
    ["n[1-999999999999]", "n[0-99999]", "n[1-60000]n[1-60000]", f"n[1-{'9' * 300}]", ",".join(["a"] * 40000)],
)
def test_a_set_that_would_fill_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        node_set(text)


@given(st.text(max_size=40))
def test_whatever_is_typed_gives_names_or_is_refused(text: str) -> None:
    try:
        names = node_set(text)
    except UsageError:
        return
    assert all(is_name(name) for name in names)
    for name in names:
        # The name stays one argument that is no option, whatever shell gets to see it.
        assert shlex.quote(name) == name
        assert not name.startswith("-")


def program(directory: Path, name: str, text: str) -> None:
    """A double of a cluster's program on PATH: a shell script."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_the_nodes_of_a_slurm_job(path: Path) -> None:
    # As squeue of Slurm 23 does: only running jobs, one line a job, the node list in brackets.
    program(
        path,
        "squeue",
        f"""
echo "$@" > {path}/asked
for argument; do
    case $argument in
        --jobs=4711) echo 'gpu[001-003,010]' ;;
        --jobs=4712) ;;
        --jobs=4713) echo 'gpu1;reboot' ;;
        --jobs=4714) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;
    esac
done""",
    )
    assert nodes_of_job("4711") == ["gpu001", "gpu002", "gpu003", "gpu010"]
    assert "--states=RUNNING" in (path / "asked").read_text()
    with pytest.raises(UsageError, match="not running"):
        nodes_of_job("4712")
    with pytest.raises(UsageError, match="no set of nodes"):
        nodes_of_job("4713")
    with pytest.raises(HostError, match="Invalid job id"):
        nodes_of_job("4714")


@pytest.mark.parametrize("job", ["$(x)", "1;2", "-1", "", "1" * 300, "1\n2", "../1"])
def test_a_hostile_job_is_refused_before_anything_runs(path: Path, job: str) -> None:
    program(path, "squeue", f"touch {path}/ran")
    with pytest.raises(UsageError):
        nodes_of_job(job)
    assert not (path / "ran").exists()


def test_without_slurm_it_says_what_to_do(path: Path) -> None:
    with pytest.raises(HostError, match=r"no squeue here.*-w"):
        nodes_of_job("1")


def test_what_kubectl_says_last_is_told_whole(path: Path) -> None:
    why = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    program(path, "kubectl", f"echo 'E1130 memcache.go:265 Unhandled Error' >&2; echo '{why}' >&2; exit 1")
    with pytest.raises(HostError) as failed:
        pods_of_label("app=pulse", "ops")
    assert str(failed.value) == f"kubectl fails: {why}"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--worker", "k8s", "--label", ""], "no label of Kubernetes"),
        (["-w", "a", "--rehearse", ""], "does not begin with /"),
        (["-w", "a", "--rehearse", "job"], "does not begin with /"),
        (["-w", "a", "--topology", "none"], "cannot use the topology none"),
        (["-w", "a", "--topology", "none", "--bootstrap"], "do not go together"),
        (["-w", "a", "--pulse", "/opt/pulse", "--bootstrap"], "do not go together"),
        (["-w", "a", "--bootstrap", "tmp"], "no path of a directory"),
        (["-w", "a", "--bootstrap", "/tmp/$(x)"], "no path of a directory"),
        (["-w", "a", "--bootstrap", "/tmp/a\nb"], "no path of a directory"),
        (["-w", "a", "--bootstrap", "/" + 300 * "a"], "no path of a directory"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    """A program of the cluster would fail the test, and so would a thread, for which the interpreter would wait."""
    threads = threading.active_count()
    assert main(["investigate", "-o", str(path / "out"), *arguments]) == USAGE
    assert why in capsys.readouterr().err
    assert threading.active_count() == threads


def test_a_dry_run_says_what_would_be_sent(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-w", "a", "-o", str(path / "out"), "--bootstrap", "/run/x", "--dry-run"]
    assert main(["investigate", *arguments]) == OK
    told = capsys.readouterr().out
    assert "/usr/bin/python3 -c" in told
    assert re.search(r"\d MB unpacked: pulse-trace .*, polars ", told)
    assert "into a new directory below /run/x, which it removes" in told
    assert not (path / "out").exists()


def test_a_place_that_cannot_be_is_refused_before_anything_runs(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path / "file").touch()
    assert main(["investigate", "-w", "a", "-o", str(path / "file" / "out")]) == HOST
    assert "Not a directory" in capsys.readouterr().err


def test_a_dry_run_refuses_the_place_that_a_run_would(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "out").mkdir()
    (path / "out" / "manifest.json").touch()
    assert main(["investigate", "-w", "a", "-o", str(path / "out"), "--dry-run"]) == USAGE
    assert "out" in capsys.readouterr().err


def pod(name: str, node: str, phase: str = "Running") -> dict[str, object]:
    return {"metadata": {"name": name}, "spec": {"nodeName": node}, "status": {"phase": phase}}


def test_the_pods_of_a_label(path: Path) -> None:
    items = [pod("pulse-a", "gpu1"), pod("pulse-b", "gpu2"), pod("pulse-old", "gpu3", "Succeeded")]
    (path / "answer").write_text(json.dumps({"items": items}))
    program(path, "kubectl", f'echo "$@" > {path}/asked; cat {path}/answer')
    assert pods_of_label("app=pulse", "ops") == {"gpu1": "pulse-a", "gpu2": "pulse-b"}
    asked = (path / "asked").read_text().split()
    assert asked == ["get", "pods", "--namespace=ops", "--selector=app=pulse", "-o", "json"]


@pytest.mark.parametrize(
    "items",
    [
        [],
        [pod("pulse-a", "gpu1", "Pending")],
        [pod("pulse-a", "gpu1"), pod("pulse-b", "gpu1")],
        [pod("$(x)", "gpu1")],
        [pod("pulse-a", "../gpu1")],
        [{}],
        ["x"],
    ],
)
def test_pods_that_cannot_be_told_apart_or_named_are_refused(path: Path, items: list[object]) -> None:
    (path / "answer").write_text(json.dumps({"items": items}))
    program(path, "kubectl", f"cat {path}/answer")
    with pytest.raises((UsageError, HostError)):
        pods_of_label("app=pulse", "ops")


@pytest.mark.parametrize(
    ("label", "namespace"), [("$(x)", "ops"), ("-A", "ops"), ("a=b", "-A"), ("a b", "o")]
)
def test_hostile_labels_and_namespaces_are_refused(label: str, namespace: str) -> None:
    with pytest.raises(UsageError):
        pods_of_label(label, namespace)


def test_what_is_run_for_a_node() -> None:
    agent = ("/opt/pulse dir/pulse", "node")
    ssh = Way("ssh", agent, 10.0, ssh_config=Path("/etc/my config")).on_node("gpu1")
    assert ssh[-2:] == ["gpu1", "'/opt/pulse dir/pulse' node"], "for the shell that sshd starts"
    assert ssh[ssh.index("-F") + 1] == "/etc/my config"
    assert "-oBatchMode=yes" in ssh
    slurm = Way("slurm", agent, 10.0, job="4711").on_node("gpu1")
    assert slurm[1] == "srun"
    assert {"--jobid=4711", "--nodelist=gpu1", "--overlap"} < set(slurm)
    assert slurm[-2:] == list(agent)
    k8s = Way("k8s", agent, 10.0, pods={"gpu1": "pulse-a"}, namespace="ops").on_node("gpu1")
    assert k8s[1:] == ["kubectl", "exec", "-i", "--namespace=ops", "pulse-a", "--", *agent]
