/* cpu_sum_body.h - every reduction, written once for all instruction sets.
 *
 *   two inputs     in[0] + in[1] -> out           straight through the range
 *   more           in[0] + in[1] -> acc           a block at a time, so that the
 *                  acc   + in[r] -> acc           accumulator stays in L1, each
 *                  acc   + in[n - 1] -> out       input is read once, and the
 *                                                 prefetcher sees few streams
 *   the rest       less than a step: through a padded copy, by the same code
 *
 * An output may be one of the inputs: a step of two inputs, or a block of more, reads
 * every input before it writes any output.
 *
 * The including file sets the target and includes cpu_sum_vec.h, then defines
 *   PLI_V_ISA, PLI_V_TABLE   the pli_isa, and the name of the table's getter
 *   f16_load, f16_store      a step of float16, to and from float32 lanes
 */
#ifndef PLI_CPU_SUM_BODY_H
#define PLI_CPU_SUM_BODY_H

/* Describes a reduction.  `lane` and `reduction` are compile-time constants.
 *
 * The mean of finite inputs must be finite.  So each input is first multiplied by
 * `scale`, the largest power of two up to 1/n, and the sum is divided by n * scale,
 * which is 1 if n is a power of two.  Scaling is exact, so the mean has the same bits
 * as the sum divided by n.  (Denormal numbers may lose bits.)
 */
typedef struct how {
    pl_dtype lane; /* complex types use their parts' type */
    pl_reduction reduction;
    int is_power; /* n is a power of two: no division is needed */
    float scale;
    float divisor; /* n * scale: in (0.5, 1] */
} how;

enum {
    ACC_BYTES = 8192,
    STEP_MAX_BYTES = 2 * PLI_V_BYTES,
    BLOCK_STEPS = ACC_BYTES / STEP_MAX_BYTES
};

PLI_INLINE size_t step_bytes(how h)
{
    const int is_widened = h.lane == PL_F16 || h.lane == PL_BF16;
    return is_widened ? PLI_V_BYTES : STEP_MAX_BYTES;
}

/* ---- bfloat16 ------------------------------------------------------------------- */

/* Widens the even elements to one vector of float32 and the odd ones to another, which
 * needs no shuffle; bf16_store() interleaves them again. */
PLI_INLINE pair bf16_load(const unsigned char *p)
{
    const v_u32 v = v_load(p);
    return (pair){v << 16, v & 0xffff0000u};
}

/* Rounds to nearest even in the upper 16 bits, and leaves garbage in the lower ones.
 * A NaN stays a NaN: it comes from a bfloat16 or from the processor, so its lower bits
 * are zero, and nothing carries into its upper bits.  In integers, because AVX512-BF16
 * would flush denormals. */
PLI_INLINE v_u32 bf16_round(v_u32 v)
{
    return v + (0x7fffu + ((v >> 16) & 1u));
}

PLI_INLINE void bf16_store(unsigned char *p, pair v)
{
    v_store(p, (bf16_round(v.a) >> 16) | (bf16_round(v.b) & 0xffff0000u));
}

/* ---- one step ------------------------------------------------------------------- */

PLI_INLINE pair load(how h, const unsigned char *p)
{
    if (h.lane == PL_F16)
        return f16_load(p);
    if (h.lane == PL_BF16)
        return bf16_load(p);
    return (pair){v_load(p), v_load(p + PLI_V_BYTES)};
}

PLI_INLINE void store(how h, unsigned char *p, pair v)
{
    if (h.lane == PL_F16) {
        f16_store(p, v);
    } else if (h.lane == PL_BF16) {
        bf16_store(p, v);
    } else {
        v_store(p, v.a);
        v_store(p + PLI_V_BYTES, v.b);
    }
}

/* Adds integers as unsigned, because that wraps by definition. */
PLI_INLINE v_u32 v_add(pl_dtype lane, v_u32 x, v_u32 y)
{
    switch (lane) {
    case PL_U8:
    case PL_I8:
        return (v_u32)((v_u8)x + (v_u8)y);
    case PL_I16:
        return (v_u32)((v_u16)x + (v_u16)y);
    case PL_I32:
        return x + y;
    case PL_I64:
        return (v_u32)((v_u64)x + (v_u64)y);
    case PL_F64:
        return (v_u32)((v_f64)x + (v_f64)y);
    default: /* float32, and the 16-bit floats widened to it */
        return (v_u32)((v_f32)x + (v_f32)y);
    }
}

PLI_INLINE v_u32 v_max(pl_dtype lane, v_u32 x, v_u32 y)
{
    switch (lane) {
    case PL_U8:
        return v_select((v_u32)((v_u8)x > (v_u8)y), x, y);
    case PL_I8:
        return v_select((v_u32)((v_i8)x > (v_i8)y), x, y);
    case PL_I16:
        return v_select((v_u32)((v_i16)x > (v_i16)y), x, y);
    case PL_I32:
        return v_select((v_u32)((v_i32)x > (v_i32)y), x, y);
    default:
        return v_select((v_u32)((v_i64)x > (v_i64)y), x, y);
    }
}

PLI_INLINE pair join(how h, pair x, pair y)
{
    if (h.reduction == PL_MAX)
        return (pair){v_max(h.lane, x.a, y.a), v_max(h.lane, x.b, y.b)};
    return (pair){v_add(h.lane, x.a, y.a), v_add(h.lane, x.b, y.b)};
}

PLI_INLINE v_u32 v_scale(how h, v_u32 x)
{
    return h.lane == PL_F64 ? (v_u32)((v_f64)x * (double)h.scale)
                            : (v_u32)((v_f32)x * h.scale);
}

PLI_INLINE v_u32 v_divide(how h, v_u32 x)
{
    return h.lane == PL_F64 ? (v_u32)((v_f64)x / (double)h.divisor)
                            : (v_u32)((v_f32)x / h.divisor);
}

/* Loads a step of an input, scaled for a mean. */
PLI_INLINE pair take(how h, const unsigned char *p)
{
    const pair v = load(h, p);
    if (h.reduction == PL_MEAN)
        return (pair){v_scale(h, v.a), v_scale(h, v.b)};
    return v;
}

PLI_INLINE pair finish(how h, pair x)
{
    if (h.reduction == PL_MEAN && !h.is_power)
        return (pair){v_divide(h, x.a), v_divide(h, x.b)};
    return x;
}

/* ---- loops over whole steps ----------------------------------------------------- */

/* in[0] + in[1] -> out, and -> twin unless that is NULL. */
PLI_INLINE void two_to_out(how h, const pli_sum_args *args, size_t at, size_t n_bytes,
                           unsigned char *twin)
{
    const unsigned char *x = (const unsigned char *)args->in[0] + at;
    const unsigned char *y = (const unsigned char *)args->in[1] + at;
    unsigned char *out = (unsigned char *)args->out[0] + at;
    for (size_t i = 0; i < n_bytes; i += step_bytes(h)) {
        const pair v = finish(h, join(h, take(h, x + i), take(h, y + i)));
        store(h, out + i, v);
        if (twin != NULL)
            store(h, twin + i, v);
    }
}

/* One block of three inputs or more -> out[0]. */
PLI_INLINE void block_to_out(how h, const pli_sum_args *args, size_t at, size_t n_bytes)
{
    pair acc[BLOCK_STEPS];
    const int last = args->n_in - 1;
    const size_t n_steps = n_bytes / step_bytes(h);
    const unsigned char *x = (const unsigned char *)args->in[0] + at;
    const unsigned char *y = (const unsigned char *)args->in[1] + at;
    unsigned char *out = (unsigned char *)args->out[0] + at;
    for (size_t i = 0; i < n_steps; i++, x += step_bytes(h), y += step_bytes(h))
        acc[i] = join(h, take(h, x), take(h, y));
    for (int r = 2; r < last; r++) {
        x = (const unsigned char *)args->in[r] + at;
        for (size_t i = 0; i < n_steps; i++, x += step_bytes(h))
            acc[i] = join(h, acc[i], take(h, x));
    }
    x = (const unsigned char *)args->in[last] + at;
    for (size_t i = 0; i < n_steps; i++, x += step_bytes(h))
        store(h, out + i * step_bytes(h), finish(h, join(h, acc[i], take(h, x))));
}

/* A range shorter than a step. */
PLI_INLINE void rest_to_out(how h, const pli_sum_args *args, size_t at, size_t n_bytes)
{
    unsigned char pad[STEP_MAX_BYTES] = {0};
    memcpy(pad, (const unsigned char *)args->in[0] + at, n_bytes);
    pair v = take(h, pad);
    for (int r = 1; r < args->n_in; r++) {
        memcpy(pad, (const unsigned char *)args->in[r] + at, n_bytes);
        v = join(h, v, take(h, pad));
    }
    store(h, pad, finish(h, v));
    for (int k = 0; k < args->n_out; k++)
        memcpy((unsigned char *)args->out[k] + at, pad, n_bytes);
}

/* ---- a whole range -------------------------------------------------------------- */

/* Copies the block just written, which is still in L1, to the other outputs. */
static void copy_to_others(const pli_sum_args *args, size_t at, size_t n_bytes)
{
    const unsigned char *first = (const unsigned char *)args->out[0] + at;
    for (int k = 1; k < args->n_out; k++) {
        unsigned char *other = (unsigned char *)args->out[k] + at;
        if (other != first)
            memcpy(other, first, n_bytes);
    }
}

/* The reduction of one rank is its input, bit for bit. */
static void copy_only_input(const pli_sum_args *args, size_t n_bytes)
{
    for (int k = 0; k < args->n_out; k++)
        if (args->out[k] != args->in[0] && n_bytes > 0)
            memcpy(args->out[k], args->in[0], n_bytes);
}

PLI_INLINE void reduce_two(how h, const pli_sum_args *args, size_t n_bytes)
{
    if (args->n_out == 1)
        two_to_out(h, args, 0, n_bytes, NULL);
    else
        two_to_out(h, args, 0, n_bytes, args->out[1]);
}

PLI_INLINE void reduce_blocks(how h, const pli_sum_args *args, size_t n_bytes)
{
    const size_t block_bytes = BLOCK_STEPS * step_bytes(h);
    for (size_t at = 0; at < n_bytes; at += block_bytes) {
        const size_t n_left = n_bytes - at;
        const size_t n = n_left < block_bytes ? n_left : block_bytes;
        if (args->n_in == 2)
            two_to_out(h, args, at, n, NULL);
        else
            block_to_out(h, args, at, n);
        copy_to_others(args, at, n);
    }
}

PLI_INLINE void reduce(how h, const pli_sum_args *args, size_t elem_bytes)
{
    const size_t n_bytes = args->n_elems * elem_bytes;
    const size_t n_rest = n_bytes % step_bytes(h);
    const unsigned n_in = (unsigned)args->n_in;
    if (n_in == 1) {
        copy_only_input(args, n_bytes);
        return;
    }
    h.is_power = (n_in & (n_in - 1)) == 0;
    h.scale = 1.0F;
    while (h.scale * (float)n_in > 1.0F)
        h.scale *= 0.5F;
    h.divisor = h.scale * (float)n_in;
    if (n_in == 2 && args->n_out <= 2)
        reduce_two(h, args, n_bytes - n_rest);
    else
        reduce_blocks(h, args, n_bytes - n_rest);
    if (n_rest > 0)
        rest_to_out(h, args, n_bytes - n_rest, n_rest);
}

/* ---- the table ------------------------------------------------------------------ */

#define PLI_SUM_FN(name, lane, reduction, elem_bytes)                                  \
    static void name(const pli_sum_args *args)                                         \
    {                                                                                  \
        reduce((how){lane, reduction, 0, 0.0F, 0.0F}, args, elem_bytes);               \
    }

#define PLI_COMPLEX_FN(name, of_parts)                                                 \
    static void name(const pli_sum_args *args)                                         \
    {                                                                                  \
        pli_sum_args parts = *args;                                                    \
        parts.n_elems *= 2;                                                            \
        of_parts(&parts);                                                              \
    }

PLI_SUM_FN(sum_i8, PL_I8, PL_SUM, 1)
PLI_SUM_FN(sum_i16, PL_I16, PL_SUM, 2)
PLI_SUM_FN(sum_i32, PL_I32, PL_SUM, 4)
PLI_SUM_FN(sum_i64, PL_I64, PL_SUM, 8)
PLI_SUM_FN(sum_f16, PL_F16, PL_SUM, 2)
PLI_SUM_FN(sum_bf16, PL_BF16, PL_SUM, 2)
PLI_SUM_FN(sum_f32, PL_F32, PL_SUM, 4)
PLI_SUM_FN(sum_f64, PL_F64, PL_SUM, 8)
PLI_COMPLEX_FN(sum_c64, sum_f32)
PLI_COMPLEX_FN(sum_c128, sum_f64)
PLI_SUM_FN(mean_f16, PL_F16, PL_MEAN, 2)
PLI_SUM_FN(mean_bf16, PL_BF16, PL_MEAN, 2)
PLI_SUM_FN(mean_f32, PL_F32, PL_MEAN, 4)
PLI_SUM_FN(mean_f64, PL_F64, PL_MEAN, 8)
PLI_COMPLEX_FN(mean_c64, mean_f32)
PLI_COMPLEX_FN(mean_c128, mean_f64)
PLI_SUM_FN(max_u8, PL_U8, PL_MAX, 1)
PLI_SUM_FN(max_i8, PL_I8, PL_MAX, 1)
PLI_SUM_FN(max_i16, PL_I16, PL_MAX, 2)
PLI_SUM_FN(max_i32, PL_I32, PL_MAX, 4)
PLI_SUM_FN(max_i64, PL_I64, PL_MAX, 8)

/* Wrapping sums of signed and unsigned bytes have the same bits. */
static const pli_sum_table table = {
    .isa = PLI_V_ISA,
    .fn = {[PL_U8] = {[PL_SUM] = sum_i8, [PL_MAX] = max_u8},
           [PL_I8] = {[PL_SUM] = sum_i8, [PL_MAX] = max_i8},
           [PL_I16] = {[PL_SUM] = sum_i16, [PL_MAX] = max_i16},
           [PL_I32] = {[PL_SUM] = sum_i32, [PL_MAX] = max_i32},
           [PL_I64] = {[PL_SUM] = sum_i64, [PL_MAX] = max_i64},
           [PL_F16] = {[PL_SUM] = sum_f16, [PL_MEAN] = mean_f16},
           [PL_BF16] = {[PL_SUM] = sum_bf16, [PL_MEAN] = mean_bf16},
           [PL_F32] = {[PL_SUM] = sum_f32, [PL_MEAN] = mean_f32},
           [PL_F64] = {[PL_SUM] = sum_f64, [PL_MEAN] = mean_f64},
           [PL_C64] = {[PL_SUM] = sum_c64, [PL_MEAN] = mean_c64},
           [PL_C128] = {[PL_SUM] = sum_c128, [PL_MEAN] = mean_c128}},
};

const pli_sum_table *PLI_V_TABLE(void)
{
    return &table;
}

#endif
