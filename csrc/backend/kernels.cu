/* kernels.cu - moves many tensors at once on a GPU.
 *
 * nvcc, NVRTC and, in the tests, a C compiler take it, so it uses only what C and C++
 * share.  A launch passes its table of spans as a parameter.  A block finds its span by
 * binary search over `first_block`, and handles a fixed share of it.  Neighbouring
 * threads access neighbouring memory; they communicate only in ADD_TO():
 *
 *     span  |head|vec vec vec vec ... vec|tail|      if both sides can be aligned
 *     span  |word word word ...              |      if they cannot
 *
 * Each thread issues several loads before its first store.  No pointer is declared
 * restrict: `to` may be `from`.  Multiply and add must not be fused: -fmad=false.
 */
#include "kernels_words.h"

/* ---- a block's share of a copy, in bytes ---------------------------------------- */

#define DEFINE_COPY(name, vector)                                                      \
    DEVICE void name(u8 *to, const u8 *from, u32 n, u32 t)                             \
    {                                                                                  \
        const u32 ahead = (u32)((0 - (u64)to) % sizeof(vector));                       \
        const u32 head = ahead < n ? ahead : n;                                        \
        const u32 n_vectors = (n - head) / (u32)sizeof(vector);                        \
        const u32 tail = head + n_vectors * (u32)sizeof(vector);                       \
        vector *const v_to = (vector *)(to + head);                                    \
        const vector *const v_from = (const vector *)(from + head);                    \
        u32 i = t;                                                                     \
        for (; i + (BATCH - 1) * PLI_THREADS < n_vectors; i += BATCH * PLI_THREADS) {  \
            vector x[BATCH];                                                           \
            REACHED(#name ": batch");                                                  \
            UNROLL for (u32 b = 0; b < BATCH; b++) x[b] =                              \
                VEC(v_from, i + b * PLI_THREADS);                                      \
            UNROLL for (u32 b = 0; b < BATCH; b++) VEC(v_to, i + b * PLI_THREADS) =    \
                x[b];                                                                  \
        }                                                                              \
        for (; i < n_vectors; i += PLI_THREADS) {                                      \
            REACHED(#name ": rest");                                                   \
            VEC(v_to, i) = VEC(v_from, i);                                             \
        }                                                                              \
        if (t < head) {                                                                \
            REACHED(#name ": head");                                                   \
            to[t] = from[t];                                                           \
        }                                                                              \
        if (t < n - tail) {                                                            \
            REACHED(#name ": tail");                                                   \
            to[tail + t] = from[tail + t];                                             \
        }                                                                              \
    }
DEFINE_COPY(copy_by_16, vec_u32)
DEFINE_COPY(copy_by_4, u32)
DEFINE_COPY(copy_by_2, u16)

DEVICE void copy_by_1(u8 *to, const u8 *from, u32 n, u32 t)
{
    REACHED("copy_by_1");
    for (u32 i = t; i < n; i += PLI_THREADS)
        to[i] = from[i];
}

DEVICE void fill_zeros(u8 *to, u32 n, u32 t)
{
    const vec_u32 zeros = {{0, 0, 0, 0}};
    const u32 ahead = (u32)((0 - (u64)to) % sizeof zeros);
    const u32 head = ahead < n ? ahead : n;
    const u32 n_vecs = (n - head) / (u32)sizeof zeros;
    const u32 tail = head + n_vecs * (u32)sizeof zeros;
    for (u32 i = t; i < n_vecs; i += PLI_THREADS) {
        REACHED("fill_zeros: vectors");
        VEC((vec_u32 *)(to + head), i) = zeros;
    }
    if (t < head) {
        REACHED("fill_zeros: head");
        to[t] = 0;
    }
    if (t < n - tail) {
        REACHED("fill_zeros: tail");
        to[tail + t] = 0;
    }
}

DEVICE void copy(const pli_span *span, const pli_spans_head *head, u64 begin, u32 n,
                 u32 t)
{
    u8 *const to = (u8 *)span->to + begin;
    const u8 *const from = (const u8 *)span->from + (span->from != 0 ? begin : 0);
    const u64 misfit = (u64)to ^ (u64)from;
    (void)head;
    if (from == 0)
        fill_zeros(to, n, t);
    else if (misfit % sizeof(vec_u32) == 0)
        copy_by_16(to, from, n, t);
    else if (misfit % sizeof(u32) == 0)
        copy_by_4(to, from, n, t);
    else if (misfit % sizeof(u16) == 0)
        copy_by_2(to, from, n, t);
    else
        copy_by_1(to, from, n, t);
}

/* ---- a block's share of an operation word by word ------------------------------- */

/* to[i] = value(from[i], to[i], head); operands that `value` ignores are not read. */
#define DEFINE_MAP(name, word, value)                                                  \
    DEVICE void name(word *to, const word *from, u32 n, const pli_spans_head *head,    \
                     u32 t)                                                            \
    {                                                                                  \
        const u32 ahead = WORDS_TO_VEC(word, to);                                      \
        const u32 n_ahead = ahead < n ? ahead : n;                                     \
        const int fits = WORDS_TO_VEC(word, from + n_ahead) == 0;                      \
        const u32 n_vecs = fits ? (n - n_ahead) / LANES(word) : 0;                     \
        vec_##word *const v_to = (vec_##word *)(to + n_ahead);                         \
        const vec_##word *const v_from = (const vec_##word *)(from + n_ahead);         \
        UNROLL_NOT for (u32 i = t; i < n_vecs; i += BATCH_OF(word) * PLI_THREADS)      \
        {                                                                              \
            vec_##word x[BATCH_OF(word)] = {{{0}}};                                    \
            vec_##word y[BATCH_OF(word)] = {{{0}}};                                    \
            REACHED(#name ": vectors");                                                \
            UNROLL for (u32 b = 0; b < BATCH_OF(word); b++)                            \
            {                                                                          \
                if (i + b * PLI_THREADS < n_vecs) {                                    \
                    x[b] = VEC(v_from, i + b * PLI_THREADS);                           \
                    y[b] = VEC(v_to, i + b * PLI_THREADS);                             \
                }                                                                      \
            }                                                                          \
            UNROLL for (u32 b = 0; b < BATCH_OF(word); b++)                            \
            {                                                                          \
                UNROLL for (u32 k = 0; k < LANES(word); k++) y[b].e[k] =               \
                    value(x[b].e[k], y[b].e[k], head);                                 \
                if (i + b * PLI_THREADS < n_vecs)                                      \
                    VEC(v_to, i + b * PLI_THREADS) = y[b];                             \
                else                                                                   \
                    REACHED(#name ": less than a batch");                              \
            }                                                                          \
        }                                                                              \
        UNROLL_NOT for (u32 k = t; k < n - n_vecs * LANES(word); k += PLI_THREADS)     \
        {                                                                              \
            const u32 i = k < n_ahead ? k : k + n_vecs * LANES(word);                  \
            REACHED(#name ": head, tail, or what does not fit");                       \
            to[i] = value(from[i], to[i], head);                                       \
        }                                                                              \
    }

/* The same for rare types: one word after another. */
#define DEFINE_RARE_MAP(name, word, value)                                             \
    DEVICE void name(word *to, const word *from, u32 n, const pli_spans_head *head,    \
                     u32 t)                                                            \
    {                                                                                  \
        REACHED(#name);                                                                \
        UNROLL_NOT for (u32 i = t; i < n; i += PLI_THREADS) to[i] =                    \
            value(from[i], to[i], head);                                               \
    }

/* One case of a switch over the words of a span. */
#define CASE_MAP(value, name, word)                                                    \
    case value:                                                                        \
        name((word *)span->to + begin, (const word *)span->from + begin, n, head, t);  \
        break;

/* kind, KIND, and the C type of its words */
#define INTEGERS(X) X(u8, U8, u8) X(u16, U16, u16) X(u32, U32, u32) X(u64, U64, u64)
#define HALVES(X) X(f16, F16, u16) X(bf16, BF16, u16)
#define NARROW_FLOATS(X) HALVES(X) X(f32, F32, u32)
#define FLOATS(X) NARROW_FLOATS(X) X(f64, F64, u64)

/* ---- add ------------------------------------------------------------------------ */

#define ADD_INTEGERS(kind, KIND, word)                                                 \
    DEVICE word kind##_plus(word x, word y, const pli_spans_head *head)                \
    {                                                                                  \
        (void)head;                                                                    \
        return (word)(y + x);                                                          \
    }
#define ADD_FLOATS(kind, KIND, word)                                                   \
    DEVICE word kind##_plus(word x, word y, const pli_spans_head *head)                \
    {                                                                                  \
        (void)head;                                                                    \
        return kind##_write(kind##_read(y) + kind##_read(x));                          \
    }
#define ADD_MAP(kind, KIND, word) DEFINE_MAP(add_##kind, word, kind##_plus)
#define ADD_RARE_MAP(kind, KIND, word) DEFINE_RARE_MAP(add_##kind, word, kind##_plus)
#define ADD_CASE(kind, KIND, word) CASE_MAP(PLI_WORD_##KIND, add_##kind, word)
INTEGERS(ADD_INTEGERS)
FLOATS(ADD_FLOATS)
NARROW_FLOATS(ADD_MAP)
INTEGERS(ADD_RARE_MAP)
ADD_RARE_MAP(f64, F64, u64)

DEVICE void add(const pli_span *span, const pli_spans_head *head, u64 begin, u32 n,
                u32 t)
{
    switch (span->detail) {
        INTEGERS(ADD_CASE)
        FLOATS(ADD_CASE)
    default:
        break;
    }
}

/* ---- scale: in float64; `from` equals `to`, and is not read --------------------- */

#define SCALE_FLOATS(kind, KIND, word)                                                 \
    DEVICE word kind##_scaled(word x, word y, const pli_spans_head *head)              \
    {                                                                                  \
        const double wide = (double)kind##_read(y);                                    \
        (void)x;                                                                       \
        if (kind##_is_special(y))                                                      \
            return y;                                                                  \
        return f64_to_##kind(wide * head->factor / head->divisor);                     \
    }
#define SCALE_MAP(kind, KIND, word) DEFINE_RARE_MAP(scale_##kind, word, kind##_scaled)
#define SCALE_CASE(kind, KIND, word) CASE_MAP(PLI_WORD_##KIND, scale_##kind, word)
FLOATS(SCALE_FLOATS)
FLOATS(SCALE_MAP)

DEVICE void scale(const pli_span *span, const pli_spans_head *head, u64 begin, u32 n,
                  u32 t)
{
    switch (span->detail) {
        FLOATS(SCALE_CASE)
    default:
        break;
    }
}

/* ---- checksum of a segment's tensors, independent of their addresses ------------- */

/* At a given place, different words give different numbers.  So a change of one word is
 * always detected, and a change of several is missed with probability 2^-64. */
DEVICE u64 mix(u64 word, u64 place)
{
    u64 x = word ^ place * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 32) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 29) * 0x94d049bb133111ebull;
    return x ^ x >> 32;
}

DEVICE u64 mix_by_16(const u8 *from, u64 place, u32 n, u32 t)
{
    const vec_u32 *const v_from = (const vec_u32 *)from;
    const u32 n_vectors = n / (u32)sizeof(vec_u32);
    u64 sum = 0;
    UNROLL_NOT for (u32 i = t; i < n_vectors; i += BATCH * PLI_THREADS)
    {
        vec_u32 x[BATCH] = {{{0}}};
        REACHED("mix_by_16: vectors");
        UNROLL for (u32 b = 0; b < BATCH; b++) if (i + b * PLI_THREADS < n_vectors)
            x[b] = VEC(v_from, i + b * PLI_THREADS);
        UNROLL for (u32 b = 0; b < BATCH; b++)
        {
            const u64 at = place + 2 * (u64)(i + b * PLI_THREADS);
            if (i + b * PLI_THREADS < n_vectors)
                sum += mix(x[b].e[0] | (u64)x[b].e[1] << 32, at) +
                       mix(x[b].e[2] | (u64)x[b].e[3] << 32, at + 1);
            else
                REACHED("mix_by_16: less than a batch");
        }
    }
    return sum;
}

DEVICE u64 mix_by_4(const u8 *from, u64 place, u32 n, u32 t)
{
    const u32 *const words = (const u32 *)from;
    u64 sum = 0;
    UNROLL_NOT for (u32 i = t; i < n / 8; i += PLI_THREADS)
    {
        REACHED("mix_by_4");
        sum += mix(words[2 * i] | (u64)words[2 * i + 1] << 32, place + i);
    }
    return sum;
}

/* From word `first` on; the last word may be short. */
DEVICE u64 mix_by_1(const u8 *from, u64 place, u32 first, u32 n, u32 t)
{
    u64 sum = 0;
    UNROLL_NOT for (u32 i = first + t; i * 8 < n; i += PLI_THREADS)
    {
        u64 word = 0;
        REACHED("mix_by_1");
        UNROLL_NOT for (u32 k = 0; k < 8 && i * 8 + k < n; k++) word |=
            (u64)from[i * 8 + k] << 8 * k;
        sum += mix(word, place + i);
    }
    return sum;
}

DEVICE void checksum(const pli_span *span, const pli_spans_head *head, u64 begin, u32 n,
                     u32 t)
{
    const u8 *const from = (const u8 *)span->from + begin;
    const u64 place = span->detail + begin / PLI_PLACE_BYTES;
    u64 sum = 0;
    (void)head;
    if ((u64)from % sizeof(vec_u32) == 0)
        sum = mix_by_16(from, place, n, t) + mix_by_1(from, place, n / 16 * 2, n, t);
    else if ((u64)from % sizeof(u32) == 0)
        sum = mix_by_4(from, place, n, t) + mix_by_1(from, place, n / 8, n, t);
    else
        sum = mix_by_1(from, place, 0, n, t);
    ADD_TO((u64 *)span->to, sum);
}

/* ---- refresh: a copy of the segments whose checksums differ ---------------------- */

DEVICE void refresh(const pli_span *span, const pli_spans_head *head, u64 begin, u32 n,
                    u32 t)
{
    if (head->sums[span->detail] == head->wanted_sums[span->detail]) {
        REACHED("refresh: nothing to do");
        return;
    }
    REACHED("refresh: copied");
    if (t == 0)
        FETCHED(n);
    copy(span, head, begin, n, t);
}

/* ---- sum of ranges --------------------------------------------------------------- */

/* The factor of each input of a mean: the largest power of two up to 1/n, so that the
 * mean of finite numbers is finite; see cpu_sum_body.h. */
DEVICE float scale_of(u32 n_ranks, int is_mean)
{
    float scale = 1.0f;
    while (is_mean && scale * (float)n_ranks > 1.0f)
        scale *= 0.5f;
    return scale;
}

#define SUM_FLOATS(kind, KIND, word)                                                   \
    DEVICE kind##_real kind##_divided(kind##_real sum, u32 n_ranks, int is_mean)       \
    {                                                                                  \
        const float rest = scale_of(n_ranks, is_mean) * (float)n_ranks;                \
        if (!is_mean)                                                                  \
            return sum;                                                                \
        if ((n_ranks & (n_ranks - 1)) == 0) {                                          \
            REACHED("sum_" #kind ": mean of a power of two");                          \
            return sum;                                                                \
        }                                                                              \
        REACHED("sum_" #kind ": mean of another number");                              \
        return sum / (kind##_real)rest;                                                \
    }                                                                                  \
    DEVICE void sum_##kind(const pli_sum_span *span, u64 begin, u32 n, u32 t)          \
    {                                                                                  \
        word *const to = (word *)span->to + begin;                                     \
        const word *const from = (const word *)span->from + begin;                     \
        const u64 stride = span->stride_bytes / sizeof(word);                          \
        const u32 ahead = WORDS_TO_VEC(word, to);                                      \
        const u32 n_ahead = ahead < n ? ahead : n;                                     \
        const int fits = WORDS_TO_VEC(word, from + n_ahead) == 0 &&                    \
                         stride * sizeof(word) % sizeof(vec_##word) == 0;              \
        const u32 n_vecs = fits ? (n - n_ahead) / LANES(word) : 0;                     \
        const kind##_real scale = (kind##_real)scale_of(span->n_ranks, span->is_mean); \
        UNROLL_NOT for (u32 i = t; i < n_vecs; i += PLI_THREADS)                       \
        {                                                                              \
            const word *const at = from + n_ahead + (u64)i * LANES(word);              \
            vec_##word x = VEC((const vec_##word *)at, 0);                             \
            kind##_real sums[LANES(word)];                                             \
            REACHED("sum_" #kind ": vectors");                                         \
            UNROLL for (u32 k = 0; k < LANES(word); k++) sums[k] =                     \
                scale * kind##_read(x.e[k]);                                           \
            UNROLL_SOME for (u32 r = 1; r < span->n_ranks; r++)                        \
            {                                                                          \
                x = VEC((const vec_##word *)(at + r * stride), 0);                     \
                UNROLL for (u32 k = 0; k < LANES(word); k++) sums[k] +=                \
                    scale * kind##_read(x.e[k]);                                       \
            }                                                                          \
            UNROLL for (u32 k = 0; k < LANES(word); k++) x.e[k] =                      \
                kind##_write(kind##_divided(sums[k], span->n_ranks, span->is_mean));   \
            VEC((vec_##word *)(to + n_ahead), i) = x;                                  \
        }                                                                              \
        UNROLL_NOT for (u32 k = t; k < n - n_vecs * LANES(word); k += PLI_THREADS)     \
        {                                                                              \
            const u32 i = k < n_ahead ? k : k + n_vecs * LANES(word);                  \
            kind##_real sum = scale * kind##_read(from[i]);                            \
            REACHED("sum_" #kind ": head, tail, or what does not fit");                \
            UNROLL_NOT for (u32 r = 1; r < span->n_ranks; r++) sum +=                  \
                scale * kind##_read(from[i + r * stride]);                             \
            to[i] = kind##_write(kind##_divided(sum, span->n_ranks, span->is_mean));   \
        }                                                                              \
    }
FLOATS(SUM_FLOATS)

#define SUM_CASE(kind, KIND, word)                                                     \
    case PLI_WORD_##KIND:                                                              \
        sum_##kind(&span, begin, n, t);                                                \
        break;

KERNEL(pl_sum, pli_sum_span)
{
    const pli_sum_span span = GIVEN;
    const u64 begin = (u64)BLOCK * PLI_BLOCK_WORDS;
    const u64 left = span.n - begin;
    const u32 n = (u32)(left < PLI_BLOCK_WORDS ? left : PLI_BLOCK_WORDS);
    FOR_EACH_THREAD(t)
    {
        switch (span.word) {
            FLOATS(SUM_CASE)
        default:
            break;
        }
    }
}

/* ---- the kernels of many spans -------------------------------------------------- */

#define DEFINE_KERNEL(name, type, work, share)                                         \
    KERNEL(name, type)                                                                 \
    {                                                                                  \
        const pli_spans_head head = GIVEN.head;                                        \
        u32 low = 0;                                                                   \
        u32 high = head.n_spans;                                                       \
        while (high - low > 1) {                                                       \
            const u32 middle = (low + high) / 2;                                       \
            if (GIVEN.spans[middle].first_block <= BLOCK)                              \
                low = middle;                                                          \
            else                                                                       \
                high = middle;                                                         \
        }                                                                              \
        const pli_span span = GIVEN.spans[low];                                        \
        const u64 begin = (u64)(BLOCK - span.first_block) * (share);                   \
        const u64 left = span.n - begin;                                               \
        const u32 n = (u32)(left < (share) ? left : (share));                          \
        FOR_EACH_THREAD(t) work(&span, &head, begin, n, t);                            \
    }
#define DEFINE_KERNELS(size)                                                           \
    DEFINE_KERNEL(pl_copy_##size, pli_##size##_spans, copy, PLI_BLOCK_BYTES)           \
    DEFINE_KERNEL(pl_add_##size, pli_##size##_spans, add, PLI_BLOCK_WORDS)             \
    DEFINE_KERNEL(pl_scale_##size, pli_##size##_spans, scale, PLI_BLOCK_WORDS)         \
    DEFINE_KERNEL(pl_checksum_##size, pli_##size##_spans, checksum, PLI_BLOCK_BYTES)   \
    DEFINE_KERNEL(pl_refresh_##size, pli_##size##_spans, refresh, PLI_BLOCK_BYTES)
DEFINE_KERNELS(small)
#ifdef HAS_LARGE
DEFINE_KERNELS(large)
#endif
