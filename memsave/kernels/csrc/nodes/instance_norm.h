/* Instance normalization: as torch does it, batch normalization of one example that has all channels. */

#pragma once

#include "arguments.h"
#include "layer.h"
#include "norm.h"

namespace {

Tensor as_one(const Tensor &x) {
    at::DimVector shape(x.sizes());
    shape[0] = 1, shape[1] = x.size(0) * x.size(1);
    return x.view(shape);
}

std::optional<Tensor> for_each_example(const Tensor &vector, const Tensor &x) {
    if (!vector.defined()) return std::nullopt;
    return (x.size(0) == 1 ? vector : vector.repeat(x.size(0))).contiguous();
}

const void *data_of(const std::optional<Tensor> &vector) { return vector ? vector->const_data_ptr() : nullptr; }

/* The output and the statistics, of memory that is contiguous. */
std::tuple<Tensor, Tensor, Tensor> normalized_by_loop(const Tensor &x, const std::optional<Tensor> &weight,
                                                      const std::optional<Tensor> &bias, double eps) {
    const auto dtype = x.scalar_type();
    const int64_t channels = x.size(0) * x.size(1);
    const Tensor y = memory(x.sizes(), dtype), mean = memory({channels}, dtype), rstd = memory({channels}, dtype);
    const BatchNorm norm = {x.const_data_ptr(), data_of(weight), data_of(bias), y.mutable_data_ptr(),
                            mean.mutable_data_ptr(), rstd.mutable_data_ptr(), nullptr, nullptr,
                            1, channels, x.numel() / channels, 0, eps};
    loops->batch_norm(&norm, dtype == at::kDouble, at::get_num_threads());
    return {y, mean, rstd};
}

Backward instance_norm_backward;

PyObject *instance_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 6, "instance_norm takes 6 arguments");
    const Tensor *x = plain(args[1]);
    double eps;
    Tensor vectors[2];
    if (!x || !numbers(args + 4, &eps, 1)) Py_RETURN_NONE;
    if (x->dim() < 3 || x->numel() < 2 * x->size(0) * x->size(1) || !x->numel()) Py_RETURN_NONE;
    for (int k = 0; k < 2; k++) {
        if (args[2 + k] == Py_None) continue;
        const Tensor *vector = plain(args[2 + k]);
        if (!vector || vector->scalar_type() != x->scalar_type() || vector->dim() != 1 ||
            vector->numel() != x->size(1) || vector->requires_grad())
            Py_RETURN_NONE;
        vectors[k] = *vector;
    }
    const bool by_loop = args[5] == Py_True;
    Made made;
    compute([&] {
        const Tensor read = contiguous(*x, true);
        const auto weight = for_each_example(vectors[0], *x), bias = for_each_example(vectors[1], *x);
        const auto [y, mean, rstd] =
            by_loop ? normalized_by_loop(read, weight, bias, eps)
                    : at::native_batch_norm(as_one(read), weight, bias, {}, {}, true, 0, eps);
        const at::IntArrayRef shape = x->sizes().slice(0, 2);
        made.y = y.view(x->sizes());
        made.kept = {*x, vectors[0], mean.view(shape), rstd.view(shape)};
    });
    made.call["eps"] = eps;
    return layer(args[0], *x, instance_norm_backward, made);
    END_HANDLE_TH_ERRORS
}

/* (The derivative of torch's operation accounts for the statistics as functions of x.) */
Tensor instance_norm_backward(AutogradContext *ctx, const Tensor &g) {
    const auto kept = ctx->get_saved_variables();
    const double eps = ctx->saved_data.at("eps").toDouble();
    const bool at_once = is_final(g);
    const Tensor x = contiguous(kept[0], at_once);
    /* (Hooks of saved tensors may give back anything.) */
    const int64_t rows = g.size(0) * g.size(1), elements[] = {g.numel(), g.size(1), rows, rows};
    bool fast = at_once && is_wide(g) && x.sizes() == g.sizes();
    for (int k = 0; k < 4; k++) {
        const Tensor &one = k ? kept[k] : x;
        fast = fast && (!one.defined() || (is_plain(one) && one.is_contiguous() && one.numel() == elements[k] &&
                                           one.scalar_type() == g.scalar_type()));
    }
    if (fast) {
        const bool wanted[] = {true, false, false};
        return norm_by_loop(g, {x, kept[1], {}, {}, kept[3]}, wanted, g.size(1), false, true, kept[2])[0];
    }
    const auto weight = for_each_example(kept[1], g);
    const auto grads = at::native_batch_norm_backward(as_one(contiguous(g, at_once)), as_one(x), weight, {}, {},
                                                      kept[2].flatten(), kept[3].flatten(), true, eps,
                                                      {true, false, false});
    return std::get<0>(grads).view(g.sizes());
}

}  // namespace
