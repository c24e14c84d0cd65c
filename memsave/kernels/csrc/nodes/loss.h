/* Cross-entropy of rows of logits, or of images of many places, by indices of classes. */

#pragma once

#include <ATen/OpMathType.h>

#include "arguments.h"
#include "cpu.h"
#include "cuda.h"
#include "layer.h"

namespace {

constexpr int64_t CLASSES_AT_ONCE = 4096; /* by a program of a CUDA device */
constexpr int64_t FEW_PLACES = 32; /* of which a loop over images makes no vectors */

bool fits(const Tensor &x, const Tensor &target) {
    const auto dtype = x.scalar_type();
    const bool is_served = has_loops(x) && (dtype != at::kHalf || x.is_cuda());
    if (!is_known(x) || !is_served || x.dim() < 2 || !x.numel()) return false;
    const auto shape = x.sizes();
    const bool are_many = x.dim() == 2 || c10::multiply_integers(shape.slice(2)) >= FEW_PLACES;
    return are_many && x.is_contiguous() && is_beside(target, x) && target.scalar_type() == at::kLong &&
           target.is_contiguous() && target.dim() == x.dim() - 1 && target.size(0) == shape[0] &&
           target.sizes().slice(1) == shape.slice(2);
}

bool is_weight(const Tensor &weight, const Tensor &x) {
    return is_beside(weight, x) && weight.scalar_type() == x.scalar_type() && weight.dim() == 1 &&
           weight.size(0) == x.size(1) && weight.is_contiguous();
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
        if (!given || !is_weight(*given, *x)) Py_RETURN_NONE;
        weight = *given;
    }
    if (weight && smoothing) Py_RETURN_NONE;
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

/* On a CUDA device, from what cross_entropy_backward has looked at; undefined where there is no kernel. */
Tensor loss_of_rows(const Tensor &g, const Tensor &x, const Tensor &target, const Tensor &weight, int64_t ignored,
                    bool is_mean, double smoothing) {
    const auto own = x.scalar_type(), wide = own == at::kDouble ? own : at::kFloat;
    const int64_t rows = target.numel(), classes = x.size(1), places = rows / x.size(0);
    if (x.numel() > MOST_ELEMENTS || (smoothing && own == at::kDouble)) return {};
    for (const Tensor &one : {g, x, target, weight})
        if (one.defined() && !is_aligned(one)) return {};
    int64_t block = 1;
    while (block < classes && block < CLASSES_AT_ONCE) block *= 2;
    const int64_t at_once = std::max<int64_t>(1, ELEMENTS_OF_PROGRAM / block);
    const bool of_rows = g.dim(), has_weight = weight.defined();
    const Kernel *kernel = kernel_for(x, {LOSS_OF_ROWS, (int64_t)own, (int64_t)g.scalar_type(), of_rows, has_weight,
                                          is_mean, places == 1, at_once, block, is_even(classes)});
    const Kernel *weigh = is_mean ? kernel_for(x, {WEIGHTS_OF_ROWS, (int64_t)own, has_weight}) : kernel;
    if (!kernel || !weigh) return {};
    const int64_t parts = std::min((rows + ELEMENTS_OF_PROGRAM - 1) / ELEMENTS_OF_PROGRAM, MOST_PARTS);
    const Tensor sums = is_mean ? at::empty({parts}, g.options().dtype(wide)) : g, dx = at::empty_like(x);
    const Tensor &weights = has_weight ? weight : x;
    if (is_mean) {
        Arguments arguments;
        arguments.read(target);
        arguments.read(weights);
        arguments.write(sums);
        arguments.add((int32_t)rows);
        arguments.add(ignored);
        arguments.run(*weigh, x, parts);
    }
    Arguments arguments;
    for (const Tensor &one : {x, target, g, weights, sums}) arguments.read(one);
    arguments.write(dx);
    arguments.add((int32_t)rows);
    if (classes != 1) arguments.add((int32_t)classes);
    if (places != 1) arguments.add((int32_t)places);
    arguments.add(ignored);
    arguments.add((int32_t)parts);
    arguments.add((float)smoothing);
    const int64_t images = places == 1 ? 1 : x.size(0), each = places == 1 ? rows : places;
    arguments.run(*kernel, x, (each + at_once - 1) / at_once * images);
    return dx;
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
    const auto own = x.scalar_type(), wide = c10::elementSize(own) < 4 ? at::kFloat : own;
    bool fast = is_final(g) && fits(x, target) && x.device() == g.device() &&
                      (g.scalar_type() == own || g.scalar_type() == wide) &&
                      (!weight.defined() || is_weight(weight, x)) && (of_rows || !g.dim());
    if (fast && g.is_cuda()) {
        at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor dx = loss_of_rows(g, x, target, weight, ignored, is_mean, smoothing);
        if (dx.defined()) return dx;
        fast = false;
    }
    if (!fast) {
        const Tensor counts = target != ignored, index = target * counts;
        const auto dtype = g.scalar_type();
        const Tensor of_target = weight.defined() ? weight.index({index}).to(dtype) * counts : counts;
        const Tensor each = is_mean ? g / of_target.sum(dtype) : g;
        const Tensor zero = at::zeros({}, g.options());
        const Tensor h = at::where(counts, weight.defined() ? each * of_target : each, zero).unsqueeze(1);
        const Tensor p = at::softmax(x, 1, dtype), hard = smoothing ? h * (1 - smoothing) : h, column = index.unsqueeze(1);
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
