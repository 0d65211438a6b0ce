"""What recorded calls of libibverbs say, whatever the program that called passed to it."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pulse_bpf.probes import verbs
from pulse_bpf.probes.events import EVENT_VERSION, QP_EVENT, VerbsCall

NODES = {10: "node1"}
EVERYTHING = (1 << 32) - 1


def batch(count: int, **fields: int | bytes) -> NDArray[np.void]:
    events = np.zeros(count, QP_EVENT)
    for name, value in {"version": EVENT_VERSION, "tgid": 10, "qp_type": verbs.RC, **fields}.items():
        events[name] = value
    return events


def test_no_calls() -> None:
    assert verbs.qp_events(batch(0), NODES, 0).schema == verbs.QP_EVENTS


def test_what_a_call_does_not_set_is_unknown() -> None:
    events = batch(1, mask=verbs.MASK_TIMEOUT, nic=b"mlx5_0", qpn=7, mono_ns=5, state=3, timeout=18, port=1)
    (row,) = verbs.qp_events(events, NODES, 100).to_dicts()
    known = {name: value for name, value in row.items() if value is not None}
    assert known == {
        "node": "node1",
        "nic": "mlx5_0",
        "qpn": 7,
        "pid": 10,
        "t_ns": 105,
        "timeout": 18,
        "destroyed": False,
    }


def test_a_path_without_a_global_address_has_no_gid() -> None:
    events = batch(2, mask=verbs.MASK_AV, path_port=2, gid_index=4, peer_gid=bytes(range(16)))
    events["is_global"] = [0, 1]
    frame = verbs.qp_events(events, NODES, 0)
    assert frame["peer_gid"].to_list() == [None, "1:203:405:607:809:a0b:c0d:e0f"]
    assert frame["local_gid_index"].to_list() == [None, 4]
    assert frame["port"].to_list() == [2, 2]


def test_other_processes_other_types_and_other_versions_are_left_out() -> None:
    events = batch(4)
    events["tgid"][1] = 11
    events["qp_type"][2] = 4
    events["version"][3] = EVENT_VERSION + 1
    assert verbs.qp_events(events, NODES, 0).height == 1


def test_calls_come_out_in_the_order_of_time() -> None:
    events = batch(3)
    events["mono_ns"] = [3, 1, 2]
    assert verbs.qp_events(events, NODES, 0)["t_ns"].to_list() == [1, 2, 3]


@settings(max_examples=100)
@given(
    st.binary(min_size=QP_EVENT.itemsize, max_size=QP_EVENT.itemsize),
    st.sampled_from([VerbsCall.MODIFY_QP, VerbsCall.DESTROY_QP]),
)
def test_any_attributes_make_a_row(content: bytes, kind: int) -> None:
    events = np.frombuffer(content, QP_EVENT).copy()
    # Only these are not under the control of the program that called.
    fixed = {"version": EVENT_VERSION, "kind": kind, "tgid": 10, "mono_ns": 1, "mask": EVERYTHING}
    for name, value in {**fixed, "qp_type": verbs.RC, "is_global": 1}.items():
        events[name] = value
    frame = verbs.qp_events(events, NODES, 0)
    assert frame.schema == verbs.QP_EVENTS
    assert frame["peer_qpn"].to_list() == events["peer_qpn"].tolist()
    assert frame["timeout"].to_list() == events["timeout"].tolist()
    assert frame.select(pl.col("peer_gid").is_not_null().all()).item()


def test_a_created_queue_pair_is_in_state_reset() -> None:
    events = batch(1, kind=VerbsCall.CREATE_QP, nic=b"mlx5_0", qpn=7, mono_ns=5)
    (row,) = verbs.qp_events(events, NODES, 0).to_dicts()
    assert (row["qpn"], row["state"], row["destroyed"], row["port"]) == (7, 0, False, None)
