/* Counts RoCEv2 packets at XDP or tc ingress and at tc egress: bytes per (interface, hook, addresses, QP,
 * time bin). It reads headers only and never changes, drops or redirects a packet. Macros: BIN_NS, the width
 * of a bin. */
#include <linux/types.h>
#include "roce.h"
#include "roce_headers.h"

/* Bins that one CPU holds open at a time, in sets of ROCE_WAYS; a power of two. */
#ifndef FLOW_SETS
#define FLOW_SETS 1024
#endif
/* Flows whose sequence numbers are remembered; further ones displace the least recently used. */
#ifndef MAX_HISTORIES
#define MAX_HISTORIES 16384
#endif
/* Room for closed bins, a power of two: 160,000 of them in pages of 4 KiB. */
#ifndef RING_PAGES
#define RING_PAGES 4096
#endif

#define TC_ACT_UNSPEC (-1) /* go on to the next filter */
#define XDP_PASS 2
#define MAX_VLAN_TAGS 2
#define MAX_EXTENSIONS 6 /* IPv6 headers before UDP, each of the common ones once, one twice */
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

/* Where the UDP header of a packet is, and the bytes that IP says there are from it on. */
struct datagram {
    u32 offset, bytes;
    u32 is_fragment;
};

/* Requests and READ responses of one flow are numbered in the spaces of opposite directions. */
struct psn_space {
    struct roce_flow flow;
    u64 responses;
};

struct psn_block {
    u64 seen; /* one bit for each PSN of the block; none is set in a block never used */
    u32 number;
    u32 reserved;
};

struct psn_history {
    struct psn_block blocks[PSN_BLOCKS];
};

BPF_PERCPU_ARRAY(open_bins, struct roce_set, FLOW_SETS);
BPF_TABLE("lru_hash", struct psn_space, struct psn_history, psn_histories, MAX_HISTORIES);
BPF_ARRAY(blank_history, struct psn_history, 1); /* too large for the stack */
BPF_PERCPU_ARRAY(totals, u64, ROCE_TOTALS);
BPF_RINGBUF_OUTPUT(closed_bins, RING_PAGES);

static inline void add_total(u32 index, u32 count) {
    u64 *total = totals.lookup(&index);
    if (total)
        *total += count;
}

/* Both are inlined with a constant `is_xdp`, so each program has calls of its own kind only. */
static inline int load(void *context, int is_xdp, u32 offset, void *to, u32 bytes) {
    return is_xdp ? bpf_xdp_load_bytes(context, offset, to, bytes)
                  : bpf_skb_load_bytes(context, offset, to, bytes);
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

static inline int same_flow(struct roce_flow *a, struct roce_flow *b) {
    return a->qpn == b->qpn && a->ifindex == b->ifindex && a->egress == b->egress &&
           a->source[1] == b->source[1] && a->target[1] == b->target[1] && a->source[0] == b->source[0] &&
           a->target[0] == b->target[0];
}

static inline u32 flow_set(struct roce_flow *flow) {
    u64 words[] = {(u64)flow->ifindex << 32 | flow->egress << 31 | flow->qpn, flow->source[0],
                   flow->source[1], flow->target[0], flow->target[1]};
    u64 hash = 0;
#pragma unroll
    for (int i = 0; i < 5; i++) {
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15ULL;
        hash ^= hash >> 32;
    }
    return hash & (FLOW_SETS - 1);
}

/* The bin that is open now for `flow` on this CPU. What it displaces, an earlier bin of the flow or one of
 * the flow that was idle longest, is handed to user space: no number of flows fills the table for good. */
static inline struct roce_counts *current_bin(struct roce_flow *flow) {
    u64 now_ns = bpf_ktime_get_ns();
    u64 start_ns = now_ns - now_ns % BIN_NS;
    u32 index = flow_set(flow);
    struct roce_set *set = open_bins.lookup(&index);
    if (!set)
        return NULL;
    struct roce_bin *bin = &set->bins[0];
#pragma unroll
    for (int i = 0; i < ROCE_WAYS; i++) {
        if (same_flow(&set->bins[i].flow, flow)) {
            bin = &set->bins[i];
            break;
        }
        if (set->bins[i].start_ns < bin->start_ns)
            bin = &set->bins[i];
    }
    if (bin->start_ns != start_ns || !same_flow(&bin->flow, flow)) {
        if (bin->counts.packets && closed_bins.ringbuf_output(bin, sizeof(*bin), BPF_RB_NO_WAKEUP)) {
            add_total(ROCE_LOST_BINS, 1);
            add_total(ROCE_LOST_PACKETS, bin->counts.packets);
        }
        bin->start_ns = start_ns;
        bin->flow = *flow;
        __builtin_memset(&bin->counts, 0, sizeof(bin->counts));
    }
    return &bin->counts;
}

/* Which total a packet belongs to by its opcode alone: ROCE_COUNTED, or that of a kind that is not counted.
 */
static inline u32 opcode_total(u8 opcode) {
    switch (opcode >> 5) {
    case TRANSPORT_RC:
        return opcode > SEND_ONLY_INVALIDATE || opcode == RESERVED_21 ? ROCE_RESERVED : ROCE_COUNTED;
    case TRANSPORT_UC:
        return ROCE_UC;
    case TRANSPORT_RD:
        return ROCE_RD;
    case TRANSPORT_UD:
        return ROCE_UD;
    case TRANSPORT_XRC:
        return ROCE_XRC;
    default:
        return opcode == CNP ? ROCE_COUNTED : ROCE_RESERVED;
    }
}

/* Counts one packet for the RoCE port into the bin of `flow`, whose QP number is set here, and returns the
 * total it belongs to. */
static inline u32 count(void *context, int is_xdp, struct datagram *udp, struct roce_flow *flow) {
    struct udp_bth header;
    u32 first_word = 0, direct_bytes = 0; /* AETH, or the length in a RETH */
    u32 after_bth = udp->offset + sizeof(header);

    if (load(context, is_xdp, udp->offset, &header, sizeof(header)))
        return ROCE_MALFORMED;
    u8 opcode = header.opcode;
    u32 psn = bpf_ntohl(header.psn) & PSN_MASK;
    u32 length = bpf_ntohs(header.length);
    u32 overhead = sizeof(header) + 4;
    if (length < overhead || length > udp->bytes)
        return ROCE_MALFORMED;
    u32 total = opcode_total(opcode);
    if (total != ROCE_COUNTED)
        return total;
    overhead += extended_header_bytes(opcode) + (header.flags >> 4 & 3);
    if ((opcode != CNP && length < overhead) ||
        (opcode == ACKNOWLEDGE && load(context, is_xdp, after_bth, &first_word, 4)) ||
        (opcode == WRITE_ONLY && load(context, is_xdp, after_bth + 12, &direct_bytes, 4)))
        return ROCE_MALFORMED;

    flow->qpn = bpf_ntohl(header.qpn) & 0xffffff;
    struct roce_counts *counts = current_bin(flow);
    if (!counts)
        return ROCE_COUNTED;
    counts->packets += 1;
    if (opcode == CNP) {
        counts->cnps += 1;
        return ROCE_COUNTED;
    }
    if (opcode == ACKNOWLEDGE || opcode == ATOMIC_ACKNOWLEDGE) {
        u32 kind = bpf_ntohl(first_word) >> 29 & 3; /* top bits of the AETH syndrome */
        counts->ack_packets += 1;
        counts->rnrs += kind == 1;
        counts->naks += kind == 3;
        return ROCE_COUNTED;
    }
    int repeated = is_repeat(flow, opcode, psn);
    if (opcode == WRITE_ONLY && bpf_ntohl(direct_bytes) <= CTS_MAX_BYTES) {
        counts->ctl_packets += 1;
        return ROCE_COUNTED;
    }
    counts->bytes += length - overhead;
    if (repeated)
        counts->retx_bytes += length - overhead;
    return ROCE_COUNTED;
}

/* Sets `udp` and the addresses of `flow` by the IPv4 header at `offset`; whether it leads to a UDP header. */
static inline int parse_ipv4(void *context, int is_xdp, u32 offset, struct datagram *udp,
                             struct roce_flow *flow) {
    struct ipv4 ip;
    if (load(context, is_xdp, offset, &ip, sizeof(ip)))
        return 0;
    u32 header_bytes = (ip.version_ihl & 15) * 4;
    u32 total_bytes = bpf_ntohs(ip.total_length);
    u16 fragment = bpf_ntohs(ip.fragment);
    if (ip.version_ihl >> 4 != 4 || header_bytes < sizeof(ip) || ip.protocol != UDP || fragment & 0x1fff)
        return 0;
    udp->offset = offset + header_bytes;
    udp->bytes = total_bytes > header_bytes ? total_bytes - header_bytes : 0;
    udp->is_fragment = (fragment & 0x2000) != 0;
    flow->source[1] = (u64)ip.source << 32 | bpf_htonl(0xffff);
    flow->target[1] = (u64)ip.target << 32 | bpf_htonl(0xffff);
    return 1;
}

/* The same by an IPv6 header and up to MAX_EXTENSIONS extension headers. */
static inline int parse_ipv6(void *context, int is_xdp, u32 offset, struct datagram *udp,
                             struct roce_flow *flow) {
    struct ipv6 ip;
    if (load(context, is_xdp, offset, &ip, sizeof(ip)) || bpf_ntohl(ip.version_class_flow) >> 28 != 6)
        return 0;
    u8 next = ip.next_header;
    u32 end = offset + sizeof(ip) + bpf_ntohs(ip.payload_length);
    offset += sizeof(ip);
    udp->is_fragment = 0;
#pragma unroll
    for (int i = 0; i < MAX_EXTENSIONS; i++) {
        u8 extension[4]; /* next header, length, and in a fragment header its offset with flags */
        if (next != HOP_BY_HOP && next != ROUTING && next != FRAGMENT && next != AUTHENTICATION &&
            next != DESTINATION_OPTIONS)
            break;
        if (load(context, is_xdp, offset, extension, sizeof(extension)))
            return 0;
        if (next == FRAGMENT) {
            u32 fragment = extension[2] << 8 | extension[3];
            if (fragment & 0xfff8)
                return 0;
            udp->is_fragment |= fragment & 1;
            offset += 8;
        } else if (next == AUTHENTICATION) {
            offset += (extension[1] + 2) * 4;
        } else {
            offset += (extension[1] + 1) * 8;
        }
        next = extension[0];
    }
    if (next != UDP)
        return 0;
    udp->offset = offset;
    udp->bytes = end > offset ? end - offset : 0;
    __builtin_memcpy(flow->source, ip.source, sizeof(ip.source) + sizeof(ip.target));
    return 1;
}

static inline void meter(void *context, int is_xdp, u32 ifindex, u32 egress, u32 is_merged) {
    struct roce_flow flow = {};
    struct datagram udp = {};
    u32 offset = 12;
    u16 ethertype = 0, ports[4];

#pragma unroll
    for (int tags = 0; tags <= MAX_VLAN_TAGS; tags++) {
        if (load(context, is_xdp, offset, &ethertype, 2))
            return;
        ethertype = bpf_ntohs(ethertype);
        offset += 2;
        if (ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_QINQ)
            break;
        offset += 2;
    }
    if (ethertype == ETHERTYPE_IPV4) {
        if (!parse_ipv4(context, is_xdp, offset, &udp, &flow))
            return;
    } else if (ethertype != ETHERTYPE_IPV6 || !parse_ipv6(context, is_xdp, offset, &udp, &flow)) {
        return;
    }
    if (load(context, is_xdp, udp.offset, ports, sizeof(ports)) || ports[1] != bpf_htons(ROCE_UDP_PORT))
        return;
    flow.ifindex = ifindex;
    flow.egress = egress;
    add_total(udp.is_fragment ? ROCE_FRAGMENT
              : is_merged     ? ROCE_MERGED
                              : count(context, is_xdp, &udp, &flow),
              1);
}

int roce_ingress(struct __sk_buff *skb) {
    meter(skb, 0, skb->ifindex, 0, skb->gso_size != 0);
    return TC_ACT_UNSPEC;
}

int roce_egress(struct __sk_buff *skb) {
    meter(skb, 0, skb->ifindex, 1, skb->gso_size != 0);
    return TC_ACT_UNSPEC;
}

int roce_xdp(struct xdp_md *xdp) {
    meter(xdp, 1, xdp->ingress_ifindex, 0, 0);
    return XDP_PASS;
}
