/* cpu_scale.c - elements widened to float64, scaled, and rounded back. */
#include "cpu_scale.h"

#include <math.h>

/* What tells one 16-bit float from another. */
typedef struct half_format {
    int n_fraction;   /* bits */
    int least_normal; /* its exponent */
} half_format;

static const half_format f16_format = {.n_fraction = 10, .least_normal = -14};
static const half_format bf16_format = {.n_fraction = 7, .least_normal = -126};

enum { SIGN = 0x8000, SIZE = 0x7fff };

static uint16_t infinity_of(half_format format)
{
    return (uint16_t)(SIZE >> format.n_fraction << format.n_fraction);
}

/* Of a finite number. */
static double half_to_f64(uint16_t bits, half_format format)
{
    const int size = bits & SIZE;
    const int exponent = size >> format.n_fraction;
    const int one = 1 << format.n_fraction;
    const int fraction = size % one + (exponent > 0 ? one : 0);
    const int above = exponent > 0 ? exponent - 1 : 0;
    const double value =
        ldexp(fraction, above + format.least_normal - format.n_fraction);
    return bits & SIGN ? -value : value;
}

/* The nearest, or the even one of two.  A fraction that rounds up to the next power of
 * two carries into the exponent, and the largest exponent's carry is infinity. */
static uint16_t half_of_f64(double value, half_format format)
{
    const uint16_t sign = signbit(value) ? SIGN : 0;
    int exponent = 0;
    (void)frexp(value, &exponent); /* value is in [0.5, 1) times 2 to that */
    exponent--;
    if (exponent < format.least_normal || value == 0)
        exponent = format.least_normal;
    const double steps = nearbyint(ldexp(fabs(value), format.n_fraction - exponent));
    const long bits =
        ((long)(exponent - format.least_normal) << format.n_fraction) + (long)steps;
    const uint16_t infinity = infinity_of(format);
    return (uint16_t)(sign | (bits < infinity ? (uint16_t)bits : infinity));
}

static void scale_half(uint16_t *data, size_t n, half_format format, const int ratio[2])
{
    for (size_t i = 0; i < n; i++) {
        if ((data[i] & SIZE) >= infinity_of(format))
            continue; /* infinities and NaNs stay what they are */
        data[i] =
            half_of_f64(half_to_f64(data[i], format) * ratio[0] / ratio[1], format);
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
        scale_half(move->to, n, f16_format, ratio);
        break;
    case PL_BF16:
        scale_half(move->to, n, bf16_format, ratio);
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
