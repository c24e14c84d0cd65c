/* Embeddings, which keep their indices as the smallest integers. */

#pragma once

#include <torch/csrc/Dtype.h>

#include "arguments.h"
#include "layer.h"

namespace {

Backward embedding_backward;

PyObject *embedding(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 6 && THPDtype_Check(args[3]), "embedding takes 6 arguments, the fourth a dtype");
    const Tensor *weight = known(args[1]), *indices = known(args[2]);
    const int64_t padding = PyLong_AsLongLong(args[4]);
    const bool by_freq = args[5] == Py_True;
    if (PyErr_Occurred()) return nullptr;
    if (!weight || !indices || !weight->is_contiguous() || !weight->numel()) Py_RETURN_NONE;
    Made made;
    const auto dtype = ((THPDtype *)args[3])->scalar_type;
    made.y = compute([&] {
        made.kept = {as_integers(*indices, dtype)};
        return at::embedding(*weight, *indices, padding, by_freq);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    const int64_t options[] = {weight->size(0), padding, by_freq};
    made.call["options"] = at::IntArrayRef(options);
    return layer(args[0], *weight, embedding_backward, made);
    END_HANDLE_TH_ERRORS
}

Tensor embedding_backward(AutogradContext *ctx, const Tensor &g) {
    const Tensor kept = ctx->get_saved_variables()[0]; /* (the kernel takes no smaller integers) */
    const Tensor indices = kept.scalar_type() == at::kLong ? kept : as_integers(kept, at::kInt);
    const auto options = ctx->saved_data.at("options").toDimVector();
    return at::embedding_dense_backward(g, indices, options[0], options[1], options[2]);
}

}  // namespace
