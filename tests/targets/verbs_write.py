"""A process that connects two RC queue pairs on two RDMA devices and writes from one to the other when told to.

usage: verbs_write.py GID_INDEX PATH_MTU DEVICE_A DEVICE_B. Prints the numbers of the queue pairs as JSON; then for each
line {"sender": 0 or 1, "window": writes under way at a time, "messages": [[bytes, with immediate], ...]} on stdin makes
the writes and prints "done" when all are acknowledged; ends at the end of stdin.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pyverbs import enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

BUFFER_BYTES = 1 << 20
QUEUE = 64
MTUS = {1024: enums.IBV_MTU_1024, 2048: enums.IBV_MTU_2048}


class End:
    """One queue pair with a buffer that the other may write to."""

    def __init__(self, device: str) -> None:
        self.context = Context(name=device)
        domain = PD(self.context)
        self.sent, self.received = CQ(self.context, QUEUE), CQ(self.context, QUEUE)
        cap = QPCap(max_send_wr=QUEUE, max_recv_wr=QUEUE)
        init = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self.sent, rcq=self.received, cap=cap)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE
        self.pair = QP(domain, init, attributes)
        self.memory = MR(domain, BUFFER_BYTES, enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE)

    def connect(self, other: End, gid_index: int, path_mtu: int) -> None:
        attributes = QPAttr(port_num=1)
        attributes.dest_qp_num = other.pair.qp_num
        attributes.path_mtu = MTUS[path_mtu]
        # 0.3 s without an answer before all is sent again: an emulated machine may stand still for a while.
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 16, 7, 7
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        gid = GID(str(other.context.query_gid(1, gid_index)))
        route = GlobalRoute(dgid=gid, sgid_index=gid_index)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.pair.to_rts(attributes)

    def write(self, other: End, size_bytes: int, immediate: bool) -> None:
        if immediate:
            other.pair.post_recv(RecvWR(num_sge=1, sg=[SGE(other.memory.buf, 0, other.memory.lkey)]))
        opcode = enums.IBV_WR_RDMA_WRITE_WITH_IMM if immediate else enums.IBV_WR_RDMA_WRITE
        part = SGE(self.memory.buf, size_bytes, self.memory.lkey)
        request = SendWR(opcode=opcode, num_sge=1, sg=[part], send_flags=enums.IBV_SEND_SIGNALED)
        request.set_wr_rdma(other.memory.rkey, other.memory.buf)
        self.pair.post_send(request)


def completed(queue: CQ) -> int:
    count, found = queue.poll(QUEUE)
    for completion in found:
        if completion.status != enums.IBV_WC_SUCCESS:
            raise SystemExit(f"a write failed with status {completion.status}")
    return int(count)


def transfer(sender: End, receiver: End, window: int, messages: list[Any]) -> None:
    under_way = 0
    for size_bytes, immediate in messages:
        while under_way == window:
            under_way -= wait(sender, receiver)
        sender.write(receiver, size_bytes, immediate)
        under_way += 1
    while under_way:
        under_way -= wait(sender, receiver)


def wait(sender: End, receiver: End) -> int:
    completed(receiver.received)
    # The emulated machine has better things to do than to poll.
    return completed(sender.sent) or time.sleep(0.0005) or 0


def main(gid_index: str, path_mtu: str, *devices: str) -> None:
    ends = [End(device) for device in devices]
    for mine, other in zip(ends, reversed(ends), strict=True):
        mine.connect(other, int(gid_index), int(path_mtu))
    print(json.dumps([end.pair.qp_num for end in ends]), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        sender, receiver = ends if order["sender"] == 0 else reversed(ends)
        transfer(sender, receiver, order["window"], order["messages"])
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
