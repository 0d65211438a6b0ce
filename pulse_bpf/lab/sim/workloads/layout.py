"""Which GPUs form which groups: ranks are numbered as Megatron-Core and DeepSpeed number them.

Megatron-Core's order is "tp-cp-ep-dp-pp" (RankGenerator in megatron/core/parallel_state.py): the tensor position
changes fastest from rank to rank, the pipeline stage slowest. DeepSpeed's PipeModelDataParallelTopology also has
the model (tensor) axis fastest. Rank r runs on GPU r.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.model import Cluster


class Layout(NamedTuple):
    """How many GPUs there are along each axis, fastest first; their product is all GPUs."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    pipeline: int = 1

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups of GPUs that differ in nothing but their position along `axes`."""
        slowest_first = list(reversed(self._fields))
        grid = np.arange(math.prod(self)).reshape(tuple(reversed(self)))
        kept = [number for number, axis in enumerate(slowest_first) if axis not in axes]
        joined = [number for number, axis in enumerate(slowest_first) if axis in axes]
        members = math.prod(getattr(self, axis) for axis in axes)
        grouped = grid.transpose(kept + joined).reshape(-1, members)
        return [[int(gpu) for gpu in group] for group in grouped]

    def roles(self) -> dict[str, list[int]]:
        """Each GPU's position along each axis."""
        positions = np.unravel_index(np.arange(math.prod(self)), tuple(reversed(self)))
        return {
            axis: position.tolist() for axis, position in zip(reversed(self._fields), positions, strict=True)
        }


def tensor_size(cluster: Cluster) -> int:
    """Tensor parallelism never leaves a node."""
    return math.gcd(cluster.gpus, 8)


def pipeline_layout(cluster: Cluster) -> Layout:
    """Tensor x data x pipeline: four stages, or near it, and two replicas or more where the cluster has room."""
    tensor = tensor_size(cluster)
    rest = cluster.nodes * cluster.gpus // tensor
    stages = min(_divisors(rest), key=lambda count: (rest // count < 2, abs(count - 4)))
    if stages == 1:
        stages = rest
    return Layout(tensor=tensor, data=rest // stages, pipeline=stages)


def spread(cluster: Cluster, most: int, what: str) -> tuple[int, int, int]:
    """Tensor size, size of a group of at most `most` over several nodes, and replicas of it.

    UsageError when the nodes cannot be divided into such groups of equal size.
    """
    tensor = tensor_size(cluster)
    rest = cluster.nodes * cluster.gpus // tensor
    size = max(count for count in _divisors(rest) if count <= most)
    if size == 1:
        raise UsageError(
            f"no {what} groups on {cluster.nodes} nodes",
            f"{rest} replicas of {tensor} GPUs make no groups of 2 to {most}",
            "Use an even number of nodes",
        )
    return tensor, size, rest // size


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
