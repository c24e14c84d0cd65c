/* Activations that are linear in pieces. */

#pragma once

#include "arguments.h"
#include "bits.h"
#include "layer.h"

namespace {

/* What by_bits reads. */
void to_go_by_bits(Made &made, Family family, double a, double b) {
    made.call["family"] = (int64_t)family;
    if (family != SELECT) made.call["a"] = a, made.call["b"] = b;
    if (!made.y.is_contiguous()) made.call["stride"] = made.y.strides();
}

/* Where the output lies: in new memory, which is stored as torch stores results, or exactly as x; or, of
   softshrink on CPU, torch makes it of what does not fill its vectors. */
enum Output : int64_t { AS_RESULT, AS_X, OF_SOFTSHRINK };

Backward bits_backward;

PyObject *bits(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 12, "bits takes 12 arguments");
    PyObject *also = args[10];
    const Tensor *x = known(args[1]);
    double number[4];
    const int64_t forward = PyLong_AsLongLong(args[2]), family = PyLong_AsLongLong(args[6]);
    const int64_t output = PyLong_AsLongLong(args[9]);
    if (PyErr_Occurred()) return nullptr;
    TORCH_CHECK_INDEX(family >= 0 && family <= SCALE, "no such family");
    if (!x || !numbers(args + 4, number, 2) || !numbers(args + 7, number + 2, 2)) Py_RETURN_NONE;
    const int inplace = PyObject_IsTrue(args[3]);
    const int64_t kind = PyLong_AsLongLong(args[11]);
    if (inplace < 0 || PyErr_Occurred()) return nullptr;
    for (const double one : number)
        if (is_beyond(one, code_of(x->scalar_type()), 8 * x->element_size())) Py_RETURN_NONE;
    Loop *loop = nullptr;
    const Kernel *kernel = nullptr;
    bool by_torch = false;
    if (x->is_cuda()) {
        const bool in_any_dtype = kind <= HARDTANH;
        if (kind == NOTHING || !has_loops(*x)) Py_RETURN_NONE;
        if (!in_any_dtype && x->scalar_type() != at::kFloat) Py_RETURN_NONE;
        if (kind >= HARDSIGMOID && x->scalar_type() == at::kDouble) Py_RETURN_NONE;
        if (!from_bits(*x, family) || !(kernel = to_bits(*x, kind, true))) Py_RETURN_NONE;
    } else {
        by_torch = output == OF_SOFTSHRINK && !fills_vectors(x->numel(), at::get_num_threads());
        loop = loop_for(by_torch ? family_of[NOT_INSIDE] : forward, x->scalar_type());
        if (!loop || !loop_for(family_of[family], x->scalar_type())) Py_RETURN_NONE;
    }
    if (inplace && (by_torch || !is_writable(*x))) Py_RETURN_NONE;
    Made made;
    if (also != Py_None && !THPVariable_CheckExact(also)) Py_RETURN_NONE;
    compute([&] {
        if (by_torch) made.y = at::softshrink(*x, number[1]);
        else made.y = inplace ? *x : output == AS_X ? memory_like(*x) : memory_of_result(*x);
        if (also != Py_None) made.kept.push_back(THPVariable_Unpack(also));
        made.kept.push_back(empty_bits(*x));
        if (kernel) run(*kernel, *x, made.y, made.kept.back(), number[0], number[1]);
        else run(loop, *x, made.y, made.kept.back(), number[0], number[1]);
    });
    made.inplace = inplace;
    to_go_by_bits(made, (Family)family, number[2], number[3]);
    return layer(args[0], *x, bits_backward, made);
    END_HANDLE_TH_ERRORS
}

/* Of the output, as a node remembers it. */
at::DimVector stride_of(AutogradContext *ctx, const Tensor &g) {
    const auto found = ctx->saved_data.find("stride");
    return found == ctx->saved_data.end() ? c10::contiguous_strides(g.sizes()) : found->second.toDimVector();
}

Tensor by_bits(AutogradContext *ctx, const Tensor &g, const Tensor &bits) {
    auto &call = ctx->saved_data;
    const auto family = (Family)call.at("family").toInt();
    const double a = family == SELECT ? 1 : call.at("a").toDouble();
    const double b = family == SELECT ? 0 : call.at("b").toDouble();
    return from_bits(family, g, bits, stride_of(ctx, g), a, b);
}

Tensor bits_backward(AutogradContext *ctx, const Tensor &g) {
    return by_bits(ctx, g, ctx->get_saved_variables().back());
}

/* PReLU on a CUDA device, by one weight or by those of the channels: which element is of which. */
struct Slopes {
    int64_t inner = 1, count = 1;

    /* Whether it can be said. */
    bool find(const Tensor &x, const Tensor &weight) {
        count = weight.numel();
        if (count == 1 && weight.dim() < 2) return true;
        if (weight.dim() != 1 || x.dim() < 2 || x.size(1) != count) return false;
        inner = x.is_contiguous() ? x.numel() / (x.size(0) * count) : 1;
        return x.is_contiguous() || x.is_contiguous(at::MemoryFormat::ChannelsLast);
    }

    const Kernel *kernel(const Tensor &x, bool forward) const {
        if (!x.numel() || x.numel() > MOST_ELEMENTS || !is_aligned(x)) return nullptr;
        return kernel_for(x, {SLOPING, (int64_t)x.scalar_type(), forward, count == 1, is_even(x.numel())});
    }

    void run(const Kernel &kernel, const Tensor &x, const Tensor &y, const Tensor &bits, const Tensor &weight) const {
        Arguments arguments;
        arguments.read(x);
        arguments.write(y);
        arguments.write(bits);
        arguments.read(weight);
        arguments.add((int32_t)x.numel());
        if (count != 1) {
            arguments.add((int32_t)inner);
            arguments.add((int32_t)count);
        }
        arguments.run(kernel, x, programs_of(x));
    }
};

Backward prelu_backward;

PyObject *prelu(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3, "prelu takes 3 arguments");
    const Tensor *x = known(args[1]), *weight = known(args[2]);
    Slopes slopes;
    if (!x || !weight || !has_loops(*x) || !is_beside(*weight, *x) || weight->scalar_type() != x->scalar_type()) Py_RETURN_NONE;
    if (!is_aligned(*weight) || !slopes.find(*x, *weight)) Py_RETURN_NONE;
    const Kernel *kernel = slopes.kernel(*x, true);
    if (!kernel || !slopes.kernel(*x, false)) Py_RETURN_NONE;
    Made made;
    compute([&] {
        made.y = memory_of_result(*x);
        made.kept = {*weight, empty_bits(*x)};
        slopes.run(*kernel, *x, made.y, made.kept[1], *weight);
    });
    made.call["inner"] = slopes.inner;
    if (!made.y.is_contiguous()) made.call["stride"] = made.y.strides();
    return layer(args[0], *x, prelu_backward, made);
    END_HANDLE_TH_ERRORS
}

Tensor prelu_backward(AutogradContext *ctx, const Tensor &g) {
    if (is_cuda(g) && is_constant(g) && !is_aligned(g)) return prelu_backward(ctx, g.clone());
    const auto kept = ctx->get_saved_variables();
    const Tensor &weight = kept[0], &bits = kept[1];
    const Slopes slopes = {ctx->saved_data.at("inner").toInt(), weight.numel()};
    const auto stride = stride_of(ctx, g);
    const bool fits = is_constant(g) && is_constant(weight) && are_bits(bits, g, g.numel()) && is_beside(weight, g) &&
                      weight.is_contiguous() && is_aligned(weight) && weight.scalar_type() == g.scalar_type();
    if (fits) {
        at::AutoDispatchBelowADInplaceOrView guard;
        if (const Kernel *kernel = slopes.kernel(g, false)) {
            const auto [from, dx] = in_order(g, stride);
            slopes.run(*kernel, from, dx, bits, weight);
            return dx;
        }
    }
    at::DimVector shape(std::max<int64_t>(g.dim(), 1), 1);
    if (weight.numel() > 1) shape[1] = weight.numel();
    const Tensor by = g.dim() ? weight.view(shape) : weight.view({});
    return at::where(unpack(bits, g.sizes(), stride), g, g * by);
}

}  // namespace
