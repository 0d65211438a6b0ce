/* What the RoCE meter hands to user space. Its Python mirror is nic/packets.py. */
#ifndef PULSE_ROCE_H
#define PULSE_ROCE_H

/* One direction of one queue pair as its packets name it: they carry the QPN of the receiver only. */
struct roce_flow {
    u32 ifindex;
    u32 egress; /* hook that saw the packet: 0 ingress, 1 egress */
    u32 source; /* IPv4 address, network byte order */
    u32 target; /* IPv4 address, network byte order */
    u32 qpn;    /* destination QP */
};

struct roce_counts {
    u64 bytes;       /* payload of the messages, repeats included; no headers, padding or checksum */
    u64 retx_bytes;  /* the part of it that had passed before */
    u32 packets;     /* every packet, those below included */
    u32 ctl_packets; /* clear-to-send writes, not in bytes */
    u32 ack_packets;
    u32 naks; /* sequence errors and the like */
    u32 rnrs; /* receiver not ready */
    u32 cnps; /* congestion notifications */
};

/* One closed bin of one flow on one CPU, a record of the ring buffer. */
struct roce_bin {
    u64 start_ns; /* CLOCK_MONOTONIC */
    struct roce_flow flow;
    u32 cpu;
    struct roce_counts counts;
};

/* Indexes of the per-CPU array `totals`. */
enum roce_total {
    ROCE_PACKETS,    /* counted in some bin */
    ROCE_RING_FULL,  /* bins lost because user space was too slow */
    ROCE_FLOWS_FULL, /* packets lost because there are more flows than MAX_FLOWS */
    ROCE_UNDECODED,  /* packets for UDP port 4791 of a kind that is not counted: IPv6, fragments, UD, XRC */
    ROCE_TOTALS
};

#endif
