/* fake_sum.c - arithmetic on NCCL's types, element by element. */
#include "../naive_sum.h"
#include "nccl_state.h"

static double load(const char *at, ncclDataType_t dtype)
{
    float f32 = 0;
    double f64 = 0;
    uint16_t half = 0;
    switch (dtype) {
    case ncclFloat32:
        memcpy(&f32, at, sizeof f32);
        return (double)f32;
    case ncclFloat64:
        memcpy(&f64, at, sizeof f64);
        return f64;
    default:
        memcpy(&half, at, sizeof half);
        return dtype == ncclFloat16 ? naive_decode(half, 10, -14)
                                    : naive_decode(half, 7, -126);
    }
}

static void store(char *at, ncclDataType_t dtype, double value)
{
    const float f32 = (float)value;
    const uint16_t half =
        (uint16_t)(dtype == ncclFloat16 ? naive_encode(value, 10, -14)
                                        : naive_encode(value, 7, -126));
    switch (dtype) {
    case ncclFloat32:
        memcpy(at, &f32, sizeof f32);
        break;
    case ncclFloat64:
        memcpy(at, &value, sizeof value);
        break;
    default:
        memcpy(at, &half, sizeof half);
        break;
    }
}

double fk_round(double value, ncclDataType_t dtype)
{
    char bytes[8];
    store(bytes, dtype, value);
    return load(bytes, dtype);
}

static int is_float(ncclDataType_t dtype)
{
    return dtype >= ncclFloat16;
}

static int64_t load_int(const char *at, ncclDataType_t dtype)
{
    int64_t value = 0;
    memcpy(&value, at, fk_dtype_bytes(dtype));
    if (dtype == ncclInt8)
        return (int8_t)value;
    return dtype == ncclInt32 ? (int32_t)value : value;
}

void fk_add(void *to, const void *from, size_t n, ncclDataType_t dtype)
{
    const size_t step = fk_dtype_bytes(dtype);
    char *a = to;
    const char *b = from;
    for (size_t i = 0; i < n; i++, a += step, b += step) {
        if (is_float(dtype)) {
            store(a, dtype, load(a, dtype) + load(b, dtype));
        } else {
            const uint64_t value =
                (uint64_t)load_int(a, dtype) + (uint64_t)load_int(b, dtype);
            memcpy(a, &value, step);
        }
    }
}

void fk_scale(void *to, size_t n, ncclDataType_t dtype, double scale)
{
    const size_t step = fk_dtype_bytes(dtype);
    char *at = to;
    for (size_t i = 0; i < n; i++, at += step)
        store(at, dtype, load(at, dtype) * scale);
}
