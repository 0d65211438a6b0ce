/* What the library's kernels do on a GPU: take a slice, copy or reduce it, hand it on. */
#include "engine.h"

#include <math.h>
#include <stdlib.h>

/* Synchronization of thread blocks and flags, per slice. */
#define SLICE_NS 500
/* From the last member's coming to the end of the smallest operator inside a node. */
#define LOCAL_NS 10e3
#define CELL_BYTES 16

static int32_t gpu_of(const struct engine *e, int32_t call) {
    return e->in->comm_gpus[e->in->comms[e->in->calls[call].comm].first_gpu + e->in->calls[call].rank];
}

static int is_paired(const struct call_in *call) {
    return call->kind >= ALL_TO_ALL;
}

static int32_t kernels_of(const struct engine *e, const struct call_in *call) {
    if (call->kind == ALL_TO_ALL)
        return 2 * e->in->comms[call->comm].ranks;
    if (is_paired(call))
        return 1;
    return call->algorithm == TREE ? 2 * call->channels : call->channels;
}

static double wire_factor(const struct call_in *call) {
    return call->protocol == LL ? 2 : call->protocol == LL128 ? 128.0 / 120 : 1;
}

static void use(int32_t *list, int32_t *count, int32_t connection) {
    if (connection != NONE)
        list[(*count)++] = connection;
}

/* The part of `bytes` that falls to one of `channels`. */
static double channel_part(double bytes, int32_t channel, int32_t channels) {
    return floor(bytes * (channel + 1) / channels) - floor(bytes * channel / channels);
}

static void describe_paired(const struct engine *e, const struct call_in *call, int32_t n, struct kernel *k) {
    const struct comm_in *comm = &e->in->comms[call->comm];
    int32_t peer = call->peer, sends = call->kind == SEND, a, b;
    double bytes = (double)call->bytes;
    if (call->kind == ALL_TO_ALL) {
        sends = n % 2;
        /* Rank r first turns to r + 1, as in the library's schedule, to spread the load. */
        peer = sends ? (call->rank + n / 2) % comm->ranks : (call->rank - n / 2 + comm->ranks) % comm->ranks;
        bytes /= comm->ranks;
    }
    a = sends ? call->rank : peer;
    b = sends ? peer : call->rank;
    if (a != b)
        use(sends ? k->send : k->recv, sends ? &k->sends : &k->recvs,
            e->in->pairs[comm->pairs + (a * comm->ranks + b) * e->in->p2p_parts]);
    k->part = k->sends || k->recvs ? bytes : 0;
    k->slices = 1;
    k->chunk_max = call->slice_bytes;
    k->steps = 1;
}

static void describe_tree(const struct place_in *place, int32_t half, struct kernel *k) {
    int is_root = place->up_send == NONE;
    k->steps = 1;
    if (half == 0 || is_root)
        for (int n = 0; n < 3; n++)
            use(k->recv, &k->recvs, place->up_recv[n]);
    if (half == 0 && !is_root)
        use(k->send, &k->sends, place->up_send);
    if (half == 1 && !is_root)
        use(k->recv, &k->recvs, place->down_recv);
    if (half == 1 || is_root)
        for (int n = 0; n < 3; n++)
            use(k->send, &k->sends, place->down_send[n]);
    /* The root's two halves are one. */
    if (half == 1 && is_root)
        k->part = 0;
}

static void describe_ring(const struct call_in *call, const struct place_in *place, int32_t ranks,
                          const struct place_in *root, struct kernel *k) {
    int32_t after_root = root ? (place->ring_index - root->ring_index + ranks) % ranks : 0;
    k->ring_ranks = ranks;
    k->ring_index = place->ring_index;
    k->steps = call->kind == ALL_REDUCE ? 2 * ranks - 1 : root ? 1 : ranks;
    if (call->kind == ALL_GATHER || call->kind == REDUCE_SCATTER)
        k->part = floor(k->part / ranks);
    /* A chain from the root to the one before it, or from the one after it to the root. */
    if (!root || (call->kind == BROADCAST ? after_root != 0 : after_root != 1))
        use(k->recv, &k->recvs, place->ring_recv);
    if (!root || (call->kind == BROADCAST ? after_root != ranks - 1 : after_root != 0))
        use(k->send, &k->sends, place->ring_send);
}

/* The n-th kernel of a call. */
static struct kernel describe(const struct engine *e, int32_t number, int32_t n) {
    const struct call_in *call = &e->in->calls[number];
    const struct comm_in *comm = &e->in->comms[call->comm];
    struct kernel k = {.call = number, .gpu = gpu_of(e, number), .slices = call->slices};
    int32_t channel = call->algorithm == TREE ? n / 2 : n;
    const struct place_in *place, *root = 0;
    if (is_paired(call)) {
        describe_paired(e, call, n, &k);
        return k;
    }
    place = &e->in->places[comm->first_place + call->rank * comm->channels + channel];
    if (call->kind == BROADCAST || call->kind == REDUCE)
        root = &e->in->places[comm->first_place + call->peer * comm->channels + channel];
    k.part = channel_part((double)call->bytes, channel, call->channels);
    k.chunk_max = (double)call->slice_bytes * call->slices;
    if (call->algorithm == TREE)
        describe_tree(place, n % 2, &k);
    else
        describe_ring(call, place, comm->ranks, root, &k);
    return k;
}

static int is_all_reduce_ring(const struct kernel *k) {
    return k->ring_ranks && k->steps == 2 * k->ring_ranks - 1 && k->ring_ranks > 1;
}

static int takes(const struct kernel *k) {
    return k->recvs && (k->steps == 1 || k->step > 0);
}

static int gives(const struct kernel *k) {
    return k->sends && (k->steps == 1 || k->step < k->steps - 1);
}

/* The size of the chunks of the loop that begins at `done`. */
static void begin_loop(struct kernel *k) {
    double rest = k->part - k->done;
    if (is_all_reduce_ring(k))
        rest = ceil(rest / k->ring_ranks / CELL_BYTES) * CELL_BYTES;
    k->chunk = rest < k->chunk_max ? rest : k->chunk_max;
}

static double loops(const struct kernel *k) {
    return ceil(k->part / (k->chunk_max * (is_all_reduce_ring(k) ? k->ring_ranks : 1)));
}

/* Bytes of the slice at which the kernel is. */
static double slice_bytes(struct kernel *k) {
    double chunk = k->chunk, rest;
    if (is_all_reduce_ring(k)) {
        int32_t place = (k->ring_index - 1 - k->step + 2 * k->ring_ranks) % k->ring_ranks;
        rest = k->part - k->done - place * k->chunk;
        chunk = rest < chunk ? rest : chunk;
    }
    /* Nearly all chunks of a kernel are equal. */
    if (chunk != k->sized) {
        k->sized = chunk;
        k->size = ceil(chunk / k->slices / CELL_BYTES) * CELL_BYTES;
        if (k->slices > 1 && k->size < k->chunk_max / k->slices / 32)
            k->size = floor(k->chunk_max / k->slices / 32);
    }
    rest = chunk - k->slice * k->size;
    return rest <= 0 ? 0 : rest < k->size ? rest : k->size;
}

/* On to the next slice; 0 after the last. */
static int next_slice(struct kernel *k) {
    if (++k->slice < k->slices)
        return 1;
    k->slice = 0;
    if (++k->step < k->steps)
        return 1;
    k->step = 0;
    k->done += k->chunk * (is_all_reduce_ring(k) ? k->ring_ranks : 1);
    if (k->done >= k->part)
        return 0;
    begin_loop(k);
    return 1;
}

void plan_call(struct engine *e, int32_t number) {
    const struct call_in *call = &e->in->calls[number];
    if (call->algorithm == LOCAL)
        return;
    for (int32_t n = 0; n < kernels_of(e, call); n++) {
        struct kernel k = describe(e, number, n);
        double slices = loops(&k) * k.slices * (k.steps == 1 ? 1 : k.steps - 1);
        for (int32_t i = 0; k.part > 0 && i < k.recvs; i++)
            plan_receive(e, k.recv[i], (uint32_t)slices);
    }
}

static struct kernel *make_kernel(struct engine *e, const struct kernel *described) {
    struct kernel *k;
    int32_t id;
    if (e->free_count) {
        id = e->free_kernels[--e->free_count];
    } else {
        if (e->kernel_count == e->kernel_capacity) {
            e->kernel_capacity = e->kernel_capacity ? 2 * e->kernel_capacity : 1024;
            e->kernels = realloc(e->kernels, (size_t)e->kernel_capacity * sizeof(*e->kernels));
            e->free_kernels = realloc(e->free_kernels, (size_t)e->kernel_capacity * sizeof(int32_t));
            if (!e->kernels || !e->free_kernels)
                abort();
        }
        id = e->kernel_count++;
        e->kernels[id] = malloc(sizeof(**e->kernels));
        if (!e->kernels[id])
            abort();
    }
    k = e->kernels[id];
    *k = *described;
    k->id = id;
    return k;
}

static void append(struct kernel **queue, struct kernel *k) {
    while (*queue)
        queue = &(*queue)->next;
    *queue = k;
}

/* Takes the kernel's connections, or puts it in line for the first that is in use. */
static void begin(struct engine *e, struct kernel *k) {
    k->next = 0;
    for (int32_t n = 0; n < k->recvs; n++)
        if (e->connections[k->recv[n]].receiver) {
            append(&e->connections[k->recv[n]].receiver_queue, k);
            return;
        }
    for (int32_t n = 0; n < k->sends; n++)
        if (e->connections[k->send[n]].sender) {
            append(&e->connections[k->send[n]].sender_queue, k);
            return;
        }
    for (int32_t n = 0; n < k->recvs; n++)
        e->connections[k->recv[n]].receiver = k;
    for (int32_t n = 0; n < k->sends; n++)
        e->connections[k->send[n]].sender = k;
    begin_loop(k);
    try_copy(e, k);
}

void start_call(struct engine *e, int32_t number) {
    const struct call_in *call = &e->in->calls[number];
    const struct comm_in *comm = &e->in->comms[call->comm];
    e->out->call_times[number].start_ns = e->now;
    if (call->algorithm == LOCAL) {
        int32_t slot = e->met[e->met_first[call->comm] + call->rank]++ % 4;
        struct meeting *meeting = &e->meetings[4 * call->comm + slot];
        meeting->calls[meeting->arrived++] = number;
        if (meeting->arrived == comm->ranks)
            begin_meeting(e, call->comm, slot);
        return;
    }
    e->call_open[number] = 1;
    for (int32_t n = 0; n < kernels_of(e, call); n++) {
        struct kernel k = describe(e, number, n);
        if (k.part <= 0)
            continue;
        e->call_open[number]++;
        begin(e, make_kernel(e, &k));
    }
    if (!--e->call_open[number])
        call_ended(e, gpu_of(e, number), number);
}

void try_copy(struct engine *e, struct kernel *k) {
    struct gpu *gpu = &e->gpus[k->gpu];
    double bytes, gbps;
    if (k->copying || gpu->killed)
        return;
    for (int32_t n = 0; takes(k) && n < k->recvs; n++)
        if (e->connections[k->recv[n]].arrived == e->connections[k->recv[n]].consumed)
            return;
    for (int32_t n = 0; gives(k) && n < k->sends; n++)
        if (!has_slot(&e->connections[k->send[n]]))
            return;
    k->copying = 1;
    gpu->copying++;
    bytes = k->bytes = slice_bytes(k);
    gbps = e->in->nvlink_gbps * gpu->nvlink / gpu->copying;
    gbps = gbps < e->in->channel_gbps ? gbps : e->in->channel_gbps;
    at(e, finishes(e, GPU, k->gpu, e->now, SLICE_NS + bytes * 8 / (gbps * gpu->speed)), DUE_COPIED, k->id, 0);
}

static void end(struct engine *e, struct kernel *k) {
    struct kernel *waiting[6];
    int32_t count = 0, call = k->call, gpu = k->gpu;
    for (int32_t n = 0; n < k->recvs; n++) {
        struct connection *c = &e->connections[k->recv[n]];
        c->receiver = 0;
        if ((waiting[count] = c->receiver_queue))
            c->receiver_queue = waiting[count++]->next;
    }
    for (int32_t n = 0; n < k->sends; n++) {
        struct connection *c = &e->connections[k->send[n]];
        c->sender = 0;
        if ((waiting[count] = c->sender_queue))
            c->sender_queue = waiting[count++]->next;
    }
    e->free_kernels[e->free_count++] = k->id;
    for (int32_t n = 0; n < count; n++)
        begin(e, waiting[n]);
    if (!--e->call_open[call])
        call_ended(e, gpu, call);
}

void copied_due(struct engine *e, int32_t id) {
    struct kernel *k = e->kernels[id];
    int takes_one = takes(k), gives_one = gives(k), more;
    double bytes = k->bytes * wire_factor(&e->in->calls[k->call]);
    k->copying = 0;
    e->gpus[k->gpu].copying--;
    if (e->gpus[k->gpu].killed)
        return;
    k->copying = 1; /* until its own step is counted, nothing may start the next one */
    for (int32_t n = 0; takes_one && n < k->recvs; n++)
        consume_slice(e, k->recv[n], k->call);
    for (int32_t n = 0; gives_one && n < k->sends; n++)
        fill_slice(e, k->send[n], bytes, k->call);
    k->copying = 0;
    more = next_slice(k);
    if (more)
        try_copy(e, k);
    else
        end(e, k);
}

/* All members of an operator inside a node are there: it takes as long as the slowest needs. */
void begin_meeting(struct engine *e, int32_t comm, int32_t slot) {
    struct meeting *meeting = &e->meetings[4 * comm + slot];
    double ends_ns = 0, ranks = e->in->comms[comm].ranks, passes;
    for (int32_t n = 0; n < meeting->arrived; n++) {
        const struct call_in *call = &e->in->calls[meeting->calls[n]];
        int32_t gpu = gpu_of(e, meeting->calls[n]);
        double rate = e->in->nvlink_gbps / 8 * e->gpus[gpu].nvlink * e->gpus[gpu].speed, member_ns;
        passes = call->kind == ALL_REDUCE ? 2 * (ranks - 1) / ranks : (ranks - 1) / ranks;
        member_ns = finishes(e, GPU, gpu, e->now, LOCAL_NS + passes * (double)call->bytes / rate);
        ends_ns = member_ns > ends_ns ? member_ns : ends_ns;
    }
    at(e, ends_ns, DUE_MET, comm, (uint32_t)slot);
}

void met_due(struct engine *e, int32_t comm, uint32_t slot) {
    struct meeting *meeting = &e->meetings[4 * comm + (int32_t)slot];
    int32_t count = meeting->arrived;
    meeting->arrived = 0;
    for (int32_t n = 0; n < count; n++)
        call_ended(e, gpu_of(e, meeting->calls[n]), meeting->calls[n]);
}
