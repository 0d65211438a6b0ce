"""What is probed in running processes: the kernel-side C under bpf/, and the meaning of its events."""

from __future__ import annotations

from pathlib import Path

BPF_DIRECTORY = Path(__file__).with_name("bpf")
