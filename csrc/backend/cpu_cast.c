/* cpu_cast.c - each element widened to a double, scaled there or in float32, rounded.
 */
#include "cpu_cast.h"

#include <math.h>

#include "cpu_half.h"

/* Of a float that is no complex. */
static double read_part(const void *from, pl_dtype dtype, size_t i)
{
    if (dtype == PL_F64)
        return ((const double *)from)[i];
    if (dtype == PL_F32)
        return (double)((const float *)from)[i];
    return pli_half_to_f64(((const uint16_t *)from)[i], pli_half_format_of(dtype));
}

static void write_part(void *to, pl_dtype dtype, size_t i, double value)
{
    if (dtype == PL_F64)
        ((double *)to)[i] = value;
    else if (dtype == PL_F32)
        ((float *)to)[i] = (float)value;
    else
        ((uint16_t *)to)[i] = pli_half_of_f64(value, pli_half_format_of(dtype));
}

/* Arithmetic in float32 is a product of two float32 rounded to one; all else is exact
 * but for the last step. */
void pli_cpu_cast(const pl_cast *cast, double scale)
{
    const int is_wide = cast->from_dtype == PL_F64 || cast->to_dtype == PL_F64;
    for (size_t i = 0; i < cast->n_elems; i++) {
        const double value = read_part(cast->from, cast->from_dtype, i);
        const double scaled =
            is_wide ? value * scale : (double)((float)value * (float)scale);
        write_part(cast->to, cast->to_dtype, i, scaled);
    }
}

/* The type of a complex number's parts, and how many of them; else of the numbers. */
static pl_dtype parts_of(const pl_move *move, size_t *n_parts)
{
    *n_parts = move->n_elems;
    if (move->dtype != PL_C64 && move->dtype != PL_C128)
        return move->dtype;
    *n_parts *= 2;
    return move->dtype == PL_C64 ? PL_F32 : PL_F64;
}

int pli_cpu_has_nonfinite(const pl_move *move)
{
    size_t n_parts = 0;
    const pl_dtype part = parts_of(move, &n_parts);
    if (part < PL_F16 || move->from == NULL)
        return 0;
    for (size_t i = 0; i < n_parts; i++)
        if (!isfinite(read_part(move->from, part, i)))
            return 1;
    return 0;
}
