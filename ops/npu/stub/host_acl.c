/* A stand-in for Ascend's ACL runtime, for tests on a machine that has none: device memory is host memory.
 *
 * It covers what torch_npu calls to allocate, copy, and use streams and events. Kernels are not covered: those calls
 * fail. Everything runs immediately, in the calling thread, with one exception: with HOST_ACL_LATE_D2H=1 an asynchronous
 * copy to the host happens only when its stream, or an event recorded after it, is waited for. A test that reads too
 * early then reads old data, as it may on a real device.
 *
 * HOST_ACL_DEVICES: number of devices (default 2). HOST_ACL_REFUSE_SET: they are seen, but cannot be opened.
 * The current device is per thread, as in the real runtime.
 * The signatures are those that the torch_npu wheel was linked against; see build_stub.py.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int acl_error;

enum { ACL_OK = 0, BAD_PARAMETER = 107000, BAD_DEVICE = 107001, NO_CONTEXT = 107002, NO_MEMORY = 207001 };
enum { COPY_D2H = 2 };

#define ALIGNMENT ((size_t)2 << 20)
#define TOTAL_MEMORY ((size_t)64 << 30)
#define FREE_MEMORY ((size_t)60 << 30)

static __thread int32_t current_device = -1;

static int device_count(void) {
    const char *text = getenv("HOST_ACL_DEVICES");
    return text ? atoi(text) : 2;
}

/* ---- start, devices, contexts ---- */

acl_error aclInit(const char *config) { return ACL_OK; }
acl_error aclFinalize(void) { return ACL_OK; }

acl_error aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)device_count();
    return ACL_OK;
}

acl_error aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count() || getenv("HOST_ACL_REFUSE_SET")) return BAD_DEVICE;
    current_device = device;
    return ACL_OK;
}

acl_error aclrtGetDevice(int32_t *device) {
    if (current_device < 0) return NO_CONTEXT;
    *device = current_device;
    return ACL_OK;
}

acl_error aclrtResetDevice(int32_t device) { return ACL_OK; }

/* A context is the number of its device, plus one so that it is not null. */
acl_error aclrtGetCurrentContext(void **context) {
    if (current_device < 0) return NO_CONTEXT;
    *context = (void *)(intptr_t)(current_device + 1);
    return ACL_OK;
}

acl_error aclrtSetCurrentContext(void *context) {
    current_device = (int32_t)(intptr_t)context - 1;
    return ACL_OK;
}

acl_error aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    *active = 1;
    return ACL_OK;
}

const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return ""; }

acl_error aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = 1;
    return ACL_OK;
}

acl_error aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return ACL_OK; }

/* ---- memory ---- */

static acl_error allocate(void **memory, size_t size) {
    return posix_memalign(memory, ALIGNMENT, size ? size : 1) ? NO_MEMORY : ACL_OK;
}

acl_error aclrtMalloc(void **memory, size_t size, int policy) { return allocate(memory, size); }
acl_error aclrtMallocAlign32(void **memory, size_t size, int policy) { return allocate(memory, size); }
acl_error aclrtMallocHost(void **memory, size_t size) { return allocate(memory, size); }
acl_error aclrtMallocHostWithCfg(void **memory, uint64_t size, void *config) { return allocate(memory, size); }

acl_error aclrtFree(void *memory) {
    free(memory);
    return ACL_OK;
}

acl_error aclrtFreeHost(void *memory) { return aclrtFree(memory); }

acl_error aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = FREE_MEMORY;
    *total_bytes = TOTAL_MEMORY;
    return ACL_OK;
}

acl_error aclrtHostRegister(void *memory, uint64_t size, int kind, void **device_memory) {
    *device_memory = memory;
    return ACL_OK;
}

acl_error aclrtHostUnregister(void *memory) { return ACL_OK; }

/* Answers "ordinary host memory" for whatever is asked. */
acl_error aclrtPointerGetAttributes(const void *memory, void *attributes) {
    memset(attributes, 0, 24);
    return ACL_OK;
}

/* ---- copies, some of them late ---- */

struct copy {
    void *stream, *to;
    const void *from;
    size_t size;
    struct copy *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct copy *late_copies;
/* Runs the late copies of one stream in order; of all streams when `stream` is null. */
static void run_late_copies(void *stream) {
    pthread_mutex_lock(&lock);
    struct copy **link = &late_copies;
    while (*link) {
        struct copy *copy = *link;
        if (stream && copy->stream != stream) {
            link = &copy->next;
            continue;
        }
        memcpy(copy->to, copy->from, copy->size);
        *link = copy->next;
        free(copy);
    }
    pthread_mutex_unlock(&lock);
}

static acl_error run_later(void *to, const void *from, size_t size, void *stream) {
    struct copy *copy = malloc(sizeof *copy);
    if (!copy) return NO_MEMORY;
    *copy = (struct copy){stream, to, from, size, NULL};
    pthread_mutex_lock(&lock);
    struct copy **link = &late_copies;
    while (*link) link = &(*link)->next;
    *link = copy;
    pthread_mutex_unlock(&lock);
    return ACL_OK;
}

acl_error aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    if (size > room) return BAD_PARAMETER;
    memcpy(to, from, size);
    return ACL_OK;
}

acl_error aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    const char *late = getenv("HOST_ACL_LATE_D2H");
    if (kind != COPY_D2H || !late || *late != '1') return aclrtMemcpy(to, room, from, size, kind);
    if (size > room) return BAD_PARAMETER;
    return run_later(to, from, size, stream);
}

acl_error aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    return aclrtMemcpyAsync(to, room, from, size, kind, stream);
}

acl_error aclrtMemset(void *memory, size_t room, int32_t value, size_t size) {
    if (size > room) return BAD_PARAMETER;
    memset(memory, value, size);
    return ACL_OK;
}

acl_error aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t size, void *stream) {
    return aclrtMemset(memory, room, value, size);
}

/* ---- streams ---- */

struct stream {
    int32_t number;
};

acl_error aclrtCreateStream(void **stream) {
    static int32_t last_number;
    struct stream *made = malloc(sizeof *made);
    if (!made) return NO_MEMORY;
    made->number = __sync_add_and_fetch(&last_number, 1);
    *stream = made;
    return ACL_OK;
}

acl_error aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    return aclrtCreateStream(stream);
}

/* Streams live as long as the process: torch_npu keeps a pool of them. */
acl_error aclrtDestroyStream(void *stream) { return ACL_OK; }
acl_error aclrtDestroyStreamForce(void *stream) { return ACL_OK; }

acl_error aclrtSynchronizeStream(void *stream) {
    run_late_copies(stream);
    return ACL_OK;
}

acl_error aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout_ms) { return aclrtSynchronizeStream(stream); }
acl_error aclrtSynchronizeDevice(void) { return aclrtSynchronizeStream(NULL); }
acl_error aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) { return aclrtSynchronizeStream(NULL); }

acl_error aclrtStreamQuery(void *stream, int *status) {
    *status = 0;
    return ACL_OK;
}

acl_error aclrtStreamGetId(void *stream, int32_t *number) {
    *number = stream ? ((struct stream *)stream)->number : 0;
    return ACL_OK;
}

acl_error aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return ACL_OK; }

acl_error aclmdlRICaptureGetInfo(void *stream, int *status, void **graph) {
    *status = 0;
    if (graph) *graph = NULL;
    return ACL_OK;
}

/* ---- events ---- */

struct event {
    void *stream;
    struct timespec recorded_at;
};

acl_error aclrtCreateEvent(void **event) {
    *event = calloc(1, sizeof(struct event));
    return *event ? ACL_OK : NO_MEMORY;
}

acl_error aclrtCreateEventWithFlag(void **event, uint32_t flags) { return aclrtCreateEvent(event); }
acl_error aclrtCreateEventExWithFlag(void **event, uint32_t flags) { return aclrtCreateEvent(event); }

acl_error aclrtDestroyEvent(void *event) {
    free(event);
    return ACL_OK;
}

acl_error aclrtRecordEvent(void *event, void *stream) {
    struct event *recorded = event;
    recorded->stream = stream;
    clock_gettime(CLOCK_MONOTONIC, &recorded->recorded_at);
    return ACL_OK;
}

acl_error aclrtResetEvent(void *event, void *stream) { return ACL_OK; }

acl_error aclrtSynchronizeEvent(void *event) {
    if (((struct event *)event)->stream) run_late_copies(((struct event *)event)->stream);
    return ACL_OK;
}

acl_error aclrtStreamWaitEvent(void *stream, void *event) { return aclrtSynchronizeEvent(event); }

acl_error aclrtQueryEventStatus(void *event, int *status) {
    *status = 1;
    return ACL_OK;
}

acl_error aclrtQueryEventWaitStatus(void *event, int *status) {
    *status = 0;
    return ACL_OK;
}

acl_error aclrtEventElapsedTime(float *elapsed_ms, void *start, void *end) {
    struct timespec a = ((struct event *)start)->recorded_at, b = ((struct event *)end)->recorded_at;
    *elapsed_ms = (float)(b.tv_sec - a.tv_sec) * 1e3f + (float)(b.tv_nsec - a.tv_nsec) * 1e-6f;
    return ACL_OK;
}

acl_error aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
    *microseconds = (uint64_t)((struct event *)event)->recorded_at.tv_sec * 1000000u;
    return ACL_OK;
}

/* ---- settings, taken and ignored ---- */

acl_error aclrtSetDeviceSatMode(int mode) { return ACL_OK; }
acl_error aclrtSetOpExecuteTimeOut(uint32_t seconds) { return ACL_OK; }
acl_error aclrtSetOpExecuteTimeOutV2(uint64_t wanted, uint64_t *actual) { return ACL_OK; }
acl_error aclrtSetOpWaitTimeout(uint32_t seconds) { return ACL_OK; }
acl_error aclrtGetLastError(int level) { return ACL_OK; }
acl_error aclrtPeekAtLastError(int level) { return ACL_OK; }
acl_error aclSetCompileopt(int option, const char *value) { return ACL_OK; }
acl_error aclGetCompileopt(int option, char *value, size_t length) { return ACL_OK; }
size_t aclGetCompileoptSize(int option) { return 256; }
acl_error aclopSetCompileFlag(int flag) { return ACL_OK; }
acl_error aclrtSetSysParamOpt(int option, int64_t value) { return ACL_OK; }
acl_error aclrtCtxSetSysParamOpt(int option, int64_t value) { return ACL_OK; }

acl_error aclrtGetSysParamOpt(int option, int64_t *value) {
    *value = 0;
    return ACL_OK;
}

acl_error aclrtCtxGetSysParamOpt(int option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
