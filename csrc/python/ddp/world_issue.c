/* world_issue.c - World.issue(): an operation given by names. */
#include <string.h>

#include "world.h"

const char *const pli_reduction_texts[PL_N_REDUCTIONS] = {
    [PL_SUM] = "sum", [PL_MEAN] = "mean", [PL_MAX] = "max"};

static int parse_word(const char *what, const char *word, const char *const *words,
                      int n_words, int *out)
{
    for (int i = 0; i < n_words; i++) {
        if (strcmp(word, words[i]) != 0)
            continue;
        *out = i;
        return 0;
    }
    return pli_error(PyExc_ValueError, "%s: '%s' is not known", what, word);
}

PyObject *pli_world_issue(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const char *kinds[PL_N_OP_KINDS];
    const char *dtypes[PL_N_DTYPES];
    const char *kind_word, *dtype_word, *reduction_word;
    Py_ssize_t offset, n_elems;
    int root = 0, kind = 0, dtype = 0, reduction = 0;
    pl_ticket ticket = 0;
    pl_comm *comm = ((world_object *)object)->comm;
    for (int i = 0; i < PL_N_OP_KINDS; i++)
        kinds[i] = pli_op_kind_text((pl_op_kind)i);
    for (int i = 0; i < PL_N_DTYPES; i++)
        dtypes[i] = pl_dtype_text((pl_dtype)i);
    if (!PyArg_ParseTuple(args, "sssnn|i:issue", &kind_word, &dtype_word,
                          &reduction_word, &offset, &n_elems, &root) ||
        parse_word("kind", kind_word, kinds, PL_N_OP_KINDS, &kind) != 0 ||
        parse_word("dtype", dtype_word, dtypes, PL_N_DTYPES, &dtype) != 0 ||
        parse_word("reduction", reduction_word, pli_reduction_texts, PL_N_REDUCTIONS,
                   &reduction) != 0)
        return NULL;
    if (offset < 0 || n_elems < 0)
        return PyErr_Format(
            PyExc_ValueError,
            "offset_bytes is %zd and n_elems is %zd: neither can be negative", offset,
            n_elems);
    const pl_op op = {.kind = (pl_op_kind)kind,
                      .reduction = (pl_reduction)reduction,
                      .dtype = (pl_dtype)dtype,
                      .root = root,
                      .offset_bytes = (size_t)offset,
                      .n_elems = (size_t)n_elems};
    PyThreadState *thread = pli_let_go(((world_object *)object)->gpu);
    const pl_status st = pl_comm_issue(comm, &op, &ticket);
    pli_take_back(thread);
    if (st != PL_OK)
        return pli_raise(state_of(object), st);
    return PyLong_FromUnsignedLongLong(ticket);
}
