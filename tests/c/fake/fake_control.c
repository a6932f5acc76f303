/* fake_control.c - the lock, options, counts, ordered failures, errors, live objects.
 */
#include <dlfcn.h>
#include <stdarg.h>

#include "state.h"

fk_state fk = {.lock = PTHREAD_MUTEX_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER};

enum { MAX_ERRORS = 64, MAX_ERROR_BYTES = 512 };

static fake_options defaults;
static char errors[MAX_ERRORS][MAX_ERROR_BYTES];
static int n_errors;

#define ROW_CUDA(its, since, newest, suffix, arguments) {.name = #its},
#define ROW_NCCL(its, since, arguments) {.name = #its},
static fk_function functions[] = {FAKE_CUDA_MAP(ROW_CUDA) FAKE_NCCL_MAP(ROW_NCCL)};
enum { N_FUNCTIONS = sizeof functions / sizeof functions[0] };

/* ---- small things --------------------------------------------------------------- */

uint64_t fk_draw(void)
{
    uint64_t z = fk.draw += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

unsigned fk_below(unsigned n)
{
    return (unsigned)(fk_draw() % n);
}

void *fk_new(size_t n_bytes)
{
    void *memory = calloc(1, n_bytes > 0 ? n_bytes : 1);
    if (memory == NULL) {
        (void)fprintf(stderr, "fake: out of memory\n");
        abort();
    }
    return memory;
}

static void lock(void)
{
    (void)pthread_mutex_lock(&fk.lock);
}

static void unlock(void)
{
    fk_memory_close();
    (void)pthread_mutex_unlock(&fk.lock);
}

void fk_error(const char *format, ...)
{
    va_list rest;
    if (n_errors < MAX_ERRORS) {
        va_start(rest, format);
        (void)vsnprintf(errors[n_errors], MAX_ERROR_BYTES, format, rest);
        va_end(rest);
        if (!fk.options.quiet)
            (void)fprintf(stderr, "fake: error: %s\n", errors[n_errors]);
    }
    n_errors++;
}

/* ---- calls ---------------------------------------------------------------------- */

static fk_function *find_function(const char *name)
{
    for (size_t i = 0; i < N_FUNCTIONS; i++)
        if (strcmp(functions[i].name, name) == 0)
            return &functions[i];
    (void)fprintf(stderr, "fake: there is no function %s\n", name);
    abort();
}

int fk_enter(const char *name)
{
    lock();
    fk_function *function = find_function(name);
    function->n_calls++;
    /* Some functions need no cuInit. */
    if (strncmp(name, "cu", 2) == 0 && strncmp(name, "cuGet", 5) != 0 &&
        strcmp(name, "cuDriverGetVersion") != 0 && (fk.is_forked || fk.sticky != 0)) {
        const int result = fk.is_forked ? CUDA_ERROR_NOT_INITIALIZED : fk.sticky;
        unlock();
        return result;
    }
    if (function->is_hidden)
        fk_error("%s was called, which this version does not have", name);
    for (size_t i = 0; i < sizeof function->failures / sizeof function->failures[0];
         i++) {
        fk_failure *failure = &function->failures[i];
        if (failure->nth == function->n_calls) {
            failure->nth = 0;
            unlock();
            return failure->code;
        }
    }
    return 0;
}

int fk_leave(int result)
{
    fk_run_some();
    unlock();
    return result;
}

int fk_is_hidden(const char *name)
{
    return find_function(name)->is_hidden;
}

void fake_fail(const char *name, int nth, int code)
{
    lock();
    fk_function *function = find_function(name);
    for (size_t i = 0; i < sizeof function->failures / sizeof function->failures[0];
         i++) {
        if (function->failures[i].nth == 0) {
            function->failures[i] =
                (fk_failure){.nth = function->n_calls + nth, .code = code};
            break;
        }
    }
    unlock();
}

FAKE_GETTER(int, fake_count, (const char *name), find_function(name)->n_calls)

void fake_hide(const char *name)
{
    lock();
    find_function(name)->is_hidden = 1;
    fk_hide_symbol(name);
    unlock();
}

/* ---- errors, and live objects --------------------------------------------------- */

FAKE_GETTER(int, fake_errors, (void), n_errors)

const char *fake_error(int i)
{
    return i >= 0 && i < fake_errors() && i < MAX_ERRORS ? errors[i] : NULL;
}

void fake_forget_errors(void)
{
    lock();
    n_errors = 0;
    unlock();
}

void fk_object_add(fk_object *object, int kind)
{
    object->kind = kind;
    object->id = ++fk.n_ids;
    object->next = fk.objects;
    fk.objects = object;
    if (kind < FAKE_N_KINDS)
        fk.n_live[kind]++;
}

void fk_object_kill(fk_object *object)
{
    object->is_dead = 1;
    if (object->kind < FAKE_N_KINDS)
        fk.n_live[object->kind]--;
}

FAKE_GETTER(int, fake_live, (fake_kind kind), (fk_torch_reuse(), fk.n_live[kind]))

int fake_live_objects(void)
{
    int n = 0;
    lock();
    fk_torch_reuse();
    for (int kind = 0; kind < FAKE_N_KINDS; kind++)
        n += fk.n_live[kind];
    unlock();
    return n;
}

FAKE_GETTER(int, fake_pending, (void), fk.n_pending)
const char *fake_path(void)
{
    static Dl_info where;
    if (dladdr(&fk, &where) == 0)
        return NULL;
    return where.dli_fname;
}

/* ---- options -------------------------------------------------------------------- */

static int schedule_of(const char *text)
{
    static const char *const names[] = {"random", "early", "late"};
    for (int i = 0; i < 3; i++)
        if (strcmp(text, names[i]) == 0)
            return i;
    return -1;
}

static int set_option(fake_options *it, const char *name, const char *text)
{
#define OPTION(name)                                                                   \
    {                                                                                  \
        #name, offsetof(fake_options, name), sizeof it->name                           \
    }
    static const struct {
        const char *name;
        size_t at, n_bytes;
    } numbers[] = {OPTION(seed),         OPTION(devices),       OPTION(driver),
                   OPTION(nccl),         OPTION(compute),       OPTION(protect),
                   OPTION(pump),         OPTION(foreign),       OPTION(capacity),
                   OPTION(alloc_waits),  OPTION(lazy_connect),  OPTION(connect_bytes),
                   OPTION(net),          OPTION(proxy_blocks),  OPTION(abort_ms),
                   OPTION(queue_depth),  OPTION(peers),         OPTION(corrupt_bytes),
                   OPTION(share_device), OPTION(one_bus),       OPTION(quiet),
                   OPTION(blocking),     OPTION(corrupt_peers), OPTION(lazy_load),
                   OPTION(one_queue)};
#undef OPTION
    const int64_t value = strtoll(text, NULL, 10); /* its low bytes come first */
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(name, numbers[i].name) == 0) {
            memcpy((char *)it + numbers[i].at, &value, numbers[i].n_bytes);
            return 1;
        }
    }
    const int schedule = strcmp(name, "schedule") == 0 ? schedule_of(text) : -1;
    if (schedule >= 0)
        it->schedule = (fake_schedule)schedule;
    return schedule >= 0;
}

static int parse(const char *text, fake_options *out)
{
    char *copy = strdup(text);
    char *rest = copy;
    fake_options it = defaults;
    int is_right = copy != NULL;
    for (char *part = strsep(&rest, ","); part != NULL && is_right;
         part = strsep(&rest, ",")) {
        char *value = strchr(part, '=');
        if (*part == '\0')
            continue;
        is_right = value != NULL;
        if (is_right) {
            *value++ = '\0';
            is_right = set_option(&it, part, value);
        }
    }
    free(copy);
    if (is_right)
        *out = it;
    return is_right;
}

fake_options fake_defaults(void)
{
    return defaults;
}

static void forget_objects(void)
{
    while (fk.objects != NULL) {
        fk_object *object = fk.objects;
        fk.objects = object->next;
        free(object);
    }
    while (fk.kernels != NULL) {
        fk_kernel *kernel = fk.kernels;
        fk.kernels = kernel->next;
        free(kernel);
    }
}

void fake_reset(const fake_options *options)
{
    fk_pump_stop();
    lock();
    fk_unhide_all();
    fk_capture_reset();
    fk_graph_reset();
    fk_schedule_reset();
    fk_clock_reset();
    fk_nccl_reset();
    fk_memory_reset();
    forget_objects();
    for (size_t i = 0; i < N_FUNCTIONS; i++)
        functions[i] = (fk_function){.name = functions[i].name};
    fk.options = options != NULL ? *options : defaults;
    fk_hide_newer(fk.options.driver, fk.options.nccl);
    fk.draw = fk.options.seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    fk.resting = fk_draw();
    fk.is_initialized = 0;
    fk.is_forked = 0;
    fk.is_stuck = 0;
    fk.sticky = 0;
    fk.n_let_go = 0;
    fk.n_connections = 0;
    fk.n_ids = 0;
    fk.generation++;
    memset(fk.n_live, 0, sizeof fk.n_live);
    memset(fk.contexts, 0, sizeof fk.contexts);
    for (int i = 0; i < FK_MAX_DEVICES; i++) {
        fk.contexts[i].device = i;
        fk_stream_init(&fk.contexts[i].legacy, i, CU_STREAM_DEFAULT);
    }
    n_errors = 0;
    unlock();
    if (fk.options.pump)
        fk_pump_start();
}

int fake_reset_text(const char *text)
{
    fake_options options;
    if (!parse(text, &options))
        return 0;
    fake_reset(&options);
    return 1;
}

__attribute__((constructor)) static void load(void)
{
    defaults = (fake_options){.devices = 3,
                              .driver = 13000,
                              .nccl = 22809,
                              .compute = 90,
                              .capacity = INT64_C(1) << 32,
                              .peers = 1,
                              .alloc_waits = 2};
    const char *text = getenv("FAKE_CUDA");
    if (text != NULL && !parse(text, &defaults))
        (void)fprintf(stderr, "fake: FAKE_CUDA is wrong: %s\n", text);
    fake_reset(NULL);
}
