/* Queue pairs: messages in order, as a fluid whose rate sharing.c sets; loss, go-back-N and timeouts. */
#include "engine.h"

#include <math.h>
#include <stdlib.h>

#define LEAST_BYTES 1e-3

static struct message *message(const struct flow *f, uint32_t number) {
    return &f->queue[number & (f->capacity - 1)];
}

static int has_message(const struct flow *f) {
    return f->inject != f->last;
}

/* How much of what comes to the receiver's port up to `position` has not been there before. */
static double seen_until(struct flow *f, double position) {
    double fresh = position > f->seen ? position - f->seen : 0;
    f->seen += fresh;
    return fresh;
}

/* The same of so many bytes that come after a lost packet, itself included. */
static double out_of_order(struct flow *f, double bytes) {
    double end = f->injected > f->repeat_until ? f->injected : f->repeat_until;
    double seen = f->seen, fresh, from, to, hole;
    f->passing = f->passing + bytes < end ? f->passing + bytes : end;
    fresh = seen_until(f, f->passing);
    from = seen > f->lost_begin ? seen : f->lost_begin;
    to = f->passing < f->lost_end ? f->passing : f->lost_end;
    hole = fresh > 0 && to > from ? to - from : 0;
    f->hole += hole;
    return fresh - hole;
}

/* Lets the time since the last change pass. */
void advance(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    double passed = e->now - f->since_ns, sent = f->tx * passed, got = f->rx * passed;
    if (passed <= 0)
        return;
    if (sent > 0) {
        double end = f->injected + sent, repeated = f->repeat_until - f->injected;
        repeated = repeated < 0 ? 0 : repeated < sent ? repeated : sent;
        count_bytes(e, flow, 0, f->since_ns, e->now, sent, sent - repeated);
        f->injected = end;
        f->until_loss -= sent;
    }
    if (got > 0) {
        double wasted = f->waste < got ? f->waste : got, good = got - wasted, fresh, again;
        double latency_ns = f->in->latency_ns;
        f->waste -= wasted;
        if (good > f->limit - f->delivered)
            good = f->limit - f->delivered;
        /* Its port sees also what the receiver throws away, and a lost packet first when it comes again. */
        fresh = seen_until(f, f->delivered + good);
        again = f->hole < good - fresh ? f->hole : good - fresh;
        f->hole -= again;
        fresh += again + out_of_order(f, got - good);
        count_bytes(e, flow, 1, f->since_ns + latency_ns, e->now + latency_ns, got, fresh);
        f->delivered += good;
    }
    f->backlog += sent - got;
    if (f->backlog < LEAST_BYTES && (sent > 0 || got > 0)) {
        /* Rounding must not leave a message unfinished. */
        f->backlog = f->waste = 0;
        f->delivered = f->doomed ? f->limit : f->injected;
    }
    f->since_ns = e->now;
}

/* When the rates of now lead to something. */
void reschedule(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    double soonest = NEVER, t;
    if (f->first != f->inject && f->delivered >= message(f, f->first)->end - LEAST_BYTES)
        soonest = 0;
    if (f->tx > 0 && has_message(f)) {
        if ((t = (message(f, f->inject)->end - f->injected) / f->tx) < soonest)
            soonest = t;
        if (!f->doomed && f->until_loss < NEVER && (t = f->until_loss / f->tx) < soonest)
            soonest = t;
    }
    if (f->rx > 0) {
        if (f->first != f->last && message(f, f->first)->end <= f->limit &&
            (t = (message(f, f->first)->end - f->delivered + f->waste) / f->rx) < soonest)
            soonest = t;
        if (f->rx > f->tx && (t = f->backlog / (f->rx - f->tx)) < soonest)
            soonest = t;
    }
    f->scheduled = soonest < NEVER;
    if (f->scheduled)
        foresee(e, e->now + (soonest > 0 ? soonest : 0), DUE_FLOW, flow);
    else
        forget(e, DUE_FLOW, flow);
}

static int path_down(const struct engine *e, const struct flow *f) {
    for (int hop = 0; hop < f->hops; hop++)
        if (e->links[f->in->path[hop]].down)
            return 1;
    return f->dead;
}

static void stall(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    if (f->stalled)
        return;
    f->stalled = 1;
    f->retries = 0;
    f->retry_ns = e->now + e->in->retry_ns;
    at(e, f->retry_ns, DUE_RETRY, flow, 0);
}

static struct moved *moved_by(const struct engine *e, const struct message *m) {
    int32_t row = e->connections[m->connection].slices[m->slice % SLICES].moved;
    return (struct moved *)e->out->moved.data + row;
}

/* The first byte comes when it was sent and all messages before are there. */
static void reception_begins(struct engine *e, const struct flow *f) {
    const struct message *m = message(f, f->first);
    if (f->first == f->last || m->connection == NONE)
        return;
    if (isnan(moved_by(e, m)->first_rx_ns))
        moved_by(e, m)->first_rx_ns = e->now + f->in->latency_ns;
}

static void injection_begins(struct engine *e, const struct flow *f, const struct message *m) {
    if (m->connection == NONE)
        return;
    if (isnan(moved_by(e, m)->first_tx_ns))
        moved_by(e, m)->first_tx_ns = e->now;
    if (f->first == f->inject)
        reception_begins(e, f);
}

void post_message(struct engine *e, int32_t flow, int32_t connection, uint32_t slice, double bytes) {
    struct flow *f = &e->flows[flow];
    int idle = !has_message(f);
    if (f->last - f->first == f->capacity) {
        uint32_t capacity = f->capacity ? 2 * f->capacity : 8;
        struct message *queue = calloc(capacity, sizeof(*queue));
        if (!queue)
            abort();
        for (uint32_t n = f->first; n != f->last; n++)
            queue[n & (capacity - 1)] = *message(f, n);
        free(f->queue);
        f->queue = queue;
        f->capacity = capacity;
    }
    /* A message without data still is a packet. */
    bytes = bytes < 1 ? 1 : bytes;
    f->posted += bytes;
    *message(f, f->last++) = (struct message){connection, slice, bytes, f->posted};
    if (!idle)
        return;
    advance(e, flow);
    injection_begins(e, f, message(f, f->inject));
    if (path_down(e, f)) {
        stall(e, flow);
    } else if (!f->stalled) {
        /* The first packet after a lost one makes its receiver ask for that one. */
        if (f->doomed)
            at(e, e->now + 2 * f->in->latency_ns, DUE_NAK, flow, 0);
        dirty_path(e, flow);
    }
}

static double draw_loss(struct engine *e, const struct flow *f) {
    double packets;
    if (f->loss <= 0)
        return NEVER;
    packets = ceil(log(1 - uniform(e)) / log1p(-f->loss));
    return (packets < 1 ? 1 : packets) * e->in->mtu_bytes;
}

void set_loss(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    double passes = 1;
    for (int hop = 0; hop < f->hops; hop++)
        passes *= 1 - e->in->links[f->in->path[hop]].loss;
    if (f->loss == 1 - passes)
        return;
    advance(e, flow);
    f->loss = 1 - passes;
    f->until_loss = draw_loss(e, f);
    reschedule(e, flow);
}

/* Counts a lost packet on the port that lost it, if a link's errors and no full queue did. */
static void blame(struct engine *e, const struct flow *f) {
    double all = 0, drawn;
    for (int hop = 0; hop < f->hops; hop++)
        all += e->in->links[f->in->path[hop]].loss;
    drawn = uniform(e) * all;
    for (int hop = 0; hop < f->hops; hop++) {
        const struct link_in *link = &e->in->links[f->in->path[hop]];
        if ((drawn -= link->loss) >= 0)
            continue;
        if (link->nic != NONE) {
            e->nics[link->nic].counters.lost_packets++;
            /* What is damaged on its way to a switch, the switch's port counts. */
            e->nics[link->nic].counters.rx_errors += link->stage != SENDER;
        }
        return;
    }
}

/* A packet is lost now: what comes after it is thrown away until it has been sent again. */
void lose(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    double begins;
    if (f->doomed || f->first == f->last)
        return;
    begins = message(f, f->first)->end - message(f, f->first)->bytes;
    f->doomed = 1;
    f->until_loss = NEVER;
    f->lost_end = f->injected;
    f->limit = f->injected - e->in->mtu_bytes > begins ? f->injected - e->in->mtu_bytes : begins;
    f->lost_begin = f->passing = f->limit;
    /* The fluid is there at once, whose last packet was the lost one. */
    f->delivered = f->delivered < f->limit ? f->delivered : f->limit;
    f->meters[1].skip += f->injected - f->limit;
    blame(e, f);
    f->retry_ns = e->now + e->in->retry_ns;
    at(e, f->retry_ns, DUE_RETRY, flow, 0);
    at(e, e->now + 2 * f->in->latency_ns + (f->rx > 0 ? f->backlog / f->rx : 0), DUE_NAK, flow, 0);
}

/* Sends again from `position` on. */
static void rewind_to(struct engine *e, int32_t flow, double position) {
    struct flow *f = &e->flows[flow];
    double good = position > f->delivered ? position - f->delivered : 0;
    f->repeat_until = f->injected > f->repeat_until ? f->injected : f->repeat_until;
    /* All that is queued but not in order, also what an earlier loss left there. */
    f->waste = f->backlog > good ? f->backlog - good : 0;
    f->injected = position;
    f->doomed = 0;
    f->limit = NEVER;
    f->until_loss = draw_loss(e, f);
    while (f->inject != f->first && message(f, f->inject - 1)->end > position + LEAST_BYTES)
        f->inject--;
    dirty_path(e, flow);
}

void nak_due(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    if (!f->doomed || f->stalled)
        return;
    advance(e, flow);
    /* Without a later packet nobody notices, until the sender's timer runs out. */
    if (f->injected <= f->lost_end + LEAST_BYTES)
        return;
    see(e, f->in->src_nic, flow, SEEN_NAK, 1);
    e->nics[f->in->dst_nic].counters.naks_sent++;
    e->nics[f->in->src_nic].counters.naks_received++;
    rewind_to(e, flow, f->limit);
}

void retry_due(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    double position;
    if (e->now != f->retry_ns || !(f->stalled || f->doomed))
        return;
    /* Queue pairs end with their process. */
    if (f->dead && e->gpus[f->in->src_nic].killed)
        return;
    advance(e, flow);
    position = f->stalled ? f->delivered : f->limit;
    see(e, f->in->src_nic, flow, SEEN_TIMEOUT, 1);
    e->nics[f->in->src_nic].counters.timeouts++;
    if (path_down(e, f)) {
        if (++f->retries > e->in->retry_count)
            return;
        f->retry_ns = e->now + e->in->retry_ns;
        at(e, f->retry_ns, DUE_RETRY, flow, 0);
        return;
    }
    f->stalled = 0;
    rewind_to(e, flow, position);
}

/* What of it is in the network is gone; the sender's timer runs. */
void break_flow(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    if (f->first == f->last)
        return;
    advance(e, flow);
    f->backlog = f->waste = 0;
    stall(e, flow);
    dirty_path(e, flow);
}

void set_link_down(struct engine *e, int32_t link, int down) {
    struct link *l = &e->links[link];
    int32_t nic = e->in->links[link].nic;
    l->down = (uint8_t)down;
    if (nic != NONE && nic < e->in->gpu_count)
        see(e, nic, NONE, down ? SEEN_PORT_DOWN : SEEN_PORT_UP, 1);
    for (int32_t flow = 0; down && flow < e->in->flows_count; flow++) {
        int crosses = 0;
        for (int hop = 0; hop < e->flows[flow].hops; hop++)
            crosses |= e->flows[flow].in->path[hop] == link;
        if (crosses)
            break_flow(e, flow);
    }
}

void background_due(struct engine *e, int32_t row) {
    const struct background_in *background = &e->in->background[row];
    struct flow *f = &e->flows[background->flow];
    f->background = row;
    if (e->now < background->end_ns && !has_message(f))
        post_message(e, background->flow, NONE, 0, background->message_bytes);
}

/* Something that reschedule foresaw has come about. */
void flow_due(struct engine *e, int32_t flow) {
    struct flow *f = &e->flows[flow];
    int began = has_message(f), backlogged = f->backlog > 0;
    advance(e, flow);
    while (has_message(f) && f->injected >= message(f, f->inject)->end - LEAST_BYTES) {
        struct message *m = message(f, f->inject);
        double packets = m->bytes / e->in->mtu_bytes;
        f->meters[0].packets += ceil(packets) - packets;
        f->meters[1].packets += ceil(packets) - packets;
        if (m->connection != NONE)
            moved_by(e, m)->last_tx_ns = e->now;
        f->inject++;
        if (!has_message(f) && f->background != NONE && e->now < e->in->background[f->background].end_ns)
            post_message(e, flow, NONE, 0, e->in->background[f->background].message_bytes);
        else if (has_message(f))
            injection_begins(e, f, message(f, f->inject));
    }
    if (!f->doomed && f->until_loss <= LEAST_BYTES)
        lose(e, flow);
    while (f->first != f->inject && f->delivered >= message(f, f->first)->end - LEAST_BYTES) {
        const struct message *m = message(f, f->first++);
        reception_begins(e, f);
        if (m->connection != NONE)
            delivered_part(e, m->connection, m->slice);
    }
    /* The queue can have run empty at a look at it just before. */
    if (began != has_message(f) || backlogged != (f->backlog > 0) || (f->rx > f->tx && f->backlog <= 0))
        dirty_path(e, flow);
    else
        reschedule(e, flow);
}
