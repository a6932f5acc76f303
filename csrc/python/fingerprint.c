/* fingerprint.c - a number that stands for a tensor's bytes, the first 8 KiB of them.
 *
 * Replicas draw random numbers of their own, by seeds that follow from the state of the
 * caller's generator: so torch.manual_seed makes them repeatable, and the caller's
 * stream is left as it was.  That state is some 5 kB; this takes half a microsecond.
 */
#include "fingerprint.h"

#include <string.h>

#include "tensor.h"

enum { N_LANES = 4 };
#define BLOCK_BYTES (N_LANES * sizeof(uint64_t))
#define MOST_BYTES ((size_t)8192)

static uint64_t stir(uint64_t value)
{
    /* The finaliser of SplitMix64: every bit of the input moves every bit. */
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

/* Lanes of their own let the multiplications of one not wait for the other's. */
static uint64_t digest(const unsigned char *bytes, size_t n_bytes)
{
    uint64_t lanes[N_LANES] = {1, 2, 3, 4};
    uint64_t words[N_LANES];
    for (; n_bytes >= BLOCK_BYTES; bytes += BLOCK_BYTES, n_bytes -= BLOCK_BYTES) {
        memcpy(words, bytes, BLOCK_BYTES);
        for (int lane = 0; lane < N_LANES; lane++)
            lanes[lane] = (lanes[lane] ^ words[lane]) * UINT64_C(0x9e3779b97f4a7c15) +
                          (lanes[lane] >> 32);
    }
    uint64_t sum = n_bytes;
    memset(words, 0, BLOCK_BYTES);
    memcpy(words, bytes, n_bytes);
    for (int lane = 0; lane < N_LANES; lane++)
        sum = stir(sum ^ stir(lanes[lane]) ^ words[lane]);
    return sum;
}

PyObject *pli_fingerprint(PyObject *module, PyObject *object)
{
    const module_state *state = PyModule_GetState(module);
    pli_tensor tensor;
    if (pli_tensor_read(state, object, "the tensor", &tensor) != 0)
        return NULL;
    if (!pli_layout_is_dense(&tensor.layout)) {
        PyErr_SetString(PyExc_ValueError,
                        "the tensor has holes or overlaps: give a contiguous copy");
        return NULL;
    }
    const size_t n_bytes = pli_layout_bytes(&tensor.layout);
    return PyLong_FromUnsignedLongLong(
        digest(tensor.data, n_bytes < MOST_BYTES ? n_bytes : MOST_BYTES));
}
