/* Convolutions that pad by other values than zeros, or by more on one side: what is kept is x, not its padded
   copy, which backward makes again. */

#pragma once

#include "arguments.h"
#include "conv.h"
#include "layer.h"
#include "padding.h"

namespace {

enum Mode { ZEROS, REFLECT, REPLICATE, CIRCULAR, MODES };
constexpr const char *NAMES_OF_MODES[] = {"zeros", "reflect", "replicate", "circular"};

Mode mode_of(PyObject *name) {
    int mode = ZEROS;
    while (mode < MODES && PyUnicode_CompareWithASCIIString(name, NAMES_OF_MODES[mode])) mode++;
    return (Mode)mode;
}

Tensor padded(const Tensor &x, at::IntArrayRef edges, Mode mode) {
    return at::pad(x, edges, mode == ZEROS ? "constant" : NAMES_OF_MODES[mode]);
}

/* The gradient of what was padded, of that of the padded copy, which nobody else has. */
Tensor unpadded(const Tensor &g, at::IntArrayRef shape, at::IntArrayRef edges, Mode mode, at::MemoryFormat format) {
    if (mode == REFLECT || mode == REPLICATE) return unpad(g, shape, edges, mode == REPLICATE, format);
    const int64_t dims = edges.size() / 2;
    Tensor inner = g;
    for (int64_t axis = 2; axis < dims + 2; axis++) {
        const int64_t size = shape[axis], left = edges[2 * (dims + 1 - axis)], right = edges[2 * (dims + 1 - axis) + 1];
        if (mode == CIRCULAR) {
            g.narrow(axis, size, left).add_(g.narrow(axis, 0, left));
            g.narrow(axis, left, right).add_(g.narrow(axis, left + size, right));
        }
        inner = inner.narrow(axis, left, size);
    }
    return is_known(g) ? inner.clone(format) : inner.clone();
}

struct PaddedConvs : Function<PaddedConvs> {
    static variable_list backward(AutogradContext *ctx, const variable_list &gs);
};

PyObject *padded_convolution(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "padded_convolution takes 9 arguments");
    const Tensor *x = plain(args[1]), *weight = plain(args[2]), *bias = nullptr;
    const bool has_bias = args[3] != Py_None;
    if (!x || !weight || (has_bias && !(bias = plain(args[3])))) Py_RETURN_NONE;
    if (x->dim() != weight->dim() || x->dim() < 3 || x->dim() > 5 || !x->numel() || !weight->numel()) Py_RETURN_NONE;
    if (is_autocast(*x) || !PyLong_CheckExact(args[6]) || !PyUnicode_Check(args[7])) Py_RETURN_NONE;
    const size_t dims = x->dim() - 2;
    const int64_t groups = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred()) return nullptr;
    const Mode mode = mode_of(args[7]);
    const auto format = any_format_of(*x, dims);
    at::DimVector by[4], edges;
    by[PADDING] = at::DimVector(dims, 0);
    if (mode == MODES || !format || count_of(args[8]) != (Py_ssize_t)(2 * dims)) Py_RETURN_NONE;
    if (!sizes(args[4], dims, by[STRIDE]) || !sizes(args[5], dims, by[DILATION])) Py_RETURN_NONE;
    if (!sizes(args[8], 2 * dims, edges)) Py_RETURN_NONE;
    for (const int64_t edge : edges)
        if (edge < 0) Py_RETURN_NONE;
    /* (Those of a module are the module's, where another thread may replace them.) */
    const Tensor own_weight = *weight, own_bias = has_bias ? *bias : Tensor();
    Made made;
    made.kept.resize(2);
    if (own_weight.requires_grad()) made.kept[0] = *x;
    if (x->requires_grad()) made.kept[1] = own_weight;
    made.y = compute([&] {
        const auto given = has_bias ? std::optional<Tensor>(own_bias) : std::nullopt;
        return at::convolution(padded(*x, edges, mode), own_weight, given, by[STRIDE], by[PADDING], by[DILATION], false,
                               by[PADDING], groups);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    made.call["has_bias"] = has_bias;
    made.call["weight"] = own_weight.sizes();
    made.call["edges"] = at::IntArrayRef(edges);
    Numbers options = {mode, groups, (int64_t)*format};
    options.append(x->sizes().begin(), x->sizes().end());
    for (const Sizes one : {STRIDE, DILATION}) options.append(by[one].begin(), by[one].end());
    made.call["options"] = at::IntArrayRef(options);
    if (!name(args[0], made)) return nullptr;
    link<PaddedConvs>({*x, own_weight, own_bias}, {made.y}, made);
    return THPVariable_Wrap(made.y);
    END_HANDLE_TH_ERRORS
}

variable_list PaddedConvs::backward(AutogradContext *ctx, const variable_list &gs) {
    const auto kept = ctx->get_saved_variables();
    if (!gs[0].defined()) return variable_list(4);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto options = options_of(ctx);
    const auto edges = ctx->saved_data.at("edges").toDimVector();
    const auto of_weight = ctx->saved_data.at("weight").toDimVector();
    const size_t dims = edges.size() / 2, first = 3;
    const Mode mode = (Mode)options[0];
    const int64_t groups = options[1];
    const auto format = (at::MemoryFormat)options[2];
    const at::IntArrayRef numbers = at::IntArrayRef(options).slice(first);
    const at::DimVector shape(numbers.slice(0, dims + 2)), zeros(at::IntArrayRef(NO_PLACES, dims));
    at::DimVector by[4], around = shape;
    by[STRIDE] = at::DimVector(numbers.slice(dims + 2, dims));
    by[DILATION] = at::DimVector(numbers.slice(2 * dims + 2, dims));
    by[PADDING] = by[LEFT_OVER] = zeros;
    for (size_t axis = 0; axis < dims; axis++) {
        const int64_t places = shape[2 + axis] + edges[2 * (dims - 1 - axis)] + edges[2 * (dims - 1 - axis) + 1];
        const int64_t of_kernel = by[DILATION][axis] * (of_weight[2 + axis] - 1) + 1;
        around[2 + axis] = places;
        by[LEFT_OVER][axis] = (places - of_kernel) % by[STRIDE][axis];
    }
    const bool wants_x = ctx->needs_input_grad(0), wants_weight = ctx->needs_input_grad(1);
    const bool wants_bias = ctx->saved_data.at("has_bias").toBool() && ctx->needs_input_grad(2);
    const Tensor g = wants_x ? in_format(gs[0], format) : gs[0];
    variable_list grads(4);
    /* Of few elements the padded copies live at once; of others that of x is gone before there is its gradient. */
    const bool at_once = wants_x && wants_weight && c10::multiply_integers(shape) < FEW_ELEMENTS;
    if (wants_weight) {
        const Tensor weight = at_once ? kept[1] : stand_in(g, of_weight);
        std::tie(grads[0], grads[1], grads[2]) = at::convolution_backward(
            g, padded(kept[0], edges, mode), weight, at::OptionalIntArrayRef(at::IntArrayRef(of_weight).slice(0, 1)),
            by[STRIDE], zeros, by[DILATION], false, zeros, groups, {at_once, true, wants_bias});
    } else if (wants_bias) {
        at::DimVector others(dims + 1, 0);
        for (size_t axis = 0; axis < dims; axis++) others[1 + axis] = 2 + axis;
        grads[2] = g.sum(others);
    }
    if (wants_x && !at_once) grads[0] = gradient_of_images(g, kept[1], around, format, by, false, groups);
    if (wants_x) grads[0] = unpadded(grads[0], shape, edges, mode, format);
    return grads;
}

}  // namespace
