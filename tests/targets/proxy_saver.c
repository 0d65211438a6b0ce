/* A program with a double of NCCL 2.27.7 in it that gives a proxy what to do, at the places where the real
 * one does: on the thread that launches, after asking whether there is anything to do. It does nothing else.
 *
 * For each line it is given it calls what acts() says.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

const char version[] = "NCCL version 2.27.7+cuda12.9";

struct comm {
    uint8_t before[0x1044b8 - 8];
    uint64_t comm_hash;
    int32_t rank, nranks, cuda_dev, nvml_dev;
};
/* The beginning of struct ncclProxyOp as that release has it. */
struct op {
    void *connection;
    int64_t bytes;
    uint64_t op_count;
    int32_t root, next, nsteps, hole;
    uint64_t chunk_bytes, slice_bytes, loop_bytes, loop_offset, channel_bytes;
    uint8_t slice_steps, chunk_steps, channel, dtype, redop, coll, pattern, protocol;
    uint8_t rest[200];
};
struct plan {
    void *before[2];
    struct comm *comm;
};
struct graph {
    void *stream, *graph, *origin;
};

enum { RING_TWICE = 1, TREE_UP_DOWN = 6, SEND = 13 };
enum { ALL_REDUCE = 4, SEND_FUNCTION = 6 };
enum { LL = 0, SIMPLE = 2 };

static struct comm comm = {.comm_hash = 0x5eed, .rank = 1, .nranks = 4};
static struct op waiting[16];
static int waits, depth;
static uint64_t launched;

/* As in NCCL the functions begin by saving a register, for which a probe costs little. */
#if defined(__aarch64__)
#define WORK(value) __asm__ volatile("" : : "r"(value) : "memory", "x19")
#else
#define WORK(value) __asm__ volatile("" : : "r"(value) : "memory", "rbx")
#endif
#define FUNCTION __attribute__((noipa))

int save(struct comm *comm, struct op *op,
         uint8_t *only_asks) __asm__("_Z15ncclProxySaveOpP8ncclCommP11ncclProxyOpPb");
void replay(struct plan *plan) __asm__("_ZL22hostStreamPlanCallbackPv");
int capture(struct graph graph, void (*destroy)(void *),
            void *plan) __asm__("_Z26ncclCudaGraphAddDestructor13ncclCudaGraphPFvPvES0_");

FUNCTION int save(struct comm *comm, struct op *op, uint8_t *only_asks) {
    WORK(op);
    if (only_asks)
        *only_asks = 1;
    return 0;
}

static void launch(void) {
    for (int i = 0; i < waits; i++) {
        uint8_t needed;
        save(&comm, &waiting[i], &needed);
        save(&comm, &waiting[i], NULL);
    }
    waits = 0;
}

static void add(struct op op) {
    op.op_count += launched;
    waiting[waits++] = op;
}

FUNCTION void replay(struct plan *plan) {
    WORK(plan);
    launched += 2;
    add((struct op){
        .pattern = RING_TWICE, .coll = ALL_REDUCE, .protocol = SIMPLE, .channel = 7, .channel_bytes = 40});
    launch();
}

FUNCTION int capture(struct graph graph, void (*destroy)(void *), void *plan) {
    WORK(&graph);
    return plan == NULL;
}

FUNCTION int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, struct comm *comm,
                           void *stream) {
    WORK(comm);
    return 0;
}

FUNCTION int ncclSend(const void *from, size_t count, int dtype, int peer, struct comm *comm, void *stream) {
    WORK(comm);
    return 0;
}

FUNCTION int ncclGroupStart(void) {
    WORK(1);
    return depth++;
}

FUNCTION int ncclGroupEnd(void) {
    WORK(2);
    if (--depth == 0)
        launch();
    return 0;
}

FUNCTION int ncclCommUserRank(const struct comm *comm, int *rank) {
    *rank = comm->rank;
    return 0;
}

FUNCTION int ncclCommCount(const struct comm *comm, int *count) {
    *count = comm->nranks;
    return 0;
}

FUNCTION int ncclCommCuDevice(const struct comm *comm, int *device) {
    *device = comm->cuda_dev;
    return 0;
}

static void *replays(void *plan) {
    replay(plan);
    return NULL;
}

static void *launches(void *nothing) {
    launch();
    return nothing;
}

static void on_another_thread(void *(*function)(void *), void *argument) {
    pthread_t thread;
    pthread_create(&thread, NULL, function, argument);
    pthread_join(thread, NULL);
}

static void all_reduce(size_t count) {
    launched += 2;
    ncclAllReduce(NULL, NULL, count, 7, 0, &comm, NULL);
}

static void acts(void) {
    struct op ring = {.pattern = RING_TWICE, .coll = ALL_REDUCE, .protocol = SIMPLE, .channel_bytes = 2000};
    struct op tree = {.pattern = TREE_UP_DOWN, .coll = ALL_REDUCE, .protocol = LL, .channel_bytes = 80};
    struct op message = {
        .pattern = SEND, .coll = SEND_FUNCTION, .protocol = SIMPLE, .nsteps = 1, .bytes = 12, .root = 2};

    /* One collective on two channels. */
    all_reduce(1000);
    ring.channel = 4;
    add(ring);
    ring.channel = 5;
    add(ring);
    launch();

    /* A group of what can be told apart. */
    ncclGroupStart();
    ncclSend(NULL, 3, 7, 2, &comm, NULL);
    all_reduce(20);
    add(tree);
    add(message);
    ncclGroupEnd();

    /* And one of what cannot. */
    ncclGroupStart();
    all_reduce(20);
    add(tree);
    all_reduce(20);
    add(tree);
    ncclGroupEnd();

    /* A graph that is captured, and replayed once. */
    struct plan plan = {.comm = &comm};
    all_reduce(10);
    capture((struct graph){0}, NULL, &plan);
    on_another_thread(replays, &plan);

    /* A communicator that does not block. */
    all_reduce(1000);
    add(ring);
    on_another_thread(launches, NULL);
}

int main(void) {
    char line[16];
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        acts();
        puts("done");
        fflush(stdout);
    }
    return version[0] == 0;
}
