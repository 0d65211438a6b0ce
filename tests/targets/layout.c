/* A process that calls doubles of NCCL, wherever they are.
 *
 * usage: layout [LIBRARY...]. Opens the libraries (built with -DLINKED: has one of its own), prints "ready"
 * and carries out one command for each line on stdin, answering each with one line: call COUNT      calls
 * every copy from a new thread; answers with KIND,COUNT,COMM,RANK of each operator open LIBRARY    opens one
 * more copy again LIBRARY   opens it in a link namespace of its own, a second time if it is open already
 *   memory LIBRARY  opens a copy of it that is in no directory
 *   move            moves the code of every copy to anonymous memory, at the same addresses
 *   fork            a child takes over; the parent ends with it
 *   exec            executes itself anew, with the same arguments; answers "ready"
 *   pid             answers with the pid, as the process itself sees it
 * Others than `call` answer "done". Ends at the end of stdin.
 */
#define _GNU_SOURCE
#include "layout.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <unistd.h>

#define MOST_COPIES 8
#define NRANKS 8

static struct layout_calls copies[MOST_COPIES];
static int copies_count;
static struct {
    uint8_t before[LAYOUT_RANK_OFFSET - 8];
    uint64_t comm_hash;
    int32_t rank, nranks, cuda_dev, nvml_dev;
} comms[MOST_COPIES];

static void check(int good, const char *what) {
    if (good)
        return;
    perror(what);
    exit(1);
}

static void answer(const char *text) {
    printf("%s\n", text);
    fflush(stdout);
}

static void add(void (*get)(struct layout_calls *)) {
    int index = copies_count++;
    get(&copies[index]);
    comms[index].comm_hash = 0xC0FFEE00 + index;
    comms[index].rank = index;
    comms[index].nranks = NRANKS;
    comms[index].cuda_dev = index;
}

#ifndef STATIC
static void add_from(void *library) {
    void *get = library ? dlsym(library, "layout_calls") : NULL;
    if (!get) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    add((void (*)(struct layout_calls *))get);
}

static void open_in_memory(const char *path) {
    struct stat status;
    char name[64];
    int from = open(path, O_RDONLY), memory = memfd_create("copy", 0);
    check(from >= 0 && memory >= 0 && !fstat(from, &status), "memfd");
    check(sendfile(memory, from, NULL, status.st_size) == status.st_size, "sendfile");
    snprintf(name, sizeof(name), "/proc/self/fd/%d", memory);
    add_from(dlopen(name, RTLD_NOW | RTLD_LOCAL));
}
#endif

static void move_code(const void *function) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    while (fgets(line, sizeof(line), maps)) {
        char *rest;
        uintptr_t start = strtoul(line, &rest, 16), end = strtoul(rest + 1, NULL, 16);
        if ((uintptr_t)function < start || (uintptr_t)function >= end)
            continue;
        int writable = PROT_READ | PROT_WRITE;
        void *copy = mmap(NULL, end - start, writable, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(copy != MAP_FAILED, "mmap");
        memcpy(copy, (void *)start, end - start);
        check(!mprotect(copy, end - start, PROT_READ | PROT_EXEC), "mprotect");
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
        check(mremap(copy, end - start, end - start, flags, (void *)start) == (void *)start, "mremap");
        break;
    }
    fclose(maps);
}

static void note(const char *kind, size_t count, int copy) {
    printf("%s,%zu,%lu,%d ", kind, count, (unsigned long)&comms[copy], copy);
}

static void *call_all(void *first_count) {
    static char from[64], to[64];
    size_t count = (size_t)first_count;
    void *stream = (void *)0x5000;
    for (int copy = 0; copy < copies_count; copy++) {
        struct layout_calls *call = &copies[copy];
        void *comm = &comms[copy];
        call->all_reduce(from, to, count, 7, 0, comm, stream);
        note("AllReduce", count, copy);
        call->reduce_scatter(from, to, count + 1, 7, 0, comm, stream);
        note("ReduceScatter", count + 1, copy);
        call->all_gather(from, to, count + 2, 7, comm, stream);
        note("AllGather", count + 2, copy);
        call->broadcast(from, to, count + 3, 7, 1, comm, stream);
        note("Broadcast", count + 3, copy);
        call->reduce(from, to, count + 4, 7, 0, 1, comm, stream);
        note("Reduce", count + 4, copy);
        call->group_start();
        call->send(from, count + 5, 7, 1, comm, stream);
        note("Send", count + 5, copy);
        call->recv(to, count + 6, 7, 1, comm, stream);
        note("Recv", count + 6, copy);
        call->group_end();
    }
    answer("");
    return NULL;
}

static void take_over(void) {
    pid_t child = fork();
    check(child >= 0, "fork");
    if (!child)
        return;
    waitpid(child, NULL, 0);
    _exit(0);
}

int main(int argc, char **argv) {
    char line[4096];
#ifdef LINKED
    add(layout_calls);
#endif
#ifndef STATIC
    for (int index = 1; index < argc; index++)
        add_from(dlopen(argv[index], RTLD_NOW | RTLD_LOCAL));
#endif
    /* A child or a program that is executed takes over a stdin of which nothing has been read ahead. */
    setvbuf(stdin, NULL, _IONBF, 0);
    answer("ready");
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = 0;
        char *argument = strchr(line, ' ');
        if (argument)
            *argument++ = 0;
        if (!strcmp(line, "call")) {
            pthread_t thread;
            check(!pthread_create(&thread, NULL, call_all, (void *)strtoul(argument, NULL, 10)), "thread");
            pthread_join(thread, NULL);
            continue;
        }
        if (!strcmp(line, "pid")) {
            printf("%d\n", getpid());
            fflush(stdout);
            continue;
        }
        if (!strcmp(line, "exec")) {
            execv("/proc/self/exe", argv);
            check(0, "exec");
        }
        if (!strcmp(line, "fork"))
            take_over();
        else if (!strcmp(line, "move"))
            for (int copy = 0; copy < copies_count; copy++)
                move_code((void *)copies[copy].all_reduce);
#ifndef STATIC
        else if (!strcmp(line, "open"))
            add_from(dlopen(argument, RTLD_NOW | RTLD_LOCAL));
        else if (!strcmp(line, "again"))
            add_from(dlmopen(LM_ID_NEWLM, argument, RTLD_NOW | RTLD_LOCAL));
        else if (!strcmp(line, "memory"))
            open_in_memory(argument);
#endif
        else
            return 2;
        answer("done");
    }
    return 0;
}
