/* cpu.c - host memory: the calling thread moves it, and finishes before it returns.
 *
 * Additions (of a gradient that arrives twice in one backward) use the functions of
 * cpu_sum.h, as the sums over ranks do, so both round in the same way.
 */
#include <math.h>
#include <string.h>

#include "backend.h"
#include "core/alloc.h"
#include "core/config.h"
#include "cpu_sum.h"

enum { SIGN = 0x8000, SIZE = 0x7fff }; /* of a 16-bit float */

typedef struct cpu_backend {
    pl_backend super;
    const pli_sum_table *sums;
} cpu_backend;

pl_status pli_cpu_sums(const pli_sum_table **out)
{
    pl_status st = PL_OK;
    const char *word = pli_config_word("PACELINE_ISA");
    pli_isa isa = PLI_ISA_PLAIN;
    if (word == NULL) {
        *out = pli_sum_table_best();
        goto done;
    }
    PL_TRY(pli_isa_parse(word, &isa));
    const pli_sum_table *sums = pli_sum_table_of(isa);
    if (sums == NULL)
        PL_FAIL(
            PL_EINVAL,
            "PACELINE_ISA is '%s', which this processor or build lacks: unset it, or "
            "set it to 'plain'",
            word);
    *out = sums;
done:
    return st;
}

/* ---- scaling -------------------------------------------------------------------- */

/* Describes a 16-bit float type. */
typedef struct half_format {
    int n_fraction;   /* bits of the fraction */
    int least_normal; /* exponent of the smallest normal number */
} half_format;

static half_format format_of(pl_dtype dtype)
{
    return dtype == PL_F16 ? (half_format){.n_fraction = 10, .least_normal = -14}
                           : (half_format){.n_fraction = 7, .least_normal = -126};
}

static uint16_t infinity_of(half_format format)
{
    return (uint16_t)(SIZE >> format.n_fraction << format.n_fraction);
}

/* A 16-bit float, which must be finite, as a double, which holds it exactly. */
static double widen(uint16_t bits, pl_dtype dtype)
{
    const half_format format = format_of(dtype);
    const int size = bits & SIZE;
    const int exponent = size >> format.n_fraction;
    const int one = 1 << format.n_fraction;
    const int fraction = size % one + (exponent > 0 ? one : 0);
    const int above = exponent > 0 ? exponent - 1 : 0;
    const double value =
        ldexp(fraction, above + format.least_normal - format.n_fraction);
    return copysign(value, bits & SIGN ? -1.0 : 1.0);
}

/* A finite double as a 16-bit float, rounded to nearest even.  A fraction that rounds
 * up to the next power of two carries into the exponent, and a carry out of the largest
 * exponent gives infinity. */
static uint16_t round_to_half(double value, pl_dtype dtype)
{
    const half_format format = format_of(dtype);
    const uint16_t sign = signbit(value) ? SIGN : 0;
    const uint16_t infinity = infinity_of(format);
    int exponent = 0;
    (void)frexp(value, &exponent); /* value is in [0.5, 1) times 2 to that */
    exponent--;
    if (value == 0 || exponent < format.least_normal)
        exponent = format.least_normal;
    else if (exponent > -format.least_normal + 1)
        return (uint16_t)(sign | infinity);
    const double steps = nearbyint(ldexp(fabs(value), format.n_fraction - exponent));
    const long bits =
        ((long)(exponent - format.least_normal) << format.n_fraction) + (long)steps;
    return (uint16_t)(sign | (bits < infinity ? (uint16_t)bits : infinity));
}

static void scale_half(uint16_t *data, size_t n, pl_dtype dtype, const int ratio[2])
{
    const uint16_t infinity = infinity_of(format_of(dtype));
    for (size_t i = 0; i < n; i++) {
        if ((data[i] & SIZE) >= infinity)
            continue; /* infinities and NaNs keep their bits */
        data[i] = round_to_half(widen(data[i], dtype) * ratio[0] / ratio[1], dtype);
    }
}

static void scale_f32(float *data, size_t n, const int ratio[2])
{
    for (size_t i = 0; i < n; i++)
        data[i] = (float)((double)data[i] * ratio[0] / ratio[1]);
}

static void scale_f64(double *data, size_t n, const int ratio[2])
{
    for (size_t i = 0; i < n; i++)
        data[i] = data[i] * ratio[0] / ratio[1];
}

void pli_cpu_scale(const pl_move *move, int numerator, int denominator)
{
    const int ratio[2] = {numerator, denominator};
    const size_t n = move->n_elems;
    switch (move->dtype) {
    case PL_F16:
    case PL_BF16:
        scale_half(move->to, n, move->dtype, ratio);
        break;
    case PL_F32:
        scale_f32(move->to, n, ratio);
        break;
    case PL_C64:
        scale_f32(move->to, 2 * n, ratio);
        break;
    case PL_F64:
        scale_f64(move->to, n, ratio);
        break;
    case PL_C128:
        scale_f64(move->to, 2 * n, ratio);
        break;
    default: /* integers have no mean */
        break;
    }
}

/* ---- the table ------------------------------------------------------------------ */

static pl_status cpu_alloc(pl_backend *backend, size_t n_bytes, void **out)
{
    (void)backend;
    return pli_calloc(n_bytes, 1, "memory", out);
}

static void cpu_free(pl_backend *backend, void *memory)
{
    (void)backend;
    pli_free(memory);
}

static pl_status cpu_copy(pl_backend *backend, const pl_move *moves, size_t n_moves,
                          pl_stream *stream)
{
    (void)backend;
    (void)stream;
    for (size_t i = 0; i < n_moves; i++) {
        const size_t n_bytes = moves[i].n_elems * pl_dtype_bytes(moves[i].dtype);
        if (moves[i].from == NULL)
            memset(moves[i].to, 0, n_bytes);
        else
            memcpy(moves[i].to, moves[i].from, n_bytes);
    }
    return PL_OK;
}

static pl_status cpu_add(pl_backend *backend, const pl_move *moves, size_t n_moves,
                         pl_stream *stream)
{
    const cpu_backend *self = (const cpu_backend *)backend;
    (void)stream;
    for (size_t i = 0; i < n_moves; i++) {
        if (moves[i].from == NULL)
            continue;
        const void *const in[2] = {moves[i].to, moves[i].from};
        void *const out[1] = {moves[i].to};
        self->sums->fn[moves[i].dtype][PL_SUM](&(pli_sum_args){
            .in = in, .n_in = 2, .out = out, .n_out = 1, .n_elems = moves[i].n_elems});
    }
    return PL_OK;
}

static pl_status cpu_scale(pl_backend *backend, const pl_move *moves, size_t n_moves,
                           int numerator, int denominator, pl_stream *stream)
{
    (void)backend;
    (void)stream;
    for (size_t i = 0; i < n_moves; i++)
        pli_cpu_scale(&moves[i], numerator, denominator);
    return PL_OK;
}

static pl_status cpu_sum(pl_backend *backend, const pl_rank_ranges *ranges,
                         pl_stream *stream)
{
    pl_status st = PL_OK;
    const cpu_backend *self = (const cpu_backend *)backend;
    const void *in[PL_MAX_RANKS];
    void *const out[1] = {ranges->to};
    (void)stream;
    PL_TRY(pli_backend_check_ranges(ranges));
    if (ranges->n_ranks > PL_MAX_RANKS)
        PL_FAIL(PL_EINVAL, "ranges of %d ranks, but 1 to %d can be summed",
                ranges->n_ranks, PL_MAX_RANKS);
    for (int r = 0; r < ranges->n_ranks; r++)
        in[r] = (const char *)ranges->from + (size_t)r * ranges->stride_bytes;
    self->sums->fn[ranges->dtype][ranges->reduction](
        &(pli_sum_args){.in = in,
                        .n_in = ranges->n_ranks,
                        .out = out,
                        .n_out = 1,
                        .n_elems = ranges->n_elems});
done:
    return st;
}

/* The CPU needs no events: each call has finished its work when it returns. */
static pl_status cpu_event_create(pl_backend *backend, pl_event **out)
{
    (void)backend;
    *out = NULL;
    return PL_OK;
}

static pl_status cpu_event_nothing(pl_backend *backend, pl_event *event,
                                   pl_stream *stream)
{
    (void)backend;
    (void)event;
    (void)stream;
    return PL_OK;
}

static pl_status cpu_event_is_done(pl_backend *backend, pl_event *event, int *out)
{
    (void)backend;
    (void)event;
    *out = 1;
    return PL_OK;
}

static void cpu_event_destroy(pl_backend *backend, pl_event *event)
{
    (void)backend;
    (void)event;
}

static pl_status cpu_synchronize(pl_backend *backend, pl_stream *stream)
{
    (void)backend;
    (void)stream;
    return PL_OK;
}

static void cpu_destroy(pl_backend *backend)
{
    pli_free(backend);
}

static const pl_backend_ops cpu_ops = {
    .name = "cpu",
    .batching = PL_MOVE_AT_ONCE,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .add = cpu_add,
    .scale = cpu_scale,
    .sum = cpu_sum,
    .event_create = cpu_event_create,
    .event_record = cpu_event_nothing,
    .event_wait = cpu_event_nothing,
    .event_is_done = cpu_event_is_done,
    .event_destroy = cpu_event_destroy,
    .synchronize = cpu_synchronize,
    .destroy = cpu_destroy,
};

pl_status pli_cpu_backend_create(pl_backend **out)
{
    pl_status st = PL_OK;
    cpu_backend *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "CPU backend", &self));
    PL_TRY(pli_cpu_sums(&self->sums));
    self->super.ops = &cpu_ops;
    *out = &self->super;
    self = NULL;
done:
    pli_free(self);
    return st;
}
