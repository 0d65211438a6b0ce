/* A card that plays a file of 44-byte events ($PCC_EVENTS) to the program that is loaded onto it, in their
 * own time: time passes only while the host sleeps. Linked with --wrap=nanosleep,--wrap=clock_gettime. The
 * wall clock is $PCC_WALL_NS at the first event. $PCC_TRACE, if set, is the file that traces go to. */
#include "doca_double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct doca_pcc {
    char **formats;
    FILE *trace;
    uint32_t request_size, response_size, used_size;
    uint32_t workers, worker;
    doca_pcc_dev_event_t *events;
    size_t count, next;
    int64_t start_ns, now_ns, event_ns; /* on the card's clock; event_ns is that of the event before `next` */
};

struct doca_pcc_app *pulse_pcc_app;

static struct doca_pcc card;
static uint64_t request[64], response[1 << 17];

static uint32_t word(const doca_pcc_dev_event_t *event, int n) {
    return __builtin_bswap32(event->words[n]);
}

/* The internal algorithm: what the observer must have called, and with what, is in the rate. */
void doca_pcc_dev_default_internal_algo(doca_pcc_dev_algo_ctxt_t *context, doca_pcc_dev_event_t *event,
                                        const doca_pcc_dev_attr_t *attr, doca_pcc_dev_results_t *results) {
    context->data[11]++;
    results->rate = word(event, 4) + attr->algo_slot;
}

static void play(doca_pcc_dev_event_t *event) {
    static doca_pcc_dev_algo_ctxt_t context;
    const doca_pcc_dev_attr_t attr = {.algo_slot = 15};
    doca_pcc_dev_algo_ctxt_t expected = context;
    doca_pcc_dev_results_t results = {0, 0};
    card.worker = word(event, 4) % card.workers;
    expected.data[11]++;
    doca_pcc_dev_user_algo(&context, event, &attr, &results);
    if (results.rate != word(event, 4) + attr.algo_slot || memcmp(&context, &expected, sizeof(context))) {
        fprintf(stderr, "the program changed the algorithm's rate or context\n");
        exit(9);
    }
}

static void play_until(int64_t until_ns) {
    card.now_ns = until_ns;
    for (; card.next < card.count; card.next++) {
        uint32_t stamp = word(&card.events[card.next], 6);
        int64_t event_ns = card.event_ns + (int32_t)(stamp - (uint32_t)card.event_ns);
        if (event_ns > until_ns)
            return;
        play(&card.events[card.next]);
        card.event_ns = event_ns;
    }
}

int __wrap_nanosleep(const struct timespec *pause, struct timespec *rest);
int __wrap_nanosleep(const struct timespec *pause, struct timespec *rest) {
    (void)rest;
    play_until(card.now_ns + pause->tv_sec * 1000000000 + pause->tv_nsec);
    return 0;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    int64_t wall_ns = strtoll(getenv("PCC_WALL_NS"), NULL, 10) + card.now_ns - card.start_ns;
    (void)clock;
    now->tv_sec = wall_ns / 1000000000;
    now->tv_nsec = wall_ns % 1000000000;
    return 0;
}

doca_error_t doca_pcc_start(struct doca_pcc *pcc) {
    uint32_t disabled;
    FILE *file = fopen(getenv("PCC_EVENTS"), "rb");
    if (!file || fseek(file, 0, SEEK_END))
        return DOCA_ERROR_UNKNOWN;
    pcc->count = (size_t)ftell(file) / sizeof(*pcc->events);
    pcc->events = malloc(pcc->count * sizeof(*pcc->events) + 1);
    rewind(file);
    if (fread(pcc->events, sizeof(*pcc->events), pcc->count, file) != pcc->count)
        return DOCA_ERROR_UNKNOWN;
    fclose(file);
    if (pcc->count)
        pcc->start_ns = pcc->now_ns = pcc->event_ns = word(&pcc->events[0], 6);
    if (getenv("PCC_TRACE"))
        pcc->trace = fopen(getenv("PCC_TRACE"), "w");
    doca_pcc_dev_user_init(&disabled);
    return disabled ? DOCA_ERROR_UNKNOWN : DOCA_SUCCESS;
}

doca_error_t doca_pcc_stop(struct doca_pcc *pcc) {
    if (pcc->trace)
        fclose(pcc->trace);
    free(pcc->events);
    return DOCA_SUCCESS;
}

doca_error_t doca_pcc_get_process_state(const struct doca_pcc *pcc, doca_pcc_process_state_t *state) {
    *state = pcc->next < pcc->count ? DOCA_PCC_PS_ACTIVE : DOCA_PCC_PS_DEACTIVATED;
    return DOCA_SUCCESS;
}

doca_error_t doca_pcc_mailbox_send(const struct doca_pcc *pcc, uint32_t request_size, uint32_t *response_size,
                                   uint32_t *callback_status) {
    *callback_status =
        doca_pcc_dev_user_mailbox_handle(request, request_size, pcc->response_size, response, response_size);
    return DOCA_SUCCESS;
}

doca_error_t doca_pcc_mailbox_get_request_buffer(const struct doca_pcc *pcc, void **buffer) {
    *buffer = request;
    return pcc->request_size <= sizeof(request) ? DOCA_SUCCESS : DOCA_ERROR_UNKNOWN;
}

doca_error_t doca_pcc_mailbox_get_response_buffer(const struct doca_pcc *pcc, void **buffer) {
    *buffer = response;
    return pcc->response_size <= sizeof(response) ? DOCA_SUCCESS : DOCA_ERROR_UNKNOWN;
}

doca_error_t doca_pcc_set_mailbox(struct doca_pcc *pcc, uint32_t request_size, uint32_t response_size) {
    pcc->request_size = request_size;
    pcc->response_size = response_size;
    return DOCA_SUCCESS;
}

doca_error_t doca_pcc_set_trace_message(struct doca_pcc *pcc, char **formats) {
    pcc->formats = formats;
    return DOCA_SUCCESS;
}

doca_error_t doca_pcc_set_thread_affinity(struct doca_pcc *pcc, uint32_t count, uint32_t *threads) {
    (void)threads;
    pcc->workers = count;
    return count ? DOCA_SUCCESS : DOCA_ERROR_UNKNOWN;
}

doca_error_t doca_pcc_set_app(struct doca_pcc *pcc, struct doca_pcc_app *app) {
    (void)pcc, (void)app;
    return DOCA_SUCCESS;
}

doca_error_t doca_pcc_create(struct doca_dev *device, struct doca_pcc **pcc) {
    (void)device;
    *pcc = &card;
    return DOCA_SUCCESS;
}

doca_error_t doca_pcc_destroy(struct doca_pcc *pcc) {
    (void)pcc;
    return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_create_list(struct doca_devinfo ***devices, uint32_t *count) {
    static struct doca_devinfo *list[1];
    *devices = list;
    *count = 1;
    return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_destroy_list(struct doca_devinfo **devices) {
    (void)devices;
    return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_get_ibdev_name(const struct doca_devinfo *device, char *name, uint32_t size) {
    (void)device;
    snprintf(name, size, "mlx5_0");
    return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_get_is_pcc_supported(const struct doca_devinfo *device) {
    (void)device;
    return getenv("PCC_REFUSE") ? DOCA_ERROR_UNKNOWN : DOCA_SUCCESS;
}

doca_error_t doca_dev_open(struct doca_devinfo *info, struct doca_dev **device) {
    (void)info;
    *device = (struct doca_dev *)&card;
    return DOCA_SUCCESS;
}

doca_error_t doca_dev_close(struct doca_dev *device) {
    (void)device;
    return DOCA_SUCCESS;
}

const char *doca_error_get_descr(doca_error_t error) {
    return error ? "refused" : "ok";
}

doca_pcc_dev_event_general_attr_t doca_pcc_dev_get_ev_attr(doca_pcc_dev_event_t *event) {
    doca_pcc_dev_event_general_attr_t attributes;
    uint32_t value = word(event, 3);
    memcpy(&attributes, &value, sizeof(value));
    return attributes;
}

uint32_t doca_pcc_dev_get_flowtag(doca_pcc_dev_event_t *event) {
    return word(event, 4);
}

uint32_t doca_pcc_dev_get_sn(doca_pcc_dev_event_t *event) {
    return word(event, 5);
}

uint32_t doca_pcc_dev_get_timestamp(doca_pcc_dev_event_t *event) {
    return word(event, 6);
}

uint32_t doca_pcc_dev_get_roce_first_timestamp(doca_pcc_dev_event_t *event) {
    return word(event, 7);
}

doca_pcc_dev_roce_tx_cntrs_t doca_pcc_dev_get_roce_tx_cntrs(doca_pcc_dev_event_t *event) {
    doca_pcc_dev_roce_tx_cntrs_t counters;
    uint32_t value = word(event, 8);
    memcpy(&counters, &value, sizeof(value));
    return counters;
}

doca_pcc_dev_ack_nack_cnp_extra_t doca_pcc_dev_get_ack_nack_cnp_extra(doca_pcc_dev_event_t *event) {
    doca_pcc_dev_ack_nack_cnp_extra_t extra;
    uint32_t value = word(event, 9);
    memcpy(&extra, &value, sizeof(value));
    return extra;
}

uint32_t doca_pcc_dev_get_flow_qpn(doca_pcc_dev_event_t *event) {
    return word(event, 9) & 0xffffff;
}

unsigned int doca_pcc_dev_thread_rank(void) {
    return card.worker;
}

void doca_pcc_dev_trace_5(int format, uint64_t arg1, uint64_t arg2, uint64_t arg3, uint64_t arg4,
                          uint64_t arg5) {
    if (card.trace)
        fprintf(card.trace, card.formats[format], arg1, arg2, arg3, arg4, arg5);
}
