/* Sends planned RoCEv2 packets at their times to a network device, or writes them to a pcap file.
 *
 *   replay device FLOWS NAME ALIGN_NS      start at a multiple of ALIGN_NS of CLOCK_MONOTONIC
 *   replay pcap FLOWS FILE EPOCH_NS SNAP   time 0 of the plan is EPOCH_NS; at most SNAP bytes of each frame
 *
 * Standard input: FLOWS times struct flow, then struct packet in the order of due_ns until the end.
 * Standard output: one JSON object, the report. Exit status: 0 all sent, 1 an error (on standard error), 2
 * given up because it was late by more than GIVE_UP_NS. Its Python mirror is replay.py.
 *
 * Layout and invariant CRC: InfiniBand Architecture Specification vol. 1, chapter 9 and annex A17 (RoCEv2).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_PAYLOAD 4096
#define ETHERNET_BYTES 14
#define IPV4_BYTES 20
#define UDP_BYTES 8
#define BTH_BYTES 12
#define ICRC_BYTES 4
#define MAX_HEADERS (ETHERNET_BYTES + 40 + UDP_BYTES + BTH_BYTES + 20)
/* Built in advance, so that sending at the due time is all there is to do then. */
#define BATCH 32
#define QUEUED (1 << 20)
#define START_AFTER_NS 20000000
#define SLEEP_NS 1000000
#define WAKE_EARLY_NS 200000
#ifndef GIVE_UP_NS
#define GIVE_UP_NS 1000000000
#endif
/* Lateness is kept in steps of a 32nd of its power of two. */
#define STEPS 32
#define POWERS 64

enum {
    WRITE_FIRST = 6,
    WRITE_LAST_IMM = 9,
    WRITE_ONLY = 10,
    WRITE_ONLY_IMM = 11,
    ACKNOWLEDGE = 17,
    ACK_SYNDROME = 0x1f, /* an acknowledgement that grants no credits */
};

/* Ethernet, IP and UDP as they are in every packet of the flow, but for lengths and the IPv4 checksum. */
struct flow {
    uint8_t header[62];
    uint16_t header_bytes;
    uint32_t qpn;
};

struct packet {
    uint64_t due_ns;
    uint32_t flow, psn, message_bytes;
    uint16_t payload_bytes;
    uint8_t opcode, reserved;
};

struct frame {
    uint64_t due_ns;
    uint32_t bytes;
    uint32_t icrc;
    struct iovec parts[3]; /* headers; payload and padding, which are zero; ICRC */
    uint8_t headers[MAX_HEADERS];
};

/* The reader thread fills it, the main thread empties it. */
static struct packet queue[QUEUED];
static _Atomic uint64_t queued, taken;
static _Atomic int at_end;

static struct flow *flows;
static uint32_t flow_count;
static uint32_t crc_table[8][256];
/* What a CRC becomes after 4k further zero bytes, bit by bit of the CRC before. */
static uint32_t after_zeros[MAX_PAYLOAD / 4 + 1][32];
static uint8_t zeros[MAX_PAYLOAD];
static uint64_t late_counts[POWERS * STEPS], late_max;

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void make_crc_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xedb88320 & -(crc & 1));
        crc_table[0][byte] = crc;
    }
    for (int table = 1; table < 8; table++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t before = crc_table[table - 1][byte];
            crc_table[table][byte] = before >> 8 ^ crc_table[0][before & 255];
        }
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = 1u << bit;
        for (int words = 0; words <= MAX_PAYLOAD / 4; words++) {
            after_zeros[words][bit] = crc;
            crc = crc_table[3][crc & 255] ^ crc_table[2][crc >> 8 & 255] ^ crc_table[1][crc >> 16 & 255] ^
                  crc_table[0][crc >> 24];
        }
    }
}

static uint32_t crc_of(uint32_t crc, const uint8_t *bytes, size_t count) {
    for (; count >= 8; bytes += 8, count -= 8) {
        uint32_t low, high;
        memcpy(&low, bytes, 4);
        memcpy(&high, bytes + 4, 4);
        low = htole32(low) ^ crc;
        high = htole32(high);
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^
              crc_table[4][low >> 24] ^ crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255] ^
              crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
    while (count--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *bytes++) & 255];
    return crc;
}

/* The CRC over all that no router changes: fields that one may are taken for ones, and so is the space of an
 * InfiniBand header that RoCE has not. */
static uint32_t icrc_of(const uint8_t *frame, uint32_t headers, uint32_t ip_bytes, uint32_t zero_words) {
    uint8_t masked[8 + MAX_HEADERS];
    uint8_t *ip = masked + 8, *udp = ip + ip_bytes, *bth = udp + UDP_BYTES;
    uint32_t count = headers - ETHERNET_BYTES;
    memset(masked, 0xff, 8);
    memcpy(ip, frame + ETHERNET_BYTES, count);
    if (ip_bytes == IPV4_BYTES) {
        ip[1] = ip[8] = ip[10] = ip[11] = 0xff; /* service, time to live, checksum */
    } else {
        ip[0] |= 0x0f; /* class and flow label */
        ip[1] = ip[2] = ip[3] = ip[7] = 0xff;
    }
    udp[6] = udp[7] = 0xff;
    bth[4] = 0xff;
    uint32_t crc = crc_of(0xffffffff, masked, 8 + count), after = 0;
    for (int bit = 0; bit < 32; bit++)
        after ^= after_zeros[zero_words][bit] & -(crc >> bit & 1);
    return ~after;
}

static void put16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static void put32(uint8_t *at, uint32_t value) {
    put16(at, value >> 16);
    put16(at + 2, value);
}

static void set_ipv4_checksum(uint8_t *ip) {
    uint32_t sum = 0;
    for (int at = 0; at < IPV4_BYTES; at += 2)
        sum += (uint32_t)ip[at] << 8 | ip[at + 1];
    sum = (sum >> 16) + (sum & 0xffff);
    put16(ip + 10, ~(sum + (sum >> 16)));
}

/* Extended headers of `packet`, zero but for the length of the message and the syndrome; returns their size.
 */
static uint32_t put_extended(uint8_t *at, const struct packet *packet) {
    memset(at, 0, 20);
    switch (packet->opcode) {
    case WRITE_FIRST:
    case WRITE_ONLY:
        put32(at + 12, packet->message_bytes);
        return 16;
    case WRITE_ONLY_IMM:
        put32(at + 12, packet->message_bytes);
        return 20;
    case WRITE_LAST_IMM:
        return 4;
    case ACKNOWLEDGE:
        put32(at, (uint32_t)ACK_SYNDROME << 24 | packet->psn);
        return 4;
    default:
        return 0;
    }
}

static void build(struct frame *frame, const struct packet *packet) {
    const struct flow *flow = &flows[packet->flow];
    uint32_t ip_bytes = flow->header_bytes - ETHERNET_BYTES - UDP_BYTES;
    uint32_t pad = -packet->payload_bytes & 3u;
    uint8_t *ip = frame->headers + ETHERNET_BYTES, *udp = ip + ip_bytes, *bth = udp + UDP_BYTES;

    memcpy(frame->headers, flow->header, sizeof(flow->header));
    uint32_t headers = flow->header_bytes + BTH_BYTES + put_extended(bth + BTH_BYTES, packet);
    uint32_t bytes = headers + packet->payload_bytes + pad + ICRC_BYTES;
    uint32_t udp_bytes = bytes - ETHERNET_BYTES - ip_bytes;
    int asks_for_ack = packet->opcode >= WRITE_LAST_IMM && packet->opcode <= WRITE_ONLY_IMM;
    put16(udp + 4, udp_bytes);
    bth[0] = packet->opcode;
    bth[1] = (uint8_t)(pad << 4);
    put16(bth + 2, 0xffff);
    put32(bth + 4, flow->qpn);
    put32(bth + 8, (asks_for_ack ? 0x80000000 : 0) | packet->psn);
    if (ip_bytes == IPV4_BYTES) {
        put16(ip + 2, ip_bytes + udp_bytes);
        set_ipv4_checksum(ip);
    } else {
        put16(ip + 4, udp_bytes);
    }
    frame->icrc = htole32(icrc_of(frame->headers, headers, ip_bytes, (packet->payload_bytes + pad) / 4));
    frame->due_ns = packet->due_ns;
    frame->bytes = bytes;
    frame->parts[0] = (struct iovec){frame->headers, headers};
    frame->parts[1] = (struct iovec){zeros, packet->payload_bytes + pad};
    frame->parts[2] = (struct iovec){&frame->icrc, ICRC_BYTES};
}

static int read_whole(void *target, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t got = read(STDIN_FILENO, (char *)target + done, bytes - done);
        if (got < 0)
            fail("reading the plan");
        if (got == 0)
            return 0;
        done += (size_t)got;
    }
    return 1;
}

/* Takes the plan in ahead of time, so that no pause of the planner is one of the sender. */
static void *fill_queue(void *unused) {
    static struct packet block[1024];
    size_t filled = 0;
    for (;;) {
        ssize_t got = read(STDIN_FILENO, (char *)block + filled, sizeof(block) - filled);
        if (got < 0)
            fail("reading the plan");
        if (got == 0)
            break;
        filled += (size_t)got;
        size_t whole = filled / sizeof(block[0]);
        for (size_t i = 0; i < whole; i++) {
            uint64_t place = atomic_load_explicit(&queued, memory_order_relaxed);
            while (place - atomic_load_explicit(&taken, memory_order_acquire) == QUEUED)
                usleep(100);
            if (block[i].flow >= flow_count || block[i].payload_bytes > MAX_PAYLOAD) {
                errno = EINVAL;
                fail("reading the plan");
            }
            queue[place % QUEUED] = block[i];
            atomic_store_explicit(&queued, place + 1, memory_order_release);
        }
        filled -= whole * sizeof(block[0]);
        memmove(block, block + whole, filled);
    }
    atomic_store(&at_end, 1);
    return unused;
}

/* Builds up to BATCH frames of what is queued, waiting until there is something; 0 at the end. */
static int build_batch(struct frame *frames) {
    uint64_t first = atomic_load_explicit(&taken, memory_order_relaxed), ready;
    while ((ready = atomic_load_explicit(&queued, memory_order_acquire) - first) == 0) {
        if (atomic_load(&at_end) && atomic_load(&queued) == first)
            return 0;
        usleep(20);
    }
    int count = ready < BATCH ? (int)ready : BATCH;
    for (int i = 0; i < count; i++)
        build(&frames[i], &queue[(first + (uint64_t)i) % QUEUED]);
    atomic_store_explicit(&taken, first + (uint64_t)count, memory_order_release);
    return count;
}

static void count_late(uint64_t late_ns) {
    uint64_t value = late_ns + STEPS;
    int power = 63 - __builtin_clzll(value);
    late_counts[(uint64_t)power * STEPS + (value >> (power - 5)) % STEPS]++;
}

/* The lateness that `share` of the packets do not exceed, up to a 32nd too much. */
static uint64_t late_quantile(uint64_t packets, double share) {
    uint64_t seen = 0, wanted = (uint64_t)((double)packets * share);
    for (uint64_t i = 0; i < POWERS * STEPS; i++) {
        seen += late_counts[i];
        if (seen > wanted) {
            uint64_t late_ns = ((STEPS + i % STEPS + 1) << (i / STEPS - 5)) - 1 - STEPS;
            return late_ns < late_max ? late_ns : late_max;
        }
    }
    return late_max;
}

static int open_device(const char *name) {
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_ifindex = (int)if_nametoindex(name)};
    int descriptor = socket(AF_PACKET, SOCK_RAW, 0);
    if (descriptor < 0 || !address.sll_ifindex ||
        bind(descriptor, (struct sockaddr *)&address, sizeof(address)))
        fail(name);
    return descriptor;
}

static void wait_until(uint64_t due_ns, uint64_t now) {
    if (due_ns > now + SLEEP_NS) {
        uint64_t wake = due_ns - WAKE_EARLY_NS;
        struct timespec until = {(time_t)(wake / 1000000000), (long)(wake % 1000000000)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
}

static int send_all(const char *device, uint64_t align_ns) {
    static struct frame frames[BATCH];
    static struct mmsghdr messages[BATCH];
    int descriptor = open_device(device), count, kept_up = 1;
    uint64_t packets = 0, bytes = 0;
    /* When it was last early, real and planned: how fast it got on since then tells what it could keep up
     * with. */
    uint64_t early_ns = 0, early_due_ns = 0;
    double progress = 1;

    for (int i = 0; i < BATCH; i++)
        messages[i].msg_hdr = (struct msghdr){.msg_iov = frames[i].parts, .msg_iovlen = 3};
    while (atomic_load(&queued) < QUEUED / 16 && !atomic_load(&at_end))
        usleep(100);
    uint64_t start_ns = (now_ns() + START_AFTER_NS) / align_ns * align_ns + align_ns, now;
    while (kept_up && (count = build_batch(frames))) {
        for (int next = 0; kept_up && next < count;) {
            int due = next;
            now = now_ns();
            while (due < count && start_ns + frames[due].due_ns <= now)
                due++;
            if (due == next) {
                early_ns = now;
                early_due_ns = frames[next].due_ns;
                wait_until(start_ns + frames[next].due_ns, now);
                continue;
            }
            int sent = sendmmsg(descriptor, messages + next, (unsigned)(due - next), 0);
            if (sent < 0 && errno == ENOBUFS)
                continue;
            if (sent < 0)
                fail(device);
            now = now_ns();
            for (; sent; sent--, next++) {
                uint64_t late_ns = now - start_ns - frames[next].due_ns;
                count_late(late_ns);
                packets++;
                bytes += frames[next].bytes;
                if (late_ns > late_max) {
                    late_max = late_ns;
                    progress = (double)(frames[next].due_ns - early_due_ns) / (double)(now - early_ns + 1);
                    kept_up = late_ns < GIVE_UP_NS;
                }
            }
        }
    }
    printf("{\"packets\": %" PRIu64 ", \"frame_bytes\": %" PRIu64 ", \"start_ns\": %" PRIu64
           ", \"end_ns\": %" PRIu64 ", \"late_p50_ns\": %" PRIu64 ", \"late_p99_ns\": %" PRIu64
           ", \"late_max_ns\": %" PRIu64 ", \"progress\": %.6f}\n",
           packets, bytes, start_ns, now_ns(), late_quantile(packets, 0.5), late_quantile(packets, 0.99),
           late_max, progress);
    return kept_up ? 0 : 2;
}

static void write_or_fail(FILE *file, const void *data, size_t bytes) {
    if (fwrite(data, 1, bytes, file) != bytes)
        fail("writing the capture");
}

/* Nanosecond pcap in this machine's byte order: a file header, then a record header and the frame. */
static int write_all(const char *path, uint64_t epoch_ns, uint32_t snap) {
    static struct frame frames[BATCH];
    struct {
        uint32_t magic;
        uint16_t major, minor;
        uint32_t zone, accuracy, snap, link;
    } head = {0xa1b23c4d, 2, 4, 0, 0, snap, 1 /* Ethernet */};
    FILE *file = fopen(path, "wb");
    uint64_t packets = 0, bytes = 0;
    int count;

    if (!file)
        fail(path);
    write_or_fail(file, &head, sizeof(head));
    while ((count = build_batch(frames)))
        for (struct frame *frame = frames; frame < frames + count; frame++) {
            uint64_t at_ns = epoch_ns + frame->due_ns;
            uint32_t kept = frame->bytes < snap ? frame->bytes : snap;
            uint32_t record[4] = {(uint32_t)(at_ns / 1000000000), (uint32_t)(at_ns % 1000000000), kept,
                                  frame->bytes};
            write_or_fail(file, record, sizeof(record));
            for (int part = 0; part < 3 && kept; part++) {
                size_t length = frame->parts[part].iov_len < kept ? frame->parts[part].iov_len : kept;
                write_or_fail(file, frame->parts[part].iov_base, length);
                kept -= (uint32_t)length;
            }
            packets++;
            bytes += frame->bytes;
        }
    if (fclose(file))
        fail(path);
    printf("{\"packets\": %" PRIu64 ", \"frame_bytes\": %" PRIu64 "}\n", packets, bytes);
    return 0;
}

int main(int argc, char **argv) {
    pthread_t reader;

    if (argc < 5 || (strcmp(argv[1], "pcap") == 0) != (argc == 6)) {
        fprintf(stderr, "usage: replay device FLOWS NAME ALIGN_NS | replay pcap FLOWS FILE EPOCH_NS SNAP\n");
        return 1;
    }
    /* A plan whose planner was killed ends with it. */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    make_crc_tables();
    flow_count = (uint32_t)strtoul(argv[2], NULL, 10);
    flows = calloc(flow_count + 1, sizeof(*flows));
    if (!flows || !read_whole(flows, flow_count * sizeof(*flows)))
        fail("reading the flows");
    if ((errno = pthread_create(&reader, NULL, fill_queue, NULL)))
        fail("starting a thread");
    uint64_t time_ns = strtoull(argv[4], NULL, 10);
    return argc == 5 ? send_all(argv[3], time_ns)
                     : write_all(argv[3], time_ns, (uint32_t)strtoul(argv[5], NULL, 10));
}
