/* A double of NCCL for the layouts a library can have: the calls that are probed, with the arguments of
 * nccl.h and the weak names of the real one, and the three accessors that tell where a communicator keeps its
 * rank. It does nothing.
 *
 * Built into a program or a library, exported or not; `layout_calls` is the way in that is always there.
 */
#include "layout.h"

#include <stdint.h>

#ifndef VERSION
#define VERSION "2.99.0"
#endif

/* As in nccl.h: pncclX is the function, ncclX a weak name of it. */
#define NAMED(name) __attribute__((weak, alias("p" #name)))

#ifdef HALF_HIDDEN
#define PARTLY_HIDDEN __attribute__((visibility("hidden")))
#else
#define PARTLY_HIDDEN
#endif

#ifdef FILLER_BYTES
/* What else a bigger library holds. */
#define TEXT(x) #x
#define SKIP(x) ".skip " TEXT(x)
__asm__(".text\n" SKIP(FILLER_BYTES) "\n");
#endif

const char layout_version[] = "NCCL version " VERSION "+cuda12.9";

struct ncclComm {
    uint8_t before[LAYOUT_RANK_OFFSET - 8];
    uint64_t comm_hash;
    int32_t rank, nranks, cuda_dev, nvml_dev;
};

/* What a call does: like NCCL's, the functions begin by saving a register; with SLOW_ENTRY by making room on
 * the stack, which uprobes execute in single steps.
 */
static inline int done(const void *comm) {
#ifdef SLOW_ENTRY
    char room[256];
    __asm__ volatile("" : : "r"(room), "r"(comm) : "memory");
#elif defined(__aarch64__)
    __asm__ volatile("" : : "r"(comm) : "memory", "x19");
#else
    __asm__ volatile("" : : "r"(comm) : "memory", "rbx");
#endif
    return comm ? 0 : 4;
}

int pncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, void *comm, void *stream) {
    return done(comm);
}
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *) NAMED(ncclAllReduce);

int pncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op, void *comm,
                       void *stream) {
    return done(comm);
}
int ncclReduceScatter(const void *, void *, size_t, int, int, void *, void *) NAMED(ncclReduceScatter);

int pncclAllGather(const void *from, void *to, size_t count, int dtype, void *comm, void *stream) {
    return done(comm);
}
int ncclAllGather(const void *, void *, size_t, int, void *, void *) NAMED(ncclAllGather);

int pncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, void *comm, void *stream) {
    return done(comm);
}
int ncclBroadcast(const void *, void *, size_t, int, int, void *, void *) NAMED(ncclBroadcast);

int pncclReduce(const void *from, void *to, size_t count, int dtype, int op, int root, void *comm,
                void *stream) {
    return done(comm);
}
int ncclReduce(const void *, void *, size_t, int, int, int, void *, void *) NAMED(ncclReduce);

int pncclSend(const void *from, size_t count, int dtype, int peer, void *comm, void *stream) {
    return done(comm);
}
int ncclSend(const void *, size_t, int, int, void *, void *) NAMED(ncclSend);

int pncclRecv(void *to, size_t count, int dtype, int peer, void *comm, void *stream) {
    return done(comm);
}
int ncclRecv(void *, size_t, int, int, void *, void *) NAMED(ncclRecv);

int pncclGroupStart(void) {
    return done((void *)1);
}
int ncclGroupStart(void) NAMED(ncclGroupStart);

/* Not quite the function above: functions that are the same may be made one. */
PARTLY_HIDDEN int pncclGroupEnd(void) {
    return done((void *)2) * 2;
}
PARTLY_HIDDEN int ncclGroupEnd(void) NAMED(ncclGroupEnd);

int pncclCommUserRank(const struct ncclComm *comm, int *rank) {
    *rank = comm->rank;
    return 0;
}
int ncclCommUserRank(const struct ncclComm *, int *) NAMED(ncclCommUserRank);

int pncclCommCount(const struct ncclComm *comm, int *count) {
    *count = comm->nranks;
    return 0;
}
int ncclCommCount(const struct ncclComm *, int *) NAMED(ncclCommCount);

int pncclCommCuDevice(const struct ncclComm *comm, int *device) {
    *device = comm->cuda_dev;
    return 0;
}
int ncclCommCuDevice(const struct ncclComm *, int *) NAMED(ncclCommCuDevice);

__attribute__((visibility("default"))) void layout_calls(struct layout_calls *calls) {
    *calls = (struct layout_calls){
        .all_reduce = ncclAllReduce,
        .reduce_scatter = ncclReduceScatter,
        .all_gather = ncclAllGather,
        .broadcast = ncclBroadcast,
        .reduce = ncclReduce,
        .send = ncclSend,
        .recv = ncclRecv,
        .group_start = ncclGroupStart,
        .group_end = ncclGroupEnd,
    };
}
