/* What the relay writes before each of the card's answers. */
#ifndef PULSE_PCC_RELAY_H
#define PULSE_PCC_RELAY_H

#include <stdint.h>

enum { PCC_FRAME_MAGIC = 0x46434350 };

struct pcc_frame {
    uint32_t magic;
    uint32_t bytes;   /* of the answer that follows */
    uint64_t wall_ns; /* when it had come */
    uint32_t took_ns; /* since it was asked for, at most 2^32 - 1 */
    uint32_t reserved;
};

#endif
