"""A process that maps NCCL and connects two RC queue pairs on two RDMA devices when told to.

usage: verbs_connect.py LIBNCCL DEVICE_A DEVICE_B. Prints "ready"; after a line on stdin connects them and prints their
numbers as JSON; after another line destroys them and prints "destroyed"; ends at the end of stdin.
"""

from __future__ import annotations

import ctypes
import json
import sys

from pyverbs import enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

# Of soft-RoCE: index 1 is the GID of the interface's IPv4 address.
GID_INDEX = 1


def main(library: str, *devices: str) -> None:
    ctypes.CDLL(library)
    contexts = [Context(name=device) for device in devices]
    domains = [PD(context) for context in contexts]
    completions = [CQ(context, 4) for context in contexts]
    print("ready", flush=True)
    sys.stdin.readline()
    pairs = []
    for domain, completion in zip(domains, completions, strict=True):
        init = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=completion, rcq=completion, cap=QPCap())
        pairs.append(QP(domain, init, QPAttr(port_num=1)))
    gids = [str(context.query_gid(1, GID_INDEX)) for context in contexts]
    for mine, other, gid in zip(pairs, reversed(pairs), reversed(gids), strict=True):
        attributes = QPAttr(port_num=1)
        attributes.dest_qp_num = other.qp_num
        attributes.path_mtu = enums.IBV_MTU_1024
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 6, 7
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        route = GlobalRoute(dgid=GID(gid), sgid_index=GID_INDEX)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        mine.to_rts(attributes)
    print(json.dumps([pair.qp_num for pair in pairs]), flush=True)
    sys.stdin.readline()
    for pair in pairs:
        pair.close()
    print("destroyed", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
