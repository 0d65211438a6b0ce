/* relay DEVICE THREAD,... POLL_MS sum|cumulative: loads the observer onto the card and copies what it answers
 * to standard output, until that is closed, SIGTERM or SIGINT, or the card ends it. Exit status 3: the card
 * refuses.
 *
 * THREAD,... are the DPA's execution units to run on. Written against the documented host API of DOCA PCC
 * and, like doca_device.c, never compiled with DOCA nor run on a card.
 */
#include <doca_dev.h>
#include <doca_error.h>
#include <doca_pcc.h>

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core.h"
#include "relay.h"

enum { MAX_WORKERS = 64, RESPONSE_BYTES = 1 << 16 };

extern struct doca_pcc_app *pulse_pcc_app; /* made of doca_device.c and core.c by dpacc */

static char *trace_formats[] = {"pulse_pcc %#lx %#lx %#lx %#lx %#lx\n", NULL};
static volatile sig_atomic_t asked_to_stop;

static void on_signal(int number) {
    (void)number;
    asked_to_stop = 1;
}

static int refused(const char *what, doca_error_t error) {
    if (error != DOCA_SUCCESS)
        fprintf(stderr, "relay: %s: %s\n", what, doca_error_get_descr(error));
    return error != DOCA_SUCCESS;
}

static uint64_t wall_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct doca_dev *open_device(const char *name) {
    struct doca_devinfo **devices;
    struct doca_dev *device = NULL;
    uint32_t count;
    if (refused("cannot list devices", doca_devinfo_create_list(&devices, &count)))
        return NULL;
    for (uint32_t n = 0; n < count && !device; n++) {
        char found[DOCA_DEVINFO_IBDEV_NAME_SIZE] = "";
        if (doca_devinfo_get_ibdev_name(devices[n], found, sizeof(found)) != DOCA_SUCCESS ||
            strcmp(found, name) != 0)
            continue;
        if (refused("no programmable congestion control", doca_devinfo_get_is_pcc_supported(devices[n])) ||
            refused("cannot open the device", doca_dev_open(devices[n], &device)))
            break;
    }
    doca_devinfo_destroy_list(devices);
    return device;
}

/* Asks one worker once and writes its answer; returns how many more epochs it has, or -1. */
static int64_t ask(struct doca_pcc *pcc, uint32_t worker, uint32_t poll, uint32_t cumulative,
                   uint32_t *acknowledged) {
    struct pcc_request *request;
    struct pcc_response *response;
    uint32_t bytes, status;
    uint64_t start_ns = wall_ns();
    struct pcc_frame frame = {.magic = PCC_FRAME_MAGIC};
    if (refused("no request buffer", doca_pcc_mailbox_get_request_buffer(pcc, (void **)&request)))
        return -1;
    *request = (struct pcc_request){.magic = PCC_MAGIC,
                                    .worker = worker,
                                    .poll = poll,
                                    .acknowledged = *acknowledged,
                                    .cumulative = cumulative};
    if (refused("no answer", doca_pcc_mailbox_send(pcc, sizeof(*request), &bytes, &status)) ||
        refused("no response buffer", doca_pcc_mailbox_get_response_buffer(pcc, (void **)&response)))
        return -1;
    if (status || bytes < sizeof(*response)) {
        fprintf(stderr, "relay: worker %u refuses the request\n", worker);
        return -1;
    }
    frame.bytes = bytes;
    frame.wall_ns = wall_ns();
    frame.took_ns = (uint32_t)(frame.wall_ns - start_ns);
    if (fwrite(&frame, sizeof(frame), 1, stdout) != 1 || fwrite(response, bytes, 1, stdout) != 1)
        return -1;
    *acknowledged = response->first + response->epochs;
    return response->waiting;
}

static int poll_workers(struct doca_pcc *pcc, uint32_t workers, uint32_t poll, uint32_t cumulative) {
    static uint32_t acknowledged[MAX_WORKERS];
    for (uint32_t worker = 0; worker < workers; worker++) {
        int64_t waiting;
        do
            waiting = ask(pcc, worker, poll, cumulative, &acknowledged[worker]);
        while (waiting > 0);
        if (waiting < 0)
            return -1;
    }
    return fflush(stdout);
}

static int run(struct doca_pcc *pcc, uint32_t *threads, uint32_t workers, long poll_ms, uint32_t cumulative) {
    struct timespec pause = {poll_ms / 1000, poll_ms % 1000 * 1000000};
    doca_pcc_process_state_t state = DOCA_PCC_PS_ACTIVE;
    int failed = 0;
    if (refused("cannot set the program", doca_pcc_set_app(pcc, pulse_pcc_app)) ||
        refused("cannot use these threads", doca_pcc_set_thread_affinity(pcc, workers, threads)) ||
        refused("no mailbox", doca_pcc_set_mailbox(pcc, sizeof(struct pcc_request), RESPONSE_BYTES)) ||
        refused("no trace", doca_pcc_set_trace_message(pcc, trace_formats)) ||
        refused("cannot start (does another program own the slot?)", doca_pcc_start(pcc)))
        return 3;
    failed = poll_workers(pcc, workers, 1, cumulative);
    for (uint32_t poll = 2; !failed && !asked_to_stop && state <= DOCA_PCC_PS_STANDBY; poll++) {
        nanosleep(&pause, NULL);
        failed = poll_workers(pcc, workers, poll, cumulative) ||
                 refused("no state", doca_pcc_get_process_state(pcc, &state));
    }
    doca_pcc_stop(pcc);
    return failed ? 1 : 0;
}

int main(int argc, char **argv) {
    uint32_t threads[MAX_WORKERS], workers = 0;
    struct doca_dev *device;
    struct doca_pcc *pcc;
    int status = 3;
    if (argc != 5 || (strcmp(argv[4], "sum") != 0 && strcmp(argv[4], "cumulative") != 0) ||
        atol(argv[3]) <= 0) {
        fprintf(stderr, "usage: relay DEVICE THREAD,... POLL_MS sum|cumulative\n");
        return 2;
    }
    for (char *thread = strtok(argv[2], ","); thread && workers < MAX_WORKERS; thread = strtok(NULL, ","))
        threads[workers++] = (uint32_t)strtoul(thread, NULL, 0);
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    signal(SIGPIPE, SIG_IGN);
    device = open_device(argv[1]);
    if (!device) {
        fprintf(stderr, "relay: no usable device %s\n", argv[1]);
        return 3;
    }
    if (!refused("no congestion control context", doca_pcc_create(device, &pcc))) {
        status = run(pcc, threads, workers, atol(argv[3]), !strcmp(argv[4], "cumulative"));
        doca_pcc_destroy(pcc);
    }
    doca_dev_close(device);
    return status;
}
