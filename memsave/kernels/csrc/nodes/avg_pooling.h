/* Average pooling. Of one axis, as torch: of two, of which the first has one place. */

#pragma once

#include "arguments.h"
#include "layer.h"

namespace {

Backward avg_pool_backward;

PyObject *avg_pool(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "avg_pool takes 9 arguments");
    const Tensor *x = known(args[1]);
    const size_t dims = PyLong_AsSize_t(args[2]);
    bool rounding[2];
    const int64_t divisor = PyLong_CheckExact(args[8]) ? PyLong_AsLongLong(args[8]) : 0;
    if (PyErr_Occurred()) return nullptr;
    at::DimVector by[3];
    if (!x || !x->numel() || !flags(args + 6, rounding, 2)) Py_RETURN_NONE;
    if (args[8] != Py_None && !divisor) Py_RETURN_NONE;
    const bool ceil = rounding[0], includes = rounding[1];
    const auto format = dims == 2 && x->is_cpu() ? any_format_of(*x, dims) : std::nullopt;
    if (!format && !x->is_contiguous()) Py_RETURN_NONE;
    for (int k = 0; k < 3; k++)
        if (!sizes(args[3 + k], dims, by[k])) Py_RETURN_NONE;
    const auto given = divisor ? std::optional<int64_t>(divisor) : std::nullopt;
    Made made;
    made.y = compute([&] {
        if (dims == 1) return at::avg_pool1d(*x, by[0], by[1], by[2], ceil, includes);
        if (dims == 2) return at::avg_pool2d(*x, by[0], by[1], by[2], ceil, includes, given);
        return at::avg_pool3d(*x, by[0], by[1], by[2], ceil, includes, given);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    Numbers options = {ceil, includes, divisor, (int64_t)dims, format ? (int64_t)*format : -1};
    const int64_t absent[] = {1, 1, 0};
    for (int k = 0; k < 3; k++) {
        if (dims == 1) options.push_back(absent[k]);
        options.append(by[k].begin(), by[k].end());
    }
    options.append(x->sizes().begin(), x->sizes().end());
    made.call["options"] = at::IntArrayRef(options);
    return layer(args[0], *x, avg_pool_backward, made);
    END_HANDLE_TH_ERRORS
}

Tensor avg_pool_backward(AutogradContext *ctx, const Tensor &g) {
    ctx->get_saved_variables(); /* none; but a second time is an error, as in stock */
    const auto options = options_of(ctx);
    const bool flat = options[3] == 1;
    const size_t first = 5, dims = flat ? 2 : options[3];
    const auto by = [&](int k) { return at::IntArrayRef(options).slice(first + k * dims, dims); };
    const at::DimVector shape(at::IntArrayRef(options).slice(first + 3 * dims));
    const auto divisor = options[2] ? std::optional<int64_t>(options[2]) : std::nullopt;
    if (options[4] >= 0) {
        const auto format = (at::MemoryFormat)options[4];
        if (Tensor dx = to_be_written(g, shape, format); dx.defined()) {
            at::AutoDispatchBelowADInplaceOrView guard;
            return at::avg_pool2d_backward_outf(g.contiguous(format), dx, by(0), by(1), by(2), options[0], options[1],
                                                divisor, dx);
        }
    }
    const Tensor x = stand_in(g, flat ? with_one_place(shape) : shape);
    const BelowAutograd guard(g);
    const Tensor dx = (dims == 3 ? at::avg_pool3d_backward : at::avg_pool2d_backward)(
        flat ? g.unsqueeze(-2) : g, x, by(0), by(1), by(2), options[0], options[1], divisor);
    return flat ? dx.squeeze(-2) : dx;
}

Backward adaptive_avg_pool_backward;

PyObject *adaptive_avg_pool(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 4, "adaptive_avg_pool takes 4 arguments");
    const Tensor *x = known(args[1]);
    const size_t dims = PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred()) return nullptr;
    at::DimVector out;
    const Py_ssize_t given = count_of(args[3]);
    if (given < 0 ? args[3] == Py_None : (size_t)given != dims) Py_RETURN_NONE;
    if (!x || !x->numel() || (size_t)x->dim() < dims) Py_RETURN_NONE;
    const auto format = any_format_of(*x, dims);
    if (!format || (x->is_cuda() && !x->is_contiguous())) Py_RETURN_NONE;
    if (!sizes(args[3], dims, out, x->sizes().slice(x->dim() - dims))) Py_RETURN_NONE;
    Made made;
    made.y = compute([&] {
        if (dims == 1) return at::adaptive_avg_pool1d(*x, out);
        return dims == 2 ? at::adaptive_avg_pool2d(*x, out) : at::adaptive_avg_pool3d(*x, out);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    made.call["dims"] = (int64_t)dims;
    made.call["shape"] = x->sizes();
    made.call["format"] = (int64_t)*format;
    return layer(args[0], *x, adaptive_avg_pool_backward, made);
    END_HANDLE_TH_ERRORS
}

Tensor adaptive_avg_pool_backward(AutogradContext *ctx, const Tensor &g) {
    ctx->get_saved_variables(); /* none; but a second time is an error, as in stock */
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    const int64_t dims = ctx->saved_data.at("dims").toInt();
    const auto format = format_in(ctx);
    if (dims == 1) return at::_adaptive_avg_pool2d_backward(g.unsqueeze(-2), stand_in(g, with_one_place(shape))).squeeze(-2);
    const auto backward = dims == 2 ? at::_adaptive_avg_pool2d_backward : at::_adaptive_avg_pool3d_backward;
    Tensor dx = format == at::MemoryFormat::Contiguous ? Tensor() : to_be_written(g, shape, format);
    if (!dx.defined()) return backward(g, stand_in(g, shape));
    const Tensor last = g.contiguous(format);
    /* The kernel for channels that are last wants x in this format; another takes the gradient itself for x. */
    const int64_t windows[] = {shape[2] / g.size(2), shape[3] / g.size(3)}, none[] = {0, 0};
    if (dims == 3 || shape[2] % g.size(2) || shape[3] % g.size(3)) return backward(last, dx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::avg_pool2d_backward_outf(last, dx, windows, windows, none, false, true, std::nullopt, dx);
}

}  // namespace
