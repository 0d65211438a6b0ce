/* The events in their order, and what the other parts share. */
#include "engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void *grown(struct array *array, int64_t size) {
    if (array->count == array->capacity) {
        array->capacity = array->capacity ? 2 * array->capacity : 1024;
        array->data = realloc(array->data, (size_t)(array->capacity * size));
        if (!array->data)
            abort();
    }
    return (char *)array->data + array->count++ * size;
}

/* xoroshiro128+ (Blackman, Vigna 2018): the next number from 0 to 1. */
double uniform(struct engine *e) {
    uint64_t a = e->random[0], b = e->random[1], sum = a + b;
    b ^= a;
    e->random[0] = ((a << 24) | (a >> 40)) ^ b ^ (b << 16);
    e->random[1] = (b << 37) | (b >> 27);
    return (double)(sum >> 11) * 0x1.0p-53;
}

/* The windows in which it is kept from running that end after t_ns. */
static struct span windows(const struct engine *e, int executor, int32_t gpu, double t_ns) {
    struct span span = e->pauses[executor * e->in->gpu_count + gpu];
    int64_t last = span.last;
    while (span.first < last) {
        int64_t middle = (span.first + last) / 2;
        if (e->in->pauses[middle].end_ns <= t_ns)
            span.first = middle + 1;
        else
            last = middle;
    }
    return span;
}

double resumes(const struct engine *e, int executor, int32_t gpu, double t_ns) {
    return finishes(e, executor, gpu, t_ns, 0);
}

double finishes(const struct engine *e, int executor, int32_t gpu, double t_ns, double work_ns) {
    struct span span = windows(e, executor, gpu, t_ns);
    for (; span.first < span.last && e->in->pauses[span.first].start_ns <= t_ns + work_ns; span.first++) {
        const struct pause_in *pause = &e->in->pauses[span.first];
        if (pause->start_ns > t_ns) {
            if (pause->start_ns == t_ns + work_ns)
                break;
            work_ns -= pause->start_ns - t_ns;
        }
        t_ns = pause->end_ns;
    }
    return t_ns + work_ns;
}

void see(struct engine *e, int32_t nic, int32_t flow, int kind, uint64_t value) {
    struct event *event;
    if (e->now < e->in->record_ns)
        return;
    event = grown(&e->out->events, sizeof(*event));
    *event = (struct event){e->now, nic, flow, (uint8_t)kind, value};
}

static void change_due(struct engine *e, int32_t row) {
    const struct change_in *change = &e->in->changes[row];
    int32_t target = change->target;
    switch (change->what) {
    case LINK_FACTOR:
        e->links[target].factor = change->value;
        dirty_link(e, target);
        break;
    case LINK_LOSS:
        ((struct link_in *)e->in->links)[target].loss = change->value;
        for (int32_t flow = 0; flow < e->in->flows_count; flow++)
            set_loss(e, flow);
        break;
    case LINK_DOWN:
        set_link_down(e, target, change->value != 0);
        break;
    case GPU_SPEED:
        e->gpus[target].speed = change->value;
        break;
    case NVLINK_FACTOR:
        e->gpus[target].nvlink = change->value;
        break;
    case HOST_SPEED:
        e->gpus[target].host_speed = change->value;
        break;
    case KILLED:
        e->gpus[target].killed = 1;
        for (int32_t flow = 0; flow < e->in->flows_count; flow++) {
            int32_t number = e->in->flows[flow].connection;
            if (number == NONE || e->flows[flow].background != NONE)
                continue;
            if (e->in->connections[number].src_proxy == target ||
                e->in->connections[number].dst_proxy == target) {
                e->flows[flow].dead = 1;
                break_flow(e, flow);
            }
        }
        break;
    }
}

static void handle(struct engine *e, const struct due *due) {
    switch (due->what) {
    case DUE_HOST:
        host_due(e, due->id);
        break;
    case DUE_COMPUTED:
        computed_due(e, due->id, due->version);
        break;
    case DUE_COPIED:
        copied_due(e, due->id);
        break;
    case DUE_MET:
        met_due(e, due->id, due->version);
        break;
    case DUE_ARRIVED:
        arrived_due(e, due->id, due->version);
        break;
    case DUE_ACKED:
        acked_due(e, due->id, due->version);
        break;
    case DUE_PROMISE:
        e->connections[due->id].waits_to_grant = 0;
        try_grant(e, due->id);
        break;
    case DUE_GRANT:
        grant_due(e, due->id);
        break;
    case DUE_POST:
        e->connections[due->id].waits_to_post = 0;
        try_post(e, due->id);
        break;
    case DUE_FLOW:
        flow_due(e, due->id);
        break;
    case DUE_QUEUE:
        dirty_link(e, due->id);
        break;
    case DUE_TICK:
        tick(e, due->id);
        break;
    case DUE_NAK:
        nak_due(e, due->id);
        break;
    case DUE_RETRY:
        retry_due(e, due->id);
        break;
    case DUE_CHANGE:
        change_due(e, due->id);
        break;
    case DUE_BACKGROUND:
        background_due(e, due->id);
        break;
    case DUE_MILLISECOND:
        count_pauses(e);
        at(e, e->now + 1e6, DUE_MILLISECOND, 0, 0);
        break;
    case DUE_COUNTERS:
        count_counters(e);
        at(e, e->now + e->in->counter_interval_ns, DUE_COUNTERS, 0, 0);
        break;
    }
}

void *zeroed(int64_t count, size_t size) {
    void *memory = calloc((size_t)(count ? count : 1), size);
    if (!memory)
        abort();
    return memory;
}

static void set_up_network(struct engine *e) {
    const struct inputs *in = e->in;
    e->links = zeroed(in->links_count, sizeof(*e->links));
    e->flows = zeroed(in->flows_count, sizeof(*e->flows));
    e->connections = zeroed(in->connections_count, sizeof(*e->connections));
    e->nics = zeroed(in->gpu_count + in->tenant_nics, sizeof(*e->nics));
    e->foreseen.dues = zeroed(in->flows_count + in->links_count, sizeof(*e->foreseen.dues));
    e->foreseen.places = zeroed(in->flows_count + in->links_count, sizeof(*e->foreseen.places));
    for (int64_t n = 0; n < in->flows_count + in->links_count; n++)
        e->foreseen.places[n] = NONE;
    for (int64_t n = 0; n < in->links_count; n++) {
        e->links[n].bytes_per_ns = in->links[n].gbps / 8;
        e->links[n].factor = 1;
    }
    for (int64_t n = 0; n < in->flows_count; n++) {
        struct flow *flow = &e->flows[n];
        flow->in = &in->flows[n];
        flow->limit = flow->until_loss = flow->rate = flow->target = NEVER;
        flow->background = flow->bottleneck = NONE;
        flow->meters[0].bin = flow->meters[1].bin = INT64_MIN;
    }
    set_up_sharing(e);
    for (int32_t n = 0; n < in->flows_count; n++)
        set_loss(e, n);
    for (int64_t n = 0; n < in->connections_count; n++) {
        e->connections[n].in = &in->connections[n];
        e->connections[n].slots = (uint32_t)in->connections[n].slots;
        e->connections[n].networked = in->connections[n].flows > 0;
        e->connections[n].sender_call = e->connections[n].moved = NONE;
    }
}

static void set_up_machines(struct engine *e) {
    const struct inputs *in = e->in;
    int64_t members = 0;
    e->tasks = zeroed(in->tasks_count, sizeof(*e->tasks));
    e->gpus = zeroed(in->gpu_count, sizeof(*e->gpus));
    e->pauses = zeroed(EXECUTORS * in->gpu_count, sizeof(*e->pauses));
    e->meetings = zeroed(4 * in->comms_count, sizeof(*e->meetings));
    e->met_first = zeroed(in->comms_count, sizeof(*e->met_first));
    for (int64_t n = 0; n < in->comms_count; n++) {
        e->met_first[n] = (int32_t)members;
        members += in->comms[n].ranks;
        for (int slot = 0; slot < 4; slot++)
            e->meetings[4 * n + slot].calls = zeroed(in->comms[n].ranks, sizeof(int32_t));
    }
    e->met = zeroed(members, sizeof(*e->met));
    e->call_open = zeroed(in->calls_count, sizeof(*e->call_open));
    e->call_task = zeroed(in->calls_count, sizeof(*e->call_task));
    for (int32_t n = 0; n < in->tasks_count; n++)
        for (int32_t k = 0; k < in->tasks[n].calls; k++)
            e->call_task[in->tasks[n].call + k] = n;
    for (int64_t n = 0; n < in->pauses_count; n++) {
        struct span *span = &e->pauses[in->pauses[n].executor * in->gpu_count + in->pauses[n].target];
        if (!span->last)
            span->first = n;
        span->last = n + 1;
    }
    for (int64_t g = 0; g < in->gpu_count; g++) {
        struct gpu *gpu = &e->gpus[g];
        int32_t last[MAX_STREAMS];
        gpu->speed = gpu->nvlink = gpu->host_speed = 1;
        gpu->next_task = in->first_task[g];
        gpu->sync_task = NONE;
        for (int stream = 0; stream < MAX_STREAMS; stream++)
            gpu->heads[stream] = last[stream] = NONE;
        for (int32_t n = in->first_task[g]; n < in->first_task[g + 1]; n++) {
            int32_t stream = in->tasks[n].stream;
            e->tasks[n].next = NONE;
            if (last[stream] == NONE)
                gpu->heads[stream] = n;
            else
                e->tasks[last[stream]].next = n;
            last[stream] = n;
        }
        if (gpu->next_task < in->first_task[g + 1])
            at(e, finishes(e, HOST, (int32_t)g, 0, in->tasks[gpu->next_task].host_ns), DUE_HOST, (int32_t)g,
               0);
    }
}

static void tear_down(struct engine *e) {
    for (int64_t n = 0; n < e->in->links_count; n++)
        free(e->links[n].flows);
    for (int64_t n = 0; n < e->in->flows_count; n++)
        free(e->flows[n].queue);
    for (int32_t n = 0; n < e->kernel_count; n++)
        free(e->kernels[n]);
    for (int64_t n = 0; n < 4 * e->in->comms_count; n++)
        free(e->meetings[n].calls);
    free(e->call_open);
    free(e->call_task);
    tear_down_sharing(e);
    void *all[] = {
        e->links,     e->flows,         e->connections,    e->nics,      e->tasks, e->gpus,
        e->pauses,    e->kernels,       e->free_kernels,   e->met_first, e->met,   (void *)e->meetings,
        e->dues.dues, e->foreseen.dues, e->foreseen.places};
    for (size_t n = 0; n < sizeof(all) / sizeof(*all); n++)
        free(all[n]);
}

static int settled(struct engine *e) {
    const struct inputs *in = e->in;
    if (!__atomic_load_n(in->told, __ATOMIC_ACQUIRE))
        return 0;
    while (e->settled < in->calls_count &&
           (!in->awaited[e->settled] || !isnan(e->out->call_times[e->settled].end_ns)))
        e->settled++;
    return e->settled == in->calls_count;
}

/* Runs it all; out->call_times and task_times are the caller's, NaN-filled; the other arrays' memory
 * is the caller's to free with sim_free. Changes links' loss in `in`. */
void sim_run(struct inputs *in, struct outputs *out) {
    struct engine engine = {.in = in, .out = out}, *e = &engine;
    e->random[0] = in->seed * 0x9e3779b97f4a7c15u + 1;
    e->random[1] = in->seed ^ 0xd1b54a32d192ed03u;
    for (int n = 0; n < 16; n++)
        uniform(e);
    set_up_network(e);
    set_up_machines(e);
    for (int32_t n = 0; n < in->changes_count; n++)
        at(e, in->changes[n].t_ns, DUE_CHANGE, n, 0);
    for (int32_t n = 0; n < in->background_count; n++) {
        e->flows[in->background[n].flow].background = n;
        at(e, in->background[n].start_ns, DUE_BACKGROUND, n, 0);
    }
    at(e, 0, DUE_MILLISECOND, 0, 0);
    at(e, in->record_ns, DUE_COUNTERS, 0, 0);
    out->ended_ns = in->end_ns;
    for (;;) {
        struct due due;
        /* Once for all that happens at one moment. */
        if (e->dirty_count && next_ns(e) > e->now)
            share(e);
        if (next_ns(e) == NEVER)
            break;
        due = next_due(e);
        e->now = due.t_ns;
        out->steps++;
        handle(e, &due);
        if (due.what == DUE_MILLISECOND && settled(e)) {
            out->ended_ns = e->now;
            break;
        }
    }
    e->now = out->ended_ns;
    for (int32_t flow = 0; flow < in->flows_count; flow++)
        advance(e, flow);
    count_counters(e);
    flush_meters(e);
    tear_down(e);
}

void sim_free(void *data) {
    free(data);
}
