/* Tensors, as DLPack lays them out: https://dmlc.github.io/dlpack/latest/c_api.html. (With cold caches
   each question to torch in Python takes about as long as a small kernel.) */

#pragma once

#include <Python.h>

#include "elements.h"

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous, *others[3];
    int (*look_at)(PyObject *tensor, DLTensor *out);
} DLPackExchangeAPI;

enum { ON_CPU = 1, PINNED = 3, UNSIGNED = 1, FLOAT = 2, BFLOAT = 4, COMPLEX = 5 };

/* What Python hands over, in this order. */
static struct {
    PyObject *tensor, *parameter; /* classes */
    PyObject *is_neg, *empty_result, *empty_bytes, *overwritten, *threads, *modes[2], *functions, *in_order;
} torch;
static DLPackExchangeAPI *dlpack;

static PyObject *connect(PyObject *module, PyObject *args) {
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOO:connect", &capsule, &torch.tensor, &torch.parameter,
                          &torch.is_neg, &torch.empty_result, &torch.empty_bytes, &torch.overwritten,
                          &torch.threads, &torch.modes[0], &torch.modes[1], &torch.functions,
                          &torch.in_order))
        return NULL;
    Py_INCREF(args); /* for good */
    dlpack = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (dlpack && (dlpack->major != 1 || !dlpack->look_at)) {
        PyErr_SetString(PyExc_ImportError, "another version of DLPack");
        dlpack = NULL;
    }
    if (!dlpack) return NULL;
    Py_RETURN_NONE;
}

/* A number that Python makes; -1 with its error. */
static size number_of(PyObject *function) {
    PyObject *result = PyObject_CallObject(function, NULL);
    if (!result) return -1;
    const size number = PyLong_AsSsize_t(result);
    Py_DECREF(result);
    return number;
}

/* Of torch's, as many as in_threads can use; -1 with an error. */
static size threads_for(size elements) { return elements > GRAIN ? number_of(torch.threads) : 1; }

static int is_dense(const DLTensor *x) {
    size expected = 1, place = x->ndim;
    while (place-- && (x->shape[place] == 1 || x->strides[place] == expected))
        expected *= x->shape[place];
    if (place < 0) return 1;
    /* From the smallest stride on. */
    uint64_t seen = 0;
    expected = 1;
    for (int k = 0; k < x->ndim; k++) {
        int least = -1;
        for (int j = 0; j < x->ndim; j++) {
            if (seen >> j & 1) continue;
            if (x->shape[j] == 0) return 1;
            if (least < 0 || x->strides[j] < x->strides[least] ||
                (x->strides[j] == x->strides[least] && x->shape[j] < x->shape[least]))
                least = j;
        }
        if (x->shape[least] != 1 && x->strides[least] != expected) return 0;
        expected *= x->shape[least];
        seen |= (uint64_t)1 << least;
    }
    return 1;
}

/* Whether it is of a class of torch's own, and an array of real numbers: not of another layout, nor
   of torch.func, for instance. */
static int is_array(PyObject *tensor, DLTensor *x) {
    const PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != torch.tensor && type != torch.parameter) return 0;
    if (dlpack->look_at(tensor, x)) return PyErr_Clear(), 0;
    return x->code != COMPLEX && x->lanes == 1;
}

static int is_here(const DLTensor *x) {
    return x->device_type == ON_CPU || x->device_type == PINNED;
}

/* Whether it lies in memory without gaps; -1 with an error. */
static int look_at(PyObject *tensor, DLTensor *x, size *elements) {
    if (!is_array(tensor, x) || !is_here(x)) return 0;
    *elements = 1;
    for (int k = 0; k < x->ndim; k++) *elements *= x->shape[k];
    if (x->ndim > 64 || !is_dense(x) || (*elements && !x->data)) return 0;
    x->data = (char *)x->data + x->byte_offset;
    PyObject *is_neg = PyObject_CallFunctionObjArgs(torch.is_neg, tensor, NULL);
    if (!is_neg) return -1;
    Py_DECREF(is_neg);
    return is_neg == Py_False;
}

/* Of these, in which loops come; -1 for others. */
static int kind_of(int code, int bits) {
    static const uint8_t KINDS[4][2] = {{FLOAT, 32}, {FLOAT, 64}, {BFLOAT, 16}, {FLOAT, 16}};
    for (int k = 0; k < 4; k++)
        if (code == KINDS[k][0] && bits == KINDS[k][1]) return k;
    return -1;
}

/* Whether no mode has to see operations; -1 with an error. */
static int is_unobserved(void) {
    for (int k = 0; k < 2; k++) {
        size depth = number_of(torch.modes[k]);
        if (k && depth > 0) depth = number_of(torch.functions); /* of which some do not count */
        if (depth) return depth < 0 ? -1 : 0;
    }
    return 1;
}

/* Whether all are plain tensors, or None; -1 with an error. */
static int look_at_all(PyObject *const *tensors, DLTensor *arrays, const void **data, size count) {
    size elements;
    for (size k = 0; k < count; k++) {
        arrays[k].data = NULL;
        const int can = tensors[k] == Py_None ? 1 : look_at(tensors[k], &arrays[k], &elements);
        if (can <= 0) return can;
        data[k] = arrays[k].data;
    }
    return is_unobserved();
}

static size elements_of(const DLTensor *x) {
    size elements = 1;
    for (int k = 0; k < x->ndim; k++) elements *= x->shape[k];
    return elements;
}

static int is_stored_as(const DLTensor *x, PyObject *stride) {
    if (PyTuple_Size(stride) != x->ndim) return PyErr_Clear(), 0;
    for (int k = 0; k < x->ndim; k++)
        if (PyLong_AsSsize_t(PyTuple_GetItem(stride, k)) != x->strides[k]) return PyErr_Clear(), 0;
    return 1;
}
