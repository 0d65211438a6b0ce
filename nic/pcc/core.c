#include "core.h"

#define PCC_SEALED ((uint64_t)1 << 63) /* in an epoch's key; a flow's place that is free has it alone */
#define PCC_COLD __attribute__((noinline, cold))
#define PCC_HOT inline __attribute__((always_inline))

enum {
    MAX_EPOCHS = 1 << 23, /* which end within 4 GiB, so that 32 bits tell where one is */
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
    uint32_t reciprocals[EIGHTHS]; /* 2^16 / (n + 1), since there is no division where events are counted */
    struct pcc_counters counters;
};

static uint32_t offset_of(const struct pcc *pcc, const struct pcc_epoch *epoch) {
    return (uint32_t)((const char *)epoch - (const char *)pcc);
}

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
    pcc->flows = (struct pcc_flow *)(pcc + 1);
    pcc->epochs = (struct pcc_epoch *)(pcc->flows + flow_places(flow_bits));
    pcc->ages = (uint8_t *)(pcc->epochs + pcc->epoch_count);
    pcc->hash_factor = (uint64_t)0x9e3779b9 << 32;
    pcc->hash_shift = 64 - flow_bits;
    pcc->is_cumulative = cumulative;
    for (uint32_t n = 0; n < flow_places(flow_bits); n++)
        pcc->flows[n] = (struct pcc_flow){PCC_SEALED, 0, offset_of(pcc, pcc->epochs)};
    for (uint32_t n = 0; n < EIGHTHS; n++)
        pcc->reciprocals[n] = 65536 / (n + 1);
    return pcc;
}

static int is_taken(const struct pcc_flow *flow) {
    return !(flow->key & PCC_SEALED);
}

static uint32_t next_place(const struct pcc *pcc, uint32_t place) {
    return place + 1 == pcc->epoch_count ? 0 : place + 1;
}

static struct pcc_epoch *latest_epoch(const struct pcc *pcc, const struct pcc_flow *flow) {
    return (struct pcc_epoch *)((char *)pcc + flow->epoch);
}

/* A new epoch for the flow, from the bin of `ns` on; 0 when all are full of what the host has not read yet.
 */
static PCC_COLD struct pcc_epoch *open_epoch(struct pcc *pcc, struct pcc_flow *flow, uint32_t ns) {
    struct pcc_epoch *epoch = &pcc->epochs[pcc->head_place];
    if (pcc->head - *(volatile uint32_t *)&pcc->tail == pcc->epoch_count)
        return 0;
    epoch->start_ns = ns & ~(PCC_BIN_NS - 1u);
    epoch->key = flow->key;
    flow->epoch = offset_of(pcc, epoch);
    pcc->ages[flow - pcc->flows] = (uint8_t)pcc->poll;
    pcc->head_place = next_place(pcc, pcc->head_place);
    PCC_FENCE();
    *(volatile uint32_t *)&pcc->head = pcc->head + 1;
    return epoch;
}

/* Where the epoch counts what the flow of `key` sent at `ns`; 0 when it does not, or no longer. */
static inline uint16_t *find_bin(struct pcc_epoch *epoch, uint64_t key, uint32_t ns) {
    int64_t bin = (int32_t)(ns - epoch->start_ns) >> PCC_BIN_SHIFT; /* signed, for fewer instructions */
    return epoch->key == key && (uint64_t)bin < PCC_EPOCH_BINS ? &epoch->units[bin] : 0;
}

/* Adds to a bin if there is one and it has room. */
static inline int add_to(uint16_t *bin, uint64_t units) {
    if (!bin || (units += *bin) > 0xffff)
        return 0;
    *bin = (uint16_t)units;
    return 1;
}

/* Adds where add_to has not. What is too much for a bin goes on in an epoch of its own; the host adds up.
 */
static PCC_COLD void add_to_new(struct pcc *pcc, struct pcc_flow *flow, uint32_t ns, uint64_t units) {
    uint16_t *bin = find_bin(latest_epoch(pcc, flow), flow->key, ns);
    struct pcc_epoch *epoch;
    if (!units)
        return;
    if (bin) {
        units -= 0xffffu - *bin;
        *bin = 0xffff;
    }
    epoch = open_epoch(pcc, flow, ns);
    if (epoch) {
        epoch->units[0] = (uint16_t)units;
    } else {
        pcc->counters.lost_epochs++;
        pcc->counters.lost_units += units;
    }
}

static PCC_COLD void add(struct pcc *pcc, struct pcc_flow *flow, uint32_t ns, uint64_t units) {
    if (!add_to(find_bin(latest_epoch(pcc, flow), flow->key, ns), units))
        add_to_new(pcc, flow, ns, units);
}

/* Counts `share` in the bin of `ns`, `inner` in each of the `bins` - 1 after it and the rest in the last one.
 */
static PCC_COLD void spread(struct pcc *pcc, struct pcc_flow *flow, uint32_t ns, uint64_t bins,
                            uint64_t share, uint64_t inner, uint64_t units) {
    for (; bins; bins--, ns += PCC_BIN_NS, share = inner) {
        add(pcc, flow, ns, share);
        units -= share;
    }
    add(pcc, flow, ns, units);
}

/* Counts a burst of at least a bin: in the latest epoch, without looking for each bin, as far as that has
 * room. */
static void add_burst(struct pcc *pcc, struct pcc_flow *flow, uint32_t first_ns, uint32_t ns,
                      uint64_t units) {
    struct pcc_epoch *epoch = latest_epoch(pcc, flow);
    uint32_t start_ns = first_ns & ~(PCC_BIN_NS - 1u);
    uint64_t bins = (uint64_t)((int32_t)(ns - start_ns) >> PCC_BIN_SHIFT), per_eighth, share, inner;
    uint16_t *bin, *last;
    if (bins - 1 >= PCC_SPREAD_BINS) {
        pcc->counters.unspread++;
        add(pcc, flow, ns, units);
        return;
    }
    per_eighth = units * pcc->reciprocals[(int32_t)(ns - first_ns) >> EIGHTH_SHIFT];
    share = per_eighth * ((start_ns + PCC_BIN_NS - first_ns) >> EIGHTH_SHIFT) >> 16;
    inner = per_eighth * 8 >> 16;
    bin = find_bin(epoch, flow->key, first_ns);
    last = find_bin(epoch, flow->key, ns);
    if (bin && last) {
        for (; bin < last && add_to(bin, share); bin++, share = inner)
            units -= share;
        if (bin == last && add_to(bin, units))
            return;
        bins = (uint64_t)(last - bin);
    }
    spread(pcc, flow, ns - ((uint32_t)bins << PCC_BIN_SHIFT), bins, share, inner, units);
}

/* Counts a burst shorter than a bin, or hands on a longer one. */
static PCC_HOT void count_sent(struct pcc *pcc, struct pcc_flow *flow, const struct pcc_event *event) {
    uint32_t ns = event->timestamp_ns;
    uint64_t units = event->count;
    pcc->counters.events[PCC_TX]++;
    pcc->last_ns = ns;
    if (pcc->is_cumulative) {
        units = (units - flow->count) & 0xffff;
        flow->count = event->count;
    }
    if (ns - event->first_timestamp_ns >= PCC_BIN_NS)
        add_burst(pcc, flow, event->first_timestamp_ns, ns, units);
    else if (!add_to(find_bin(latest_epoch(pcc, flow), event->key, ns), units))
        add_to_new(pcc, flow, ns, units);
}

static void swap(struct pcc *pcc, struct pcc_flow *a, struct pcc_flow *b) {
    struct pcc_flow flow = *a;
    uint8_t age = pcc->ages[a - pcc->flows];
    *a = *b;
    *b = flow;
    pcc->ages[a - pcc->flows] = pcc->ages[b - pcc->flows];
    pcc->ages[b - pcc->flows] = age;
}

/* Of flows with one tag, the one that sent last comes first: CNP, NACK and RTT events, which name no queue
 * pair, are its own. */
static inline void count_first(struct pcc *pcc, struct pcc_flow *same_tag, struct pcc_flow *flow,
                               const struct pcc_event *event) {
    if (same_tag && same_tag != flow) {
        swap(pcc, same_tag, flow);
        flow = same_tag;
    }
    count_sent(pcc, flow, event);
}

/* Counts what a new flow sent. It takes the first place that is free, or whose flow has gone. */
static PCC_COLD void count_new(struct pcc *pcc, const struct pcc_event *event, struct pcc_flow *flow,
                               struct pcc_flow *same_tag) {
    const struct pcc_flow *end = flow + PCC_PROBES;
    uint8_t *age = &pcc->ages[flow - pcc->flows];
    while (is_taken(flow) && (uint8_t)(pcc->poll - *age) < PCC_AGED_POLLS) {
        flow++, age++;
        if (flow == end) {
            pcc->counters.events[PCC_TX]++;
            pcc->counters.lost_flows++;
            return;
        }
    }
    if (same_tag)
        pcc->counters.shared_tags++;
    if (pcc->is_cumulative)
        pcc->counters.baseless++;
    flow->key = event->key;
    flow->count = event->count;
    *age = (uint8_t)pcc->poll;
    count_first(pcc, same_tag, flow, event);
}

/* Counts a TX event that is flagged, whose flow is new or not where it belongs, or that names no queue pair.
 */
static PCC_COLD void count_rare(struct pcc *pcc, const struct pcc_event *event, struct pcc_flow *home) {
    struct pcc_flow *flow = home, *end = home + PCC_PROBES, *same_tag = 0;
    if (!(event->key >> 32 & 0xffffff) || event->key & PCC_SEALED) {
        pcc->counters.undecoded++;
        return;
    }
    if (event->flags & PCC_OVERLOADED)
        pcc->counters.overloaded++;
    for (; flow < end && is_taken(flow); flow++) {
        if (flow->key == event->key) {
            count_first(pcc, same_tag, flow, event);
            return;
        }
        if (!same_tag && (uint32_t)flow->key == (uint32_t)event->key)
            same_tag = flow;
    }
    count_new(pcc, event, home, same_tag);
}

static inline void add_feedback(struct pcc *pcc, struct pcc_epoch *epoch, const struct pcc_event *event) {
    uint32_t count = event->count ? event->count : 1, most = 0xff;
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

static PCC_COLD void add_feedback_to_new(struct pcc *pcc, struct pcc_flow *flow,
                                         const struct pcc_event *event) {
    struct pcc_epoch *epoch = open_epoch(pcc, flow, event->timestamp_ns);
    if (epoch)
        add_feedback(pcc, epoch, event);
    else
        pcc->counters.lost_epochs++;
}

/* Counts an event that is no TX event; of those, CNPs and NACKs go into the epoch of their flow. */
static void count_feedback(struct pcc *pcc, const struct pcc_event *event, struct pcc_flow *flow) {
    const struct pcc_flow *end = flow + PCC_PROBES;
    struct pcc_epoch *epoch;
    if (event->type >= PCC_TYPES) {
        pcc->counters.undecoded++;
        return;
    }
    pcc->counters.events[event->type]++;
    if (event->type != PCC_CNP && event->type != PCC_NACK)
        return;
    while (flow < end && is_taken(flow) && (uint32_t)flow->key != (uint32_t)event->key)
        flow++;
    if (flow == end || !is_taken(flow)) {
        pcc->counters.unowned++;
        return;
    }
    epoch = latest_epoch(pcc, flow);
    if (find_bin(epoch, flow->key, event->timestamp_ns))
        add_feedback(pcc, epoch, event);
    else
        add_feedback_to_new(pcc, flow, event);
}

void pcc_event(struct pcc *pcc, const struct pcc_event *event) {
    struct pcc_flow *flow = &pcc->flows[event->key * pcc->hash_factor >> pcc->hash_shift];
    if (flow->key == event->key && !(event->flags & PCC_OVERLOADED))
        count_sent(pcc, flow, event);
    else if (event->type == PCC_TX)
        count_rare(pcc, event, flow);
    else
        count_feedback(pcc, event, flow);
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
