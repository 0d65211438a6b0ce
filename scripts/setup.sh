#!/bin/sh
# setup.sh VENV [tests]: installs the distribution's packages that are missing, and the rest into VENV from PyPI;
# with "tests" also the compilers, shells and the browser that only tests use.
# Does nothing, quickly, when everything is there.
set -eu
venv=$1
cd "$(dirname "$0")/.."

# bcc and pyverbs come from the distribution (PyPI's pyverbs does not fit its libibverbs), hence
# --system-site-packages below. qemu and kmod boot the lab where this kernel has no soft-RoCE.
packages="python3 python3-venv python3-bpfcc python3-pyverbs rdma-core ibverbs-providers libibverbs-dev
gcc libc6-dev iproute2 kmod qemu-system-x86 xz-utils"
[ "${2:-}" = tests ] && packages="$packages g++ lld gcc-riscv64-linux-gnu libc6-dev-riscv64-cross qemu-user
groff-base openssh-server zsh"
# Debian alone has a Chromium that is no snap, and that runs without a desktop.
if [ "${2:-}" = tests ] && grep -qx 'ID=debian' /etc/os-release; then
    packages="$packages chromium-headless-shell fonts-dejavu-core"
fi
[ "$(uname -m)" = x86_64 ] || packages=$(echo "$packages" | sed 's/qemu-system-x86/qemu-system-arm/')

missing=
for package in $packages; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
missing=$(echo "$missing" | xargs)
if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "setup: run as root, or install first: apt-get install $missing" >&2
        exit 3
    fi
    echo "setup: installing $missing" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

[ -x "$venv/bin/python" ] || /usr/bin/python3 -m venv --system-site-packages "$venv"
stamp=$venv/installed-$(sha256sum pyproject.toml | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "setup: installing Python packages into $venv" >&2
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -e '.[dev]'
    rm -f "$venv"/installed-*
    touch "$stamp"
fi
