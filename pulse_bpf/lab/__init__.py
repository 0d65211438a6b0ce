"""The lab: several soft-RoCE hosts on one kernel, a training-like job on them, and faults from outside."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pulse"
