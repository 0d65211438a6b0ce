/* What a meter at each end of a queue pair counts in the bins of its node's clock, and a port's counters. */
#include "engine.h"

#include <math.h>

static int32_t nic_of(const struct engine *e, int32_t flow, int rx) {
    return rx ? e->in->flows[flow].dst_nic : e->in->flows[flow].src_nic;
}

/* In bins, on the clock of the NIC's node. */
static double position(const struct engine *e, int32_t nic, double t_ns) {
    const struct clock_in *clock = &e->in->clocks[nic / e->in->gpus_per_node];
    return (clock->offset_ns + (1 + clock->drift) * t_ns - clock->phase_ns) / e->in->bin_ns;
}

/* Whole numbers go out, what is left of them stays in the meter for the next bin. */
static void close_bin(struct engine *e, int32_t flow, int rx) {
    struct meter *m = &e->flows[flow].meters[rx];
    double bytes = floor(m->bytes + 1e-6), retx = floor(m->retx_bytes + 1e-6),
           packets = floor(m->packets + 1e-6);
    struct sample *sample;
    bytes = bytes < 0 ? 0 : bytes;
    packets = packets < 0 ? 0 : packets;
    retx = retx < 0 ? 0 : retx < bytes ? retx : bytes;
    if (bytes > 0 || packets > 0 || m->ctl || m->acks) {
        sample = grown(&e->out->samples, sizeof(*sample));
        *sample = (struct sample){flow,           (uint8_t)rx,       m->bin,           (uint32_t)bytes,
                                  (uint32_t)retx, (uint32_t)packets, (uint16_t)m->ctl, (uint16_t)m->acks};
        m->bytes -= bytes;
        m->retx_bytes -= retx;
        m->packets -= packets;
        if (bytes > 0 || packets > 0)
            m->told = e->out->samples.count;
    }
    m->ctl = m->acks = 0;
}

static void open_bin(struct engine *e, int32_t flow, int rx, int64_t bin) {
    struct meter *m = &e->flows[flow].meters[rx];
    if (bin <= m->bin)
        return;
    if (m->bin != INT64_MIN)
        close_bin(e, flow, rx);
    m->bin = bin;
}

/* What is skipped may have come earlier than what is left out for it: repeats are right in sum. */
void count_bytes(struct engine *e, int32_t flow, int rx, double from_ns, double to_ns, double bytes,
                 double fresh) {
    int32_t nic = nic_of(e, flow, rx);
    struct meter *m = &e->flows[flow].meters[rx];
    double from, to, retx, skipped = m->skip < bytes ? m->skip : bytes;
    m->skip -= skipped;
    bytes -= skipped;
    retx = bytes - fresh;
    if (rx)
        e->nics[nic].rx_bytes += bytes;
    else
        e->nics[nic].tx_bytes += bytes;
    if (nic >= e->in->gpu_count || (bytes <= 0 && fresh <= 0))
        return;
    if (from_ns < e->in->record_ns) {
        double part = to_ns > e->in->record_ns ? (to_ns - e->in->record_ns) / (to_ns - from_ns) : 0;
        if (part <= 0)
            return;
        bytes *= part;
        retx *= part;
        from_ns = e->in->record_ns;
    }
    from = position(e, nic, from_ns);
    to = position(e, nic, to_ns);
    open_bin(e, flow, rx, (int64_t)floor(from));
    if (to > (double)(m->bin + 1)) {
        double per_bin = to - from;
        while (to > (double)(m->bin + 1)) {
            double part = ((double)(m->bin + 1) - from) / per_bin;
            if (part > 0) {
                m->bytes += bytes * part;
                m->retx_bytes += retx * part;
                m->packets += bytes * part / e->in->mtu_bytes;
                from = (double)(m->bin + 1);
            }
            open_bin(e, flow, rx, m->bin + 1);
        }
        double rest = (to - from) / per_bin;
        bytes *= rest;
        retx *= rest;
    }
    m->bytes += bytes;
    m->retx_bytes += retx;
    m->packets += bytes / e->in->mtu_bytes;
}

void count_control(struct engine *e, int32_t flow, int rx, double t_ns, int ctl, int acks) {
    int32_t nic = nic_of(e, flow, rx);
    struct meter *m = &e->flows[flow].meters[rx];
    /* What the flow moved before belongs to earlier bins; whether recorded or not, that rounding be the same.
     */
    advance(e, flow);
    if (nic >= e->in->gpu_count || t_ns < e->in->record_ns)
        return;
    open_bin(e, flow, rx, (int64_t)floor(position(e, nic, t_ns)));
    m->ctl += (uint32_t)ctl;
    m->acks += (uint32_t)acks;
}

void count_pauses(struct engine *e) {
    account_pauses(e);
    for (int64_t n = 0; n < e->in->gpu_count; n++) {
        struct nic *nic = &e->nics[n];
        if (nic->paused_ns - nic->told_ns >= 1000) {
            see(e, (int32_t)n, NONE, SEEN_PAUSE, (uint64_t)(nic->paused_ns - nic->told_ns));
            nic->told_ns = nic->paused_ns;
        }
    }
}

void count_counters(struct engine *e) {
    account_pauses(e);
    for (int32_t n = 0; n < e->in->gpu_count; n++) {
        struct counter *counter = grown(&e->out->counters, sizeof(*counter));
        *counter = e->nics[n].counters;
        counter->t_ns = e->now;
        counter->nic = n;
        counter->tx_bytes = (uint64_t)(e->nics[n].tx_bytes + 0.5);
        counter->rx_bytes = (uint64_t)(e->nics[n].rx_bytes + 0.5);
        counter->rx_pause_ns = (uint64_t)e->nics[n].paused_ns;
        counter->tx_pause_ns = (uint64_t)e->nics[n].pausing_ns;
    }
}

void flush_meters(struct engine *e) {
    for (int32_t flow = 0; flow < e->in->flows_count; flow++)
        for (int rx = 0; rx < 2; rx++) {
            struct meter *m = &e->flows[flow].meters[rx];
            if (m->bin == INT64_MIN)
                continue;
            m->bytes = floor(m->bytes + 0.5);
            m->packets = floor(m->packets + 0.5);
            if (m->told && m->bytes <= 1 && m->packets <= 1) {
                /* What rounding left of earlier bins is nothing that moves now. */
                struct sample *last = (struct sample *)e->out->samples.data + m->told - 1;
                last->bytes += (uint32_t)m->bytes;
                last->packets += (uint32_t)m->packets;
                m->bytes = m->packets = 0;
            }
            close_bin(e, flow, rx);
        }
}
