/* Calls the real ibv_modify_qp and ibv_destroy_qp on a queue pair made by hand: there is no RDMA device.
 *
 * libibverbs finds the provider's functions through pointers beside the context; all of them lead to
 * accept(). Prints "ready", runs the calls once for each line of stdin, prints "done" after each, ends at the
 * end of stdin.
 */
#include <infiniband/verbs.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

static void *functions[4096];
static void *pointers[8192];
static struct ibv_device device;

static int accept_call(void) {
    return 0;
}

int main(void) {
    for (int i = 0; i < 4096; i++)
        functions[i] = accept_call;
    /* The library keeps its own data before and behind the public context. */
    for (int i = 0; i < 8192; i++)
        pointers[i] = functions;
    struct ibv_context *context = (struct ibv_context *)&pointers[4096];
    strcpy(device.name, "mlx5_7");
    context->device = &device;
    struct ibv_qp qp = {.context = context, .qp_num = 0x1234, .qp_type = IBV_QPT_RC};
    struct ibv_qp datagram = {.context = context, .qp_num = 0x99, .qp_type = IBV_QPT_UD};

    puts("ready");
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof(line), stdin)) {
        struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 2};
        ibv_modify_qp(&datagram, &init, IBV_QP_STATE | IBV_QP_PORT);
        ibv_modify_qp(&qp, &init, IBV_QP_STATE | IBV_QP_PORT);
        struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = 0x5678};
        rtr.ah_attr.is_global = 1;
        rtr.ah_attr.port_num = 2;
        rtr.ah_attr.sl = 3;
        rtr.ah_attr.grh.sgid_index = 5;
        inet_pton(AF_INET6, "::ffff:10.9.0.2", &rtr.ah_attr.grh.dgid);
        ibv_modify_qp(&qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN);
        struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7};
        ibv_modify_qp(&qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT);
        ibv_destroy_qp(&qp);
        puts("done");
        fflush(stdout);
    }
    return 0;
}
