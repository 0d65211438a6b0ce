// Stands in for libdoca_telemetry_diag: the same exported names, samples taken from a file, calls noted in
// another.
//
// DOCA_DIAG_SCRIPT names a directory: `settings` holds "name value" lines, `samples` the bytes that
// query_counters hands out, and `calls` takes one line per call. query_counters returns what is new in
// `samples` since the query before.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int status;

static long position;

static FILE *script(const char *name, const char *mode) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", getenv("DOCA_DIAG_SCRIPT"), name);
    return fopen(path, mode);
}

static unsigned long long setting(const char *wanted, unsigned long long otherwise) {
    char name[128];
    unsigned long long value;
    FILE *file = script("settings", "r");
    while (file && fscanf(file, "%127s %llu", name, &value) == 2) {
        if (!strcmp(name, wanted))
            otherwise = value;
    }
    if (file)
        fclose(file);
    return otherwise;
}

// Notes a call with one number of its arguments; its status is the setting "fail_NAME".
static status call(const char *name, unsigned long long argument) {
    char key[160];
    FILE *file = script("calls", "a");
    fprintf(file, "%s %llu\n", name, argument);
    fclose(file);
    snprintf(key, sizeof(key), "fail_%s", name);
    return (status)setting(key, 0);
}

static void *info[2] = {"mlx5_1", "mlx5_0"};

status doca_devinfo_create_list(void ***list, uint32_t *count) {
    *list = info;
    *count = 2;
    return call("create_list", 0);
}
status doca_devinfo_destroy_list(void **list) {
    return call("destroy_list", list == info);
}
status doca_devinfo_get_ibdev_name(void *device, char *name, uint32_t size) {
    snprintf(name, size, "%s", (char *)device);
    return 0;
}
status doca_dev_open(void *device, void **opened) {
    *opened = device;
    return call("dev_open", device == info[1]);
}
status doca_dev_close(void *device) {
    return call("dev_close", device == info[1]);
}
const char *doca_error_get_name(status code) {
    return code == 3 ? "DOCA_ERROR_IN_USE" : code == 21 ? "DOCA_ERROR_DRIVER" : "DOCA_ERROR_OTHER";
}

#define DIAG(name) doca_telemetry_diag_##name
#define SETTER(name, type)                                                                                   \
    status DIAG(name)(void *diag, type value) {                                                              \
        (void)diag;                                                                                          \
        return call(#name, value);                                                                           \
    }
SETTER(set_output_format, int)
SETTER(set_sample_period, uint64_t)
SETTER(set_log_max_num_samples, uint8_t)
SETTER(set_max_num_data_ids, uint32_t)
SETTER(set_sync_mode, int)
SETTER(set_sample_mode, int)
SETTER(set_data_clear, uint8_t)
SETTER(set_data_timestamp_source, int)

status DIAG(cap_is_supported)(void *device) {
    return call("cap_is_supported", device == info[1]);
}
status DIAG(cap_get_log_max_num_samples)(void *device, uint8_t *value) {
    *value = (uint8_t)setting("log_max_num_samples", 16);
    return call("cap_get_log_max_num_samples", device == info[1]);
}
status DIAG(cap_is_data_timestamp_source_supported)(void *device, int source, uint8_t *value) {
    (void)device;
    *value = (uint8_t)setting("has_clock", 1);
    return call("cap_is_data_timestamp_source_supported", (unsigned)source);
}
status DIAG(create)(void *device, uint8_t force, void **diag) {
    *diag = device;
    return call("create", force);
}
status DIAG(destroy)(void *diag) {
    return call("destroy", diag == info[1]);
}
status DIAG(apply_config)(void *diag) {
    return call("apply_config", diag == info[1]);
}
status DIAG(check_data_id)(void *diag, uint64_t id) {
    (void)diag;
    return setting("unknown_id", 0) == id ? 4 : 0;
}
status DIAG(apply_counters_list_by_id)(void *diag, const uint64_t *ids, uint32_t count, uint64_t *failed) {
    (void)diag;
    *failed = setting("fail_apply_ids", 0) ? ids[count - 1] : 0;
    for (uint32_t index = 0; index < count; index++)
        call("id", ids[index]);
    return call("apply_ids", count);
}
status DIAG(get_sample_period)(void *diag, uint64_t *period) {
    *period = setting("period", 100000);
    return call("get_sample_period", diag == info[1]);
}
status DIAG(start)(void *diag) {
    position = 0;
    return call("start", diag == info[1]);
}
status DIAG(stop)(void *diag) {
    return call("stop", diag == info[1]);
}
status DIAG(get_sample_size)(void *diag, uint32_t *size) {
    *size = (uint32_t)setting("sample_size", 0);
    return call("get_sample_size", diag == info[1]);
}
#ifndef WITHOUT_QUERY
status DIAG(query_counters)(void *diag, void *buffer, uint32_t capacity, uint32_t *count) {
    FILE *file = script("samples", "r");
    (void)diag;
    fseek(file, position, SEEK_SET);
    *count = (uint32_t)fread(buffer, setting("sample_size", 1), capacity, file);
    position = ftell(file);
    fclose(file);
    return (status)setting("fail_query", 0);
}
#endif
