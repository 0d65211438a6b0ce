/* Host threads that enqueue ahead of their GPU, and the GPU's streams. */
#include "engine.h"

/* Launches that may be pending on a device before the host has to wait (CUDA programming guide, on
 * asynchronous execution: a launch queue of 1024). */
#define MOST_AHEAD 1024

static void host_goes_on(struct engine *e, int32_t gpu) {
    struct gpu *g = &e->gpus[gpu];
    g->host_waits = 0;
    if (g->next_task < e->in->first_task[gpu + 1] && !g->killed)
        at(e, finishes(e, HOST, gpu, e->now, e->in->tasks[g->next_task].host_ns / g->host_speed), DUE_HOST,
           gpu, 1);
}

static int may_start(const struct engine *e, int32_t gpu, int32_t number) {
    const struct task_in *in = &e->in->tasks[number];
    int32_t first = e->in->first_task[gpu];
    return e->tasks[number].enqueued && !e->tasks[number].running &&
           (in->wait_a == NONE || e->tasks[first + in->wait_a].ended) &&
           (in->wait_b == NONE || e->tasks[first + in->wait_b].ended);
}

/* Starts what can start at the head of each stream. */
static void start_tasks(struct engine *e, int32_t gpu) {
    struct gpu *g = &e->gpus[gpu];
    for (int stream = 0; stream < MAX_STREAMS && !g->killed; stream++) {
        int32_t number = g->heads[stream];
        double work_ns;
        if (number == NONE || !may_start(e, gpu, number))
            continue;
        e->tasks[number].running = 1;
        e->out->task_times[number].start_ns = e->now;
        work_ns = e->in->tasks[number].compute_ns / g->speed;
        at(e, work_ns > 0 ? finishes(e, GPU, gpu, e->now, work_ns) : e->now, DUE_COMPUTED, gpu,
           (uint32_t)number);
    }
}

static void end_task(struct engine *e, int32_t gpu, int32_t number) {
    struct gpu *g = &e->gpus[gpu];
    e->tasks[number].ended = 1;
    e->out->task_times[number].end_ns = e->now;
    g->heads[e->in->tasks[number].stream] = e->tasks[number].next;
    g->done++;
    start_tasks(e, gpu);
    if (!g->host_waits)
        return;
    if (g->sync_task == number)
        g->sync_task = NONE;
    if (g->sync_task == NONE && g->next_task - e->in->first_task[gpu] - g->done < MOST_AHEAD)
        host_goes_on(e, gpu);
}

/* Point-to-point calls of a group run side by side, collectives one after the other. */
static void start_calls(struct engine *e, int32_t number) {
    const struct task_in *in = &e->in->tasks[number];
    struct task *task = &e->tasks[number];
    while (task->next_call < in->calls) {
        int32_t call = in->call + task->next_call++;
        start_call(e, call);
        if (e->in->calls[call].kind < ALL_TO_ALL)
            return;
    }
}

void computed_due(struct engine *e, int32_t gpu, uint32_t number) {
    const struct task_in *in = &e->in->tasks[number];
    if (e->gpus[gpu].killed)
        return;
    e->tasks[number].open = in->calls;
    if (in->calls)
        start_calls(e, (int32_t)number);
    else
        end_task(e, gpu, (int32_t)number);
}

void call_ended(struct engine *e, int32_t gpu, int32_t call) {
    int32_t number = e->call_task[call];
    e->out->call_times[call].end_ns = e->now;
    if (--e->tasks[number].open)
        start_calls(e, number);
    else
        end_task(e, gpu, number);
}

void host_due(struct engine *e, int32_t gpu) {
    struct gpu *g = &e->gpus[gpu];
    int32_t number = g->next_task;
    const struct task_in *in = &e->in->tasks[number];
    if (g->killed)
        return;
    g->next_task++;
    for (int32_t n = 0; n < in->calls; n++) {
        e->out->call_times[in->call + n].call_ns = e->now;
        plan_call(e, in->call + n);
    }
    e->tasks[number].enqueued = 1;
    if (in->sync)
        g->sync_task = number;
    start_tasks(e, gpu);
    if ((in->sync && !e->tasks[number].ended) ||
        g->next_task - e->in->first_task[gpu] - g->done >= MOST_AHEAD)
        g->host_waits = 1;
    else
        host_goes_on(e, gpu);
}
