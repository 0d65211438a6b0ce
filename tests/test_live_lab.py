"""An agent on four soft-RoCE hosts, and a collector outside of their machine: a fault comes, is named, and goes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_site import PULSE, Site

from pulse_bpf.lab import CACHE, datapath, nccl, vm
from pulse_bpf.lab.sim.simulate import simulate

pytestmark = [pytest.mark.rxe, pytest.mark.long, pytest.mark.timeout(2400)]

HOSTS, FAULTY = 4, 3
NAME = "collector.test"


class Guest:
    """The hosts' machine, in which a job runs and an agent; `fault` does what `pulse lab fault` does there."""

    def __init__(self, site: Site, directory: Path) -> None:
        self._asked, self._made = directory / "asked", directory / "made"
        self._asked.touch()
        self._made.touch()
        # Compiled here for any processor, as the emulated one differs from this one and would take long to.
        kernels = {
            "NUMBA_CACHE_DIR": str(directory / "kernels"),
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CPU_FEATURES": "",
        }
        simulate("healthy", directory / "healthy", seed=1, nodes=4, gpus=1, workload="dp", seconds=0.2)
        subprocess.run(
            [*PULSE, "analyze", directory / "healthy"],
            check=True,
            capture_output=True,
            env=os.environ | kernels,
        )
        # What is fetched or built must be there before the machine, which writes nothing outside of `directory`.
        nccl.library_path()
        datapath.library_path()
        settings = kernels | {"XDG_CACHE_HOME": str(CACHE.parent)}
        agent = [*PULSE, "agent", "--hosts", "/run/pulse-lab/hosts.json", "--state", "/run/pulse-agent"]
        agent += ["--collector", f"{NAME}:{site.port}", *map(str, site.tls("lab")), "--cores", "2"]
        script = f"""
            set -eu
            echo {vm.THIS_MACHINE} {NAME} >>/etc/hosts
            {shlex.join(PULSE)} lab up --hosts {HOSTS}
            {shlex.join(agent)} & agent=$!
            number=1
            while kill -0 $agent; do
                asked=$(sed -n ${{number}}p {self._asked})
                [ "$asked" != end ] || break
                if [ "$asked" ]; then
                    {shlex.join(PULSE)} lab fault $asked
                    echo "$asked" >>{self._made}
                    number=$((number + 1))
                fi
                sleep 0.5
            done
            kill $agent
            wait $agent || true
            {shlex.join(PULSE)} lab down
        """
        command = ["env", *(f"{name}={value}" for name, value in settings.items()), "bash", "-c", script]
        self._thread = threading.Thread(target=vm.run, args=(command, directory, 2000.0, True), daemon=True)
        self._thread.start()

    def fault(self, arguments: str) -> None:
        with self._asked.open("a") as asked:
            asked.write(f"{arguments}\n")
        wait(lambda: self._made.read_text().endswith(f"{arguments}\n"), 120)

    def end(self) -> None:
        with self._asked.open("a") as asked:
            asked.write("end\n")
        self._thread.join(120)


def wait(until: Callable[[], object], seconds: float, state: Callable[[], object] = str) -> float:
    """Returns after how many seconds `until` was true."""
    began = time.monotonic()
    while not until():
        assert time.monotonic() < began + seconds, state()
        time.sleep(0.2)
    return time.monotonic() - began


def test_a_fault_on_soft_roce_is_named_while_it_lasts(tmp_path: Path) -> None:
    hosts = [f"host{number}" for number in range(1, HOSTS + 1)]
    site = Site(tmp_path, "lab", "admin", collector=("localhost", NAME))
    (tmp_path / "allow").write_text(f"lab agent {' '.join(hosts)}\nadmin viewer\n")
    log = site.state / "findings.jsonl"

    def events() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def said() -> list[tuple[str, str]]:
        return [(job["verdict"], str(job["missing"])) for job in json.loads(viewer.status())["jobs"]]

    with site.collecting():
        viewer = site.link(name="admin")
        guest = Guest(site, tmp_path)
        try:
            wait(lambda: said() == [("healthy", "[]")], 900, said)
            time.sleep(20)
            assert events() == []
            guest.fault(f"slow-nic --host {FAULTY}")
            opened_s = wait(events, 120, said)
            finding = events()[0]["finding"]
            assert hosts[FAULTY - 1] in (finding["node"], finding.get("peer_node"))
            guest.fault(f"slow-nic --host {FAULTY} --clear")
            closed_s = wait(lambda: events()[-1]["state"] == "closed", 240, said)
        finally:
            guest.end()
    assert len({event["id"] for event in events()}) == 1
    print(f"named after {opened_s:.1f} s, closed {closed_s:.1f} s after the fault was taken back")
