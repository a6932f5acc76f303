/* kernels.c - finds the kernels' functions, and cuts work into launches.
 *
 * A launch takes as many spans as fit in its parameters: 1,022 if driver and device
 * support large parameters, else 127.  Up to 127 spans use the small form, which costs
 * the host less.  All spans of a launch run concurrently, so a second span that writes
 * to the same place goes into the next launch on the stream.
 */
#include "kernels.h"

#include <stdio.h>
#include <string.h>

#include "core/alloc.h"
#include "kernels_nvrtc.h"
#include "kernels_table.h"

/* The limits of a kernel's parameters. */
_Static_assert(sizeof(pli_small_spans) <= 4096, "more than any driver takes");
_Static_assert(sizeof(pli_large_spans) <= 32764, "more than CUDA 12.1 takes");

typedef enum kind { COPY, ADD, SCALE, CHECKSUM, REFRESH, N_KINDS } kind;

static const struct kind_info {
    const char *word;  /* in the functions' names */
    const char *doing; /* for errors */
    unsigned share;    /* a block's, of a span */
} infos[N_KINDS] = {
    [COPY] = {"copy", "copying tensors", PLI_BLOCK_BYTES},
    [ADD] = {"add", "adding tensors", PLI_BLOCK_WORDS},
    [SCALE] = {"scale", "scaling tensors", PLI_BLOCK_WORDS},
    [CHECKSUM] = {"checksum", "comparing tensors", PLI_BLOCK_BYTES},
    [REFRESH] = {"refresh", "refreshing tensors", PLI_BLOCK_BYTES},
};

struct pli_kernels {
    const pli_driver *driver;
    pli_cu_module module;
    const char *origin;
    size_t most_spans; /* per launch */
    pli_cu_function small[N_KINDS];
    pli_cu_function large[N_KINDS];
    pli_cu_function sum;
};

/* ---- loading -------------------------------------------------------------------- */

/* Whether the image does not fit the driver or the device, so that another one may. */
static int is_misfit(pli_cu_result result)
{
    switch (result) {
    case 200: /* INVALID_IMAGE */
    case 209: /* NO_BINARY_FOR_GPU */
    case 218: /* INVALID_PTX */
    case 221: /* JIT_COMPILER_NOT_FOUND */
    case 222: /* UNSUPPORTED_PTX_VERSION */
    case 223: /* JIT_COMPILATION_DISABLED */
    case 300: /* INVALID_SOURCE */
    case 801: /* NOT_SUPPORTED */
        return 1;
    default:
        return 0;
    }
}

static pl_status say_what_to_do(const pli_driver *driver, const char *fatbin,
                                const char *nvrtc)
{
    char words[512]; /* a copy: `nvrtc` may be the buffer that pli_fail() overwrites */
    (void)snprintf(words, sizeof words, "%s", nvrtc);
    return pli_fail(PL_EUNSUPPORTED,
                    "no kernels for this GPU: the driver serves CUDA %d.%d; %s; %s; "
                    "install a driver for CUDA 13 or later, or NVRTC of the "
                    "driver's CUDA (pip install nvidia-cuda-nvrtc-cu12), or build "
                    "Paceline with nvcc of the driver's CUDA",
                    driver->version / 1000, driver->version % 1000 / 10, fatbin, words);
}

static pl_status compile_module(pli_kernels *self, int compute, const char *nvrtc,
                                const char *fatbin)
{
    pl_status st = PL_OK;
    void *image = NULL;
    const pli_driver *driver = self->driver;
    st =
        pli_nvrtc_compile(nvrtc, compute, driver->version >= PLI_LARGE_VERSION, &image);
    if (st == PL_EUNSUPPORTED)
        st = say_what_to_do(driver, fatbin, pl_error_message());
    PL_TRY(st);
    const pli_cu_result result = driver->cuModuleLoadData(&self->module, image);
    st = pli_driver_check(driver, result, "loading the kernels that NVRTC compiled");
    if (is_misfit(result))
        st = say_what_to_do(driver, fatbin, pl_error_message());
    PL_TRY(st);
    self->origin = "nvrtc";
done:
    pli_free(image);
    return st;
}

static pl_status load_module(pli_kernels *self, int compute, const char *nvrtc)
{
    pl_status st = PL_OK;
    const pli_driver *driver = self->driver;
    const void *fatbin = pli_kernels_fatbin();
    char why[256] = "this build has no built-in kernels (there was no nvcc)";
    if (fatbin != NULL) {
        const pli_cu_result result = driver->cuModuleLoadData(&self->module, fatbin);
        st = pli_driver_check(driver, result, "loading the built-in kernels");
        if (st == PL_OK)
            self->origin = "fatbin";
        if (!is_misfit(result))
            goto done;
        (void)snprintf(why, sizeof why, "%s", pl_error_message());
    }
    self->module = NULL;
    PL_TRY(compile_module(self, compute, nvrtc, why));
done:
    return st;
}

static pl_status find_functions(pli_kernels *self)
{
    pl_status st = PL_OK;
    const pli_driver *driver = self->driver;
    char name[32];
    int has_large = driver->version >= PLI_LARGE_VERSION;
    PL_CUDA(driver, cuModuleGetFunction(&self->sum, self->module, "pl_sum"),
            "finding kernel pl_sum");
    for (int k = 0; k < N_KINDS; k++) {
        (void)snprintf(name, sizeof name, "pl_%s_small", infos[k].word);
        PL_CUDA(driver, cuModuleGetFunction(&self->small[k], self->module, name), name);
        (void)snprintf(name, sizeof name, "pl_%s_large", infos[k].word);
        has_large = has_large && driver->cuModuleGetFunction(&self->large[k],
                                                             self->module, name) == 0;
    }
    self->most_spans = has_large ? PLI_LARGE_SPANS : PLI_SMALL_SPANS;
done:
    return st;
}

pl_status pli_kernels_load(const pli_driver *driver, int compute, const char *nvrtc,
                           pli_kernels **out)
{
    pl_status st = PL_OK;
    pli_kernels *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "kernels", &self));
    self->driver = driver;
    PL_TRY(load_module(self, compute, nvrtc));
    PL_TRY(find_functions(self));
    *out = self;
    self = NULL;
done:
    pli_kernels_unload(self);
    return st;
}

void pli_kernels_unload(pli_kernels *kernels)
{
    if (kernels != NULL && kernels->module != NULL)
        (void)kernels->driver->cuModuleUnload(kernels->module);
    pli_free(kernels);
}

const char *pli_kernels_origin(const pli_kernels *kernels)
{
    return kernels->origin;
}

/* ---- one launch ----------------------------------------------------------------- */

enum { N_PLACES = 2048, MAX_BLOCKS = INT32_MAX };

/* The launch that is being filled. */
typedef struct launch {
    pli_kernels *kernels;
    kind kind;
    pli_cu_stream stream;
    unsigned n_blocks;
    pli_large_spans table;     /* begins with a pli_small_spans */
    uint16_t places[N_PLACES]; /* hash table of `to`: 1 + its span; 0: free */
} launch;

static pl_status launch_blocks(pli_kernels *self, pli_cu_function function,
                               unsigned n_blocks, void *argument, pli_cu_stream stream,
                               const char *doing)
{
    void *arguments[1] = {argument};
    return pli_driver_check(self->driver,
                            self->driver->cuLaunchKernel(function, n_blocks, 1, 1,
                                                         PLI_THREADS, 1, 1, 0, stream,
                                                         arguments, NULL),
                            doing);
}

static void launch_init(launch *self, pli_kernels *kernels, kind k, pl_stream *stream)
{
    self->kernels = kernels;
    self->kind = k;
    self->stream = (pli_cu_stream)(void *)stream;
    self->n_blocks = 0;
    self->table.head = (pli_spans_head){.n_spans = 0};
}

static pl_status launch_flush(launch *self)
{
    pl_status st = PL_OK;
    pli_spans_head *head = &self->table.head;
    if (head->n_spans == 0)
        goto done;
    const int is_small = head->n_spans <= PLI_SMALL_SPANS;
    PL_TRY(launch_blocks(
        self->kernels,
        is_small ? self->kernels->small[self->kind] : self->kernels->large[self->kind],
        self->n_blocks, &self->table, self->stream, infos[self->kind].doing));
    self->n_blocks = 0;
    head->n_spans = 0;
done:
    return st;
}

/* The entry of `places` that holds `to`, or the free one where it belongs. */
static uint16_t *place_of(launch *self, const void *to)
{
    const uint64_t hash = (uint64_t)(uintptr_t)to * 0x9e3779b97f4a7c15u;
    size_t at = hash >> 53; /* 11 bits */
    while (self->places[at] != 0 && self->table.spans[self->places[at] - 1].to != to)
        at = (at + 1) % N_PLACES;
    return &self->places[at];
}

static pl_status launch_span(launch *self, const pli_span *span)
{
    pl_status st = PL_OK;
    pli_spans_head *head = &self->table.head;
    const int share_bits = __builtin_ctz(infos[self->kind].share); /* a power of two */
    const unsigned long long n_blocks = ((span->n - 1) >> share_bits) + 1;
    uint16_t *place = head->n_spans > 0 ? place_of(self, span->to) : self->places;
    /* Many spans may add checksums to one place: the additions are atomic. */
    if (head->n_spans == 0 || (*place != 0 && self->kind != CHECKSUM) ||
        head->n_spans == self->kernels->most_spans ||
        n_blocks > MAX_BLOCKS - self->n_blocks) {
        PL_TRY(launch_flush(self));
        memset(self->places, 0, sizeof self->places);
        place = place_of(self, span->to);
    }
    pli_span *const mine = &self->table.spans[head->n_spans++];
    *mine = *span;
    mine->first_block = self->n_blocks;
    self->n_blocks += (unsigned)n_blocks;
    *place = (uint16_t)head->n_spans;
done:
    return st;
}

/* ---- spans ---------------------------------------------------------------------- */

static int is_float(pl_dtype dtype)
{
    return dtype >= PL_F16 && dtype <= PL_C128;
}

static pli_word word_of(pl_dtype dtype)
{
    static const pli_word words[PL_N_DTYPES] = {
        [PL_U8] = PLI_WORD_U8,     [PL_I8] = PLI_WORD_U8,   [PL_I16] = PLI_WORD_U16,
        [PL_I32] = PLI_WORD_U32,   [PL_I64] = PLI_WORD_U64, [PL_F16] = PLI_WORD_F16,
        [PL_BF16] = PLI_WORD_BF16, [PL_F32] = PLI_WORD_F32, [PL_F64] = PLI_WORD_F64,
        [PL_C64] = PLI_WORD_F32,   [PL_C128] = PLI_WORD_F64};
    return words[dtype];
}

static unsigned long long n_words_of(pl_dtype dtype, size_t n_elems)
{
    return dtype == PL_C64 || dtype == PL_C128 ? 2ULL * n_elems : n_elems;
}

/* Fills *out; 0 if there is nothing to do. */
static int span_of(kind k, const pl_move *move, pli_span *out)
{
    *out = (pli_span){.to = move->to,
                      .from = move->from,
                      .n = n_words_of(move->dtype, move->n_elems),
                      .detail = word_of(move->dtype)};
    if (k == ADD)
        return out->n != 0 && out->from != NULL;
    if (k == COPY) {
        out->n = move->n_elems * pl_dtype_bytes(move->dtype);
        return out->n != 0 && out->to != out->from;
    }
    out->from = out->to;
    return out->n != 0 && is_float(move->dtype);
}

static pl_status launch_moves(launch *self, const pl_move *moves, size_t n_moves)
{
    pl_status st = PL_OK;
    pli_span span;
    for (size_t i = 0; i < n_moves; i++)
        if (span_of(self->kind, &moves[i], &span))
            PL_TRY(launch_span(self, &span));
    PL_TRY(launch_flush(self));
done:
    return st;
}

pl_status pli_kernels_copy(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                           pl_stream *stream)
{
    launch work;
    launch_init(&work, kernels, COPY, stream);
    return launch_moves(&work, moves, n_moves);
}

pl_status pli_kernels_add(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                          pl_stream *stream)
{
    launch work;
    launch_init(&work, kernels, ADD, stream);
    return launch_moves(&work, moves, n_moves);
}

pl_status pli_kernels_scale(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                            int numerator, int denominator, pl_stream *stream)
{
    launch work;
    launch_init(&work, kernels, SCALE, stream);
    work.table.head.factor = numerator;
    work.table.head.divisor = denominator;
    return launch_moves(&work, moves, n_moves);
}

/* Adds checksums to `sums`; if it is NULL, refreshes the pieces. */
static pl_status launch_pieces(launch *self, const pli_piece *pieces, size_t n_pieces,
                               uint64_t *sums)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < n_pieces; i++) {
        const pli_piece *const piece = &pieces[i];
        const size_t place = piece->offset / PLI_PLACE_BYTES;
        const pli_span span = {.to = sums != NULL ? sums + piece->segment : piece->to,
                               .from = piece->from,
                               .n = piece->n_bytes,
                               .detail =
                                   sums != NULL ? (unsigned)place : piece->segment};
        if (place > UINT32_MAX || piece->offset % PLI_PLACE_BYTES != 0)
            PL_FAIL(PL_EINVAL,
                    "a tensor's offset in its segment is %zu bytes: give a "
                    "multiple of 8 below 2^35",
                    piece->offset);
        if (span.n != 0)
            PL_TRY(launch_span(self, &span));
    }
    PL_TRY(launch_flush(self));
done:
    return st;
}

pl_status pli_kernels_checksum(pli_kernels *kernels, const pli_piece *pieces,
                               size_t n_pieces, uint64_t *sums, pl_stream *stream)
{
    launch work;
    launch_init(&work, kernels, CHECKSUM, stream);
    return launch_pieces(&work, pieces, n_pieces, sums);
}

pl_status pli_kernels_refresh(pli_kernels *kernels, const pli_piece *pieces,
                              size_t n_pieces, const uint64_t *sums,
                              const uint64_t *wanted_sums, pl_stream *stream)
{
    launch work;
    launch_init(&work, kernels, REFRESH, stream);
    work.table.head.sums = (const unsigned long long *)sums;
    work.table.head.wanted_sums = (const unsigned long long *)wanted_sums;
    return launch_pieces(&work, pieces, n_pieces, NULL);
}

/* The reduction of one rank is its input, bit for bit. */
pl_status pli_kernels_sum(pli_kernels *kernels, const pl_rank_ranges *ranges,
                          pl_stream *stream)
{
    pl_status st = PL_OK;
    pli_sum_span span = {.to = ranges->to,
                         .from = ranges->from,
                         .stride_bytes = ranges->stride_bytes,
                         .n = n_words_of(ranges->dtype, ranges->n_elems),
                         .n_ranks = (unsigned)ranges->n_ranks,
                         .word = (unsigned char)word_of(ranges->dtype),
                         .is_mean = ranges->reduction == PL_MEAN};
    const pl_move only = {ranges->to, ranges->from, ranges->dtype, ranges->n_elems};
    const unsigned long long n_blocks =
        (span.n + PLI_BLOCK_WORDS - 1) / PLI_BLOCK_WORDS;
    PL_TRY(pli_backend_check_ranges(ranges));
    if (ranges->n_ranks == 1)
        PL_TRY(pli_kernels_copy(kernels, &only, 1, stream));
    else if (span.n != 0)
        PL_TRY(launch_blocks(kernels, kernels->sum, (unsigned)n_blocks, &span,
                             (pli_cu_stream)(void *)stream, "summing ranges"));
done:
    return st;
}
