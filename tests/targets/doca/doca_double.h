/* As much of DOCA's documented API as nic/pcc uses, declared by us, so that its glue is compiled and run by
 * tests. Names and types are the documented ones; everything else is ours. */
#ifndef DOCA_DOUBLE_H
#define DOCA_DOUBLE_H

#include <stdint.h>

typedef enum { DOCA_SUCCESS, DOCA_ERROR_UNKNOWN } doca_error_t;
const char *doca_error_get_descr(doca_error_t error);

/* Host: devices */
enum { DOCA_DEVINFO_IBDEV_NAME_SIZE = 64 };
struct doca_devinfo;
struct doca_dev;
doca_error_t doca_devinfo_create_list(struct doca_devinfo ***devices, uint32_t *count);
doca_error_t doca_devinfo_destroy_list(struct doca_devinfo **devices);
doca_error_t doca_devinfo_get_ibdev_name(const struct doca_devinfo *device, char *name, uint32_t size);
doca_error_t doca_devinfo_get_is_pcc_supported(const struct doca_devinfo *device);
doca_error_t doca_dev_open(struct doca_devinfo *info, struct doca_dev **device);
doca_error_t doca_dev_close(struct doca_dev *device);

/* Host: congestion control */
struct doca_pcc;
struct doca_pcc_app;
typedef enum {
    DOCA_PCC_PS_ACTIVE,
    DOCA_PCC_PS_STANDBY,
    DOCA_PCC_PS_DEACTIVATED,
    DOCA_PCC_PS_ERROR,
} doca_pcc_process_state_t;
doca_error_t doca_pcc_create(struct doca_dev *device, struct doca_pcc **pcc);
doca_error_t doca_pcc_destroy(struct doca_pcc *pcc);
doca_error_t doca_pcc_set_app(struct doca_pcc *pcc, struct doca_pcc_app *app);
doca_error_t doca_pcc_set_thread_affinity(struct doca_pcc *pcc, uint32_t count, uint32_t *threads);
doca_error_t doca_pcc_set_mailbox(struct doca_pcc *pcc, uint32_t request_size, uint32_t response_size);
doca_error_t doca_pcc_set_trace_message(struct doca_pcc *pcc, char **formats);
doca_error_t doca_pcc_start(struct doca_pcc *pcc);
doca_error_t doca_pcc_stop(struct doca_pcc *pcc);
doca_error_t doca_pcc_get_process_state(const struct doca_pcc *pcc, doca_pcc_process_state_t *state);
doca_error_t doca_pcc_mailbox_get_request_buffer(const struct doca_pcc *pcc, void **buffer);
doca_error_t doca_pcc_mailbox_get_response_buffer(const struct doca_pcc *pcc, void **buffer);
doca_error_t doca_pcc_mailbox_send(const struct doca_pcc *pcc, uint32_t request_size, uint32_t *response_size,
                                   uint32_t *callback_status);

/* Device */
enum {
    DOCA_PCC_DEV_EVNT_ROCE_CNP = 2,
    DOCA_PCC_DEV_EVNT_ROCE_TX = 3,
    DOCA_PCC_DEV_EVNT_ROCE_NACK = 5,
};
typedef enum { DOCA_PCC_DEV_STATUS_OK, DOCA_PCC_DEV_STATUS_FAIL } doca_pcc_dev_error_t;
typedef struct {
    uint32_t data[12];
} doca_pcc_dev_algo_ctxt_t;
typedef struct {
    uint32_t words[11];
} doca_pcc_dev_event_t;
typedef struct {
    uint32_t algo_slot;
} doca_pcc_dev_attr_t;
typedef struct {
    uint32_t rate;
    uint32_t rtt_req;
} doca_pcc_dev_results_t;
typedef struct {
    uint32_t ev_type : 8;
    uint32_t ev_subtype : 8;
    uint32_t port_num : 8;
    uint32_t flags : 8;
} doca_pcc_dev_event_general_attr_t;
typedef struct {
    uint32_t sent_32bytes : 16;
    uint32_t sent_pkts : 16;
} doca_pcc_dev_roce_tx_cntrs_t;
typedef struct {
    uint32_t num_coalesced : 16;
    uint32_t reserved : 16;
} doca_pcc_dev_ack_nack_cnp_extra_t;

doca_pcc_dev_event_general_attr_t doca_pcc_dev_get_ev_attr(doca_pcc_dev_event_t *event);
uint32_t doca_pcc_dev_get_flowtag(doca_pcc_dev_event_t *event);
uint32_t doca_pcc_dev_get_sn(doca_pcc_dev_event_t *event);
uint32_t doca_pcc_dev_get_timestamp(doca_pcc_dev_event_t *event);
uint32_t doca_pcc_dev_get_roce_first_timestamp(doca_pcc_dev_event_t *event);
doca_pcc_dev_roce_tx_cntrs_t doca_pcc_dev_get_roce_tx_cntrs(doca_pcc_dev_event_t *event);
doca_pcc_dev_ack_nack_cnp_extra_t doca_pcc_dev_get_ack_nack_cnp_extra(doca_pcc_dev_event_t *event);
uint32_t doca_pcc_dev_get_flow_qpn(doca_pcc_dev_event_t *event);
unsigned int doca_pcc_dev_thread_rank(void);
void doca_pcc_dev_trace_5(int format, uint64_t arg1, uint64_t arg2, uint64_t arg3, uint64_t arg4,
                          uint64_t arg5);
void doca_pcc_dev_default_internal_algo(doca_pcc_dev_algo_ctxt_t *context, doca_pcc_dev_event_t *event,
                                        const doca_pcc_dev_attr_t *attr, doca_pcc_dev_results_t *results);

void doca_pcc_dev_user_init(uint32_t *disable_event_bitmask);
void doca_pcc_dev_user_algo(doca_pcc_dev_algo_ctxt_t *context, doca_pcc_dev_event_t *event,
                            const doca_pcc_dev_attr_t *attr, doca_pcc_dev_results_t *results);
doca_pcc_dev_error_t doca_pcc_dev_user_set_algo_params(uint32_t port, uint32_t algo_slot, uint32_t base,
                                                       uint32_t count, const uint32_t *values,
                                                       uint32_t *params);
doca_pcc_dev_error_t doca_pcc_dev_user_port_info_changed(uint32_t port);
doca_pcc_dev_error_t doca_pcc_dev_user_mailbox_handle(void *request, uint32_t request_size,
                                                      uint32_t max_response_size, void *response,
                                                      uint32_t *response_size);

#endif
