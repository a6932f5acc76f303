/* cpu_scale.c - elements widened to float64, scaled, and rounded back. */
#include "cpu_scale.h"

#include "cpu_half.h"

static void scale_half(uint16_t *data, size_t n, pli_half_format format,
                       const int ratio[2])
{
    for (size_t i = 0; i < n; i++) {
        if (pli_half_is_special(data[i], format))
            continue; /* infinities and NaNs stay what they are */
        const double wide = pli_half_to_f64(data[i], format);
        data[i] = pli_half_of_f64(wide * ratio[0] / ratio[1], format);
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
        scale_half(move->to, n, pli_half_format_of(move->dtype), ratio);
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
