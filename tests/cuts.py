"""One rate curve cut into operators, without a recording around it."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis import boundaries, walk
from pulse_bpf.analysis.boundaries import Learned
from pulse_bpf.analysis.curves import Curves, Floats, Longs
from pulse_bpf.analysis.pool import no_pool
from pulse_bpf.analysis.walk_state import NEVER, Calls, nothing_known


def cut(
    t_ns: Longs, net: Longs, bin_ns: int, call_ns: Longs, volume: Floats, kind: Longs, lossy: bool = False
) -> tuple[Learned, Longs]:
    """What is learned of the curve, and the bytes that each operator, called at `call_ns`, got of it."""
    count = len(call_ns)
    certain = np.zeros(count, np.bool_)
    learned = boundaries.learn(t_ns, np.cumsum(net), bin_ns, call_ns, call_ns, volume, kind, certain, lossy)
    _, rules, state = nothing_known(1)
    rules.learned[:], rules.bin_ns[:] = True, bin_ns
    rules.lossy[:], rules.short[:] = lossy, learned.short
    rules.paced[:], rules.alone[:], state.at[:] = learned.paced, learned.alone, learned.at
    one = np.array([count])
    sums = np.full(count, -1)
    rules.step_ns[:] = learned.step_ns
    waited = np.diff(call_ns, prepend=call_ns[0]) >= learned.step_ns
    begin, settled = np.zeros(1, np.int64), np.zeros(1, np.int64)
    expected = learned.expected
    calls = Calls(begin, one, call_ns, call_ns, expected, sums, waited, expected.copy(), settled, begin)
    nothing = np.zeros_like(net)
    curves = Curves(np.zeros(1, np.int64), np.array([len(net)]), t_ns, net, nothing, nothing)
    found, _, _ = walk.walk(curves, calls, rules, state, no_pool(), np.array([NEVER]), NEVER, True)
    assert found.number.tolist() == list(range(count))
    return learned, found.whole[:, 0]
