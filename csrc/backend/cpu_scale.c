/* cpu_scale.c - elements widened to float64, scaled, and rounded back. */
#include "cpu_scale.h"

#include <math.h>

enum { SIGN = 0x8000, SIZE = 0x7fff };

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

double pli_cpu_widen(uint16_t bits, pl_dtype dtype)
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

/* A fraction that rounds up to the next power of two carries into the exponent, and a
 * carry out of the largest exponent gives infinity. */
uint16_t pli_cpu_round(double value, pl_dtype dtype)
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
        data[i] =
            pli_cpu_round(pli_cpu_widen(data[i], dtype) * ratio[0] / ratio[1], dtype);
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
