/* Cross-entropy of rows of logits, or of images of many places, by indices of classes. */

#pragma once

#include <ATen/OpMathType.h>

#include "arguments.h"
#include "cpu.h"
#include "layer.h"

namespace {

constexpr int64_t FEW_PLACES = 32; /* of which a loop over images makes no vectors */

bool fits(const Tensor &x, const Tensor &target) {
    const auto dtype = x.scalar_type();
    const bool is_served = dtype == at::kFloat || dtype == at::kDouble || (dtype == at::kBFloat16 && x.is_cpu());
    if (!is_known(x) || !is_served || x.dim() < 2 || (x.is_cuda() && x.dim() > 2) || !x.numel()) return false;
    const auto shape = x.sizes();
    const bool are_many = x.dim() == 2 || c10::multiply_integers(shape.slice(2)) >= FEW_PLACES;
    return are_many && x.is_contiguous() && is_beside(target, x) && target.scalar_type() == at::kLong &&
           target.is_contiguous() && target.dim() == x.dim() - 1 && target.size(0) == shape[0] &&
           target.sizes().slice(1) == shape.slice(2);
}

Backward cross_entropy_backward;

PyObject *cross_entropy(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 7, "cross_entropy takes 7 arguments");
    const Tensor *x = known(args[1]), *target = known(args[2]);
    double smoothing;
    if (!x || !target || !fits(*x, *target) || !PyLong_CheckExact(args[4])) Py_RETURN_NONE;
    if (!numbers(args + 6, &smoothing, 1) || smoothing < 0 || smoothing > 1) Py_RETURN_NONE;
    const int64_t ignored = PyLong_AsLongLong(args[4]), reduction = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return nullptr;
    std::optional<Tensor> weight;
    if (args[3] != Py_None) {
        const Tensor *given = known(args[3]);
        const bool is_like_x = given && is_beside(*given, *x) && given->scalar_type() == x->scalar_type();
        if (!is_like_x || given->dim() != 1 || given->size(0) != x->size(1) || !given->is_contiguous()) Py_RETURN_NONE;
        weight = *given;
    }
    if ((weight || smoothing) && (x->is_cuda() || (weight && smoothing))) Py_RETURN_NONE;
    Made made;
    compute([&] {
        made.y = at::cross_entropy_loss(*x, *target, weight, reduction, ignored, smoothing);
        made.kept = {*x, *target};
        if (weight) made.kept.push_back(*weight);
    });
    made.call["ignored"] = ignored;
    made.call["is_mean"] = reduction == at::Reduction::Mean;
    made.call["smoothing"] = smoothing;
    return layer(args[0], *x, cross_entropy_backward, made);
    END_HANDLE_TH_ERRORS
}

/* That of x is (softmax(x) - q) * h for each row, of which q is 1 for the class of the target, or that
   smoothed over all classes. (Under autocast the loss, and so g, is wider than x.) */
Tensor cross_entropy_backward(AutogradContext *ctx, const Tensor &g) {
    const auto kept = ctx->get_saved_variables();
    const Tensor &x = kept[0], &target = kept[1], weight = kept.size() > 2 ? kept[2] : Tensor();
    const int64_t ignored = ctx->saved_data.at("ignored").toInt();
    const bool is_mean = ctx->saved_data.at("is_mean").toBool();
    const double smoothing = ctx->saved_data.at("smoothing").toDouble();
    const bool of_rows = g.dim() && g.is_contiguous() && g.sizes() == target.sizes();
    const auto own = x.scalar_type(), wide = own == at::kBFloat16 ? at::kFloat : own;
    const bool fast = is_final(g) && fits(x, target) && x.device() == g.device() &&
                      (g.scalar_type() == own || g.scalar_type() == wide) &&
                      (!weight.defined() || (is_known(weight) && weight.is_contiguous()));
    if (!fast || !(of_rows || !g.dim()) || g.is_cuda()) {
        const Tensor counts = target != ignored, index = target * counts;
        const auto dtype = g.scalar_type();
        const Tensor of_target = weight.defined() ? weight.index({index}).to(dtype) * counts : counts;
        const Tensor each = is_mean ? g / of_target.sum(dtype) : g;
        const Tensor zero = at::zeros({}, g.options());
        const Tensor h = at::where(counts, weight.defined() ? each * of_target : each, zero).unsqueeze(1);
        const Tensor p = at::softmax(x, 1, dtype), hard = smoothing ? h * (1 - smoothing) : h, column = index.unsqueeze(1);
        if (fast && !smoothing) return p.mul_(h).scatter_add_(1, column, hard.neg()).to(own);
        const Tensor dx = p * h - at::zeros_like(p).scatter(1, column, hard);
        return (smoothing ? dx - h * (smoothing / x.size(1)) : dx).to(own);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    const int64_t rows = target.numel(), classes = x.size(1), places = rows / x.size(0);
    const int64_t *classed = target.const_data_ptr<int64_t>();
    const bool is_double = own == at::kDouble;
    const Tensor dx = is_double ? at::_softmax(x, 1, false) : memory_like(x);
    const Tensor h = memory(target.sizes(), wide), given = g.to(wide);
    AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, own, "cross_entropy", [&] {
        using wide_t = at::opmath_type<scalar_t>;
        const wide_t *of = given.const_data_ptr<wide_t>();
        const scalar_t *weights = weight.defined() ? weight.const_data_ptr<scalar_t>() : nullptr;
        wide_t *each = h.mutable_data_ptr<wide_t>();
        double total = 0;
        for (int64_t row = 0; row < rows; row++) {
            const bool is_ignored = classed[row] == ignored;
            TORCH_CHECK_INDEX(is_ignored || (classed[row] >= 0 && classed[row] < classes), "Target ", classed[row],
                              " is out of bounds.");
            each[row] = is_ignored ? 0 : weights ? (wide_t)weights[classed[row]] : 1;
            total += each[row];
        }
        for (int64_t row = 0; row < rows; row++)
            if (classed[row] != ignored) each[row] *= of[of_rows ? row : 0] / (is_mean ? (wide_t)total : 1);
    });
    if (!is_double) {
        const Softmax softmax = {x.const_data_ptr(), h.const_data_ptr<float>(), classed, dx.mutable_data_ptr(), classes,
                                 places, smoothing};
        loops->softmax(&softmax, own == at::kFloat ? OF_FLOAT : OF_BFLOAT16, rows, at::get_num_threads());
        return dx;
    }
    dx.mul_(h.unsqueeze(1));
    if (smoothing) dx.sub_(h.unsqueeze(1), smoothing / (double)classes);
    const double *each = h.const_data_ptr<double>();
    double *gradient = dx.mutable_data_ptr<double>();
    for (int64_t row = 0; row < rows; row++)
        if (classed[row] != ignored)
            gradient[(row / places * classes + classed[row]) * places + row % places] -= each[row] * (1 - smoothing);
    return dx;
}

}  // namespace
