/* Kernels for the CPU: one pass over memory where torch's operations take several.

   A module of Python's stable ABI that knows of torch what DLPack says of its tensors, and the
   functions that native.py hands over. native.py calls it, and says what each loop computes. Arrays
   are dense and in storage order; eight elements share a byte of bits, the first in the lowest. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Bits are read and written as integers whose first byte is the lowest."
#endif

#include <stdlib.h>

#include "native/activation.h"
#include "native/batch_norm.h"
#include "native/curve.h"
#include "native/formats.h"
#include "native/half.h"
#include "native/loss.h"
#include "native/norm.h"
#include "native/pooling.h"
#include "native/random.h"
#include "native/tensors.h"
#include "native/threads.h"

#define NAMED(NAME) {#NAME, NAME}
typedef struct {
    const char *name;
    Loop *loop;
} Named;
static const Named NORMS[] = {
    NAMED(norm_float),       NAMED(norm_double),       NAMED(norm_bfloat16), NAMED(norm_float16),
    NAMED(group_norm_float), NAMED(group_norm_double),
};

/* Loops over elements: for float, double, bfloat16 and float16; or for elements of 1, 2, 4 and 8 bytes. */
#define FLOATS(NAME) {#NAME, 0, {NAME##_float, NAME##_double, NAME##_bfloat16, NAME##_float16}}
#define CURVES(NAME) {#NAME, 0, {NAME##_float, NULL, NAME##_bfloat16, NAME##_float16}}
static const struct {
    const char *name;
    int by_size;
    Loop *loops[4];
} OVER_BITS[] = {
    {"select", 1, {select_int8_t, select_int16_t, select_int32_t, select_int64_t}},
    FLOATS(part),
    {"relu", 0, {relu_float, relu_double, relu_bfloat16, relu_float16}},
    FLOATS(leaky_relu), FLOATS(hardtanh), FLOATS(threshold), FLOATS(hardshrink),
    FLOATS(softshrink), FLOATS(hardsigmoid), FLOATS(above), FLOATS(within), FLOATS(not_outside),
    FLOATS(not_inside), FLOATS(scale), FLOATS(scale_channels),
    {"nonzero", 1, {nonzero}},
    CURVES(rest), CURVES(tanh2), CURVES(logistic),
};
enum { SELECT, PART }; /* of these */
#define COUNT(TABLE) (size)(sizeof TABLE / sizeof *TABLE)

/* (Without memory for the totals it is less exact.) */
static void run_norm_by(Loop *loop, Norm norm, size rows, size threads) {
    const size sums = 2 * threads * norm.groups * norm.features;
    const int are_many = rows > ROWS_OF_SUM * norm.groups && (norm.dweight || norm.dbias);
    norm.totals = are_many ? calloc((size_t)sums, sizeof *norm.totals) : NULL;
    run((Task){loop, &norm, rows, 1}, threads, rows * norm.features * norm.places);
    free(norm.totals);
}

static void run_norm(const Norm *norm, int is_double, int of_groups, size rows, size threads) {
    Loop *const loops[2][2] = {{norm_float, norm_double}, {group_norm_float, group_norm_double}};
    run_norm_by(loops[of_groups][is_double], *norm, rows, threads);
}

static void run_batch_norm(const BatchNorm *norm, int is_double, size threads) {
    const size parts = (norm->channels + LANES - 1) / LANES;
    run((Task){is_double ? batch_norm_double : batch_norm_float, norm, parts, 1}, threads,
        norm->batch * norm->channels * norm->places);
    (is_double ? end_batch_norm_double : end_batch_norm_float)(norm);
}

static void run_softmax(const Softmax *given, int kind, size count, size threads) {
    Loop *const loops[2][4] = {{softmax_float, NULL, softmax_bfloat16, softmax_float16},
                               {image_softmax_float, NULL, image_softmax_bfloat16, image_softmax_float16}};
    Softmax rows = *given;
    const int of_images = rows.places > 1;
    const size at_once = of_images ? PLACES_AT_ONCE : 1, floats = threads * at_once * rows.features;
    /* (At most a quarter of what the gradient takes, in 16 bits.) */
    const int is_little = floats <= count * rows.features / 8;
    rows.aside = kind != OF_FLOAT && is_little ? malloc((size_t)floats * sizeof *rows.aside) : NULL;
    run((Task){loops[of_images][kind], &rows, count, at_once}, threads, count * rows.features);
    free(rows.aside);
}

/* Of elements of 2, 4 or 8 bytes. */
static void channels_first(const void *x, void *y, size bytes, size count, size channels, size places,
                           size threads) {
    Loop *const loops[] = {channels_first_uint16_t, channels_first_uint32_t, channels_first_uint64_t};
    const Images images = {x, y, channels, places};
    const Task task = {loops[bytes >> 2], &images, count * ((places + STRIP - 1) / STRIP), 1};
    run(task, threads, count * channels * places);
}

static Loop *loop_for(size family, int code, int bits) {
    if (family < 0 || family >= COUNT(OVER_BITS)) return NULL;
    int kind = kind_of(code, bits);
    if (OVER_BITS[family].by_size)
        for (kind = 3; kind >= 0 && bits != 8 << kind;) kind--;
    return kind < 0 ? NULL : OVER_BITS[family].loops[kind];
}

static Loop *loop_of(size family, const DLTensor *x) { return loop_for(family, x->code, x->bits); }

/* Not what only behaves like one: a symbol, say. (0 where it was left out.) */
static int is_number(PyObject *object, double *number) {
    if (!object) return *number = 0, 1;
    if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) return 0;
    *number = PyFloat_AsDouble(object);
    return *number != -1 || !PyErr_Occurred() || (PyErr_Clear(), 0);
}

/* What there is to do with a tensor: 1 if it can be done here, else 0, or -1 with an error. */
typedef struct {
    Loop *loop;
    Arrays arrays;
    size elements;
} Pass;

static int begin(Pass *pass, size family, PyObject *x, PyObject *stride, PyObject *a, PyObject *b) {
    DLTensor array;
    const int is_plain = look_at(x, &array, &pass->elements);
    if (is_plain <= 0) return is_plain;
    if (!is_number(a, &pass->arrays.a) || !is_number(b, &pass->arrays.b)) return 0;
    if (is_beyond(pass->arrays.a, array.code, array.bits)) return 0;
    if (is_beyond(pass->arrays.b, array.code, array.bits)) return 0;
    pass->loop = loop_of(family, &array);
    const int any_order = !stride || stride == Py_None;
    if (!pass->loop || (!any_order && !is_stored_as(&array, stride))) return 0;
    pass->arrays.x = pass->arrays.y = array.data, pass->arrays.also = NULL;
    return is_unobserved();
}

/* A new tensor; its memory is dense. */
static PyObject *tensor_of(PyObject *function, PyObject *of, void **data) {
    DLTensor array;
    PyObject *tensor = PyObject_CallFunctionObjArgs(function, of, NULL);
    if (!tensor || dlpack->look_at(tensor, &array)) return Py_XDECREF(tensor), NULL;
    *data = array.data;
    return tensor;
}

enum { NEW = 0, INPLACE = 1, NONE = -1 };

/* The output: a new tensor, or x, overwritten or not; NULL with an error. */
static PyObject *end(Pass *pass, PyObject *x, int output) {
    const size threads = threads_for(pass->elements);
    if (threads < 0) return NULL;
    PyObject *y = output == NEW ? tensor_of(torch.empty_result, x, &pass->arrays.y) : Py_NewRef(x);
    if (!y) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    run_over_bits(pass->loop, &pass->arrays, pass->elements, threads);
    Py_END_ALLOW_THREADS;
    if (output == INPLACE) {
        PyObject *nothing = PyObject_CallFunctionObjArgs(torch.overwritten, x, NULL);
        if (!nothing) Py_CLEAR(y);
        Py_XDECREF(nothing);
    }
    return y;
}

/* An argument, or NULL where it was left out. */
static PyObject *argument(PyObject *const *args, Py_ssize_t count, Py_ssize_t place) {
    return place < count ? args[place] : NULL;
}

static PyObject *to_bits(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Pass pass;
    if (count < 3 || count > 6)
        return PyErr_SetString(PyExc_TypeError, "to_bits takes 3 to 6 arguments"), NULL;
    PyObject *x = args[1], *inplace = args[2], *y, *bits = NULL, *result;
    const size family = PyLong_AsSsize_t(args[0]);
    const int overwrites = inplace == Py_None ? 0 : PyObject_IsTrue(inplace);
    if ((family == -1 && PyErr_Occurred()) || overwrites < 0) return NULL;
    const int can = begin(&pass, family, x, argument(args, count, 3), argument(args, count, 4),
                          argument(args, count, 5));
    if (can < 0) return NULL;
    if (!can) Py_RETURN_NONE;
    PyObject *size_of_bits = PyLong_FromSsize_t((pass.elements + 7) / 8);
    if (size_of_bits) bits = tensor_of(torch.empty_bytes, size_of_bits, (void **)&pass.arrays.bits);
    Py_XDECREF(size_of_bits);
    if (!bits) return NULL;
    const int output = inplace == Py_None ? NONE : overwrites ? INPLACE : NEW;
    y = end(&pass, x, output);
    result = !y ? NULL : output == NONE ? Py_NewRef(bits) : PyTuple_Pack(2, y, bits);
    Py_XDECREF(y);
    Py_DECREF(bits);
    return result;
}

/* Whether the bits are those of the array, too. */
static int begin_with(PyObject *bits, Pass *pass, size family, PyObject *x, PyObject *stride,
                      PyObject *a, PyObject *b) {
    DLTensor array;
    size bytes;
    int can = begin(pass, family, x, stride, a, b);
    if (can > 0) can = look_at(bits, &array, &bytes);
    if (can <= 0) return can;
    pass->arrays.bits = array.data;
    return array.code == UNSIGNED && array.bits == 8 && bytes == (pass->elements + 7) / 8;
}

static PyObject *from_bits(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Pass pass;
    DLTensor array;
    if (count < 4 || count > 7)
        return PyErr_SetString(PyExc_TypeError, "from_bits takes 4 to 7 arguments"), NULL;
    PyObject *bits = args[2], *like = args[3], *stride = PyTuple_GetItem(like, 1), *y = NULL;
    PyObject *a = argument(args, count, 4), *b = argument(args, count, 5);
    const int inplace = count > 6 ? PyObject_IsTrue(args[6]) : 0;
    size family = PyLong_AsSsize_t(args[0]);
    if (!stride || inplace < 0 || (family == -1 && PyErr_Occurred())) return NULL;
    if (!is_array(args[1], &array)) Py_RETURN_NONE;
    if (family == PART && a == Py_None) a = NULL;
    const int multiplies = family == PART && a && !loop_of(PART, &array);
    if (family == PART && (multiplies || !a)) family = SELECT;

    PyObject *x = Py_NewRef(args[1]);
    int can = begin_with(bits, &pass, family, x, stride, a, b);
    if (!can && !inplace && is_here(&array) && !is_stored_as(&array, stride)) {
        Py_DECREF(x);
        x = PyObject_CallFunctionObjArgs(torch.in_order, args[1], like, NULL);
        can = x ? begin_with(bits, &pass, family, x, stride, a, b) : -1;
    }
    if (can >= 0) y = can ? end(&pass, x, inplace ? INPLACE : NEW) : Py_NewRef(Py_None);
    if (y && can && multiplies) {
        PyObject *product = PyObject_CallMethod(y, "mul_", "O", a);
        Py_DECREF(y);
        y = product;
    }
    Py_XDECREF(x);
    return y;
}

static PyObject *are_arrays(PyObject *module, PyObject *const *tensors, Py_ssize_t count) {
    DLTensor array;
    for (Py_ssize_t k = 0; k < count; k++)
        if (tensors[k] != Py_None && !is_array(tensors[k], &array)) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

static PyObject *threads(PyObject *module, PyObject *elements) {
    const size count = PyLong_AsSsize_t(elements);
    if (count == -1 && PyErr_Occurred()) return NULL;
    const size number = threads_for(count);
    return number < 0 ? NULL : PyLong_FromSsize_t(number);
}

static PyObject *are_whole_vectors(PyObject *module, PyObject *elements) {
    const size count = PyLong_AsSsize_t(elements);
    if (count == -1 && PyErr_Occurred()) return NULL;
    const size number = threads_for(count);
    return number < 0 ? NULL : PyBool_FromLong(fills_vectors(count, number));
}

static PyObject *has_memory(PyObject *module, PyObject *tensor) {
    DLTensor array;
    const void *data;
    const int has = look_at_all(&tensor, &array, &data, 1);
    return has < 0 ? NULL : PyBool_FromLong(has);
}

static PyObject *norm(PyObject *module, PyObject *args) {
    enum { G, KEPT, VECTORS, DX = VECTORS + 5, DWEIGHT, DBIAS, ALL };
    size loop, rows, threads;
    Norm norm;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
    if (!PyArg_ParseTuple(args, "nn(nnn)n(OO)(OOOOO)(OOO)dpp:norm", &loop, &rows, &norm.features,
                          &norm.groups, &norm.places, &threads, &tensors[0], &tensors[1],
                          &tensors[2], &tensors[3], &tensors[4], &tensors[5], &tensors[6],
                          &tensors[7], &tensors[8], &tensors[9], &norm.shift, &norm.from_y,
                          &norm.centered))
        return NULL;
    if (loop < 0 || loop >= COUNT(NORMS)) {
        PyErr_SetString(PyExc_IndexError, "no such loop");
        return NULL;
    }
    const int can = look_at_all(tensors, arrays, data, ALL);
    if (can < 0) return NULL;
    if (!can) Py_RETURN_FALSE;
    for (size k = VECTORS; k < DX; k++)
        if (data[k] && (arrays[k].code != FLOAT || arrays[k].bits != (arrays[G].bits == 64 ? 64 : 32)))
            Py_RETURN_FALSE;
    /* (Hooks of saved tensors may give back anything.) */
    const size all = rows * norm.features * norm.places, channels = norm.groups * norm.features;
    if (elements_of(&arrays[G]) != all || elements_of(&arrays[KEPT]) != all ||
        arrays[KEPT].bits != arrays[G].bits)
        Py_RETURN_FALSE;
    for (size k = VECTORS; k < DX; k++)
        if (data[k] && elements_of(&arrays[k]) != (k < VECTORS + 2 ? rows : channels)) Py_RETURN_FALSE;
    norm.g = data[G], norm.kept = data[KEPT];
    norm.mean = data[VECTORS], norm.rstd = data[VECTORS + 1], norm.weight = data[VECTORS + 2];
    norm.bias = data[VECTORS + 3], norm.inverse = data[VECTORS + 4];
    norm.dx = (void *)data[DX], norm.dweight = (void *)data[DWEIGHT], norm.dbias = (void *)data[DBIAS];
    Py_BEGIN_ALLOW_THREADS;
    run_norm_by(NORMS[loop].loop, norm, rows, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE;
}

/* Whether all that are there are of one dtype, float or double, and those from `first` on vectors. */
static int are_alike(const DLTensor *arrays, const void **data, size count, size first, size length) {
    for (size k = 0; k < count; k++)
        if (data[k] && (arrays[k].code != FLOAT || arrays[k].bits != arrays[0].bits ||
                        (k >= first && (arrays[k].ndim != 1 || arrays[k].shape[0] != length))))
            return 0;
    return arrays[0].bits == 32 || arrays[0].bits == 64;
}

static PyObject *batch_norm(PyObject *module, PyObject *args) {
    enum { X, Y, MEAN, RSTD, RUNNING_MEAN, RUNNING_VAR, WEIGHT, BIAS, ALL };
    BatchNorm norm;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
    if (!PyArg_ParseTuple(args, "(nnn)OOOOOOOOdd:batch_norm", &norm.batch, &norm.channels,
                          &norm.places, &tensors[X], &tensors[Y], &tensors[MEAN], &tensors[RSTD],
                          &tensors[RUNNING_MEAN], &tensors[RUNNING_VAR], &tensors[WEIGHT],
                          &tensors[BIAS], &norm.momentum, &norm.eps))
        return NULL;
    const int can = look_at_all(tensors, arrays, data, ALL);
    const size elements = norm.batch * norm.channels * norm.places, threads = threads_for(elements);
    if (can < 0 || threads < 0) return NULL;
    if (!can || !are_alike(arrays, data, ALL, MEAN, norm.channels)) Py_RETURN_FALSE;
    norm.x = data[X], norm.y = (void *)data[Y];
    norm.mean = (void *)data[MEAN], norm.squares = (void *)data[RSTD];
    norm.running_mean = (void *)data[RUNNING_MEAN], norm.running_var = (void *)data[RUNNING_VAR];
    norm.weight = data[WEIGHT], norm.bias = data[BIAS];
    Py_BEGIN_ALLOW_THREADS;
    run_batch_norm(&norm, arrays[X].bits == 64, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE; /* (torch does not count it either as a version of the running statistics) */
}

static PyObject *batch_norm_backward(PyObject *module, PyObject *args) {
    enum { G, X, DX, MEAN, RSTD, WEIGHT, DWEIGHT, DBIAS, ALL };
    BatchNormBackward norm;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
    if (!PyArg_ParseTuple(args, "(nnn)OOOOOOOO:batch_norm_backward", &norm.batch, &norm.channels,
                          &norm.places, &tensors[G], &tensors[X], &tensors[DX], &tensors[MEAN],
                          &tensors[RSTD], &tensors[WEIGHT], &tensors[DWEIGHT], &tensors[DBIAS]))
        return NULL;
    const int can = look_at_all(tensors, arrays, data, ALL);
    const size elements = norm.batch * norm.channels * norm.places, threads = threads_for(elements);
    if (can < 0 || threads < 0) return NULL;
    if (!can || !are_alike(arrays, data, ALL, MEAN, norm.channels)) Py_RETURN_FALSE;
    norm.g = data[G], norm.x = data[X], norm.dx = (void *)data[DX];
    norm.mean = data[MEAN], norm.rstd = data[RSTD], norm.weight = data[WEIGHT];
    norm.dweight = (void *)data[DWEIGHT], norm.dbias = (void *)data[DBIAS];
    in_threads((Task){arrays[G].bits == 64 ? batch_norm_backward_double : batch_norm_backward_float,
                      &norm, norm.channels, 1}, threads, elements);
    Py_RETURN_TRUE;
}

/* Over planes, or rows of outputs. (Without Python's lock, or with it.) */
static void run_pool(int backwards, int kind, const void *x, void *y, uint8_t *offsets,
                     size planes, size channels, const Window *window, size threads) {
    Pool pool = {x, y, offsets, channels, *window, {0}};
    const size *in = window->in, *out = window->out, *kernel = window->kernel;
    const size *dilation = window->dilation;
    for (size k = 0; k < kernel[0] * kernel[1] * kernel[2]; k++) {
        const size k0 = k / kernel[2] / kernel[1], k1 = k / kernel[2] % kernel[1], k2 = k % kernel[2];
        pool.moves[k] = (k0 * dilation[0] * in[1] + k1 * dilation[1]) * in[2] + k2 * dilation[2];
    }
    Loop *const loops[][2] = {{max_pool_float, unpool_float}, {max_pool_double, unpool_double},
                              {max_pool_bfloat16, unpool_bfloat16}, {max_pool_float16, unpool_float16}};
    Loop *loop = loops[kind][backwards];
    const size rows = planes * out[0] * out[1], volume = kernel[0] * kernel[1] * kernel[2];
    if (backwards) run((Task){loop, &pool, planes, 1}, threads, planes * in[0] * in[1] * in[2] * channels);
    else run((Task){loop, &pool, rows, 1}, threads, rows * out[2] * channels * volume * LONG);
}

static void run_adaptive_pool(const Adaptive *adaptive, int is_double, size planes, size threads) {
    const size *in = adaptive->in, *out = adaptive->out;
    run((Task){is_double ? adaptive_max_pool_double : adaptive_max_pool_float, adaptive,
               planes * out[0] * out[1], 1}, threads, planes * in[0] * in[1] * in[2]);
}

static PyObject *pool(PyObject *module, PyObject *args) {
    enum { X, Y, OFFSETS, ALL };
    int backwards;
    size planes, channels;
    Window window;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
#define THREE(FIELD) &window.FIELD[0], &window.FIELD[1], &window.FIELD[2]
    if (!PyArg_ParseTuple(args, "pnnOOO(nnn)(nnn)(nnn)(nnn)(nnn)(nnn):pool", &backwards, &planes,
                          &channels, &tensors[X], &tensors[Y], &tensors[OFFSETS], THREE(in),
                          THREE(out), THREE(kernel), THREE(stride), THREE(padding), THREE(dilation)))
        return NULL;
    const size *in = window.in, *kernel = window.kernel;
    if (kernel[0] * kernel[1] * kernel[2] > LARGEST_WINDOW) {
        PyErr_SetString(PyExc_ValueError, "the window is too large");
        return NULL;
    }
    const int can = look_at_all(tensors, arrays, data, ALL);
    if (can < 0) return NULL;
    const int kind = kind_of(arrays[X].code, arrays[X].bits);
    if (!can || kind < 0 || arrays[OFFSETS].code != UNSIGNED || arrays[OFFSETS].bits != 8)
        Py_RETURN_FALSE;
    const size threads = threads_for(planes * in[0] * in[1] * in[2] * channels);
    if (threads < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    run_pool(backwards, kind, data[X], (void *)data[Y], (uint8_t *)data[OFFSETS], planes, channels,
             &window, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE;
}

static PyObject *to_channels_first(PyObject *module, PyObject *args) {
    size count, channels, places;
    PyObject *tensors[2];
    DLTensor arrays[2];
    const void *data[2];
    if (!PyArg_ParseTuple(args, "(nnn)OO:channels_first", &count, &channels, &places, &tensors[0], &tensors[1]))
        return NULL;
    const size elements = count * channels * places, threads = threads_for(elements);
    const int can = look_at_all(tensors, arrays, data, 2);
    if (can < 0 || threads < 0) return NULL;
    const int bytes = arrays[0].bits / 8;
    if (!can || (bytes != 2 && bytes != 4 && bytes != 8) || arrays[1].bits != arrays[0].bits) Py_RETURN_FALSE;
    Py_BEGIN_ALLOW_THREADS;
    channels_first(data[0], (void *)data[1], bytes, count, channels, places, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS,
     "connect(capsule, Tensor, Parameter, is_neg, empty_result, empty_bytes, overwritten, threads, mode, "
     "mode, functions, in_order): to torch, by DLPack and its own functions"},
    {"to_bits", (PyCFunction)(void (*)(void))to_bits, METH_FASTCALL,
     "to_bits(loop, x, inplace | None, stride=None, a=None, b=None): the output and the bits, or the "
     "bits alone where inplace is None; None where the loop is not for such a tensor"},
    {"from_bits", (PyCFunction)(void (*)(void))from_bits, METH_FASTCALL,
     "from_bits(loop, x, bits, like, a=None, b=None, inplace=False): the output, or None as to_bits; "
     "without a, part is select"},
    {"are_arrays", (PyCFunction)(void (*)(void))are_arrays, METH_FASTCALL,
     "are_arrays(*tensors): whether each is None, or of torch's own classes, strided, and real; and "
     "none of torch.func"},
    {"threads_for", threads, METH_O, "threads_for(elements): how many a loop over so many uses at most"},
    {"fills_vectors", are_whole_vectors, METH_O,
     "fills_vectors(elements): whether torch leaves none of so many over, as too few for a vector"},
    {"has_memory", has_memory, METH_O,
     "has_memory(x): whether it is a plain tensor, stored without gaps, and no mode has to see "
     "operations"},
    {"norm", norm, METH_VARARGS,
     "norm(loop, rows, (features, groups, places), threads, (g, kept), (mean, rstd, weight, bias, "
     "inverse), (dx, dweight, dbias), shift, from_y, centered), where inverse is that of the weight, "
     "for rows from y: whether the loop is for such tensors, which are contiguous, or None"},
    {"batch_norm", batch_norm, METH_VARARGS,
     "batch_norm((batch, channels, places), x, y, mean, rstd, running_mean, running_var, weight, bias, "
     "momentum, eps): whether the loop is for such tensors, which are contiguous, or None"},
    {"batch_norm_backward", batch_norm_backward, METH_VARARGS,
     "batch_norm_backward((batch, channels, places), g, x, dx, mean, rstd, weight, dweight, dbias): "
     "as batch_norm"},
    {"channels_first", to_channels_first, METH_VARARGS,
     "channels_first((images, channels, places), x, y): whether the loop is for such tensors, of which x "
     "stores the channels last, and y is contiguous"},
    {"pool", pool, METH_VARARGS,
     "pool(backwards, planes, channels, x, y, offsets, in, out, kernel, stride, padding, dilation), "
     "where sizes have three values: whether the loop is for such tensors"},
    {NULL, NULL, 0, NULL},
};

static const struct {
    const char *name;
    long value;
} CONSTANTS[] = {{"INTERFACE", INTERFACE}, {"LEAST_ELEMENTS", LEAST_ELEMENTS}, {"LEAST_PLACES", LEAST_PLACES}};

static int add_names(PyObject *module, const Named *table, size count) {
    for (size k = 0; k < count; k++)
        if (PyModule_AddIntConstant(module, table[k].name, (long)k) < 0) return -1;
    return 0;
}

static int add_loops(PyObject *module) {
    static const Loops loops = {loop_for, run_over_bits,     run_pool,   run_adaptive_pool,
                                run_norm, run_batch_norm,    bernoulli,  run_softmax,
                                channels_first};
    PyObject *capsule = PyCapsule_New((void *)&loops, LOOPS, NULL);
    const int failed = !capsule || PyModule_AddObjectRef(module, "loops", capsule) < 0;
    Py_XDECREF(capsule);
    if (failed) return -1;
    for (size k = 0; k < COUNT(CONSTANTS); k++)
        if (PyModule_AddIntConstant(module, CONSTANTS[k].name, CONSTANTS[k].value) < 0) return -1;
    if (add_names(module, NORMS, COUNT(NORMS))) return -1;
    for (size k = 0; k < COUNT(OVER_BITS); k++)
        if (PyModule_AddIntConstant(module, OVER_BITS[k].name, (long)k) < 0) return -1;
#if defined(__GNUC__) && !defined(_WIN32)
    if (pthread_atfork(NULL, NULL, in_fork)) return -1;
#endif
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_loops}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Loops over arrays.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
