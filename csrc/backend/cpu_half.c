/* cpu_half.c - 16-bit floats by arithmetic on doubles. */
#include "cpu_half.h"

#include <math.h>

enum { SIGN = 0x8000, SIZE = 0x7fff };

pli_half_format pli_half_format_of(pl_dtype dtype)
{
    if (dtype == PL_F16)
        return (pli_half_format){.n_fraction = 10, .least_normal = -14};
    return (pli_half_format){.n_fraction = 7, .least_normal = -126};
}

uint16_t pli_half_infinity(pli_half_format format)
{
    return (uint16_t)(SIZE >> format.n_fraction << format.n_fraction);
}

int pli_half_is_special(uint16_t bits, pli_half_format format)
{
    return (bits & SIZE) >= pli_half_infinity(format);
}

double pli_half_to_f64(uint16_t bits, pli_half_format format)
{
    const int size = bits & SIZE;
    const int exponent = size >> format.n_fraction;
    const int one = 1 << format.n_fraction;
    const int fraction = size % one + (exponent > 0 ? one : 0);
    const int above = exponent > 0 ? exponent - 1 : 0;
    double value = ldexp(fraction, above + format.least_normal - format.n_fraction);
    if (size == pli_half_infinity(format))
        value = (double)INFINITY;
    else if (size > pli_half_infinity(format))
        value = (double)NAN;
    return copysign(value, bits & SIGN ? -1.0 : 1.0);
}

/* A fraction that rounds up to the next power of two carries into the exponent, and
 * the largest exponent's carry is infinity. */
uint16_t pli_half_of_f64(double value, pli_half_format format)
{
    const uint16_t sign = signbit(value) ? SIGN : 0;
    const uint16_t infinity = pli_half_infinity(format);
    int exponent = 0;
    if (isnan(value))
        return (uint16_t)(sign | infinity | (1 << (format.n_fraction - 1)));
    if (isinf(value))
        return (uint16_t)(sign | infinity);
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
