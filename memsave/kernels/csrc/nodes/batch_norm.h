/* Batch normalization by constants, in eval mode. */

#pragma once

#include "arguments.h"
#include "function.h"
#include "layer.h"

namespace {

Backward batch_norm_eval_backward;

PyObject *batch_norm_eval(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 7, "batch_norm_eval takes 7 arguments");
    const Tensor *x = known(args[1]);
    double eps;
    if (!x || !x->numel() || !numbers(args + 6, &eps, 1) || eps < 0) Py_RETURN_NONE;
    if (x->dim() < 2 || !THPVariable_CheckExact(args[2])) Py_RETURN_NONE;
    const auto own = x->scalar_type(), wide = at::toOpMathType(own);
    /* (On CPU they may have 16 bits, too, all of them.) */
    const bool are_narrow = x->is_cpu() && THPVariable_Unpack(args[2]).scalar_type() == own;
    const auto dtype = are_narrow ? own : wide;
    enum { MEAN, VAR, SCALE_BY, SHIFT_BY };
    std::optional<Tensor> vectors[4];
    for (int k = 0; k < 4; k++) {
        if (args[2 + k] == Py_None && k > VAR) continue;
        const Tensor *vector = THPVariable_CheckExact(args[2 + k]) ? &THPVariable_Unpack(args[2 + k]) : nullptr;
        if (!vector || !is_beside(*vector, *x) || vector->scalar_type() != dtype) Py_RETURN_NONE;
        vectors[k] = *vector;
    }
    Made made;
    made.y = compute([&] {
        return at::batch_norm(*x, vectors[SCALE_BY], vectors[SHIFT_BY], vectors[MEAN], vectors[VAR], false, 0, eps,
                              x->is_cuda() && at::globalContext().userEnabledCuDNN());
    });
    made.kept = {*vectors[VAR]};
    if (vectors[SCALE_BY]) made.kept.push_back(*vectors[SCALE_BY]);
    made.call["eps"] = eps;
    return layer(args[0], *x, batch_norm_eval_backward, made);
    END_HANDLE_TH_ERRORS
}

/* How torch has it, of which the gradient of x reads no more than ours: but without a weight its second derivative
   leaves out terms, and on CUDA it keeps a copy of what is stored in neither of its formats. (On CPU, in training,
   there may be a faster loop, which is for Python to find: see beats_batch_norm of native.py.) */
bool is_for_torch(const Tensor &x, bool trains) {
    if (!x.is_cuda())
        return !trains || !is_wide(x) || !x.is_contiguous() || x.dim() < 3 || x.numel() < LEAST_ELEMENTS;
    return x.is_contiguous() || x.is_contiguous(at::MemoryFormat::ChannelsLast) ||
           x.is_contiguous(at::MemoryFormat::ChannelsLast3d);
}

/* That of a module which takes tensors of so many axes: by torch itself, where that keeps the same. */
PyObject *batch_norm_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 5 && PyDict_Check(args[1]), "batch_norm_of takes a name, a dict, a tensor and two numbers");
    const Module module = {args[1]};
    PyObject *weight = module.parameter("weight"), *bias = module.parameter("bias");
    PyObject *mean = module.buffer("running_mean"), *var = module.buffer("running_var");
    PyObject *seen = module.buffer("num_batches_tracked"), *training = module.option("training");
    PyObject *numbers_of[] = {module.option("eps"), module.option("momentum")};
    if (!weight || !bias || !mean || !var || !seen || !numbers_of[0] || !numbers_of[1]) Py_RETURN_NONE;
    if (mean == Py_None || var == Py_None || !training || !PyBool_Check(training)) Py_RETURN_NONE;
    const auto wanted = wanted_of({args[2], weight, bias, mean, var, seen});
    if (!wanted || args[2] == Py_None || *wanted & ~7l) Py_RETURN_NONE;
    const Tensor &x = THPVariable_Unpack(args[2]);
    const long least = PyLong_AsLong(args[3]), most = PyLong_AsLong(args[4]);
    if (PyErr_Occurred()) return nullptr;
    if (x.dim() < least || x.dim() > most || !x.numel()) Py_RETURN_NONE;
    const bool trains = training == Py_True;
    double options[2];
    if (!numbers(numbers_of, options, 1) || !(options[0] > 0)) Py_RETURN_NONE; /* which stock may refuse */
    if (!trains && *wanted == 1) {
        PyObject *const all[] = {args[0], args[2], mean, var, weight, bias, numbers_of[0]};
        return batch_norm_eval(nullptr, all, 7);
    }
    if (weight == Py_None || !is_for_torch(x, trains) || !are_leaves({weight, bias})) Py_RETURN_NONE;
    if (!numbers(numbers_of + 1, options + 1, 1)) Py_RETURN_NONE;
    if (*wanted && !(*wanted & (trains ? 3 : 2))) Py_RETURN_NONE; /* that of the bias alone, say */
    if (trains && (module.option("track_running_stats") != Py_True || seen == Py_None)) Py_RETURN_NONE;
    if (trains && x.numel() == x.size(1)) Py_RETURN_NONE; /* for Python to refuse */
    const auto given = bias == Py_None ? std::nullopt : std::optional<Tensor>(THPVariable_Unpack(bias));
    /* (Before another thread may replace them.) */
    const Tensor of[] = {THPVariable_Unpack(weight), THPVariable_Unpack(mean), THPVariable_Unpack(var)};
    const Tensor count_of_batches = trains ? THPVariable_Unpack(seen) : Tensor();
    Tensor y;
    {
        pybind11::gil_scoped_release unlocked;
        if (trains) count_of_batches.add_(1);
        y = at::batch_norm(x, of[0], given, of[1], of[2], trains, options[1], options[0],
                           at::globalContext().userEnabledCuDNN());
    }
    return THPVariable_Wrap(y);
    END_HANDLE_TH_ERRORS
}

/* From the variance, and the weight if there is one. */
Tensor batch_norm_eval_backward(AutogradContext *ctx, const Tensor &g) {
    const auto kept = ctx->get_saved_variables();
    const double eps = ctx->saved_data.at("eps").toDouble();
    at::DimVector shape(g.dim(), 1);
    shape[1] = kept[0].numel();
    const bool is_narrow = c10::elementSize(g.scalar_type()) < 4;
    const auto wide = at::toOpMathType(g.scalar_type()), dtype = kept[0].scalar_type();
    bool fast = is_final(g) && (dtype == wide || (g.is_cpu() && dtype == g.scalar_type()));
    for (const Tensor &one : kept)
        fast = fast && is_beside(one, g) && one.is_contiguous() && one.numel() == shape[1] &&
               one.scalar_type() == dtype;
    /* (On CUDA its gradient is always contiguous.) */
    const bool by_torch = fast && (g.is_cuda() ? g.is_contiguous() : is_narrow);
    if (!fast || (g.is_cuda() && !by_torch)) {
        Tensor scale = kept[0].to(wide).add(eps).rsqrt();
        if (kept.size() > 1) scale = scale * kept[1].to(wide);
        if (!fast) return (g * scale.view(shape)).to(g.scalar_type());
        Tensor dx = at::empty_like(g);
        return at::mul_out(dx, g, scale.view(shape)); /* in one pass, also where g is narrower */
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    if (by_torch) { /* It reads x, the mean and the statistics for other gradients alone. */
        const auto weight = kept.size() > 1 ? std::optional<Tensor>(kept[1]) : std::nullopt;
        const Tensor none = at::empty({0}, kept[0].options()); /* of statistics of a batch */
        return std::get<0>(at::native_batch_norm_backward(g, g, weight, kept[0], kept[0], none, none, false, eps,
                                                          {true, false, false}));
    }
    const Tensor scale = memory(shape, g.scalar_type());
    AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "batch_norm_eval", [&] {
        const scalar_t *var = kept[0].const_data_ptr<scalar_t>();
        const scalar_t *weight = kept.size() > 1 ? kept[1].const_data_ptr<scalar_t>() : nullptr;
        scalar_t *by = scale.mutable_data_ptr<scalar_t>();
        for (int64_t k = 0; k < shape[1]; k++)
            by[k] = 1 / std::sqrt(var[k] + (scalar_t)eps) * (weight ? weight[k] : 1);
    });
    return times(g, scale);
}

}  // namespace
