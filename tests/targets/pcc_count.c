/* pcc_count FILE N [cumulative]: counts the first N of a file of 44-byte events, all made ready beforehand,
 * so that the difference between two N is what the core takes. Prints what was lost. */
#include <stdio.h>
#include <stdlib.h>

#include "core.h"

enum { MEMORY = 64 << 20 };

static struct pcc_event events[1 << 16];
static uint64_t memory[MEMORY / sizeof(uint64_t)];
static union {
    struct pcc_response response;
    uint64_t room[128];
} answer;

int main(int argc, char **argv) {
    struct pcc *pcc = pcc_create(memory, MEMORY, 12, argc == 4);
    const struct pcc_request request = {.magic = PCC_MAGIC, .cumulative = argc == 4};
    uint32_t words[11], known = 0, count = argc >= 3 ? (uint32_t)atoi(argv[2]) : 0;
    FILE *file = argc >= 3 ? fopen(argv[1], "rb") : NULL;
    if (!file || !pcc)
        return 2;
    for (; known < sizeof(events) / sizeof(*events) && fread(words, sizeof(words), 1, file) == 1; known++) {
        struct pcc_event *event = &events[known];
        for (int n = 3; n < 10; n++)
            words[n] = __builtin_bswap32(words[n]);
        event->type = (uint8_t)words[3];
        event->subtype = (uint8_t)(words[3] >> 8);
        event->flags = (uint8_t)(words[3] >> 24);
        event->key = words[4];
        event->timestamp_ns = words[6];
        event->first_timestamp_ns = words[7];
        event->count = (uint16_t)(event->type == PCC_TX ? words[8] : words[9]);
        if (event->type == PCC_TX)
            event->key |= (uint64_t)((words[9] & 0xffffff) | (words[3] << 8 & 0xff000000)) << 32;
    }
    for (uint32_t n = 0; n < count && n < known; n++)
        pcc_event(pcc, &events[n]);
    if (!pcc_answer(pcc, &request, &answer.response, sizeof(answer)))
        return 3;
    printf("%llu\n", (unsigned long long)answer.response.counters.lost_units);
    return count > known;
}
