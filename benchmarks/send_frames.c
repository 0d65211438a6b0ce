/* Sends frames over an interface as fast as it takes them, all on one CPU together with what receives them.
 *
 *     send_frames INTERFACE CPU FRAME_BYTES FRAMES < FRAMES
 *
 * For each line "COUNT" on stdin after the frames it sends that many, in turn, giving each pass the next
 * packet sequence number, and answers with the nanoseconds it took. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define BATCH 64
#define PSN_OFFSET (14 + 20 + 8 + 9) /* Ethernet, IPv4, UDP, in the BTH */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int fail(const char *what) {
    perror(what);
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 5)
        return 2;
    size_t bytes = strtoul(argv[3], NULL, 10), frames = strtoul(argv[4], NULL, 10), next = 0, count;
    unsigned char *data = malloc(bytes * frames);
    uint32_t psn = 0;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(strtoul(argv[2], NULL, 10), &cpus);
    if (!data || fread(data, bytes, frames, stdin) != frames || sched_setaffinity(0, sizeof(cpus), &cpus))
        return fail("frames");
    int out = socket(AF_PACKET, SOCK_RAW, 0);
    struct sockaddr_ll where = {.sll_family = AF_PACKET, .sll_ifindex = (int)if_nametoindex(argv[1])};
    if (out < 0 || bind(out, (struct sockaddr *)&where, sizeof(where)))
        return fail("socket");
    while (scanf("%zu", &count) == 1) {
        uint64_t begun = now_ns();
        for (size_t sent = 0; sent < count;) {
            struct iovec parts[BATCH];
            struct mmsghdr messages[BATCH] = {0};
            unsigned int batch = count - sent < BATCH ? (unsigned int)(count - sent) : BATCH;
            if (batch > frames - next)
                batch = (unsigned int)(frames - next);
            for (unsigned int i = 0; i < batch; i++) {
                unsigned char *frame = data + (next + i) * bytes;
                uint32_t number = htonl(psn << 8);
                memcpy(frame + PSN_OFFSET, &number, 3);
                parts[i] = (struct iovec){frame, bytes};
                messages[i].msg_hdr.msg_iov = &parts[i];
                messages[i].msg_hdr.msg_iovlen = 1;
            }
            int done = sendmmsg(out, messages, batch, 0);
            if (done < 0)
                return fail("sendmmsg");
            sent += (size_t)done;
            next += (size_t)done;
            if (next == frames) {
                next = 0;
                psn++;
            }
        }
        printf("%llu\n", (unsigned long long)(now_ns() - begun));
        fflush(stdout);
    }
    return 0;
}
