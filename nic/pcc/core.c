#include "core.h"

#define PCC_SEALED ((uint64_t)1 << 63)
#define PCC_COLD __attribute__((noinline, cold))

enum {
    MAX_EPOCHS = 1 << 24,
    EIGHTH_SHIFT = PCC_BIN_SHIFT - 3,
    EIGHTHS = 8 * (PCC_SPREAD_BINS + 1),
};

/* Positions of epochs only grow, modulo 2^32: tail <= sealed <= target <= head. Each `_place` is where that
 * position is in the ring. */
struct pcc {
    struct pcc_flow *flows;
    struct pcc_epoch *epochs;
    uint64_t hash_factor; /* in memory, which takes fewer instructions than in the code */
    uint32_t hash_shift;
    uint32_t is_cumulative;
    uint8_t *ages; /* of each flow, the poll in which it last opened an epoch */
    uint32_t epoch_count;
    uint32_t head, head_place;
    uint32_t tail, tail_place;
    uint32_t sealed, sealed_place;
    uint32_t target;
    uint32_t poll;
    uint32_t last_ns;
    uint32_t reciprocals[EIGHTHS + 1]; /* 2^16 / n, since there is no division where events are counted */
    struct pcc_counters counters;
};

static uint32_t flow_places(uint32_t flow_bits) {
    return (1u << flow_bits) + PCC_PROBES - 1;
}

uint64_t pcc_bytes(uint32_t flow_bits, uint32_t epochs) {
    uint64_t flows = flow_places(flow_bits);
    uint64_t bytes = sizeof(struct pcc) + flows * (sizeof(struct pcc_flow) + 1);
    return (bytes + epochs * (uint64_t)sizeof(struct pcc_epoch) + 7) & ~(uint64_t)7;
}

struct pcc *pcc_create(void *memory, uint64_t bytes, uint32_t flow_bits, uint32_t cumulative) {
    struct pcc *pcc = memory;
    uint64_t epochs;
    if (flow_bits < 1 || flow_bits > 24 || bytes < pcc_bytes(flow_bits, 1))
        return 0;
    epochs = (bytes - pcc_bytes(flow_bits, 0)) / sizeof(struct pcc_epoch);
    pcc->epoch_count = epochs < MAX_EPOCHS ? (uint32_t)epochs : MAX_EPOCHS;
    pcc->epochs = (struct pcc_epoch *)(pcc + 1);
    pcc->flows = (struct pcc_flow *)(pcc->epochs + pcc->epoch_count);
    pcc->ages = (uint8_t *)(pcc->flows + flow_places(flow_bits));
    pcc->hash_factor = 0x9e3779b97f4a7c15u;
    pcc->hash_shift = 64 - flow_bits;
    pcc->is_cumulative = cumulative;
    for (uint32_t n = 1; n <= EIGHTHS; n++)
        pcc->reciprocals[n] = 65536 / n;
    return pcc;
}

/* Where a flow of this tag belongs in the table. */
static struct pcc_flow *home(const struct pcc *pcc, uint64_t key) {
    return &pcc->flows[(key << 32) * pcc->hash_factor >> pcc->hash_shift];
}

static uint32_t next_place(const struct pcc *pcc, uint32_t place) {
    return place + 1 == pcc->epoch_count ? 0 : place + 1;
}

static struct pcc_epoch *latest_epoch(const struct pcc *pcc, const struct pcc_flow *flow) {
    return (struct pcc_epoch *)((char *)pcc->epochs + ((uint64_t)flow->epoch << 4));
}

/* A new epoch for the flow, from the bin of `ns` on; 0 when all are full of what the host has not read yet.
 */
static PCC_COLD struct pcc_epoch *open_epoch(struct pcc *pcc, struct pcc_flow *flow, uint32_t ns) {
    struct pcc_epoch *epoch = &pcc->epochs[pcc->head_place];
    if (pcc->head - *(volatile uint32_t *)&pcc->tail == pcc->epoch_count)
        return 0;
    epoch->start_ns = ns & ~(PCC_BIN_NS - 1u);
    epoch->key = flow->key;
    flow->epoch = pcc->head_place * (uint32_t)(sizeof(*epoch) >> 4);
    pcc->ages[flow - pcc->flows] = (uint8_t)pcc->poll;
    pcc->head_place = next_place(pcc, pcc->head_place);
    PCC_FENCE();
    *(volatile uint32_t *)&pcc->head = pcc->head + 1;
    return epoch;
}

/* Adds to the bin of `ns` if the flow's latest epoch has it and it has room. */
static inline int add_to_latest(const struct pcc *pcc, const struct pcc_flow *flow, uint64_t key, uint32_t ns,
                                uint32_t units) {
    struct pcc_epoch *epoch = latest_epoch(pcc, flow);
    uint64_t bin = (uint64_t)(ns - epoch->start_ns) >> PCC_BIN_SHIFT;
    if (epoch->key != key || bin >= PCC_EPOCH_BINS)
        return 0;
    units += epoch->units[bin];
    if (units > 0xffff)
        return 0;
    epoch->units[bin] = (uint16_t)units;
    return 1;
}

/* Adds where add_to_latest has not. What is too much for a bin goes on in an epoch of its own; the host adds
 * up. */
static PCC_COLD void add_to_new(struct pcc *pcc, struct pcc_flow *flow, uint32_t ns, uint32_t units) {
    struct pcc_epoch *epoch = latest_epoch(pcc, flow);
    uint32_t bin = (ns - epoch->start_ns) >> PCC_BIN_SHIFT;
    if (!units)
        return;
    if (epoch->key == flow->key && bin < PCC_EPOCH_BINS) {
        units -= 0xffffu - epoch->units[bin];
        epoch->units[bin] = 0xffff;
    }
    epoch = open_epoch(pcc, flow, ns);
    if (epoch) {
        epoch->units[0] = (uint16_t)units;
    } else {
        pcc->counters.lost_epochs++;
        pcc->counters.lost_units += units;
    }
}

static void add(struct pcc *pcc, struct pcc_flow *flow, uint32_t ns, uint32_t units) {
    if (!add_to_latest(pcc, flow, flow->key, ns, units))
        add_to_new(pcc, flow, ns, units);
}

/* Counts a burst of at least a bin. */
static PCC_COLD void add_burst(struct pcc *pcc, struct pcc_flow *flow, const struct pcc_event *event,
                               uint32_t units) {
    uint32_t ns = event->first_timestamp_ns, length = ((event->timestamp_ns - ns) >> EIGHTH_SHIFT) + 1;
    uint32_t eighths = (PCC_BIN_NS - (ns & (PCC_BIN_NS - 1u))) >> EIGHTH_SHIFT;
    uint32_t bins = (event->timestamp_ns >> PCC_BIN_SHIFT) - (ns >> PCC_BIN_SHIFT);
    bins &= 0xffffffffu >> PCC_BIN_SHIFT;
    if (length > EIGHTHS || bins > PCC_SPREAD_BINS) {
        pcc->counters.unspread++;
    } else {
        uint64_t per_eighth = (uint64_t)units * pcc->reciprocals[length];
        for (; bins; bins--, ns += PCC_BIN_NS, eighths = 8) {
            uint32_t share = (uint32_t)(per_eighth * eighths >> 16);
            add(pcc, flow, ns, share);
            units -= share;
        }
    }
    add(pcc, flow, event->timestamp_ns, units);
}

static void swap(struct pcc *pcc, struct pcc_flow *a, struct pcc_flow *b) {
    struct pcc_flow flow = *a;
    uint8_t age = pcc->ages[a - pcc->flows];
    *a = *b;
    *b = flow;
    pcc->ages[a - pcc->flows] = pcc->ages[b - pcc->flows];
    pcc->ages[b - pcc->flows] = age;
}

/* The flow that sent this, or a new one; 0 when all its places are taken by live flows. Of flows with one
 * tag, the one that sent last comes first: CNP, NACK and RTT events, which name no queue pair, are its own.
 */
static struct pcc_flow *look_up(struct pcc *pcc, const struct pcc_event *event) {
    uint64_t key = event->key;
    struct pcc_flow *flow = home(pcc, key), *end = flow + PCC_PROBES, *same_tag = 0, *free = 0;
    for (; flow < end && flow->key && flow->key != key; flow++) {
        if ((uint32_t)flow->key == (uint32_t)key && !same_tag)
            same_tag = flow;
        if (!free && (uint8_t)(pcc->poll - pcc->ages[flow - pcc->flows]) >= PCC_AGED_POLLS)
            free = flow;
    }
    if (flow == end || !flow->key) {
        if (!free && flow < end)
            free = flow;
        if (!free)
            return 0;
        if (same_tag)
            pcc->counters.shared_tags++;
        if (pcc->is_cumulative)
            pcc->counters.baseless++;
        flow = free;
        flow->key = key;
        flow->count = event->count;
        pcc->ages[flow - pcc->flows] = (uint8_t)pcc->poll;
    }
    if (same_tag && same_tag != flow) {
        swap(pcc, same_tag, flow);
        return same_tag;
    }
    return flow;
}

/* Counts a burst shorter than a bin, or hands on a longer one. */
static inline void count_sent(struct pcc *pcc, struct pcc_flow *flow, const struct pcc_event *event) {
    uint32_t ns = event->timestamp_ns, units = event->count;
    pcc->counters.events[PCC_TX]++;
    pcc->last_ns = ns;
    if (pcc->is_cumulative) {
        units = (units - flow->count) & 0xffff;
        flow->count = event->count;
    }
    if (ns - event->first_timestamp_ns >= PCC_BIN_NS)
        add_burst(pcc, flow, event, units);
    else if (!add_to_latest(pcc, flow, event->key, ns, units))
        add_to_new(pcc, flow, ns, units);
}

/* Counts a TX event that is flagged, whose flow is new or not where it belongs, or that names no queue pair.
 */
static PCC_COLD void count_rare(struct pcc *pcc, const struct pcc_event *event) {
    struct pcc_flow *flow;
    if (!(event->key >> 32 & 0xffffff) || event->key & PCC_SEALED) {
        pcc->counters.undecoded++;
        return;
    }
    if (event->flags & PCC_OVERLOADED)
        pcc->counters.overloaded++;
    flow = look_up(pcc, event);
    if (flow) {
        count_sent(pcc, flow, event);
    } else {
        pcc->counters.events[PCC_TX]++;
        pcc->counters.lost_flows++;
    }
}

/* Counts an event that is no TX event; of those, CNPs and NACKs go into the epoch of their flow. */
static PCC_COLD void count_feedback(struct pcc *pcc, const struct pcc_event *event) {
    uint32_t count = event->count, most = 0xff, ns = event->timestamp_ns;
    struct pcc_flow *flow = home(pcc, event->key), *end = flow + PCC_PROBES;
    struct pcc_epoch *epoch;
    if (event->type >= PCC_TYPES) {
        pcc->counters.undecoded++;
        return;
    }
    pcc->counters.events[event->type]++;
    if (event->type != PCC_CNP && event->type != PCC_NACK)
        return;
    while (flow < end && flow->key && (uint32_t)flow->key != (uint32_t)event->key)
        flow++;
    if (flow == end || !flow->key) {
        pcc->counters.unowned++;
        return;
    }
    epoch = latest_epoch(pcc, flow);
    if (epoch->key != flow->key || (ns - epoch->start_ns) >> PCC_BIN_SHIFT >= PCC_EPOCH_BINS)
        epoch = open_epoch(pcc, flow, ns);
    if (!epoch) {
        pcc->counters.lost_epochs++;
        return;
    }
    count += !count;
    if (event->type == PCC_CNP) {
        most = 0xffffu - epoch->cnps;
        epoch->cnps = (uint16_t)(epoch->cnps + (count < most ? count : most));
    } else if (event->subtype == PCC_NACK_RNR) {
        most -= epoch->rnrs;
        epoch->rnrs = (uint8_t)(epoch->rnrs + (count < most ? count : most));
    } else {
        most -= epoch->naks;
        epoch->naks = (uint8_t)(epoch->naks + (count < most ? count : most));
    }
    if (count > most)
        pcc->counters.clipped += count - most;
}

void pcc_event(struct pcc *pcc, const struct pcc_event *event) {
    struct pcc_flow *flow = home(pcc, event->key);
    if (event->type != PCC_TX)
        count_feedback(pcc, event);
    else if (event->flags & PCC_OVERLOADED || flow->key != event->key)
        count_rare(pcc, event);
    else
        count_sent(pcc, flow, event);
}

/* Frees what the host has, cleared, so that whoever counts an event never has to. */
static void release(struct pcc *pcc, uint32_t count) {
    for (uint32_t n = 0; n < count; n++) {
        volatile uint64_t *words = (volatile uint64_t *)&pcc->epochs[pcc->tail_place];
        for (uint32_t word = 0; word < sizeof(struct pcc_epoch) / sizeof(*words); word++)
            words[word] = 0;
        pcc->tail_place = next_place(pcc, pcc->tail_place);
    }
    PCC_FENCE();
    *(volatile uint32_t *)&pcc->tail = pcc->tail + count;
}

static void seal(struct pcc *pcc, uint32_t most) {
    uint32_t count = pcc->target - pcc->sealed;
    count = count < most ? count : most;
    for (uint32_t n = 0; n < count; n++) {
        pcc->epochs[pcc->sealed_place].key |= PCC_SEALED;
        pcc->sealed_place = next_place(pcc, pcc->sealed_place);
    }
    pcc->sealed += count;
    PCC_FENCE();
}

uint32_t pcc_answer(struct pcc *pcc, const struct pcc_request *request, struct pcc_response *response,
                    uint32_t capacity) {
    uint32_t most, count, place;
    if (request->magic != PCC_MAGIC || !request->cumulative != !pcc->is_cumulative ||
        capacity < sizeof(*response) + sizeof(*response->epoch))
        return 0;
    most = (uint32_t)((capacity - sizeof(*response)) / sizeof(*response->epoch));
    if (request->acknowledged - pcc->tail <= pcc->sealed - pcc->tail)
        release(pcc, request->acknowledged - pcc->tail);
    if (request->poll != pcc->poll) {
        pcc->poll = request->poll;
        pcc->target = *(volatile uint32_t *)&pcc->head;
        PCC_FENCE();
    }
    count = pcc->sealed - pcc->tail;
    count = count < most ? count : most;
    place = pcc->tail_place;
    for (uint32_t n = 0; n < count; n++) {
        response->epoch[n] = pcc->epochs[place];
        place = next_place(pcc, place);
    }
    seal(pcc, most);
    response->magic = PCC_MAGIC;
    response->worker = request->worker;
    response->bin_ns = PCC_BIN_NS;
    response->first = pcc->tail;
    response->epochs = count;
    response->waiting = pcc->target - pcc->tail - count;
    response->last_ns = pcc->last_ns;
    response->cumulative = request->cumulative;
    response->counters = pcc->counters;
    return (uint32_t)(sizeof(*response) + count * sizeof(*response->epoch));
}
