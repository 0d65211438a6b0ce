/* The core under DOCA PCC, on the card's own processor (DPA): an observer around the internal algorithm.
 *
 * Written against the documented device API of DOCA PCC (doca_pcc_dev.h, doca_pcc_dev_event.h). Tests compile
 * it against declarations of our own only: it has never been compiled with DOCA nor run on a card.
 */
#include <doca_pcc_dev.h>
#include <doca_pcc_dev_event.h>

#include "core.h"

#ifndef PCC_WORKERS
#define PCC_WORKERS 64
#endif
#ifndef PCC_WORKER_BYTES
#define PCC_WORKER_BYTES (2 << 20)
#endif
#ifndef PCC_FLOW_BITS
#define PCC_FLOW_BITS 10
#endif

/* A core for each worker, since the DPA's threads share no atomics that could be relied on. A worker's first
 * request makes its core: nothing is counted before the host has said how. */
static uint64_t memory[PCC_WORKERS][PCC_WORKER_BYTES / sizeof(uint64_t)];
static struct pcc *volatile workers[PCC_WORKERS];

/* No event is disabled: the internal algorithm decides from all that it gets without us. */
void doca_pcc_dev_user_init(uint32_t *disable_event_bitmask) {
    *disable_event_bitmask = 0;
}

static void observe(struct pcc *pcc, doca_pcc_dev_event_t *event) {
    doca_pcc_dev_event_general_attr_t attributes = doca_pcc_dev_get_ev_attr(event);
    struct pcc_event seen = {
        .key = doca_pcc_dev_get_flowtag(event),
        .timestamp_ns = doca_pcc_dev_get_timestamp(event),
        .type = (uint8_t)attributes.ev_type,
        .subtype = (uint8_t)attributes.ev_subtype,
        .flags = (uint8_t)attributes.flags,
    };
    if (seen.type == DOCA_PCC_DEV_EVNT_ROCE_TX) {
        seen.key |= (uint64_t)doca_pcc_dev_get_flow_qpn(event) << 32 | (uint64_t)attributes.port_num << 56;
        seen.first_timestamp_ns = doca_pcc_dev_get_roce_first_timestamp(event);
        seen.count = (uint16_t)doca_pcc_dev_get_roce_tx_cntrs(event).sent_32bytes;
    } else if (seen.type == DOCA_PCC_DEV_EVNT_ROCE_CNP || seen.type == DOCA_PCC_DEV_EVNT_ROCE_NACK) {
        seen.count = (uint16_t)doca_pcc_dev_get_ack_nack_cnp_extra(event).num_coalesced;
    }
#ifdef PCC_TRACE
    /* Every event to the host, for a calibration or a recording of a few flows: the trace buffer is small. */
    doca_pcc_dev_trace_5(0, seen.key, (uint64_t)seen.first_timestamp_ns << 32 | seen.timestamp_ns, seen.count,
                         (uint64_t)seen.flags << 16 | (uint64_t)seen.subtype << 8 | seen.type,
                         (uint64_t)attributes.port_num << 32 | doca_pcc_dev_get_sn(event));
#endif
    pcc_event(pcc, &seen);
}

/* The rate is what the internal algorithm makes of the event, before we look at it. Its context is its own:
 * what we know of a flow is in our table, by the flow tag. */
void doca_pcc_dev_user_algo(doca_pcc_dev_algo_ctxt_t *algo_ctxt, doca_pcc_dev_event_t *event,
                            const doca_pcc_dev_attr_t *attr, doca_pcc_dev_results_t *results) {
    uint32_t worker = doca_pcc_dev_thread_rank();
    struct pcc *pcc = worker < PCC_WORKERS ? workers[worker] : 0;
    doca_pcc_dev_default_internal_algo(algo_ctxt, event, attr, results);
    if (pcc)
        observe(pcc, event);
}

/* We have no parameters, and the internal algorithm's are not ours to judge. */
doca_pcc_dev_error_t doca_pcc_dev_user_set_algo_params(uint32_t port_num, uint32_t algo_slot,
                                                       uint32_t param_id_base, uint32_t param_num,
                                                       const uint32_t *new_param_values, uint32_t *params) {
    (void)port_num, (void)algo_slot, (void)param_id_base, (void)param_num, (void)new_param_values,
        (void)params;
    return DOCA_PCC_DEV_STATUS_OK;
}

doca_pcc_dev_error_t doca_pcc_dev_user_port_info_changed(uint32_t portid) {
    (void)portid;
    return DOCA_PCC_DEV_STATUS_OK;
}

doca_pcc_dev_error_t doca_pcc_dev_user_mailbox_handle(void *request, uint32_t request_size,
                                                      uint32_t max_response_size, void *response,
                                                      uint32_t *response_size) {
    const struct pcc_request *asked = request;
    struct pcc *pcc;
    *response_size = 0;
    if (request_size < sizeof(*asked) || asked->magic != PCC_MAGIC || asked->worker >= PCC_WORKERS)
        return DOCA_PCC_DEV_STATUS_FAIL;
    pcc = workers[asked->worker];
    if (!pcc) {
        pcc = pcc_create(memory[asked->worker], sizeof(memory[0]), PCC_FLOW_BITS, asked->cumulative);
        PCC_FENCE();
        workers[asked->worker] = pcc;
    }
    *response_size = pcc ? pcc_answer(pcc, asked, response, max_response_size) : 0;
    return *response_size ? DOCA_PCC_DEV_STATUS_OK : DOCA_PCC_DEV_STATUS_FAIL;
}
