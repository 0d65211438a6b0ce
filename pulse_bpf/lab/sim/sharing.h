/* What of the network has to be shared anew at once: copied together, since it is gone through many times. */
#ifndef PULSE_SIM_SHARING_H
#define PULSE_SIM_SHARING_H

#include "engine.h"

/* A port's share of a shared buffer, for 400 Gb/s ports. */
#define FULL_BYTES 2000e3

/* What adds up to a link's capacity may be more by rounding, also that of many changes. */
#define ROUNDING 1e-9

struct shared_flow {
    double cap, tx, rx, backlog;
    int32_t flow, bottleneck;
    int32_t links[MAX_HOPS];                     /* in the part; the sender's first */
    uint8_t hops, sender_hops, injecting, known; /* known: tx is as it was */
    double rate;
};

struct shared_link {
    double capacity, left, share, wanted, held; /* held: what a full queue lets a flow of it have */
    double queue, growth, sent;
    int32_t link, open;
    uint8_t stage, full, reach;
};

/* Of a link in a part: it holds nobody up, and its other flows are none of the part's; it may; and all its
 * flows are in the part. */
enum { SLACK, BINDS, GATHERED };

/* What a change at one link can reach. */
struct part {
    struct shared_flow *flows;
    struct shared_link *links;
    int32_t *open; /* room for a number of each flow */
    int32_t flow_count, link_count;
    int whole, near_full; /* all that is connected in any way; it was when shared last */
};

/* Sets tx, rx and bottleneck of the flows, and wanted, queue, growth and full of the links; whether full
 * queues held somebody back. */
int share_out(struct part *part);

#endif
