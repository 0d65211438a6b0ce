/* RoCEv2 packets as they are on the wire, fields in network byte order. Sources: InfiniBand Architecture
 * Specification vol. 1, chapter 9 and annex A17 (RoCEv2); IPv6 and its extension headers: RFC 8200. */
#ifndef PULSE_ROCE_HEADERS_H
#define PULSE_ROCE_HEADERS_H

#define ROCE_UDP_PORT 4791

enum { ETHERTYPE_IPV4 = 0x0800, ETHERTYPE_IPV6 = 0x86dd, ETHERTYPE_VLAN = 0x8100, ETHERTYPE_QINQ = 0x88a8 };

enum {
    HOP_BY_HOP = 0,
    UDP = 17,
    ROUTING = 43,
    FRAGMENT = 44,
    AUTHENTICATION = 51,
    DESTINATION_OPTIONS = 60,
};

/* What the upper three bits of a BTH opcode name. */
enum { TRANSPORT_RC, TRANSPORT_UC, TRANSPORT_RD, TRANSPORT_UD, TRANSPORT_CNP, TRANSPORT_XRC };

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
    RESERVED_21 = 21,
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

struct ipv6 {
    u32 version_class_flow;
    u16 payload_length;
    u8 next_header, hop_limit;
    u64 source[2], target[2];
};

struct udp_bth {
    u16 source_port, target_port, length, checksum;
    u8 opcode, flags; /* flags: solicited 1, migration 1, pad 2, version 4 */
    u16 pkey;
    u32 qpn, psn; /* the low 24 bits */
};

/* Bytes between the BTH and the payload. */
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

#endif
