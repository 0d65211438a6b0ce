/* What layout.c, the program, and layout_nccl.c, the library, agree on. */
#include <stddef.h>

/* Of the rank in the double's struct ncclComm, behind the 64-bit hash as in NCCL. */
#define LAYOUT_RANK_OFFSET 0x4d8

struct layout_calls {
    int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
    int (*reduce_scatter)(const void *, void *, size_t, int, int, void *, void *);
    int (*all_gather)(const void *, void *, size_t, int, void *, void *);
    int (*broadcast)(const void *, void *, size_t, int, int, void *, void *);
    int (*reduce)(const void *, void *, size_t, int, int, int, void *, void *);
    int (*send)(const void *, size_t, int, int, void *, void *);
    int (*recv)(void *, size_t, int, int, void *, void *);
    int (*group_start)(void);
    int (*group_end)(void);
};

void layout_calls(struct layout_calls *calls);
