/* What the RoCE meter hands to user space. Its Python mirror is nic/packets.py. */
#ifndef PULSE_ROCE_H
#define PULSE_ROCE_H

/* One direction of one queue pair as its packets name it: they carry the QPN of the receiver only. */
struct roce_flow {
    u32 qpn; /* destination QP */
    u32 ifindex;
    u32 egress; /* hook that saw the packet: 0 ingress, 1 egress */
    u32 reserved;
    u64 source[2]; /* IPv6 address, or IPv4 address as ::ffff:a.b.c.d, network byte order */
    u64 target[2];
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

/* One bin of one flow on one CPU; closed, it is a record of the ring buffer. */
struct roce_bin {
    u64 start_ns; /* CLOCK_MONOTONIC */
    struct roce_flow flow;
    struct roce_counts counts;
};

/* The bins that are open on one CPU for flows of one hash. A flow that finds no room closes the oldest. */
#define ROCE_WAYS 4
struct roce_set {
    struct roce_bin bins[ROCE_WAYS];
};

/* Indexes of the per-CPU array `totals`: packets for UDP port 4791 by what became of them, and bins lost. */
enum roce_total {
    ROCE_COUNTED,      /* counted in some bin, those that were lost with it included */
    ROCE_LOST_PACKETS, /* counted in a bin that was lost because user space was too slow */
    ROCE_LOST_BINS,
    ROCE_FRAGMENT,  /* the first fragment; later ones carry no port and are invisible */
    ROCE_MERGED,    /* by receive offload, their headers are lost */
    ROCE_MALFORMED, /* lengths that contradict each other, or cut short inside a header that is needed */
    ROCE_UC,        /* unreliable connection */
    ROCE_RD,        /* reliable datagram */
    ROCE_UD,        /* datagram, such as connection management */
    ROCE_XRC,       /* extended reliable connection */
    ROCE_RESERVED,  /* opcodes that the specification has none for, or leaves to vendors */
    ROCE_TOTALS
};

#endif
