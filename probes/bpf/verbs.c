/* ibv_create_qp, ibv_modify_qp and ibv_destroy_qp at their default version: which queue pair talks to whom. A
 * place's cookie is its enum verbs_call, and from bit 8 on the number of the file.
 *
 * Offsets are those of rdma-core's <infiniband/verbs.h> on 64-bit machines, part of its stable ABI
 * (IBVERBS_1.1); a test compares them with the installed header. What is seen is the request: a call that
 * then fails leaves a record of what was asked for.
 */
#include "probe.h"

#define IBV_QP_CONTEXT 0
#define IBV_QP_QP_NUM 52
#define IBV_QP_QP_TYPE 60
#define IBV_CONTEXT_DEVICE 0
#define IBV_DEVICE_NAME 24
#define IBV_QP_ATTR_QP_STATE 0
#define IBV_QP_ATTR_PATH_MTU 8
#define IBV_QP_ATTR_DEST_QP_NUM 28
#define IBV_QP_ATTR_AH_GRH_DGID 56
#define IBV_QP_ATTR_AH_GRH_SGID_INDEX 76
#define IBV_QP_ATTR_AH_SL 82
#define IBV_QP_ATTR_AH_IS_GLOBAL 85
#define IBV_QP_ATTR_AH_PORT_NUM 86
#define IBV_QP_ATTR_PORT_NUM 129
#define IBV_QP_ATTR_TIMEOUT 130
#define IBV_QP_ATTR_RETRY_CNT 131

#define READ_USER(target, base, offset)                                                                      \
    bpf_probe_read_user(&(target), sizeof(target), (void *)((base) + (offset)))

static __always_inline struct qp_event *reserve(u64 task, u16 call, u64 qp) {
    struct qp_event *event = events.ringbuf_reserve(sizeof(struct qp_event));
    if (!event) {
        count_drop();
        return NULL;
    }
    __builtin_memset(event, 0, sizeof(*event));
    fill_header(&event->header, task, call);
    u64 context = 0, device = 0;
    u32 type = 0;
    READ_USER(event->qpn, qp, IBV_QP_QP_NUM);
    READ_USER(type, qp, IBV_QP_QP_TYPE);
    event->qp_type = type;
    READ_USER(context, qp, IBV_QP_CONTEXT);
    READ_USER(device, context, IBV_CONTEXT_DEVICE);
    bpf_probe_read_user_str(event->nic, sizeof(event->nic), (void *)(device + IBV_DEVICE_NAME));
    return event;
}

static __always_inline void fill_attributes(struct qp_event *event, u64 attributes, u32 mask) {
    event->mask = mask;
    READ_USER(event->state, attributes, IBV_QP_ATTR_QP_STATE);
    READ_USER(event->path_mtu, attributes, IBV_QP_ATTR_PATH_MTU);
    READ_USER(event->peer_qpn, attributes, IBV_QP_ATTR_DEST_QP_NUM);
    READ_USER(event->peer_gid, attributes, IBV_QP_ATTR_AH_GRH_DGID);
    READ_USER(event->gid_index, attributes, IBV_QP_ATTR_AH_GRH_SGID_INDEX);
    READ_USER(event->service_level, attributes, IBV_QP_ATTR_AH_SL);
    READ_USER(event->is_global, attributes, IBV_QP_ATTR_AH_IS_GLOBAL);
    READ_USER(event->path_port, attributes, IBV_QP_ATTR_AH_PORT_NUM);
    READ_USER(event->port, attributes, IBV_QP_ATTR_PORT_NUM);
    READ_USER(event->timeout, attributes, IBV_QP_ATTR_TIMEOUT);
    READ_USER(event->retry_count, attributes, IBV_QP_ATTR_RETRY_CNT);
}

int on_entry(struct pt_regs *ctx) {
    u64 task = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx);
    if (!is_watched(task, cookie))
        return 0;
    u8 call = cookie;
    struct qp_event *event = reserve(task, call, PT_REGS_PARM1(ctx));
    if (!event)
        return 0;
    if (call == VERBS_MODIFY_QP)
        fill_attributes(event, PT_REGS_PARM2(ctx), PT_REGS_PARM3(ctx));
    events.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
    return 0;
}

/* Entry and return of ibv_create_qp; see on_group_end in nccl.c. */
int on_create(struct pt_regs *ctx) {
    u64 task = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx);
    bool is_entry = PT_REGS_IP(ctx) == bpf_get_func_ip(ctx);
    if (!is_watched(task, cookie))
        return is_entry;
    u64 qp = PT_REGS_RC(ctx);
    if (is_entry || !qp)
        return 0;
    struct qp_event *event = reserve(task, VERBS_CREATE_QP, qp);
    if (event)
        events.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
    return 0;
}
