/* Max-min fair shares, first of the sender's links and then of the switches' ports with their queues. */
#include "sharing.h"

static void settle(struct part *part, struct shared_flow *f, int stage, double rate, int32_t bottleneck) {
    int first = stage == SENDER ? 0 : f->sender_hops, last = stage == SENDER ? f->sender_hops : f->hops;
    for (int hop = first; hop < last; hop++) {
        part->links[f->links[hop]].left -= rate;
        part->links[f->links[hop]].open--;
    }
    if (stage == SENDER) {
        f->tx = rate;
    } else {
        f->rx = rate;
        f->bottleneck = bottleneck;
    }
}

/* The link that holds `f` up, if one has no more than `least` for it. */
static int32_t narrowest(const struct part *part, const struct shared_flow *f, int stage, double least) {
    int first = stage == SENDER ? 0 : f->sender_hops, last = stage == SENDER ? f->sender_hops : f->hops;
    for (int hop = first; hop < last; hop++)
        if (part->links[f->links[hop]].share <= least * (1 + 1e-9))
            return f->links[hop];
    return NONE;
}

/* By progressive filling, of what each flow wants (its `cap`), over the links of one stage. */
static void fill(struct part *part, int stage) {
    int32_t open = 0;
    for (int32_t n = 0; n < part->link_count; n++) {
        part->links[n].left = part->links[n].capacity;
        part->links[n].open = 0;
    }
    for (int32_t n = 0; n < part->flow_count; n++) {
        struct shared_flow *f = &part->flows[n];
        int first = stage == SENDER ? 0 : f->sender_hops, last = stage == SENDER ? f->sender_hops : f->hops;
        if (stage == SENDER && f->known)
            continue;
        if (stage == SENDER)
            f->tx = 0;
        else
            f->rx = 0, f->bottleneck = NONE;
        if (f->cap <= 0)
            continue;
        part->open[open++] = n;
        for (int hop = first; hop < last; hop++)
            part->links[f->links[hop]].open++;
    }
    while (open) {
        double least = NEVER;
        int32_t left = 0;
        for (int32_t n = 0; n < part->link_count; n++) {
            struct shared_link *l = &part->links[n];
            if (!l->open)
                continue;
            l->share = l->left > 0 ? l->left / l->open : 0;
            least = l->share < least ? l->share : least;
        }
        for (int32_t n = 0; n < open; n++) {
            struct shared_flow *f = &part->flows[part->open[n]];
            if (f->cap <= least)
                settle(part, f, stage, f->cap, NONE);
            else
                part->open[left++] = part->open[n];
        }
        if (left == open) {
            left = 0;
            for (int32_t n = 0; n < open; n++) {
                struct shared_flow *f = &part->flows[part->open[n]];
                int32_t link = narrowest(part, f, stage, least);
                if (link != NONE)
                    settle(part, f, stage, least, link);
                else
                    part->open[left++] = part->open[n];
            }
        }
        open = left;
    }
}

/* Whether the switches have room for all that is sent, and nothing waits in them. */
static int all_passes(const struct part *part) {
    for (int32_t n = 0; n < part->flow_count; n++)
        if (part->flows[n].backlog > 0)
            return 0;
    for (int32_t n = 0; n < part->link_count; n++) {
        const struct shared_link *l = &part->links[n];
        if (l->stage == SWITCH && l->wanted > l->capacity * (1 + ROUNDING))
            return 0;
    }
    return 1;
}

static void fill_switches(struct part *part) {
    for (int32_t n = 0; n < part->flow_count; n++) {
        struct shared_flow *f = &part->flows[n];
        f->cap = f->backlog > 0 ? NEVER : f->tx;
    }
    fill(part, SWITCH);
}

/* The queue of each port and how fast it grows. */
static void measure_queues(struct part *part) {
    for (int32_t n = 0; n < part->link_count; n++)
        part->links[n].queue = part->links[n].growth = 0;
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct shared_flow *f = &part->flows[n];
        if (f->bottleneck != NONE) {
            part->links[f->bottleneck].queue += f->backlog;
            part->links[f->bottleneck].growth += f->tx - f->rx;
        }
    }
}

/* Whether queues are full and still grow that were not known to be; all of them are marked. */
static int more_full(struct part *part) {
    int more = 0;
    for (int32_t n = 0; n < part->link_count; n++) {
        struct shared_link *l = &part->links[n];
        if (!l->full && l->queue >= FULL_BYTES - 1 && l->growth > 0)
            more = l->full = 1;
    }
    return more;
}

/* Limits what is sent to what full queues let through. */
static void hold_back(struct part *part) {
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct shared_flow *f = &part->flows[n];
        if (f->bottleneck == NONE || !part->links[f->bottleneck].full)
            continue;
        for (int hop = 0; hop < f->sender_hops; hop++) {
            struct shared_link *l = &part->links[f->links[hop]];
            l->held = f->rx < l->held ? f->rx : l->held;
        }
    }
    for (int32_t n = 0; n < part->flow_count; n++) {
        struct shared_flow *f = &part->flows[n];
        double least = NEVER;
        for (int hop = 0; hop < f->sender_hops; hop++) {
            const struct shared_link *l = &part->links[f->links[hop]];
            least = l->held < least ? l->held : least;
        }
        f->cap = !f->injecting ? 0 : f->rate < least ? f->rate : least;
    }
}

/* What each port would send, were no queue full. */
static void note_wanted(struct part *part) {
    for (int32_t n = 0; n < part->link_count; n++) {
        struct shared_link *l = &part->links[n];
        l->wanted = l->queue = l->growth = 0;
        l->full = 0;
        l->held = NEVER;
    }
    for (int32_t n = 0; n < part->flow_count; n++) {
        const struct shared_flow *f = &part->flows[n];
        for (int hop = 0; hop < f->hops; hop++)
            part->links[f->links[hop]].wanted += f->tx;
    }
}

int share_out(struct part *part) {
    int held = 0;
    for (int32_t n = 0; n < part->flow_count; n++) {
        struct shared_flow *f = &part->flows[n];
        f->cap = f->injecting ? f->rate : 0;
    }
    fill(part, SENDER);
    note_wanted(part);
    if (all_passes(part)) {
        for (int32_t n = 0; n < part->flow_count; n++) {
            part->flows[n].rx = part->flows[n].tx;
            part->flows[n].bottleneck = NONE;
        }
        return 0;
    }
    fill_switches(part);
    measure_queues(part);
    /* Holding one port's senders back may shift what fills another one's queue. */
    while (more_full(part)) {
        held = 1;
        hold_back(part);
        fill(part, SENDER);
        fill_switches(part);
        measure_queues(part);
    }
    return held;
}
