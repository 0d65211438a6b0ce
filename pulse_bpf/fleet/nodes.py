"""Which nodes: node sets as admins write them, those of a Slurm job, the pods of a Kubernetes label."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence

from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.NodeUtils import GroupSourceError

from pulse_bpf.analysis.text import printable
from pulse_bpf.errors import HostError, UsageError

# What a host name may be (RFC 1123, and the underscores that some sites have). It begins with no "-", so that no
# program takes it for an option, and holds nothing that means something to a shell or a path.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
# Node sets reach, with their groups, the commands of the site's own groups.conf, which are shell commands.
_SET = re.compile(r"[A-Za-z0-9._\-\[\],@:/!&^*]+")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/=,-]{0,251}")
MOST_NODES = 65_536
LONGEST_SET = 65_536
_ANSWER_S = 30


def is_name(text: object) -> bool:
    """Whether this can be the name of a node, wherever it comes from."""
    return isinstance(text, str) and ".." not in text and _NAME.fullmatch(text) is not None


def node_set(text: str) -> list[str]:
    """The nodes of a set in ClusterShell's syntax: gpu[001-064], groups (@rack3), "," "!" "&" "^".

    UsageError for what is no such set, holds no node, too many, or one that is no host name.
    """
    if len(text) > LONGEST_SET or not _SET.fullmatch(text):
        raise UsageError(f"{_shown(text)} is no set of nodes", "", "Write it as gpu[001-064], or @group")
    sizes = [int(last) - int(first) + 1 for first, last in re.findall(r"(\d{1,18})-(\d{1,18})", text)]
    if re.search(r"\d{19}", text) or any(size > MOST_NODES for size in sizes):
        raise UsageError(f"{_shown(text)} names more than {MOST_NODES} nodes")
    try:
        # Ranges of several dimensions multiply, which is counted before any name is made.
        found = NodeSet(text)
        if len(found) > MOST_NODES:
            raise UsageError(f"{_shown(text)} names more than {MOST_NODES} nodes")
        names = [str(node) for node in found]
    except (NodeSetException, GroupSourceError, ValueError) as error:
        raise UsageError(f"{_shown(text)} is no set of nodes", _shown(str(error))) from error
    return checked(names, _shown(text))


def checked(names: Sequence[str], source: str) -> list[str]:
    """The distinct `names` in their order; UsageError where there is none, or one is no host name."""
    for name in names:
        if not is_name(name):
            raise UsageError(f"{source} names {_shown(name)}", "that is no host name")
    if not names:
        raise UsageError(f"{source} holds no node")
    return list(dict.fromkeys(names))


def nodes_of_job(job: str) -> list[str]:
    """The nodes of a Slurm job, as squeue(1) tells them. UsageError for what is no job or is not running."""
    if not re.fullmatch(r"\d{1,18}", job):
        raise UsageError(
            f"{_shown(job)} is no Slurm job id", "", "See with: squeue, or name the nodes with -w"
        )
    listed = _asked(["squeue", "--noheader", "--states=RUNNING", "--format=%N", f"--jobs={job}"]).strip()
    if not listed:
        raise UsageError(f"job {job} is not running on any node", "", f"See with: squeue -j {job}")
    return node_set(",".join(listed.split()))


def pods_of_label(label: str, namespace: str) -> dict[str, str]:
    """The pod on each node, by the node's name, of those that run with a label, as kubectl(1) tells them.

    UsageError for what is no label, and where a node has two such pods.
    """
    if not _LABEL.fullmatch(label):
        raise UsageError(f"{_shown(label)} is no label of Kubernetes", "", "Write it as app=pulse")
    if not is_name(namespace):
        raise UsageError(f"{_shown(namespace)} is no namespace of Kubernetes")
    answer = _asked(
        ["kubectl", "get", "pods", f"--namespace={namespace}", f"--selector={label}", "-o", "json"]
    )
    pods: dict[str, str] = {}
    try:
        for item in json.loads(answer)["items"]:
            if item["status"]["phase"] != "Running":
                continue
            node, pod = item["spec"]["nodeName"], item["metadata"]["name"]
            if not is_name(node) or not is_name(pod):
                raise UsageError(
                    f"kubectl names {_shown(str(node))} and {_shown(str(pod))}", "these are no names"
                )
            if node in pods:
                raise UsageError(
                    f"{pods[node]} and {pod} both run on {node}", "", "Give a label of one DaemonSet"
                )
            pods[node] = pod
    except (ValueError, KeyError, TypeError) as error:
        raise HostError("kubectl gives no list of pods", _shown(str(error))) from error
    if not pods:
        raise UsageError(f"no pod with the label {label} runs in {namespace}")
    return pods


def _asked(command: Sequence[str]) -> str:
    """What a program of the cluster answers; HostError where it is missing, refuses or does not answer."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise HostError(f"there is no {command[0]} here", "", "Name the nodes with -w") from error
    except subprocess.TimeoutExpired as error:
        raise HostError(
            f"{command[0]} does not answer within {_ANSWER_S} s", "", "Name the nodes with -w"
        ) from error
    if done.returncode:
        # What is to be done about it comes last, after what was tried.
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = printable(said[-1])[:300] if said else f"exit status {done.returncode}"
        raise HostError(f"{command[0]} fails", why)
    return done.stdout


def folded(nodes: Sequence[str]) -> str:
    """Names in the syntax of node sets, short: gpu[001-064]."""
    return str(NodeSet.fromlist(nodes))


def _shown(text: str) -> str:
    """A text from elsewhere as it may be shown: its beginning, without anything that a terminal obeys."""
    return repr(text[:60] + ("..." if len(text) > 60 else ""))


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """The nodes that fail for each of the `reasons` (by node)."""
    found: dict[str, list[str]] = {}
    for node, reason in reasons.items():
        found.setdefault(reason, []).append(node)
    return found
