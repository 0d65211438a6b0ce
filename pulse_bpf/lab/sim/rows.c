/* Samples in the order of a recording's rows: by end of a queue pair, at each end its data and then the
 * control packets that go the other way, in order of time. The meters close the bins of one end in order of
 * time, so that counting how many come before each is enough. */
#include "engine.h"

/* What a recorder took of the samples; its arrays are Python's. */
struct recorded {
    const struct sample *samples;
    int64_t count;
    const int32_t *node;     /* by end: 2 * flow, and one more for the receiver; NONE: nobody counts there */
    const int64_t *phase_ns; /* by node: when its bin 0 begins */
    const int64_t *first_window, *window_start_ns, *window_end_ns; /* of loss; by node, one more */
    int64_t bin_ns, part_ns, first_part, ends;
};

struct columns {
    int64_t *t_ns;
    uint64_t *bytes, *retx_bytes;
    uint32_t *packets, *ctl_packets, *ack_packets;
};

static int64_t begins_ns(const struct recorded *r, const struct sample *s) {
    return r->phase_ns[r->node[2 * s->flow + s->rx]] + s->bin * r->bin_ns;
}

/* In a window, whose ends are in order as their starts are. */
static int is_lost(const struct recorded *r, int32_t node, int64_t t_ns) {
    int64_t first = r->first_window[node], last = r->first_window[node + 1];
    while (first < last) {
        int64_t middle = (first + last) / 2;
        if (r->window_start_ns[middle] > t_ns)
            last = middle;
        else
            first = middle + 1;
    }
    return first > r->first_window[node] && t_ns < r->window_end_ns[first - 1];
}

/* NONE: in no part of the recording. */
static int64_t part_of(const struct recorded *r, const struct sample *s) {
    int32_t node = r->node[2 * s->flow + s->rx];
    int64_t t_ns;
    if (node == NONE)
        return NONE;
    t_ns = begins_ns(r, s);
    return is_lost(r, node, t_ns) ? NONE : t_ns / r->part_ns - r->first_part;
}

static int has_data(const struct sample *s) {
    return s->bytes || s->packets;
}

static int has_control(const struct sample *s) {
    return s->reverse_ctl || s->reverse_acks;
}

/* How many rows each part has of each end, `rows[part][end][is control]`, which samples it has them from,
 * from span[part][0] to before span[part][1], and how many samples each node lost. All zero before. */
void sim_count_rows(const struct recorded *r, int64_t *rows, int64_t *span, int64_t *lost) {
    for (int64_t n = 0; n < r->count; n++) {
        const struct sample *s = &r->samples[n];
        int64_t end = 2 * s->flow + s->rx, part = part_of(r, s);
        if (part == NONE) {
            if (r->node[end] != NONE)
                lost[r->node[end]]++;
            continue;
        }
        rows[2 * (part * r->ends + end)] += has_data(s);
        rows[2 * (part * r->ends + end) + 1] += has_control(s);
        if (!span[2 * part + 1])
            span[2 * part] = n;
        span[2 * part + 1] = n + 1;
    }
}

/* Fills the columns of one part; `place[end][is control]`: where its next row goes. */
void sim_fill_rows(const struct recorded *r, int64_t part, const int64_t *span, int64_t *place,
                   const struct columns *c) {
    for (int64_t n = span[0]; n < span[1]; n++) {
        const struct sample *s = &r->samples[n];
        int64_t *next = &place[2 * (2 * s->flow + s->rx)], row;
        if (part_of(r, s) != part)
            continue;
        if (has_data(s)) {
            row = next[0]++;
            c->t_ns[row] = begins_ns(r, s);
            c->bytes[row] = s->bytes;
            c->retx_bytes[row] = s->retx_bytes;
            c->packets[row] = s->packets;
            c->ctl_packets[row] = c->ack_packets[row] = 0;
        }
        if (has_control(s)) {
            row = next[1]++;
            c->t_ns[row] = begins_ns(r, s);
            c->bytes[row] = c->retx_bytes[row] = 0;
            c->packets[row] = (uint32_t)s->reverse_ctl + s->reverse_acks;
            c->ctl_packets[row] = s->reverse_ctl;
            c->ack_packets[row] = s->reverse_acks;
        }
    }
}
