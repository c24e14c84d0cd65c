/* Convolutions, transposed or not, by what is no parameter. The gradient is the other of the two; of few
   elements, and of several groups, stock's kernel is the faster. They cast as autocast says. */

#pragma once

#include "arguments.h"
#include "function.h"
#include "layer.h"

namespace {

constexpr int64_t FEW_ELEMENTS = 1 << 15;
constexpr int64_t NO_PLACES[3] = {}; /* of each axis */
enum Sizes { STRIDE, PADDING, DILATION, LEFT_OVER };

Backward convolution_backward;
PyObject *padded_convolution(PyObject *, PyObject *const *args, Py_ssize_t count); /* see padded_conv.h */

PyObject *convolution(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 10, "convolution takes 10 arguments");
    const Tensor *x = known(args[1]), *given_weight = known(args[2]);
    const bool has_bias = args[3] != Py_None, transposed = args[7] == Py_True;
    const Tensor *given_bias = has_bias ? known(args[3]) : nullptr;
    const int64_t groups = PyLong_AsLongLong(args[9]);
    if (PyErr_Occurred()) return nullptr;
    if (!x || !given_weight || (has_bias && !given_bias) || !x->numel()) Py_RETURN_NONE;
    /* (Those of a module are the module's, where another thread may replace them.) */
    const Tensor weight = *given_weight, bias = has_bias ? *given_bias : Tensor();
    if (x->dim() != weight.dim() || x->dim() < 3 || x->dim() > 5) Py_RETURN_NONE;
    const size_t dims = x->dim() - 2;
    const auto format = any_format_of(*x, dims);
    if (x->is_cpu() && !format) Py_RETURN_NONE;
    at::DimVector by[4];
    for (int k = 0; k < 4; k++)
        if (!sizes(args[k == LEFT_OVER ? 8 : 4 + k], dims, by[k])) Py_RETURN_NONE;
    const bool casts = is_autocast(*x);
    const auto dtype = casts ? at::autocast::get_autocast_dtype(x->device().type()) : x->scalar_type();
    const auto cast = [&](const Tensor &t) {
        return casts && t.is_floating_point() && t.scalar_type() != at::kDouble ? t.to(dtype) : t;
    };
    Made made;
    made.y = compute([&] {
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const auto given = has_bias ? std::optional<Tensor>(cast(bias)) : std::nullopt;
        made.kept = {cast(weight)};
        return at::convolution(cast(*x), made.kept[0], given, by[STRIDE], by[PADDING], by[DILATION], transposed,
                               by[LEFT_OVER], groups);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    for (size_t axis = 0; axis < dims && !transposed; axis++)
        by[LEFT_OVER][axis] = (x->size(2 + axis) + 2 * by[PADDING][axis] -
                               by[DILATION][axis] * (weight.size(2 + axis) - 1) - 1) % by[STRIDE][axis];
    Numbers options = {transposed, groups, x->is_cpu() ? (int64_t)*format : 0};
    for (const auto &one : by) options.append(one.begin(), one.end());
    options.append(x->sizes().begin(), x->sizes().end());
    made.call["options"] = at::IntArrayRef(options);
    return layer(args[0], *x, convolution_backward, made);
    END_HANDLE_TH_ERRORS
}

/* That of a module: by torch itself, where that keeps the same. */
PyObject *convolution_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3 && PyDict_Check(args[1]), "convolution_of takes a name, a dict and a tensor");
    static PyObject *const zero = PyLong_FromLong(0);
    const Module module = {args[1]};
    PyObject *weight = module.parameter("weight"), *bias = module.parameter("bias");
    PyObject *padding = module.option("padding"), *mode = module.option("padding_mode");
    PyObject *stride = module.option("stride"), *dilation = module.option("dilation");
    PyObject *groups = module.option("groups");
    if (!weight || !bias || !padding || !mode || !stride || !dilation || !groups) Py_RETURN_NONE;
    if (!PyUnicode_Check(mode) || args[2] == Py_None || weight == Py_None || module.option("_conv_forward"))
        Py_RETURN_NONE;
    const auto wanted = wanted_of({args[2], weight, bias});
    if (PyUnicode_CompareWithASCIIString(mode, "zeros")) {
        PyObject *edges = module.option("_reversed_padding_repeated_twice");
        PyObject *const all[] = {args[0], args[2], weight, bias, stride, dilation, groups, mode, edges};
        if (!edges || !wanted || !*wanted) Py_RETURN_NONE;
        return padded_convolution(nullptr, all, 9);
    }
    if (wanted == 1) {
        PyObject *const all[] = {args[0], args[2], weight, bias, stride, padding, dilation, Py_False, zero, groups};
        return convolution(nullptr, all, 10);
    }
    const Tensor &x = THPVariable_Unpack(args[2]);
    if (!wanted || (*wanted && !(*wanted & 2)) || !are_leaves({weight, bias})) Py_RETURN_NONE;
    if (is_autocast(x) || !PyLong_CheckExact(groups)) Py_RETURN_NONE;
    const Tensor w = THPVariable_Unpack(weight); /* before another thread may replace the module's */
    const size_t dims = w.dim() - 2;
    at::DimVector by[3];
    if (dims < 1 || dims > 3 || !sizes(stride, dims, by[STRIDE]) || !sizes(padding, dims, by[PADDING])) Py_RETURN_NONE;
    if (!sizes(dilation, dims, by[DILATION])) Py_RETURN_NONE;
    const int64_t parts = PyLong_AsLongLong(groups);
    if (PyErr_Occurred()) return nullptr;
    const auto given = bias == Py_None ? std::nullopt : std::optional<Tensor>(THPVariable_Unpack(bias));
    Tensor y;
    {
        pybind11::gil_scoped_release unlocked;
        if (dims == 1) y = at::conv1d(x, w, given, by[STRIDE], by[PADDING], by[DILATION], parts);
        else if (dims == 2) y = at::conv2d(x, w, given, by[STRIDE], by[PADDING], by[DILATION], parts);
        else y = at::conv3d(x, w, given, by[STRIDE], by[PADDING], by[DILATION], parts);
    }
    return THPVariable_Wrap(y);
    END_HANDLE_TH_ERRORS
}

/* The gradient of x, that is of this shape and stored so. */
Tensor gradient_of_images(const Tensor &given, const Tensor &weight, at::IntArrayRef shape, at::MemoryFormat format,
                          const at::DimVector *by, bool transposed, int64_t groups) {
    const size_t dims = shape.size() - 2;
    const bool few = c10::multiply_integers(shape) < FEW_ELEMENTS;
    Tensor g = given, x;
    if (g.is_cpu()) {
        g = in_format(g, format);
        const bool is_last = format != at::MemoryFormat::Contiguous, fits = c10::multiply_integers(shape) <= g.numel();
        /* (oneDNN takes twice as long for the transposed one of several groups of channels that are last.) */
        const bool in_groups = is_last && groups > 1 && groups < shape[1] && g.scalar_type() == at::kFloat;
        if (!transposed && (is_last ? fits && (few || in_groups) : few)) x = stand_in(g, shape, format);
    } else if (!transposed) {
        /* (It may copy x, if that is not stored as g is; and that of one axis always, but not of two.) */
        const auto like_x = dims == 1 ? with_one_place(at::DimVector(shape)) : at::DimVector(shape);
        const auto own = any_format_of(g, dims);
        const bool fits = own && is_final(g) && c10::multiply_integers(shape) <= g.numel();
        if (groups > 1 && g.is_contiguous()) x = at::empty({1}, g.options()).expand(like_x);
        else if (fits) x = stand_in(g, like_x, *own);
    }
    if (!x.defined())
        return at::convolution(g, weight, {}, by[STRIDE], by[PADDING], by[DILATION], !transposed,
                               transposed ? at::IntArrayRef(NO_PLACES, dims) : at::IntArrayRef(by[LEFT_OVER]), groups);
    const bool flat = x.dim() > g.dim();
    const auto along = [&](Sizes one, int64_t first) {
        at::DimVector sizes(by[one]);
        if (flat) sizes.insert(sizes.begin(), first);
        return sizes;
    };
    const BelowAutograd guard(g);
    const Tensor dx = std::get<0>(at::convolution_backward(
        flat ? g.unsqueeze(-2) : g, x, flat ? weight.unsqueeze(-2) : weight, at::OptionalIntArrayRef(),
        along(STRIDE, 1), along(PADDING, 0), along(DILATION, 1), false, {NO_PLACES, (size_t)x.dim() - 2}, groups,
        {true, false, false}));
    return flat ? dx.squeeze(-2) : dx;
}

Tensor convolution_backward(AutogradContext *ctx, const Tensor &g) {
    const Tensor weight = ctx->get_saved_variables()[0];
    const auto options = options_of(ctx);
    const size_t first = 3, dims = (options.size() - first - 2) / 5;
    const at::IntArrayRef numbers = at::IntArrayRef(options).slice(first);
    at::DimVector by[4];
    for (int k = 0; k < 4; k++) by[k] = at::DimVector(numbers.slice(k * dims, dims));
    return gradient_of_images(g, weight, numbers.slice(4 * dims), (at::MemoryFormat)options[2], by, options[0],
                              options[1]);
}

}  // namespace
