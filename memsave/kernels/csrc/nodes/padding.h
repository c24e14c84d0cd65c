/* Padding by reflection and replication. */

#pragma once

#include "arguments.h"
#include "layer.h"

namespace {

using Pad = Tensor(const Tensor &, at::IntArrayRef);
using PadBackward = Tensor(const Tensor &, const Tensor &, at::IntArrayRef);
using WritePadBackward = Tensor &(const Tensor &, const Tensor &, at::IntArrayRef, Tensor &);
Pad *const PADS[][3] = {{at::reflection_pad1d, at::reflection_pad2d, at::reflection_pad3d},
                        {at::replication_pad1d, at::replication_pad2d, at::replication_pad3d}};
PadBackward *const PADS_BACKWARD[][3] = {
    {at::reflection_pad1d_backward, at::reflection_pad2d_backward, at::reflection_pad3d_backward},
    {at::replication_pad1d_backward, at::replication_pad2d_backward, at::replication_pad3d_backward}};
WritePadBackward *const WRITE_PADS_BACKWARD[][3] = {
    {at::reflection_pad1d_backward_outf, at::reflection_pad2d_backward_outf, at::reflection_pad3d_backward_outf},
    {at::replication_pad1d_backward_outf, at::replication_pad2d_backward_outf, at::replication_pad3d_backward_outf}};

Backward pad_backward;

PyObject *pad(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 4, "pad takes 4 arguments");
    const Tensor *x = known(args[1]);
    const bool replicates = args[2] == Py_True;
    const size_t ends = std::max<Py_ssize_t>(count_of(args[3]), 0), dims = ends / 2;
    at::DimVector edges;
    if (!x || !x->numel() || ends % 2 || !dims || dims > 3) Py_RETURN_NONE;
    if ((size_t)x->dim() - dims - 1 > 1 || !sizes(args[3], ends, edges)) Py_RETURN_NONE;
    const auto format = any_format_of(*x, dims);
    if (!format || (x->is_cuda() && !x->is_contiguous())) Py_RETURN_NONE;
    Made made;
    made.y = compute([&] { return PADS[replicates][dims - 1](*x, edges); });
    if (!made.y.numel()) Py_RETURN_NONE;
    made.call["format"] = (int64_t)*format;
    made.call["replicates"] = replicates;
    made.call["edges"] = at::IntArrayRef(edges);
    made.call["shape"] = x->sizes();
    return layer(args[0], *x, pad_backward, made);
    END_HANDLE_TH_ERRORS
}

/* The gradient of x, that is of this shape and stored so, of that of its padded copy. */
Tensor unpad(const Tensor &g, at::IntArrayRef shape, at::IntArrayRef edges, bool replicates, at::MemoryFormat format) {
    if (Tensor dx = to_be_written(g, shape, format); dx.defined()) {
        at::AutoDispatchBelowADInplaceOrView guard;
        return WRITE_PADS_BACKWARD[replicates][edges.size() / 2 - 1](g.contiguous(format), dx, edges, dx);
    }
    return PADS_BACKWARD[replicates][edges.size() / 2 - 1](g, stand_in(g, shape), edges);
}

Tensor pad_backward(AutogradContext *ctx, const Tensor &g) {
    ctx->get_saved_variables(); /* none; but a second time is an error, as in stock */
    const auto edges = ctx->saved_data.at("edges").toDimVector();
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    return unpad(g, shape, edges, ctx->saved_data.at("replicates").toBool(), format_in(ctx));
}

}  // namespace
