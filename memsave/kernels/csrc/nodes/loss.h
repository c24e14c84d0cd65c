/* Cross-entropy of rows of logits, or of images of many places, by indices or probabilities of classes. */

#pragma once

#include "arguments.h"
#include "cpu.h"
#include "cuda.h"
#include "layer.h"

namespace {

constexpr int64_t CLASSES_AT_ONCE = 4096; /* by a program of a CUDA device */
constexpr int64_t FEW_PLACES = 32; /* of which a loop over images makes no vectors */

bool fits(const Tensor &x, const Tensor &target) {
    const auto dtype = x.scalar_type();
    if (!is_known(x) || !has_loops(x) || x.dim() < 2 || !x.numel()) return false;
    const auto shape = x.sizes();
    const bool are_many = x.dim() == 2 || c10::multiply_integers(shape.slice(2)) >= FEW_PLACES;
    if (!are_many || !x.is_contiguous() || !is_beside(target, x) || !target.is_contiguous()) return false;
    if (target.is_floating_point())
        return x.is_cpu() && dtype != at::kDouble && target.scalar_type() == dtype && target.sizes() == shape;
    return target.scalar_type() == at::kLong && target.dim() == x.dim() - 1 && target.size(0) == shape[0] &&
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
    if (weight && smoothing && (x->is_cuda() || x->scalar_type() == at::kDouble)) Py_RETURN_NONE;
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
    const auto own = x.scalar_type(), wide = at::toOpMathType(own);
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

/* Of what forward has looked at, by operations that have gradients themselves. */
Tensor loss_by_operations(const Tensor &g, const Tensor &x, const Tensor &target, const Tensor &weight,
                          int64_t ignored, bool is_mean, double smoothing) {
    const Tensor p = at::softmax(x, 1, g.scalar_type());
    Tensor wanted, each = g;
    if (target.is_floating_point()) {
        wanted = smoothing ? target * (1 - smoothing) + smoothing / x.size(1) : target;
        if (is_mean) each = g * ((double)x.size(1) / x.numel());
    } else {
        const Tensor counts = target != ignored, index = target * counts;
        const Tensor of_target = weight.defined() ? weight.index({index}).to(p.dtype()) * counts : counts;
        if (is_mean) each = g / of_target.sum(p.scalar_type());
        each = at::where(counts, each, at::zeros({}, g.options()));
        wanted = at::zeros_like(p).scatter(1, index.unsqueeze(1), 1 - smoothing) + smoothing / x.size(1);
    }
    if (weight.defined()) {
        at::DimVector along(x.dim() - 1, 1);
        along[0] = x.size(1);
        wanted = wanted * weight.view(along);
    }
    return ((p * wanted.sum(1, true) - wanted) * (each.dim() ? each.unsqueeze(1) : each)).to(x.scalar_type());
}

/* What each row of the gradient is to be multiplied with. */
template <typename scalar_t, typename wide_t>
void factors_of_rows(const Tensor &g, const Tensor &target, const Tensor &weight, int64_t classes, int64_t ignored,
                     bool is_mean, wide_t *each, int64_t rows) {
    const wide_t *of = g.const_data_ptr<wide_t>();
    const bool of_rows = g.dim();
    double total = rows;
    if (target.is_floating_point()) {
        for (int64_t row = 0; row < rows; row++) each[row] = 1;
    } else {
        const int64_t *classed = target.const_data_ptr<int64_t>();
        const scalar_t *weights = weight.defined() ? weight.const_data_ptr<scalar_t>() : nullptr;
        total = 0;
        for (int64_t row = 0; row < rows; row++) {
            const bool counts = classed[row] != ignored;
            TORCH_CHECK_INDEX(!counts || (classed[row] >= 0 && classed[row] < classes), "Target ", classed[row],
                              " is out of bounds.");
            each[row] = counts;
            if (counts) total += weights ? (wide_t)weights[classed[row]] : 1;
        }
    }
    for (int64_t row = 0; row < rows; row++)
        if (each[row]) each[row] = of[of_rows ? row : 0] / (is_mean ? (wide_t)total : 1);
}

/* That of x is softmax(x) times the sum of what is wanted, less that, for each row times g: of the class of the
   target 1, or probabilities; smoothed over all classes, and times their weights. (Under autocast the loss, and
   so g, is wider than x.) */
Tensor cross_entropy_backward(AutogradContext *ctx, const Tensor &given) {
    const auto kept = ctx->get_saved_variables();
    const Tensor &x = kept[0], &target = kept[1], weight = kept.size() > 2 ? kept[2] : Tensor();
    const int64_t ignored = ctx->saved_data.at("ignored").toInt();
    const bool is_mean = ctx->saved_data.at("is_mean").toBool();
    const double smoothing = ctx->saved_data.at("smoothing").toDouble();
    const int64_t classes = x.size(1), rows = x.numel() / classes, places = rows / x.size(0);
    const auto own = x.scalar_type(), wide = at::toOpMathType(own);
    bool fast = is_final(given) && fits(x, target) && x.device() == given.device() &&
                (given.scalar_type() == own || given.scalar_type() == wide) &&
                (!weight.defined() || is_weight(weight, x)) && (!given.dim() || given.numel() == rows);
    const Tensor g = fast ? given.contiguous() : given;
    if (fast && g.is_cuda()) {
        at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor dx = loss_of_rows(g, x, target, weight, ignored, is_mean, smoothing);
        if (dx.defined()) return dx;
        fast = false;
    }
    if (!fast) return loss_by_operations(g, x, target, weight, ignored, is_mean, smoothing);
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool is_double = own == at::kDouble;
    const Tensor dx = is_double ? at::_softmax(x, 1, false) : memory_like(x);
    const Tensor h = memory(g.dim() ? g.sizes() : at::IntArrayRef(rows), wide), from = g.to(wide);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, own, "cross_entropy", [&] {
        using wide_t = at::opmath_type<scalar_t>;
        factors_of_rows<scalar_t>(from, target, weight, classes, ignored, is_mean, h.mutable_data_ptr<wide_t>(), rows);
    });
    const int64_t *classed = target.is_floating_point() ? nullptr : target.const_data_ptr<int64_t>();
    if (!is_double) {
        const void *probabilities = classed ? nullptr : target.const_data_ptr();
        const void *weights = weight.defined() ? weight.const_data_ptr() : nullptr;
        const Softmax softmax = {x.const_data_ptr(), h.const_data_ptr<float>(), classed, probabilities, weights,
                                 dx.mutable_data_ptr(), classes, places, smoothing, nullptr};
        loops->softmax(&softmax, kind_of(own), rows, at::get_num_threads());
        return dx;
    }
    double *each = h.mutable_data_ptr<double>(), *gradient = dx.mutable_data_ptr<double>();
    for (int64_t row = 0; row < rows && weight.defined(); row++)
        if (each[row]) each[row] *= weight.const_data_ptr<double>()[classed[row]];
    const Tensor along = h.view(target.sizes()).unsqueeze(1);
    dx.mul_(along);
    if (smoothing) dx.sub_(along, smoothing / (double)classes);
    for (int64_t row = 0; row < rows; row++)
        if (classed[row] != ignored)
            gradient[(row / places * classes + classed[row]) * places + row % places] -= each[row] * (1 - smoothing);
    return dx;
}

}  // namespace
