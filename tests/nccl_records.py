"""Records as probes/bpf/nccl.c writes them, for the tests of what is made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.probes.events import NCCL_EVENT


def batch(*events: dict[str, int]) -> NDArray[np.void]:
    """Records with these fields, the others 0."""
    records = np.zeros(len(events), NCCL_EVENT)
    for record, fields in zip(records, events, strict=True):
        for name, value in fields.items():
            record[name] = value
    return records
