/* Who gets how much: max-min fair shares, queues in switches, flow control and congestion control.
 *
 * A flow is sent at x, which the sender's links share out, and taken at y, which the switches' ports share
 * out; the difference fills the queue of the port that holds it up. ECN marks by the queue's length, the
 * sender reacts as DCQCN does (Zhu et al., SIGCOMM 2015). A full queue pauses whole ports of those that feed
 * it (PFC), and what else they send with it: all queue pairs of a port take turns.
 */
#include "sharing.h"

#include <math.h>
#include <stdlib.h>

/* For 400 Gb/s ports: marking from 400 kB on and always above 1.6 MB, the thresholds of HPCC (Li et al.,
 * SIGCOMM 2019) for 100 Gb/s scaled with the rate. */
#define LEAST_MARKED_BYTES 400e3
#define ALWAYS_MARKED_BYTES 1600e3
#define MOST_MARKED 0.2
/* DCQCN's time between CNPs of a flow, and g. */
#define TICK_NS 50e3
#define GAIN (1.0 / 256)
#define FAST_RECOVERIES 5

static double capacity(const struct link *l) {
    return l->down ? 0 : l->bytes_per_ns * l->factor;
}

static double backlog_now(const struct engine *e, const struct flow *f) {
    double bytes = f->backlog + (f->tx - f->rx) * (e->now - f->since_ns);
    return bytes > 1e-3 ? bytes : 0;
}

void dirty_link(struct engine *e, int32_t link) {
    if (e->links[link].dirty)
        return;
    e->links[link].dirty = 1;
    e->dirty[e->dirty_count++] = link;
}

/* A flow is held up by `link` from now on, or by none. */
static void set_bottleneck(struct engine *e, struct flow *f, int32_t link) {
    if (f->bottleneck != NONE)
        e->links[f->bottleneck].limits--;
    f->bottleneck = link;
    if (link != NONE)
        e->links[link].limits++;
}

static void set_rates(struct engine *e, struct flow *f, double tx, double rx) {
    for (int hop = f->sender_hops; hop < f->hops; hop++)
        e->links[f->path[hop]].load += rx - f->rx;
    f->tx = tx;
    f->rx = rx;
}

static void join(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    for (int hop = 0; hop < f->hops; hop++) {
        struct link *l = &e->links[f->path[hop]];
        if (l->flow_count == l->flow_capacity) {
            l->flow_capacity = l->flow_capacity ? 2 * l->flow_capacity : 8;
            l->flows = realloc(l->flows, (size_t)l->flow_capacity * sizeof(*l->flows));
            if (!l->flows)
                abort();
        }
        f->place[hop] = l->flow_count;
        l->flows[l->flow_count++] = flow;
    }
}

static void leave(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    for (int hop = 0; hop < f->hops; hop++) {
        int32_t link = f->path[hop];
        struct link *l = &e->links[link];
        int32_t moved = l->flows[--l->flow_count];
        struct flow *other = &e->flows[moved];
        l->flows[f->place[hop]] = moved;
        for (int n = 0; n < other->hops; n++)
            if (other->path[n] == link)
                other->place[n] = f->place[hop];
        if (!l->flow_count)
            l->load = 0; /* and nothing left by rounding */
    }
}

/* What this flow wants has changed. */
void dirty_path(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    int active;
    advance(e, flow);
    f->injecting = f->inject != f->last && !f->stalled && !f->dead;
    active = f->injecting || (f->first != f->inject && !f->stalled && !f->dead);
    if (active && !f->active) {
        join(e, flow);
    } else if (!active && f->active) {
        set_rates(e, f, 0, 0);
        set_bottleneck(e, f, NONE);
        leave(e, flow);
        forget(e, DUE_FLOW, flow);
    }
    f->active = (uint8_t)active;
    f->scheduled = 0;
    for (int hop = 0; hop < f->hops; hop++)
        dirty_link(e, f->path[hop]);
}

void set_up_sharing(struct engine *e) {
    struct part *part = e->part = zeroed(1, sizeof(*part));
    part->flows = zeroed(e->in->flows_count, sizeof(*part->flows));
    part->links = zeroed(e->in->links_count, sizeof(*part->links));
    part->open = zeroed(e->in->flows_count, sizeof(*part->open));
    e->flow_stamps = zeroed(e->in->flows_count, sizeof(*e->flow_stamps));
    e->dirty = zeroed(e->in->links_count, sizeof(*e->dirty));
    for (int64_t n = 0; n < e->in->flows_count; n++) {
        struct flow *f = &e->flows[n];
        for (int stage = SENDER; stage <= SWITCH; stage++) {
            for (int hop = 0; hop < MAX_HOPS && f->in->path[hop] != NONE; hop++)
                if (e->in->links[f->in->path[hop]].stage == stage)
                    f->path[f->hops++] = f->in->path[hop];
            if (stage == SENDER)
                f->sender_hops = f->hops;
        }
    }
}

void tear_down_sharing(struct engine *e) {
    free(e->part->flows);
    free(e->part->links);
    free(e->part->open);
    free(e->part);
    free(e->flow_stamps);
    free(e->dirty);
}

static int32_t add_link(struct engine *e, int32_t link) {
    struct part *part = e->part;
    struct link *l = &e->links[link];
    if (l->stamp != e->stamp) {
        int stage = e->in->links[link].stage;
        int binds = part->whole || stage == SENDER || l->limits || l->load > capacity(l) * (1 + ROUNDING);
        part->near_full |= l->whole;
        l->stamp = e->stamp;
        l->place = part->link_count++;
        part->links[l->place] = (struct shared_link){.capacity = binds ? capacity(l) : NEVER,
                                                     .link = link,
                                                     .stage = (uint8_t)stage,
                                                     .reach = binds ? BINDS : SLACK};
    }
    return l->place;
}

static void add_flow(struct engine *e, int32_t flow, int known) {
    struct part *part = e->part;
    const struct flow *f = &e->flows[flow];
    struct shared_flow *shared;
    if (e->flow_stamps[flow] == e->stamp)
        return;
    e->flow_stamps[flow] = e->stamp;
    shared = &part->flows[part->flow_count++];
    shared->flow = flow;
    shared->rate = f->rate;
    shared->tx = f->tx;
    shared->backlog = backlog_now(e, f);
    shared->injecting = f->injecting;
    shared->known = (uint8_t)known;
    shared->sender_hops = known ? 0 : f->sender_hops;
    shared->hops = 0;
    for (int hop = known ? f->sender_hops : 0; hop < f->hops; hop++)
        shared->links[shared->hops++] = add_link(e, f->path[hop]);
}

/* All flows of the links of a stage that may hold somebody up, and the links of these. */
static void gather(struct engine *e, int stage) {
    struct part *part = e->part;
    for (int32_t n = 0; n < part->link_count; n++) {
        const struct link *l = &e->links[part->links[n].link];
        if (part->links[n].reach != BINDS || (part->links[n].stage != stage && !part->whole))
            continue;
        part->links[n].reach = GATHERED;
        for (int32_t k = 0; k < l->flow_count; k++)
            add_flow(e, l->flows[k], stage == SWITCH);
    }
}

/* Whether shares were reckoned without a link that has no room for them. */
static int widen(struct engine *e) {
    struct part *part = e->part;
    int more = 0;
    for (int32_t n = 0; n < part->link_count; n++)
        part->links[n].sent = e->links[part->links[n].link].load;
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct shared_flow *shared = &part->flows[n];
        for (int hop = shared->sender_hops; hop < shared->hops; hop++)
            part->links[shared->links[hop]].sent += shared->rx - e->flows[shared->flow].rx;
    }
    for (int32_t n = 0; n < part->link_count; n++) {
        struct shared_link *l = &part->links[n];
        double room = capacity(&e->links[l->link]);
        if (l->reach != SLACK || l->sent <= room * (1 + ROUNDING))
            continue;
        l->reach = BINDS;
        l->capacity = room;
        more = 1;
    }
    return more;
}

/* Shares anew what a change at `link` can reach; whether full queues hold somebody back.
 *
 * Max-min fair shares are those where each flow has what it wants, or a full link where none has more
 * (Bertsekas, Gallager: Data Networks, 6.5.2). So links that had room and still have it change nobody's
 * share; and what a sender's links give to his flows depends on nothing in the network, unless a queue is
 * full: then whoever feeds it is held back in all that he sends, and all that is connected is looked at.
 */
static int share_from(struct engine *e, int32_t link) {
    struct part *part = e->part;
    int held = 0;
    for (part->whole = 0;; part->whole = 1) {
        e->stamp++;
        part->flow_count = part->link_count = part->near_full = 0;
        add_link(e, link);
        gather(e, SENDER);
        do {
            gather(e, SWITCH);
            if (part->near_full && !part->whole)
                break;
            held = share_out(part);
        } while (widen(e));
        if (part->whole || !(held || part->near_full))
            return held;
    }
}

static void account_pause(struct engine *e, int32_t link, double paused) {
    struct link *l = &e->links[link];
    int32_t nic = e->in->links[link].nic;
    double *total;
    if (nic == NONE)
        return;
    total = e->in->links[link].stage == SENDER ? &e->nics[nic].paused_ns : &e->nics[nic].pausing_ns;
    *total += l->paused * (e->now - l->paused_since_ns);
    l->paused_since_ns = e->now;
    l->paused = paused;
}

void account_pauses(struct engine *e) {
    for (int32_t link = 0; link < e->in->links_count; link++)
        if (e->links[link].paused > 0)
            account_pause(e, link, e->links[link].paused);
}

/* What goes over each link. */
static void note_sent(struct part *part) {
    for (int32_t n = 0; n < part->link_count; n++)
        part->links[n].sent = 0;
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct shared_flow *f = &part->flows[n];
        for (int hop = 0; hop < f->hops; hop++)
            part->links[f->links[hop]].sent += hop < f->sender_hops ? f->tx : f->rx;
    }
}

/* A NIC that cannot take its line's rate pauses the switch; a port whose part of a full queue is taken up is
 * paused by it. `wanted` is what each port would send without that. */
static void note_pauses(struct engine *e, struct part *part, int held) {
    int known = 0;
    for (int32_t n = 0; n < part->link_count; n++) {
        struct shared_link *shared = &part->links[n];
        struct link *l = &e->links[shared->link];
        int slow = shared->stage == SWITCH && l->factor < 1 && shared->queue + shared->growth > 0;
        int stopped = shared->stage == SENDER && held && shared->wanted > 0;
        double paused = 0;
        if (e->in->links[shared->link].nic == NONE)
            continue;
        if ((slow || stopped) && !known) {
            note_sent(part);
            known = 1;
        }
        if (slow)
            paused = 1 - shared->sent / l->bytes_per_ns;
        else if (stopped && shared->sent < shared->wanted)
            paused = 1 - shared->sent / shared->wanted;
        if (paused != l->paused)
            account_pause(e, shared->link, paused);
    }
}

static double line_rate(const struct engine *e, const struct flow *f) {
    double least = NEVER;
    for (int hop = 0; hop < f->hops; hop++)
        if (e->in->links[f->path[hop]].stage == SENDER && e->links[f->path[hop]].bytes_per_ns < least)
            least = e->links[f->path[hop]].bytes_per_ns;
    return least;
}

static void tick_later(struct engine *e, int32_t flow) {
    /* Cards are not in step with each other, but four phases are enough to see. */
    double phase = TICK_NS / 4 * (e->flows[flow].in->src_nic % 4);
    e->flows[flow].ticking = 1;
    at(e, (floor((e->now - phase) / TICK_NS) + 1) * TICK_NS + phase, DUE_TICK, flow, 0);
}

static void apply(struct engine *e, const struct part *part, int held) {
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct shared_flow *shared = &part->flows[n];
        struct flow *f = &e->flows[shared->flow];
        set_bottleneck(e, f, shared->bottleneck == NONE ? NONE : part->links[shared->bottleneck].link);
        if (fabs(shared->tx - f->tx) <= 1e-9 * f->tx && fabs(shared->rx - f->rx) <= 1e-9 * f->rx &&
            f->scheduled)
            continue;
        advance(e, shared->flow);
        /* A queue can have run empty by the rounding of the time since. */
        set_rates(e, f, shared->tx, f->backlog > 0 || shared->rx < shared->tx ? shared->rx : shared->tx);
        reschedule(e, shared->flow);
        if (!f->ticking && f->bottleneck != NONE && (f->backlog > 0 || f->tx > f->rx))
            tick_later(e, shared->flow);
    }
    for (int32_t n = 0; n < part->link_count; n++) {
        const struct shared_link *l = &part->links[n];
        struct link *link = &e->links[l->link];
        double until_full = (FULL_BYTES - l->queue) / l->growth;
        link->dirty = 0;
        link->whole = (uint8_t)held;
        if (l->stage == SENDER)
            continue;
        if (l->growth <= 0 || l->full)
            forget(e, DUE_QUEUE, l->link);
        else /* Never at this very moment again. */
            foresee(e, e->now + (until_full < 1 ? 1 : until_full), DUE_QUEUE, l->link);
    }
}

void share(struct engine *e) {
    for (int32_t n = 0; n < e->dirty_count; n++) {
        int held;
        if (!e->links[e->dirty[n]].dirty)
            continue;
        held = share_from(e, e->dirty[n]);
        note_pauses(e, e->part, held);
        apply(e, e->part, held);
    }
    e->dirty_count = 0;
}

static double queue_before(const struct engine *e, const struct flow *f) {
    double bytes = 0;
    if (f->bottleneck == NONE)
        return 0;
    const struct link *l = &e->links[f->bottleneck];
    for (int32_t n = 0; n < l->flow_count; n++)
        if (e->flows[l->flows[n]].bottleneck == f->bottleneck)
            bytes += backlog_now(e, &e->flows[l->flows[n]]);
    return bytes;
}

/* DCQCN's reaction point, once in each interval in which a flow may get a CNP. */
void tick(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    double queue = queue_before(e, f), line = line_rate(e, f), marked = 0, before = f->rate;
    double packets = f->rx * TICK_NS / e->in->mtu_bytes;
    f->ticking = 0;
    if (queue > ALWAYS_MARKED_BYTES)
        marked = 1;
    else if (queue > LEAST_MARKED_BYTES)
        marked = MOST_MARKED * (queue - LEAST_MARKED_BYTES) / (ALWAYS_MARKED_BYTES - LEAST_MARKED_BYTES);
    if (packets > 0 && marked > 0 && uniform(e) < 1 - pow(1 - marked, packets)) {
        see(e, f->in->src_nic, flow, SEEN_CNP, 1);
        e->nics[f->in->dst_nic].counters.cnp_sent++;
        e->nics[f->in->src_nic].counters.cnp_handled++;
        f->target = f->rate < line ? f->rate : line;
        f->alpha = before < NEVER ? (1 - GAIN) * f->alpha + GAIN : 1;
        f->rate = f->target * (1 - f->alpha / 2);
        f->rate = f->rate < line / 1000 ? line / 1000 : f->rate;
        f->recoveries = 0;
    } else if (f->rate < NEVER) {
        f->alpha *= 1 - GAIN;
        if (++f->recoveries > 2 * FAST_RECOVERIES)
            f->target += line / 40;
        else if (f->recoveries > FAST_RECOVERIES)
            f->target += line / 400;
        f->target = f->target > line ? line : f->target;
        f->rate = (f->rate + f->target) / 2;
        if (f->rate >= 0.999 * line)
            f->rate = NEVER;
    }
    if (f->rate != before && f->active)
        dirty_path(e, flow);
    if (f->rate < NEVER || queue > 0)
        tick_later(e, flow);
}
