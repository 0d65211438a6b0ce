/* pcc_load BYTES FLOW_BITS FLOWS ACTIVE TURN_BINS BINS: an event in every bin for each of ACTIVE flows, the
 * next ACTIVE ones after TURN_BINS; polled every second, one request for each bin until the round is over.
 * Prints units sent, received and lost, and whether every bin received what was sent in it (by a sum in which
 * each bin has a weight of its own). */
#include <stdio.h>
#include <stdlib.h>

#include "core.h"

enum { CAPACITY = 1 << 16, FIRST_NS = 0xff000000 };

static uint64_t received, received_sum;
static union {
    struct pcc_response response;
    uint64_t room[CAPACITY / sizeof(uint64_t)];
} answer;

static uint64_t mark(uint32_t tag, uint32_t ns) {
    return ((uint64_t)tag << 32 | ns) * 0x9e3779b97f4a7c15u | 1;
}

static int ask(struct pcc *pcc, uint32_t poll, uint32_t *acknowledged) {
    const struct pcc_request request = {.magic = PCC_MAGIC, .poll = poll, .acknowledged = *acknowledged};
    if (!pcc_answer(pcc, &request, &answer.response, sizeof(answer)))
        exit(3);
    for (uint32_t n = 0; n < answer.response.epochs; n++) {
        const struct pcc_epoch *epoch = &answer.response.epoch[n];
        for (uint32_t bin = 0; bin < PCC_EPOCH_BINS; bin++) {
            received += epoch->units[bin];
            received_sum +=
                epoch->units[bin] * mark((uint32_t)epoch->key, epoch->start_ns + (bin << PCC_BIN_SHIFT));
        }
    }
    *acknowledged = answer.response.first + answer.response.epochs;
    return answer.response.waiting > 0;
}

int main(int argc, char **argv) {
    uint64_t bytes = argc == 7 ? strtoull(argv[1], NULL, 0) : 0, sent = 0, sent_sum = 0;
    uint32_t arguments[5], acknowledged = 0, poll = 0, next_poll = 1000000000u >> PCC_BIN_SHIFT;
    int asking = 0;
    void *memory = calloc(1, bytes + 8);
    struct pcc *pcc;
    for (int n = 0; n < 5; n++)
        arguments[n] = argc == 7 ? (uint32_t)atoi(argv[n + 2]) : 0;
    uint32_t flows = arguments[1], active = arguments[2], turn_bins = arguments[3], bins = arguments[4];
    pcc = memory ? pcc_create(memory, bytes, arguments[0], 0) : NULL;
    if (!pcc)
        return 2;
    for (uint32_t bin = 0; bin < bins; bin++) {
        uint32_t first = bin / turn_bins * active % flows;
        for (uint32_t n = 0; n < active; n++) {
            uint32_t flow = (first + n) % flows + 1, units = (flow * 7919 + bin * 104729) % 50000 + 1;
            const struct pcc_event event = {
                .key = (uint64_t)flow << 32 | flow * 2246822519u,
                .timestamp_ns = FIRST_NS + (bin << PCC_BIN_SHIFT) + flow,
                .first_timestamp_ns = FIRST_NS + (bin << PCC_BIN_SHIFT),
                .count = (uint16_t)units,
                .type = PCC_TX,
            };
            pcc_event(pcc, &event);
            sent += units;
            sent_sum += units * mark((uint32_t)event.key, FIRST_NS + (bin << PCC_BIN_SHIFT));
        }
        if (bin + 1 == next_poll) {
            poll++, asking = 1;
            next_poll += 1000000000u >> PCC_BIN_SHIFT;
        }
        asking = asking && ask(pcc, poll, &acknowledged);
    }
    for (poll++; ask(pcc, poll, &acknowledged);)
        ;
    printf("%llu %llu %llu %d\n", (unsigned long long)sent, (unsigned long long)received,
           (unsigned long long)answer.response.counters.lost_units, sent_sum == received_sum);
    free(memory);
    return 0;
}
