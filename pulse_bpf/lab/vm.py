"""A small virtual machine with a kernel that has soft-RoCE, booted over this machine's own files, read-only."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pulse_bpf.errors import HostError
from pulse_bpf.lab import CACHE

_HERE = Path(__file__).parent
# Where the emulator gets no CPU for a while, the kernel finds its timer broken and its CPUs locked up, and panics.
_KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 softlockup_panic=1 mitigations=off tsc=reliable random.trust_cpu=on "
    "no_timer_check watchdog_thresh=60"
)
_BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
_NICE = -10
# QEMU's user network, which needs no privilege: its guest's address is 10.0.2.15.
THIS_MACHINE = "10.0.2.2"
_NETWORK_STEPS = (
    "modprobe virtio_net",
    "ip address add 10.0.2.15/24 dev eth0",
    "ip link set eth0 up",
)
# The package that depends on the current kernel: Debian's, then Ubuntu's.
_META_PACKAGES = ("linux-image-amd64", "linux-image-generic")
_MODULE_PACKAGES = ("linux-modules-{}", "linux-modules-extra-{}")


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel package under `root`, and a static busybox beside it."""

    root: Path
    release: str

    @property
    def image(self) -> Path:
        return self.root / f"boot/vmlinuz-{self.release}"

    @property
    def modules(self) -> Path:
        return self.root / "lib/modules"


def run(command: Sequence[str], share: Path, timeout_s: float, network: bool = False) -> int:
    """Runs `command` in the guest, which sees this machine's files and may write only to `share`, at its own path.

    With a `network`, the guest reaches this machine's loopback interface at THIS_MACHINE. Returns the command's exit
    status; what it prints goes to stderr line by line. HostError when there is no QEMU, no kernel to be had, or when
    the guest does not end within `timeout_s`.
    """
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None or platform.machine() != "x86_64":
        raise HostError(
            "the lab needs soft-RoCE, and this kernel has none",
            "a virtual machine would need qemu-system-x86_64 on x86-64",
            "Install it: apt-get install qemu-system-x86",
        )
    kernel = _kernel()
    share.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pulse-vm-") as directory:
        control = Path(directory)
        shutil.copy(_HERE / "guest-init.sh", control)
        quoted = shlex.quote(str(share.resolve()))
        steps = [
            f"mkdir -p {quoted}",
            f"mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none output {quoted}",
            f"cd {quoted}",
            *(_NETWORK_STEPS if network else ()),
            f"exec {shlex.join(command)}",
        ]
        (control / "command.sh").write_text("\n".join(steps) + "\n")
        _make_initrd(kernel, control / "initrd")
        machine = [*_machine(), "-kernel", str(kernel.image), "-initrd", str(control / "initrd")]
        card = ("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net") if network else ()
        _boot([qemu, *machine, *card, *_shares(kernel, control, share.resolve())], timeout_s)
        try:
            return int((control / "status").read_text())
        except (OSError, ValueError) as error:
            raise HostError(
                "the lab's virtual machine ended without a result", "see what it printed above"
            ) from error


def _boot(command: Sequence[str], timeout_s: float) -> None:
    # Soft-RoCE in a machine that does not get its CPU sends again what only comes late, as if its links lost packets.
    process = subprocess.Popen(
        [*(("nice", "-n", str(_NICE)) if os.geteuid() == 0 else ()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    # Where the scheduler groups processes by session, niceness counts within a session only.
    with suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(_NICE))
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            print(line.rstrip("\r\n"), file=sys.stderr, flush=True)
    finally:
        timed_out = not timer.is_alive()
        timer.cancel()
        process.kill()
        process.wait()
    if timed_out:
        raise HostError("the lab's virtual machine took too long", f"over {timeout_s:.0f} s")


def _machine() -> list[str]:
    # A writable /dev/kvm proves nothing: without vmx or svm it may only run specially built guests.
    flags = set(
        re.findall(r"\w+", Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0])
    )
    if flags & {"vmx", "svm"} and os.access("/dev/kvm", os.W_OK):
        accelerator, cpu = "kvm", "host"
    else:
        accelerator, cpu = "tcg,thread=multi", "max"
    # One CPU for the job, and one for what watches it.
    return [
        *("-accel", accelerator, "-cpu", cpu, "-smp", "2", "-m", "3G", "-M", "q35"),
        *("-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-append", _KERNEL_ARGUMENTS),
        *("-device", "virtio-rng-pci"),
    ]


def _shares(kernel: Kernel, control: Path, output: Path) -> list[str]:
    arguments: list[str] = []
    for tag, path, options in (
        ("host", Path("/"), ",readonly=on,multidevs=remap"),
        ("share", control, ""),
        ("modules", kernel.modules, ",readonly=on"),
        ("output", output, ",multidevs=remap"),
    ):
        arguments += ["-fsdev", f"local,id={tag},path={path},security_model=none{options}"]
        arguments += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return arguments


def _kernel() -> Kernel:
    """The distribution's kernel, fetched at the first call (70 MB) and unpacked in the cache; nothing is installed."""
    for path in sorted(CACHE.glob("kernel-*"), reverse=True):
        return Kernel(path, path.name.removeprefix("kernel-"))
    image_package = _versioned_package()
    release = image_package.removeprefix("linux-image-")
    final = CACHE / f"kernel-{release}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, suffix=".tmp") as temporary:
        root = Path(temporary) / "root"
        for package in (
            image_package,
            *(name.format(release) for name in _MODULE_PACKAGES),
            "busybox-static",
        ):
            _download_and_unpack(package, root, optional=package.startswith("linux-modules"))
        if (root / "usr/lib/modules").exists() and not (root / "lib").exists():
            (root / "lib").symlink_to("usr/lib")
        _checked("depmod", "-b", str(root), release)
        with suppress(OSError):  # another process was faster
            root.rename(final)
    return Kernel(final, release)


def _versioned_package() -> str:
    for attempt in range(2):
        for meta in _META_PACKAGES:
            listed = subprocess.run(["apt-cache", "depends", meta], capture_output=True, text=True).stdout
            found = re.search(r"Depends: (linux-image-\d\S*)", listed)
            if found:
                return found.group(1)
        if attempt == 0:
            _checked("apt-get", "update", "-qq")
    raise HostError("no kernel package found", f"apt knows none of {', '.join(_META_PACKAGES)}")


def _download_and_unpack(package: str, root: Path, optional: bool) -> None:
    with tempfile.TemporaryDirectory(dir=root.parent) as directory:
        got = subprocess.run(
            ["apt-get", "download", "-qq", package], cwd=directory, capture_output=True, text=True
        )
        archives = list(Path(directory).glob("*.deb"))
        if not archives and optional:
            return
        if not archives:
            raise HostError(f"cannot download {package}", got.stderr.strip()[-200:], "Try: apt-get update")
        _checked("dpkg", "-x", str(archives[0]), str(root))


def _make_initrd(kernel: Kernel, target: Path) -> None:
    """An initial RAM disk of busybox and the modules that mount the host's files."""
    order: list[str] = []
    busybox = next(path for path in kernel.root.glob("**/bin/busybox"))
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ("bin", "dev", "proc", "sys", "lower", "tmp", "root"):
            (tree / name).mkdir()
        shutil.copy(busybox, tree / "bin/busybox")
        for module in _BOOT_MODULES:
            shown = _checked(
                "modprobe", "-d", str(kernel.root), "-S", kernel.release, "--show-depends", module
            )
            for line in shown.splitlines():
                if line.startswith("insmod"):
                    name = _copy_module(Path(line.split()[1]), tree)
                    order += [] if name in order else [name]
        (tree / "order").write_text("\n".join(order) + "\n")
        shutil.copy(_HERE / "initrd-init.sh", tree / "init")
        (tree / "init").chmod(0o755)
        pack = f"find . | {busybox} cpio -o -H newc 2>/dev/null | gzip -1 > {shlex.quote(str(target))}"
        subprocess.run(pack, shell=True, cwd=tree, check=True)


def _copy_module(path: Path, tree: Path) -> str:
    """Copies a kernel module, unpacked if it is compressed, and returns its name."""
    for suffix, unpack in ((".xz", "xz"), (".zst", "zstd")):
        if path.suffix == suffix:
            target = tree / path.stem
            target.write_bytes(subprocess.run([unpack, "-dc", path], check=True, capture_output=True).stdout)
            return target.name
    shutil.copy(path, tree)
    return path.name


def _checked(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise HostError(
            f"{command[0]} is missing", "", f"Install the package that has it: {command[0]}"
        ) from error
    except subprocess.CalledProcessError as error:
        raise HostError(f"{shlex.join(command)} failed", error.stderr.strip()[-300:]) from error
