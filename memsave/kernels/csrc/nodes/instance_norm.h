/* Instance normalization: as torch does it, batch normalization of one example that has all channels. */

#pragma once

#include "arguments.h"
#include "cpu.h"
#include "layer.h"

namespace {

Tensor as_one(const Tensor &x, bool is_constant) {
    at::DimVector shape(x.sizes());
    shape[0] = 1, shape[1] = x.size(0) * x.size(1);
    return contiguous(x, is_constant).view(shape);
}

std::optional<Tensor> for_each_example(const Tensor &vector, const Tensor &x) {
    if (!vector.defined()) return std::nullopt;
    return x.size(0) == 1 ? vector : vector.repeat(x.size(0));
}

Backward instance_norm_backward;

PyObject *instance_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 5, "instance_norm takes 5 arguments");
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
    Made made;
    compute([&] {
        const auto weight = for_each_example(vectors[0], *x), bias = for_each_example(vectors[1], *x);
        const auto [y, mean, rstd] = at::native_batch_norm(as_one(*x, true), weight, bias, {}, {}, true, 0, eps);
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
    const auto weight = for_each_example(kept[1], g);
    const bool fast = is_final(g);
    const auto grads = at::native_batch_norm_backward(as_one(g, fast), as_one(kept[0], fast), weight, {}, {},
                                                      kept[2].flatten(), kept[3].flatten(), true, eps,
                                                      {true, false, false});
    return std::get<0>(grads).view(g.sizes());
}

}  // namespace
