/* Who gets how much: max-min fair shares, queues in switches, flow control and congestion control.
 *
 * A flow is sent at x, which the sender's links share out, and taken at y, which the switches' ports share
 * out; the difference fills the queue of the port that holds it up. ECN marks by the queue's length, the
 * sender reacts as DCQCN does (Zhu et al., SIGCOMM 2015). A full queue pauses whole ports of those that feed
 * it (PFC), and what else they send with it: all queue pairs of a port take turns.
 */
#include "engine.h"

#include <math.h>
#include <stdlib.h>

/* For 400 Gb/s ports: marking from 400 kB on and always above 1.6 MB, the thresholds of HPCC (Li et al.,
 * SIGCOMM 2019) for 100 Gb/s scaled with the rate; a port's share of a shared buffer is 2 MB. */
#define LEAST_MARKED_BYTES 400e3
#define ALWAYS_MARKED_BYTES 1600e3
#define MOST_MARKED 0.2
#define FULL_BYTES 2000e3
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
    if (!e->share_due) {
        e->share_due = 1;
        at(e, e->now, DUE_SHARE, 0, 0);
    }
}

static void join(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    for (int hop = 0; hop < f->hops; hop++) {
        struct link *l = &e->links[f->in->path[hop]];
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
        int32_t link = f->in->path[hop];
        struct link *l = &e->links[link];
        int32_t moved = l->flows[--l->flow_count];
        struct flow *other = &e->flows[moved];
        l->flows[f->place[hop]] = moved;
        for (int n = 0; n < other->hops; n++)
            if (other->in->path[n] == link)
                other->place[n] = f->place[hop];
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
        leave(e, flow);
        f->tx = f->rx = 0;
        f->bottleneck = NONE;
        forget(e, DUE_FLOW, flow);
    }
    f->active = (uint8_t)active;
    f->scheduled = 0;
    for (int hop = 0; hop < f->hops; hop++)
        dirty_link(e, f->in->path[hop]);
}

struct part {
    int32_t *flows, *links;
    int32_t flow_count, link_count;
};

/* All that shares something with `link`, directly or not. */
static struct part connected(struct engine *e, int32_t link) {
    struct part part = {e->scratch_flows, e->scratch_links, 0, 0};
    part.links[part.link_count++] = link;
    e->links[link].stamp = e->stamp;
    for (int32_t n = 0; n < part.link_count; n++) {
        const struct link *l = &e->links[part.links[n]];
        for (int32_t k = 0; k < l->flow_count; k++) {
            struct flow *f = &e->flows[l->flows[k]];
            if (f->stamp == e->stamp)
                continue;
            f->stamp = e->stamp;
            part.flows[part.flow_count++] = l->flows[k];
            for (int hop = 0; hop < f->hops; hop++) {
                struct link *other = &e->links[f->in->path[hop]];
                if (other->stamp != e->stamp) {
                    other->stamp = e->stamp;
                    part.links[part.link_count++] = f->in->path[hop];
                }
            }
        }
    }
    return part;
}

static void settle(struct engine *e, struct flow *f, int stage, double rate, int32_t bottleneck) {
    for (int hop = 0; hop < f->hops; hop++) {
        int32_t link = f->in->path[hop];
        if (e->in->links[link].stage == stage) {
            e->links[link].left -= rate;
            e->links[link].open--;
        }
    }
    f->stage = 1;
    if (stage == SENDER) {
        f->new_tx = rate;
    } else {
        f->new_rx = rate;
        f->bottleneck = bottleneck;
    }
}

/* Max-min fair by progressive filling, of what each flow wants (its `cap`), over the links of one stage. */
static void fill(struct engine *e, const struct part *part, int stage) {
    int32_t open = 0;
    for (int32_t n = 0; n < part->link_count; n++) {
        struct link *l = &e->links[part->links[n]];
        l->left = capacity(l);
        l->open = 0;
    }
    for (int32_t n = 0; n < part->flow_count; n++) {
        struct flow *f = &e->flows[part->flows[n]];
        f->stage = f->cap <= 0;
        if (stage == SENDER)
            f->new_tx = 0;
        else
            f->new_rx = 0, f->bottleneck = NONE;
        if (f->stage)
            continue;
        open++;
        for (int hop = 0; hop < f->hops; hop++)
            if (e->in->links[f->in->path[hop]].stage == stage)
                e->links[f->in->path[hop]].open++;
    }
    while (open) {
        double least = NEVER;
        int32_t before = open;
        for (int32_t n = 0; n < part->link_count; n++) {
            struct link *l = &e->links[part->links[n]];
            if (!l->open)
                continue;
            l->share_cap = l->left > 0 ? l->left / l->open : 0;
            least = l->share_cap < least ? l->share_cap : least;
        }
        for (int32_t n = 0; n < part->flow_count; n++) {
            struct flow *f = &e->flows[part->flows[n]];
            if (!f->stage && f->cap <= least) {
                settle(e, f, stage, f->cap, NONE);
                open--;
            }
        }
        if (open < before)
            continue;
        for (int32_t n = 0; n < part->flow_count; n++) {
            struct flow *f = &e->flows[part->flows[n]];
            for (int hop = 0; hop < f->hops && !f->stage; hop++) {
                int32_t link = f->in->path[hop];
                if (e->in->links[link].stage == stage && e->links[link].share_cap <= least * (1 + 1e-9)) {
                    settle(e, f, stage, least, link);
                    open--;
                }
            }
        }
    }
}

static void fill_switches(struct engine *e, const struct part *part) {
    for (int32_t n = 0; n < part->flow_count; n++) {
        struct flow *f = &e->flows[part->flows[n]];
        f->cap = backlog_now(e, f) > 0 ? NEVER : f->new_tx;
    }
    fill(e, part, SWITCH);
}

/* The queue of each port and how fast it grows. */
static void measure_queues(struct engine *e, const struct part *part) {
    for (int32_t n = 0; n < part->link_count; n++)
        e->links[part->links[n]].queue = e->links[part->links[n]].growth = 0;
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct flow *f = &e->flows[part->flows[n]];
        if (f->bottleneck != NONE) {
            e->links[f->bottleneck].queue += backlog_now(e, f);
            e->links[f->bottleneck].growth += f->new_tx - f->new_rx;
        }
    }
}

/* Whether queues are full and still grow that were not known to be; all of them are marked. */
static int more_full(struct engine *e, const struct part *part) {
    int more = 0;
    for (int32_t n = 0; n < part->link_count; n++) {
        struct link *l = &e->links[part->links[n]];
        if (!l->full && l->queue >= FULL_BYTES - 1 && l->growth > 0)
            more = l->full = 1;
    }
    return more;
}

/* Limits what is sent to what full queues let through. */
static void hold_back(struct engine *e, const struct part *part) {
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct flow *f = &e->flows[part->flows[n]];
        if (f->bottleneck == NONE || !e->links[f->bottleneck].full)
            continue;
        for (int hop = 0; hop < f->hops; hop++) {
            struct link *l = &e->links[f->in->path[hop]];
            if (e->in->links[f->in->path[hop]].stage == SENDER && f->new_rx < l->held)
                l->held = f->new_rx;
        }
    }
    for (int32_t n = 0; n < part->flow_count; n++) {
        struct flow *f = &e->flows[part->flows[n]];
        double least = NEVER;
        for (int hop = 0; hop < f->hops; hop++) {
            const struct link *l = &e->links[f->in->path[hop]];
            if (e->in->links[f->in->path[hop]].stage == SENDER && l->held < least)
                least = l->held;
        }
        f->cap = !f->injecting ? 0 : f->rate < least ? f->rate : least;
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

/* A NIC that cannot take its line's rate pauses the switch; a port whose part of a full queue is taken up is
 * paused by it. `wanted` is what each port would send without that. */
static void note_pauses(struct engine *e, const struct part *part, int held) {
    for (int32_t n = 0; n < part->link_count; n++) {
        int32_t link = part->links[n];
        struct link *l = &e->links[link];
        double paused = 0, sent = 0;
        if (e->in->links[link].nic == NONE)
            continue;
        for (int32_t k = 0; k < l->flow_count; k++)
            sent += e->in->links[link].stage == SENDER ? e->flows[l->flows[k]].new_tx
                                                       : e->flows[l->flows[k]].new_rx;
        if (e->in->links[link].stage == SWITCH && l->factor < 1 && l->queue > 0)
            paused = 1 - sent / l->bytes_per_ns;
        else if (e->in->links[link].stage == SENDER && held && l->wanted > 0 && sent < l->wanted)
            paused = 1 - sent / l->wanted;
        if (paused != l->paused)
            account_pause(e, link, paused);
    }
}

/* What each port would send, were no queue full. */
static void note_wanted(struct engine *e, const struct part *part) {
    for (int32_t n = 0; n < part->link_count; n++) {
        struct link *l = &e->links[part->links[n]];
        l->wanted = 0;
        l->full = 0;
        l->held = NEVER;
    }
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct flow *f = &e->flows[part->flows[n]];
        for (int hop = 0; hop < f->hops; hop++)
            e->links[f->in->path[hop]].wanted += f->new_tx;
    }
}

static double line_rate(const struct engine *e, const struct flow *f) {
    double least = NEVER;
    for (int hop = 0; hop < f->hops; hop++)
        if (e->in->links[f->in->path[hop]].stage == SENDER && e->links[f->in->path[hop]].bytes_per_ns < least)
            least = e->links[f->in->path[hop]].bytes_per_ns;
    return least;
}

static void tick_later(struct engine *e, int32_t flow) {
    /* Cards are not in step with each other, but four phases are enough to see. */
    double phase = TICK_NS / 4 * (e->flows[flow].in->src_nic % 4);
    e->flows[flow].ticking = 1;
    at(e, (floor((e->now - phase) / TICK_NS) + 1) * TICK_NS + phase, DUE_TICK, flow, 0);
}

static void apply(struct engine *e, const struct part *part) {
    for (int32_t n = 0; n < part->flow_count; n++) {
        int32_t flow = part->flows[n];
        struct flow *f = &e->flows[flow];
        if (fabs(f->new_tx - f->tx) <= 1e-9 * f->tx && fabs(f->new_rx - f->rx) <= 1e-9 * f->rx &&
            f->scheduled)
            continue;
        advance(e, flow);
        f->tx = f->new_tx;
        /* A queue can have run empty by the rounding of the time since. */
        f->rx = f->backlog > 0 || f->new_rx < f->tx ? f->new_rx : f->tx;
        reschedule(e, flow);
        if (!f->ticking && f->bottleneck != NONE && (f->backlog > 0 || f->tx > f->rx))
            tick_later(e, flow);
    }
    for (int32_t n = 0; n < part->link_count; n++) {
        struct link *l = &e->links[part->links[n]];
        double until_full = (FULL_BYTES - l->queue) / l->growth;
        if (l->growth <= 0 || l->full)
            forget(e, DUE_QUEUE, part->links[n]);
        else /* Never at this very moment again. */
            foresee(e, e->now + (until_full < 1 ? 1 : until_full), DUE_QUEUE, part->links[n]);
    }
}

void share(struct engine *e) {
    e->share_due = 0;
    e->stamp++;
    for (int32_t n = 0; n < e->dirty_count; n++)
        e->links[e->dirty[n]].dirty = 0;
    for (int32_t n = 0; n < e->dirty_count; n++) {
        struct part part;
        int held;
        if (e->links[e->dirty[n]].stamp == e->stamp)
            continue;
        part = connected(e, e->dirty[n]);
        for (int32_t k = 0; k < part.flow_count; k++) {
            struct flow *f = &e->flows[part.flows[k]];
            f->cap = f->injecting ? f->rate : 0;
        }
        fill(e, &part, SENDER);
        fill_switches(e, &part);
        measure_queues(e, &part);
        note_wanted(e, &part);
        held = 0;
        /* Holding one port's senders back may shift what fills another one's queue. */
        while (more_full(e, &part)) {
            held = 1;
            hold_back(e, &part);
            fill(e, &part, SENDER);
            fill_switches(e, &part);
            measure_queues(e, &part);
        }
        note_pauses(e, &part, held);
        apply(e, &part);
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
