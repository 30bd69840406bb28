/* Stands in for NVIDIA's driver library where there is no GPU: the calls that pagoda makes, strict about their use.
 *
 * What is registered has to be mapped, whole pages at its beginning, apart from all else that is, and still mapped when
 * it is unregistered; a thread needs a context; nobody calls from a forked child. The first breach is `stub_fault`.
 * A call that is under way at exit ends the process with 70.
 * A device sees registered memory `shift` bytes further on, and memory of its own where the host does.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801 };
enum { MOST = 4096, DEVICES = 2 };

typedef struct { uint64_t address, nbytes, shift; } Piece;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Piece pieces[MOST];
static int count, retained, devices = DEVICES, init_code, registrations, refuse_at, refuse_code;
static uint64_t limit = UINT64_MAX, shift, shift_by;
static long delay_us, copies, cold, under_way;
static pid_t owner;
static char fault[256];
static int contexts[DEVICES];
static __thread void *current;

static void breach(const char *what, uint64_t address) {
    if (!fault[0]) snprintf(fault, sizeof fault, "%s at %#lx", what, (unsigned long)address);
}

/* Whether all of it is; counts what is not in memory. */
static int mapped(uint64_t address, uint64_t nbytes) {
    unsigned char here[1];
    uint64_t page = sysconf(_SC_PAGESIZE);
    for (uint64_t at = address; at < address + nbytes; at += page) {
        if (mincore((void *)at, 1, here)) return 0;
        cold += !(here[0] & 1);
    }
    return 1;
}

/* As NVIDIA's does, this library ends itself when its process exits. */
__attribute__((destructor)) static void end(void) {
    if (owner == getpid() && under_way) _exit(70);
}

static int ready(void) {
    if (owner != getpid()) { breach("a call in a forked child, or before cuInit", 0); return NOT_INITIALIZED; }
    if (!current) { breach("a call without a context", 0); return INVALID_CONTEXT; }
    return OK;
}

static uint64_t registered(void) {
    uint64_t sum = 0;
    for (int i = 0; i < count; i++) sum += pieces[i].nbytes;
    return sum;
}

/* ---- what the tests set and ask */

void stub_refuse(int nth, int code) { refuse_at = registrations + nth; refuse_code = code; }
void stub_limit(uint64_t nbytes) { limit = nbytes; }
void stub_delay(long us) { delay_us = us; }
void stub_shift(uint64_t first, uint64_t by) { shift = first; shift_by = by; } /* by: more with every piece */
void stub_init(int code, int number) { init_code = code; devices = number; }
const char *stub_fault(void) { return fault; }
uint64_t stub_registered(void) { pthread_mutex_lock(&lock); uint64_t sum = registered(); pthread_mutex_unlock(&lock); return sum; }
int stub_count(void) { return count; }
int stub_retained(void) { return retained; }
int stub_registrations(void) { return registrations; }
int stub_under_way(void) { return under_way != 0; }
long stub_copies(void) { return copies; }
uint64_t stub_piece(int index, int field) { return ((uint64_t *)&pieces[index])[field]; }
long stub_cold(void) { return cold; }
int stub_has_context(void) { return current != 0; }

/* ---- NVIDIA's */

int cuInit(unsigned flags) { owner = getpid(); return flags ? INVALID_VALUE : init_code; }

int cuDeviceGetCount(int *number) { *number = devices; return OK; }

int cuDeviceGet(int *device, int index) {
    if (index < 0 || index >= devices) return INVALID_DEVICE;
    *device = 7 + index; /* a handle is not an index */
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device < 7 || device >= 7 + devices) return INVALID_DEVICE;
    *context = &contexts[device - 7];
    retained++;
    return OK;
}

int cuCtxSetCurrent(void *context) {
    if (owner != getpid()) breach("a call in a forked child", 0);
    current = context;
    return OK;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return ready(); }

int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    static uint64_t streams = 1;
    if (flags != 1 || priority != -5) breach("a stream that blocks, or waits for others", flags);
    *stream = (void *)(++streams << 40);
    return ready();
}

static __thread int capture_mode = 0;
int stub_capture_mode(void) { return capture_mode; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
    int old = capture_mode;
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = old;
    return OK;
}

int cuMemHostRegister_v2(void *pointer, size_t nbytes, unsigned flags) {
    uint64_t address = (uint64_t)pointer;
    int code = ready();
    if (code) return code;
    pthread_mutex_lock(&lock);
    registrations++;
    under_way++;
    usleep(delay_us); /* inside: the driver has one lock for all */
    under_way--;
    if (address % sysconf(_SC_PAGESIZE)) breach("registered off a page", address);
    if (flags != 3) breach("not registered portable and mapped", address);
    if (!nbytes || !mapped(address, nbytes)) breach("registered what is not mapped", address);
    if (registrations == refuse_at) code = refuse_code;
    else if (registered() + nbytes > limit || count == MOST) code = OUT_OF_MEMORY;
    for (int i = 0; !code && i < count; i++)
        if (address < pieces[i].address + pieces[i].nbytes && pieces[i].address < address + nbytes) {
            breach("registered twice", address);
            code = ALREADY_REGISTERED;
        }
    if (!code) pieces[count++] = (Piece){address, nbytes, shift + shift_by * (registrations - 1)};
    pthread_mutex_unlock(&lock);
    return code;
}

int cuMemHostGetDevicePointer_v2(uint64_t *device, void *pointer, unsigned flags) {
    int code = ready();
    if (code || flags) return code ? code : INVALID_VALUE;
    pthread_mutex_lock(&lock);
    code = INVALID_VALUE;
    for (int i = 0; i < count; i++)
        if (pieces[i].address == (uint64_t)pointer) { *device = pieces[i].address + pieces[i].shift; code = OK; }
    pthread_mutex_unlock(&lock);
    return code;
}

int cuMemHostUnregister(void *pointer) {
    int code = ready();
    if (code) return code;
    pthread_mutex_lock(&lock);
    code = NOT_REGISTERED;
    for (int i = 0; i < count; i++)
        if (pieces[i].address == (uint64_t)pointer) {
            if (!mapped(pieces[i].address, pieces[i].nbytes)) breach("unmapped before it was unregistered", pieces[i].address);
            pieces[i] = pieces[--count];
            code = OK;
            break;
        }
    if (code) breach("unregistered what is not", (uint64_t)pointer);
    pthread_mutex_unlock(&lock);
    return code;
}

/* Where the host has a device's range; 0 if it is registered in part. */
static uint64_t host_of(uint64_t address, uint64_t nbytes) {
    uint64_t found = address, covered = 0;
    for (int i = 0; i < count; i++) {
        uint64_t begin = pieces[i].address + pieces[i].shift, end = begin + pieces[i].nbytes;
        uint64_t from = address > begin ? address : begin, to = address + nbytes < end ? address + nbytes : end;
        if (from < to) covered += to - from;
        if (begin <= address && address < end) found = address - pieces[i].shift;
    }
    return covered && covered != nbytes ? 0 : found;
}

int cuMemcpyAsync(uint64_t to, uint64_t source, size_t nbytes, void *stream) {
    int code = ready();
    (void)stream;
    if (code) return code;
    pthread_mutex_lock(&lock);
    to = host_of(to, nbytes);
    source = host_of(source, nbytes);
    if (to && source) { memmove((void *)to, (void *)source, nbytes); copies++; }
    pthread_mutex_unlock(&lock);
    return to && source ? OK : INVALID_VALUE;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED"
          : code == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE" : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
          : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : 0;
    return *name ? OK : INVALID_VALUE;
}
