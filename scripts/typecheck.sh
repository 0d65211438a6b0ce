#!/bin/sh
# mypy --strict over all packages. mypy does not follow the mapping of folders to packages in pyproject.toml,
# so it runs over a tree of links that has the shape of the installed package.
set -eu
cd "$(dirname "$0")/.."
tree=.typecheck/pulse_bpf
rm -rf .typecheck
mkdir -p "$tree"
for item in pulse_bpf/*; do ln -s "../../$item" "$tree/"; done
for folder in probes nic analysis; do ln -s "../../$folder" "$tree/$folder"; done
mypy=$PWD/.venv/bin/mypy
[ -x "$mypy" ] || mypy=mypy
cd .typecheck
exec "$mypy" --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p pulse_bpf
