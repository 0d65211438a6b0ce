/* One direction of a channel between two GPUs: slices in order, slots of credit, the two proxy threads. */
#include "engine.h"

#include <math.h>

static int32_t flow_of(const struct connection *c, uint32_t slice) {
    return c->in->flow + (int32_t)(slice % (uint32_t)c->in->flows);
}

/* The receiver's proxy tells the sender of free slots, as far as calls have been made that will use them. */
void try_grant(struct engine *e, int32_t connection) {
    struct connection *c = &e->connections[connection];
    double resumes_ns = resumes(e, PROXY, c->in->dst_proxy, e->now);
    if (c->waits_to_grant || e->gpus[c->in->dst_proxy].killed)
        return;
    while (c->promised != c->planned && c->promised - c->consumed < c->slots) {
        int32_t flow = flow_of(c, c->promised);
        if (resumes_ns > e->now) {
            c->waits_to_grant = 1;
            at(e, resumes_ns, DUE_PROMISE, connection, 0);
            return;
        }
        c->promised++;
        count_control(e, flow, 1, e->now, 1, 0);
        at(e, e->now + e->flows[flow].in->latency_ns, DUE_GRANT, connection, 0);
    }
}

void plan_receive(struct engine *e, int32_t connection, uint32_t slices) {
    e->connections[connection].planned += slices;
    if (e->connections[connection].networked)
        try_grant(e, connection);
}

void grant_due(struct engine *e, int32_t connection) {
    struct connection *c = &e->connections[connection];
    count_control(e, flow_of(c, c->granted), 0, e->now, 1, 0);
    c->granted++;
    try_post(e, connection);
}

/* The sender's proxy posts what its GPU has filled and the receiver has room for. */
void try_post(struct engine *e, int32_t connection) {
    struct connection *c = &e->connections[connection];
    double resumes_ns;
    if (c->waits_to_post || c->posted == c->filled || c->posted == c->granted)
        return;
    if (e->gpus[c->in->src_proxy].killed)
        return;
    resumes_ns = resumes(e, PROXY, c->in->src_proxy, e->now);
    if (resumes_ns > e->now) {
        c->waits_to_post = 1;
        at(e, resumes_ns, DUE_POST, connection, 0);
        return;
    }
    while (c->posted != c->filled && c->posted != c->granted) {
        uint32_t number = c->posted++;
        struct slice *slice = &c->slices[number % SLICES];
        slice->parts = c->in->split ? c->in->flows : 1;
        if (!c->in->split)
            post_message(e, flow_of(c, number), connection, number, slice->bytes);
        for (int32_t n = 0; c->in->split && n < c->in->flows; n++)
            post_message(e, c->in->flow + n, connection, number, slice->bytes / c->in->flows);
    }
}

void fill_slice(struct engine *e, int32_t connection, double bytes, int32_t call) {
    struct connection *c = &e->connections[connection];
    struct slice *slice = &c->slices[c->filled++ % SLICES];
    if (!c->networked) {
        c->arrived++;
        if (c->receiver)
            try_copy(e, c->receiver);
        return;
    }
    if (c->sender_call != call) {
        struct moved *moved = grown(&e->out->moved, sizeof(*moved));
        *moved = (struct moved){call, NONE, connection, 0, NAN, NAN, NAN, NAN};
        c->sender_call = call;
        c->moved = (int32_t)(e->out->moved.count - 1);
    }
    *slice = (struct slice){bytes, c->moved, 0};
    try_post(e, connection);
}

void consume_slice(struct engine *e, int32_t connection, int32_t call) {
    struct connection *c = &e->connections[connection];
    if (c->networked) {
        struct moved *moved = (struct moved *)e->out->moved.data + c->slices[c->consumed % SLICES].moved;
        if (moved->recv_call == NONE)
            moved->recv_call = call;
        c->consumed++;
        try_grant(e, connection);
    } else {
        c->consumed++;
        if (c->sender)
            try_copy(e, c->sender);
    }
}

void delivered_part(struct engine *e, int32_t connection, uint32_t number) {
    struct connection *c = &e->connections[connection];
    int32_t flow = flow_of(c, number);
    if (--c->slices[number % SLICES].parts > 0)
        return;
    at(e, e->now + e->flows[flow].in->latency_ns, DUE_ARRIVED, connection, number);
    at(e, e->now + 2 * e->flows[flow].in->latency_ns, DUE_ACKED, connection, number);
}

void arrived_due(struct engine *e, int32_t connection, uint32_t number) {
    struct connection *c = &e->connections[connection];
    struct slice *slice = &c->slices[number % SLICES];
    struct moved *moved = (struct moved *)e->out->moved.data + slice->moved;
    moved->last_rx_ns = e->now;
    moved->bytes += slice->bytes;
    count_control(e, flow_of(c, number), 1, e->now, 0, 1);
    slice->parts = NONE;
    /* Over several queue pairs a later slice may come first. */
    while (c->arrived != c->posted && c->slices[c->arrived % SLICES].parts == NONE)
        c->arrived++;
    if (c->receiver)
        try_copy(e, c->receiver);
}

void acked_due(struct engine *e, int32_t connection, uint32_t number) {
    struct connection *c = &e->connections[connection];
    count_control(e, flow_of(c, number), 0, e->now, 0, 1);
    c->acked++;
    if (c->sender)
        try_copy(e, c->sender);
}
