/* naive_kernels.cu - what kernels.cu does, as one would first write it: a thread an
 * element, no table, and numbers by the library of mathematics instead of by their
 * bits.
 *
 * The second opinion.  Taken by nvcc, by NVRTC (with kernels_table.h as its header),
 * and by C, where the including file has <math.h> and <string.h>.
 */
#include "backend/kernels_table.h"

typedef struct naive_task {
    void *to;
    const void *from;
    unsigned long long n;
    unsigned long long stride_bytes;
    double factor;
    double divisor;
    unsigned n_ranks;
    unsigned char word;
    unsigned char is_mean;
} naive_task;

#ifdef __CUDACC__
#define NAIVE static __device__
#define NAIVE_KERNEL(name)                                                             \
    extern "C" __global__ void name(const naive_task it, const unsigned long long i_of)
#define NAIVE_I (blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x)
#else
#define NAIVE static
#define NAIVE_KERNEL(name)                                                             \
    static void name(const naive_task it, unsigned long long i_of)
#define NAIVE_I i_of
#endif

/* ---- words ---------------------------------------------------------------------- */

NAIVE int naive_bytes(int word)
{
    const int bytes[PLI_N_WORDS] = {1, 2, 4, 8, 2, 2, 4, 8};
    return bytes[word];
}

NAIVE double naive_half_to(unsigned bits, int n_fraction, int least)
{
    const int exponent = (int)((bits & 0x7fffu) >> n_fraction);
    const int fraction = (int)(bits & ((1u << n_fraction) - 1u));
    double size = ldexp((double)fraction, least - n_fraction);
    if (exponent == 0x7fff >> n_fraction)
        size = fraction != 0 ? (double)NAN : (double)INFINITY;
    else if (exponent > 0)
        size =
            ldexp(ldexp(1.0, n_fraction) + fraction, exponent - 1 + least - n_fraction);
    return copysign(size, (bits & 0x8000u) != 0 ? -1.0 : 1.0);
}

/* In units of the last place of a number of its size, rounded to a whole number. */
NAIVE unsigned naive_half_of(double value, int n_fraction, int least)
{
    const unsigned sign = signbit(value) ? 0x8000u : 0u;
    const unsigned infinity = (0x7fffu >> n_fraction) << n_fraction;
    int exponent = 0;
    if (isnan(value))
        return sign | infinity | (1u << (n_fraction - 1));
    if (isinf(value) || fabs(value) >= ldexp(1.0, 2 - least))
        return sign | infinity;
    (void)frexp(value, &exponent);
    exponent = value == 0.0 || exponent - 1 < least ? least : exponent - 1;
    const double units = rint(ldexp(fabs(value), n_fraction - exponent));
    return sign | (unsigned)(units + ldexp((double)(exponent - least), n_fraction));
}

NAIVE double naive_read(const void *from, int word, unsigned long long i)
{
    unsigned short half = 0;
    float single = 0;
    double wide = 0;
    const char *const at =
        (const char *)from + i * (unsigned long long)naive_bytes(word);
    if (word == PLI_WORD_F64) {
        memcpy(&wide, at, sizeof wide);
    } else if (word == PLI_WORD_F32) {
        memcpy(&single, at, sizeof single);
        wide = single;
    } else {
        memcpy(&half, at, sizeof half);
        wide = word == PLI_WORD_F16 ? naive_half_to(half, 10, -14)
                                    : naive_half_to(half, 7, -126);
    }
    return wide;
}

NAIVE void naive_write(void *to, int word, unsigned long long i, double value)
{
    char *const at = (char *)to + i * (unsigned long long)naive_bytes(word);
    const float single = (float)value;
    if (word == PLI_WORD_F64) {
        memcpy(at, &value, sizeof value);
    } else if (word == PLI_WORD_F32) {
        memcpy(at, &single, sizeof single);
    } else {
        const unsigned short half =
            (unsigned short)(word == PLI_WORD_F16 ? naive_half_of(value, 10, -14)
                                                  : naive_half_of(value, 7, -126));
        memcpy(at, &half, sizeof half);
    }
}

/* ---- kernels -------------------------------------------------------------------- */

NAIVE_KERNEL(naive_copy)
{
    const unsigned long long i = NAIVE_I;
    if (i < it.n)
        ((char *)it.to)[i] = (char)(it.from != 0 ? ((const char *)it.from)[i] : 0);
}

NAIVE_KERNEL(naive_add)
{
    const unsigned long long i = NAIVE_I;
    const int bytes = naive_bytes(it.word);
    if (i >= it.n)
        return;
    if (it.word == PLI_WORD_F64) {
        naive_write(it.to, it.word, i,
                    naive_read(it.to, it.word, i) + naive_read(it.from, it.word, i));
    } else if (it.word >= PLI_WORD_F16) {
        const float x = (float)naive_read(it.to, it.word, i);
        const float y = (float)naive_read(it.from, it.word, i);
        naive_write(it.to, it.word, i, (double)(x + y));
    } else { /* byte by byte, with a carry */
        unsigned carry = 0;
        for (int k = 0; k < bytes; k++) {
            unsigned char *const to =
                (unsigned char *)it.to + i * (unsigned long long)bytes + k;
            const unsigned char *const from =
                (const unsigned char *)it.from + i * (unsigned long long)bytes + k;
            carry += (unsigned)*to + *from;
            *to = (unsigned char)(carry & 0xffu);
            carry >>= 8;
        }
    }
}

NAIVE_KERNEL(naive_scale)
{
    const unsigned long long i = NAIVE_I;
    if (i < it.n)
        naive_write(it.to, it.word, i,
                    naive_read(it.to, it.word, i) * it.factor / it.divisor);
}

NAIVE_KERNEL(naive_sum)
{
    const unsigned long long i = NAIVE_I;
    if (i >= it.n)
        return;
    const int is_wide = it.word == PLI_WORD_F64;
    /* A mean's inputs are first divided by a power of two, n or the next above, and
     * their sum by what is left: naive_halvings(). */
    unsigned power = 1;
    while (it.is_mean && power < it.n_ranks)
        power *= 2;
    double wide = naive_read(it.from, it.word, i) / (double)power;
    float narrow = (float)naive_read(it.from, it.word, i) / (float)power;
    for (unsigned r = 1; r < it.n_ranks; r++) {
        const char *const from = (const char *)it.from + r * it.stride_bytes;
        const double value = naive_read(from, it.word, i);
        wide += value / (double)power;
        narrow += (float)value / (float)power;
    }
    if (it.is_mean) {
        wide /= (double)it.n_ranks / (double)power;
        narrow /= (float)it.n_ranks / (float)power;
    }
    naive_write(it.to, it.word, i, is_wide ? wide : (double)narrow);
}
