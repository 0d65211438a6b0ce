/* Bytes sent per queue pair and time bin, counted from the events that a card's congestion control gets.
 *
 * Portable C without libc, allocation, atomics or floating point; one `struct pcc` per thread that handles
 * events. One thread calls pcc_event; one thread, the same or another, calls pcc_answer.
 */
#ifndef PULSE_PCC_CORE_H
#define PULSE_PCC_CORE_H

#include <stdint.h>

/* Orders this thread's stores: what is before it is seen by whoever sees what is after it. */
#ifndef PCC_FENCE
#define PCC_FENCE() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#endif

/* A bin is 2^PCC_BIN_SHIFT ns, at least 2^10. 2^16 units of 32 bytes in 32.768 us are 512 Gb/s. */
#ifndef PCC_BIN_SHIFT
#define PCC_BIN_SHIFT 15
#endif

enum {
    PCC_BIN_NS = 1 << PCC_BIN_SHIFT,
    PCC_EPOCH_BINS = 128,
    PCC_PROBES = 16,      /* places a flow may take in the table, from its own one on */
    PCC_SPREAD_BINS = 16, /* bins that a burst may reach back; a longer one counts where it ended */
    PCC_AGED_POLLS = 4,   /* polls without traffic after which a flow's place may be taken */
    PCC_MAGIC = 0x31434350,
};

/* Types, subtypes and flags of events: enum doca_pcc_dev_event_type_enum, DOCA_PCC_DEV_TX_FLAG_OVERLOADED. */
enum {
    PCC_CNP = 2,
    PCC_TX = 3,
    PCC_NACK = 5,
    PCC_RTT = 6,
    PCC_TYPES = 32,
    PCC_NACK_RNR = 1,
    PCC_OVERLOADED = 2,
};

/* What DOCA's getters tell of an event. */
struct pcc_event {
    uint64_t key; /* flow tag in the lower half; of a TX event, above it, the queue pair number in 24 bits and
                     the port in 7; of any other, 0 above it */
    uint32_t timestamp_ns;
    uint32_t first_timestamp_ns; /* TX: when the burst began */
    uint16_t count;              /* TX: units of 32 bytes; CNP, NACK: how many were coalesced */
    uint8_t type;
    uint8_t subtype;
    uint8_t flags;
};

/* Bins of one flow, from start_ns on. `key` is the flow's, with the highest bit set when it is sealed. 0 is
 * none. */
struct pcc_epoch {
    uint64_t key;
    uint32_t start_ns;
    uint16_t cnps;
    uint8_t naks;
    uint8_t rnrs;
    uint16_t units[PCC_EPOCH_BINS];
};

struct pcc_flow {
    uint64_t key;
    uint32_t count; /* of its latest TX event */
    uint32_t epoch; /* its latest one, in bytes from the core; its own as long as the key there is */
};

struct pcc_counters {
    uint64_t events[PCC_TYPES];
    uint64_t undecoded;   /* events of no known type, or TX events without a queue pair number */
    uint64_t overloaded;  /* TX events flagged so: the card sheds events */
    uint64_t unowned;     /* CNP and NACK events of flows that have not sent yet */
    uint64_t baseless;    /* first events of a flow, of which a cumulative counter tells nothing */
    uint64_t unspread;    /* bursts over more than PCC_SPREAD_BINS, or that began after their end */
    uint64_t shared_tags; /* flows begun under another one's tag */
    uint64_t clipped;     /* CNPs and NACKs above what an epoch can count */
    uint64_t lost_flows;  /* TX events without room in the table of flows */
    uint64_t lost_epochs; /* bins of TX events, and CNP and NACK events, without a free epoch */
    uint64_t lost_units;
};

struct pcc_request {
    uint32_t magic;
    uint32_t worker;
    uint32_t poll;         /* number of the round of requests that this one belongs to */
    uint32_t acknowledged; /* position of the first epoch that the host has not stored */
    uint32_t cumulative;   /* as the core was made with; a worker's first request makes it */
};

struct pcc_response {
    uint32_t magic;
    uint32_t worker;
    uint32_t bin_ns;
    uint32_t first;   /* position of the first epoch in here */
    uint32_t epochs;  /* how many are in here */
    uint32_t waiting; /* how many more this round has */
    uint32_t last_ns; /* timestamp of the latest TX event */
    uint32_t cumulative;
    struct pcc_counters counters;
    struct pcc_epoch epoch[];
};

struct pcc;

/* Bytes of memory for 2^flow_bits flows and `epochs` epochs:
 * sizeof(struct pcc) + 17 * (2^flow_bits + PCC_PROBES - 1) + 272 * epochs, rounded up to 8. */
uint64_t pcc_bytes(uint32_t flow_bits, uint32_t epochs);

/* Makes a core of `bytes` bytes of zeroed memory, aligned to 8; 0 when they do not hold one epoch.
 * `cumulative` says how to read a TX event's count: 0 as what its burst sent, 1 as running totals of its
 * flow, modulo 2^16. */
struct pcc *pcc_create(void *memory, uint64_t bytes, uint32_t flow_bits, uint32_t cumulative);

/* Counts an event. A burst shorter than a bin is counted in the one in which it ended; a longer one is spread
 * evenly from its first to its last timestamp, in eighths of a bin. */
void pcc_event(struct pcc *pcc, const struct pcc_event *event);

/* Answers a request with at most `capacity` bytes; returns how many, 0 when the request is none of ours,
 * wants another reading than the core was made for, or the answer does not fit. An epoch is sealed one
 * request before it is handed out, so that an event being counted at that time is in it: this takes less than
 * the host needs from one request to the next. Asking again with the same `acknowledged` gives the same
 * epochs. */
uint32_t pcc_answer(struct pcc *pcc, const struct pcc_request *request, struct pcc_response *response,
                    uint32_t capacity);

#endif
