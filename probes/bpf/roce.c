/* Counts RoCEv2 packets at tc ingress and egress: bytes per (interface, hook, addresses, QP, time bin).
 * It reads headers only and never changes, drops or redirects a packet.
 * Macros: BIN_NS, the width of a bin. Packet layout: InfiniBand Architecture Specification vol. 1,
 * chapter 9 and annex A17 (RoCEv2). */
#include <linux/types.h>
#include "roce.h"

#ifndef MAX_FLOWS
#define MAX_FLOWS 8192
#endif

#define TC_ACT_UNSPEC (-1) /* go on to the next filter */
#define ROCE_UDP_PORT 4791
/* At most this long, a write without immediate is taken for NCCL's clear-to-send. */
#define CTS_MAX_BYTES 512
/* Packet sequence numbers have 24 bits; which were seen is remembered in blocks of 64, the latest PSN_BLOCKS.
 */
#define PSN_MASK 0xffffff
#define PSN_BLOCKS 32
#define PSN_BLOCK_MASK (PSN_MASK / 64)
/* Further behind than this many blocks it is no repeat, but a new life of a reused QP number starting
 * anywhere. */
#define PSN_REPEAT_BLOCKS 1024

enum { ETHERTYPE_IPV4 = 0x0800, ETHERTYPE_IPV6 = 0x86dd, ETHERTYPE_VLAN = 0x8100, ETHERTYPE_QINQ = 0x88a8 };

/* BTH opcodes of the reliable connection (transport bits 000), and the congestion notification. */
enum {
    SEND_LAST_IMM = 3,
    SEND_ONLY_IMM = 5,
    WRITE_FIRST = 6,
    WRITE_LAST_IMM = 9,
    WRITE_ONLY = 10,
    WRITE_ONLY_IMM = 11,
    READ_REQUEST = 12,
    READ_FIRST = 13,
    READ_MIDDLE = 14,
    READ_LAST = 15,
    READ_ONLY = 16,
    ACKNOWLEDGE = 17,
    ATOMIC_ACKNOWLEDGE = 18,
    COMPARE_SWAP = 19,
    FETCH_ADD = 20,
    SEND_LAST_INVALIDATE = 22,
    SEND_ONLY_INVALIDATE = 23,
    CNP = 0x81,
};

struct ipv4 {
    u8 version_ihl, tos;
    u16 total_length, id, fragment;
    u8 ttl, protocol;
    u16 checksum;
    u32 source, target;
};

struct udp_bth {
    u16 source_port, target_port, length, checksum;
    u8 opcode, flags; /* flags: solicited 1, migration 1, pad 2, version 4 */
    u16 pkey;
    u32 qpn, psn; /* the low 24 bits */
};

struct open_bin {
    u64 start_ns;
    struct roce_counts counts;
};

/* Requests and READ responses of one flow are numbered in the spaces of opposite directions. */
struct psn_space {
    struct roce_flow flow;
    u32 responses;
};

struct psn_block {
    u64 seen; /* one bit for each PSN of the block; none is set in a block never used */
    u32 number;
    u32 reserved;
};

struct psn_history {
    struct psn_block blocks[PSN_BLOCKS];
};

BPF_TABLE("percpu_hash", struct roce_flow, struct open_bin, open_bins, MAX_FLOWS);
BPF_TABLE("hash", struct psn_space, struct psn_history, psn_histories, MAX_FLOWS);
BPF_ARRAY(blank_history, struct psn_history, 1); /* too large for the stack */
BPF_PERCPU_ARRAY(totals, u64, ROCE_TOTALS);
BPF_RINGBUF_OUTPUT(closed_bins, 1024); /* pages */

static inline void add_total(u32 index) {
    u64 *total = totals.lookup(&index);
    if (total)
        *total += 1;
}

static inline u32 extended_header_bytes(u8 opcode) {
    switch (opcode) {
    case WRITE_FIRST:
    case WRITE_ONLY:
    case READ_REQUEST:
        return 16;
    case WRITE_ONLY_IMM:
        return 20;
    case SEND_LAST_IMM:
    case SEND_ONLY_IMM:
    case WRITE_LAST_IMM:
    case READ_FIRST:
    case READ_LAST:
    case READ_ONLY:
    case ACKNOWLEDGE:
    case SEND_LAST_INVALIDATE:
    case SEND_ONLY_INVALIDATE:
        return 4;
    case ATOMIC_ACKNOWLEDGE:
        return 12;
    case COMPARE_SWAP:
    case FETCH_ADD:
        return 28;
    default:
        return 0;
    }
}

/* Whether a request or response with this PSN has passed here before.
 * What was lost on its way here is no repeat when it comes again, so bytes less repeats are what the sender
 * had to send. A reused QP number that starts close behind its former life's numbers looks like repeats. */
static inline int is_repeat(struct roce_flow *flow, u8 opcode, u32 psn) {
    struct psn_space space = {};
    u32 first = 0, number = psn / 64;
    u64 bit = 1ULL << psn % 64;

    space.flow = *flow;
    space.responses = opcode >= READ_FIRST && opcode <= READ_ONLY;
    struct psn_history *history = psn_histories.lookup(&space);
    if (!history) {
        struct psn_history *blank = blank_history.lookup(&first);
        if (blank)
            psn_histories.insert(&space, blank);
        history = psn_histories.lookup(&space);
        if (!history)
            return 0;
    }
    struct psn_block *block = &history->blocks[number % PSN_BLOCKS];
    if (block->seen && block->number != number &&
        ((block->number - number) & PSN_BLOCK_MASK) <= PSN_REPEAT_BLOCKS)
        return 1; /* older than what is remembered */
    if (block->number != number) {
        block->number = number;
        block->seen = 0;
    }
    int repeated = (block->seen & bit) != 0;
    block->seen |= bit;
    return repeated;
}

/* The bin that is open now for `flow` on this CPU, an earlier one having been handed to user space. */
static inline struct roce_counts *current_bin(struct roce_flow *flow) {
    u64 now_ns = bpf_ktime_get_ns();
    u64 start_ns = now_ns - now_ns % BIN_NS;
    struct open_bin *bin = open_bins.lookup(flow);
    if (!bin) {
        struct open_bin fresh = {};
        fresh.start_ns = start_ns;
        open_bins.insert(flow, &fresh);
        bin = open_bins.lookup(flow);
        if (!bin) {
            add_total(ROCE_FLOWS_FULL);
            return NULL;
        }
    }
    if (bin->start_ns != start_ns) {
        if (bin->counts.packets) {
            struct roce_bin closed = {};
            closed.start_ns = bin->start_ns;
            closed.flow = *flow;
            closed.cpu = bpf_get_smp_processor_id();
            closed.counts = bin->counts;
            if (closed_bins.ringbuf_output(&closed, sizeof(closed), BPF_RB_NO_WAKEUP))
                add_total(ROCE_RING_FULL);
        }
        bin->start_ns = start_ns;
        __builtin_memset(&bin->counts, 0, sizeof(bin->counts));
    }
    return &bin->counts;
}

static inline void count(struct __sk_buff *skb, u32 offset, struct roce_flow *flow, struct udp_bth *header) {
    u8 opcode = header->opcode;
    u32 psn = bpf_ntohl(header->psn) & PSN_MASK;
    u32 overhead = sizeof(*header) + extended_header_bytes(opcode) + (header->flags >> 4 & 3) + 4;
    u32 length = bpf_ntohs(header->length);
    u32 first_word = 0, direct_bytes = 0; /* AETH, or the length in a RETH */
    u32 after_bth = offset + sizeof(*header);

    /* Reserved opcodes, other transports, merged packets, whose headers are lost, and packets cut short. */
    if ((opcode != CNP && opcode > SEND_ONLY_INVALIDATE) || skb->gso_size ||
        (opcode != CNP && length < overhead) ||
        (opcode == ACKNOWLEDGE && bpf_skb_load_bytes(skb, after_bth, &first_word, 4)) ||
        (opcode == WRITE_ONLY && bpf_skb_load_bytes(skb, after_bth + 12, &direct_bytes, 4))) {
        add_total(ROCE_UNDECODED);
        return;
    }
    struct roce_counts *counts = current_bin(flow);
    if (!counts)
        return;
    add_total(ROCE_PACKETS);
    counts->packets += 1;
    if (opcode == CNP) {
        counts->cnps += 1;
        return;
    }
    if (opcode == ACKNOWLEDGE || opcode == ATOMIC_ACKNOWLEDGE) {
        u32 kind = bpf_ntohl(first_word) >> 29 & 3; /* top bits of the AETH syndrome */
        counts->ack_packets += 1;
        counts->rnrs += kind == 1;
        counts->naks += kind == 3;
        return;
    }
    int repeated = is_repeat(flow, opcode, psn);
    if (opcode == WRITE_ONLY && bpf_ntohl(direct_bytes) <= CTS_MAX_BYTES) {
        counts->ctl_packets += 1;
        return;
    }
    counts->bytes += length - overhead;
    if (repeated)
        counts->retx_bytes += length - overhead;
}

static inline int meter(struct __sk_buff *skb, u32 egress) {
    struct ipv4 ip;
    struct udp_bth header;
    struct roce_flow flow = {};
    u16 ethertype = 0;
    u32 offset = 12;

#pragma unroll
    for (int tags = 0; tags < 3; tags++) {
        if (bpf_skb_load_bytes(skb, offset, &ethertype, 2))
            return TC_ACT_UNSPEC;
        ethertype = bpf_ntohs(ethertype);
        if (ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_QINQ)
            break;
        offset += 4;
    }
    offset += 2;
    if (ethertype == ETHERTYPE_IPV6) {
        u8 next = 0;
        u16 port = 0;
        bpf_skb_load_bytes(skb, offset + 6, &next, 1);
        bpf_skb_load_bytes(skb, offset + 40 + 2, &port, 2);
        if (next == 17 && port == bpf_htons(ROCE_UDP_PORT))
            add_total(ROCE_UNDECODED);
        return TC_ACT_UNSPEC;
    }
    if (ethertype != ETHERTYPE_IPV4 || bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)) || ip.protocol != 17)
        return TC_ACT_UNSPEC;
    /* Later fragments carry no port: they are invisible. A first one would be miscounted. */
    offset += (ip.version_ihl & 15) * 4;
    if (bpf_skb_load_bytes(skb, offset, &header, sizeof(header)) ||
        header.target_port != bpf_htons(ROCE_UDP_PORT))
        return TC_ACT_UNSPEC;
    if (ip.fragment & bpf_htons(0x3fff)) {
        add_total(ROCE_UNDECODED);
        return TC_ACT_UNSPEC;
    }
    flow.ifindex = skb->ifindex;
    flow.egress = egress;
    flow.source = ip.source;
    flow.target = ip.target;
    flow.qpn = bpf_ntohl(header.qpn) & 0xffffff;
    count(skb, offset, &flow, &header);
    return TC_ACT_UNSPEC;
}

int roce_ingress(struct __sk_buff *skb) {
    return meter(skb, 0);
}

int roce_egress(struct __sk_buff *skb) {
    return meter(skb, 1);
}
