/* A process that calls one operator of the real NCCL at a pace, on a communicator made by hand as
 * pulse_bpf.lab.nccl makes them.
 *
 * usage: nccl_loop LIBNCCL RANK_OFFSET ncclAllReduce|ncclSend. Prints "ready"; then each line "CALLS
 * PER_SECOND" on stdin makes that many calls, at full speed when PER_SECOND is 0, and is answered by "CALLED
 * ELAPSED_NS LATE_NS WRONG". With CALLS 0 it calls until the next line comes. LATE_NS is the longest that a
 * call came behind its time, WRONG how many did not return what the first one did. Ends at the end of stdin.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PAST_IDENTITY_BYTES 0x8000
#define ZEROED_BYTES 0x10000

typedef int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*send)(const void *, size_t, int, int, void *, void *);

struct identity {
    uint64_t comm_hash;
    int32_t rank, nranks, gpu;
};

static void *mapped(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        exit(1);
    return memory;
}

static void *make_communicator(size_t rank_offset) {
    size_t bytes = rank_offset + PAST_IDENTITY_BYTES;
    uint64_t *words = mapped(bytes), zeroed = (uint64_t)mapped(ZEROED_BYTES);
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = zeroed;
    words[0] = 0x0280028002800280;
    struct identity who = {.comm_hash = 0xABCD0000, .rank = 1, .nranks = 4, .gpu = 1};
    memcpy((char *)words + rank_offset - 8, &who, 20);
    return words;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int has_line(void) {
    struct pollfd in = {.fd = 0, .events = POLLIN};
    return poll(&in, 1, 0) > 0;
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    void *function = library ? dlsym(library, argv[3]) : NULL;
    if (!function)
        return 1;
    int is_send = !strcmp(argv[3], "ncclSend");
    void *comm = make_communicator(strtoul(argv[2], NULL, 0));
    static char buffers[2][64];
    char line[64];
    /* has_line looks at the descriptor, so nothing may wait in a buffer. */
    setvbuf(stdin, NULL, _IONBF, 0);
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        char *rest;
        long calls = strtol(line, &rest, 10), per_second = strtol(rest, NULL, 10);
        int64_t begun_ns = now_ns();
        long called = 0, wrong = 0;
        int first = 0;
        while (calls ? called < calls : !has_line()) {
            if (per_second) {
                int64_t due_ns = begun_ns + called * 1000000000LL / per_second;
                struct timespec due = {due_ns / 1000000000LL, due_ns % 1000000000LL};
                if (now_ns() < due_ns)
                    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
            }
            int status = is_send
                             ? ((send)function)(buffers[0], 64, 7, 2, comm, (void *)0x5000)
                             : ((all_reduce)function)(buffers[0], buffers[1], 64, 7, 0, comm, (void *)0x5000);
            if (!called++)
                first = status;
            wrong += status != first;
        }
        printf("%ld %lld %ld\n", called, (long long)(now_ns() - begun_ns), wrong);
        fflush(stdout);
    }
    return 0;
}
