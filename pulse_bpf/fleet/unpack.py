"""What `pulse investigate --bootstrap` runs on a node: takes Pulse from stdin, runs its agent, and removes it again.

Its source is sent to the node's own /usr/bin/python3, so that it uses nothing but the standard library, and nothing
newer than Python 3.6: what is too old is to be told so. On stdin follow a line of JSON, and an archive in pieces, each
of which is asked for. All is put into one private directory, which is removed at the end of the agent, or before at the
end of stdin, at a signal, when nothing comes for long, or when something fails. Killed with -9 it leaves the directory;
nobody holds its lock then, and the next of its kind removes it.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time

# What a line of an agent begins with (wire.py).
MARK = "pulse-agent/1 "
PREFIX = "pulse-bootstrap-"
IDLE_S = 900
# An agent that is told to end, or its guard where it was killed, has so long to undo all.
ENDS_WITHIN_S = 20
# Beside what is unpacked: what a recording of some seconds takes.
SPARE_BYTES = 64 << 20
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)


def main() -> int:
    """Does it all; the exit status is the agent's, or 1."""

    def leave(_number: int, _frame: object) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(1)

    for number in SIGNALS:
        signal.signal(number, leave)
    directory = ""
    try:
        signal.alarm(IDLE_S)
        order = json.loads(sys.stdin.buffer.readline().decode())
        under = order["under"] or tempfile.gettempdir()
        check_python(order)
        check_place(under)
        remove_left(under)
        check_room(under, order["bytes"] + order["unpacked_bytes"])
        directory, lock = make(under)
        archive = os.path.join(directory, "archive")
        receive(archive, order)
        signal.alarm(0)
        return run_agent(directory, unpack(archive, directory), lock)
    except (OSError, ValueError, KeyError, tarfile.TarError) as error:
        with contextlib.suppress(OSError):  # where nobody is there any more
            tell("failed", {"step": "bootstrap", "why": str(error)[:500]})
        return 1
    finally:
        if directory:
            remove(directory)


def tell(word: str, content: object) -> None:
    """Writes a line as agents do."""
    os.write(1, (MARK + word + " " + json.dumps(content) + "\n").encode())


def check_python(order: dict) -> None:  # type: ignore[type-arg]
    """ValueError where this Python cannot run what would come, or lacks a module that does not come."""
    abi = sysconfig.get_config_var("SOABI")
    if abi != order["abi"]:
        raise ValueError(f"its python3 is {abi}, not {order['abi']} as here: install Pulse there")
    for module, package in order["modules"].items():
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"its python3 has no {module}: install {package} there")


def check_place(under: str) -> None:
    """ValueError where there is no such place, programs may not be, or others could exchange them."""
    if not os.path.isdir(under):
        raise ValueError(
            f"there is no directory {under}: make it, or say with --bootstrap DIR where there is one"
        )
    if os.statvfs(under).f_flag & os.ST_NOEXEC:
        raise ValueError(f"{under} is mounted noexec: say with --bootstrap DIR where programs may be")
    mode = os.stat(under).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ValueError(f"anybody may move what is in {under}: say with --bootstrap DIR where nobody may")


def remove_left(under: str) -> None:
    """Removes directories of this user's runs that were killed: nobody holds a lock on them any more."""
    for name in os.listdir(under):
        path = os.path.join(under, name)
        if not name.startswith(PREFIX):
            continue
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(held).st_uid == os.geteuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # it is in use
        finally:
            os.close(held)


def check_room(under: str, bytes_: int) -> None:
    """ValueError where so much does not fit."""
    found = os.statvfs(under)
    needed_mb, free_mb = (bytes_ + SPARE_BYTES) / 1e6, found.f_bavail * found.f_frsize / 1e6
    if free_mb < needed_mb:
        raise ValueError(
            f"{needed_mb:.0f} MB are needed in {under}, and {free_mb:.0f} are free: "
            "say with --bootstrap DIR where there is room"
        )


def make(under: str) -> "tuple[str, int]":
    """A new directory that only this user may enter, and the lock on it, which goes with who holds it."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=under)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            return path, lock
        os.close(lock)  # another took it for one that was left, just before it was locked


def receive(archive: str, order: dict) -> None:  # type: ignore[type-arg]
    """Asks for the pieces, one after the other, so that none waits in anybody's memory; ValueError for other bytes."""
    digest, got_bytes = hashlib.sha256(), 0
    with open(archive, "wb") as file:
        while True:
            tell("got", {"bytes": got_bytes})
            if got_bytes == order["bytes"]:
                break
            signal.alarm(IDLE_S)
            piece = sys.stdin.buffer.read(min(order["piece_bytes"], order["bytes"] - got_bytes))
            if not piece:
                raise ValueError("the connection ended")
            digest.update(piece)
            file.write(piece)
            got_bytes += len(piece)
    if digest.hexdigest() != order["sha256"]:
        raise ValueError("the archive is not what was sent")


def unpack(archive: str, directory: str) -> str:
    """Makes of the archive a virtual environment of this Python, which also sees what the distribution installed."""
    site = os.path.join(directory, "lib", "python{}.{}".format(*sys.version_info), "site-packages")
    os.makedirs(site)
    with tarfile.open(archive, "r:gz") as file:
        # Newer releases ask for a filter; older have none. That it is the sender's is what the hash has shown.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(site)
    os.unlink(archive)
    home = os.path.dirname(os.path.realpath(sys.executable))
    with open(os.path.join(directory, "pyvenv.cfg"), "w") as config:
        config.write(f"home = {home}\ninclude-system-site-packages = true\n")
    python = os.path.join(directory, "bin", "python3")
    os.mkdir(os.path.dirname(python))
    os.symlink(sys.executable, python)
    return python


def run_agent(directory: str, python: str, lock: int) -> int:
    """Runs the agent, which goes on with stdin and stdout, and keeps its files in the directory, too."""
    agent = subprocess.Popen(
        [python, "-I", "-m", "pulse_bpf", "node"], pass_fds=[lock], env=dict(os.environ, TMPDIR=directory)
    )
    try:
        status = agent.wait()
    finally:
        agent.terminate()
        try:
            agent.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            agent.kill()
    return status if status >= 0 else 128 - status


def remove(directory: str) -> None:
    """Removes it, again where somebody still wrote there: the guard of an agent that was killed ends what it ran."""
    until = time.monotonic() + ENDS_WITHIN_S
    while os.path.exists(directory) and time.monotonic() < until:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
