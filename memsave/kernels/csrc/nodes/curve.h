/* Activations that are curves. From x: log-sigmoid, x - tanh(x); from y: elu and its kin, and what has a
   slope of 1 - exp(factor * y): softplus and log-sigmoid. */

#pragma once

#include "arguments.h"
#include "cpu.h"
#include "layer.h"

namespace {

enum Curve : int64_t { LOGSIGMOID, TANHSHRINK, ELU_FROM_OUTPUT, SOFTPLUS_FROM_OUTPUT, LOGSIGMOID_FROM_OUTPUT, CURVES };

Backward curve_backward;

/* Elements, and bytes from which on an array is memory that the C library has to ask for. */
constexpr int64_t PIECE = 1 << 20, LARGE = 1 << 24;

/* By torch, which puts something aside of each element that nobody reads here: of what is large, that goes where
   that of the piece before was, and stays in the cache. */
Tensor log_sigmoid_of(const Tensor &x) {
    if (!x.is_cpu() || !x.is_contiguous() || (int64_t)x.nbytes() <= LARGE) return at::log_sigmoid(x);
    const Tensor y = memory(x.sizes(), x.scalar_type()), aside = memory({PIECE}, x.scalar_type());
    const auto of_x = x.view(-1).split(PIECE);
    auto of_y = y.view(-1).split(PIECE);
    for (size_t k = 0; k < of_x.size(); k++) {
        Tensor of_aside = aside.narrow(0, 0, of_x[k].numel());
        at::log_sigmoid_forward_out(of_y[k], of_aside, of_x[k]);
    }
    return y;
}

PyObject *curve(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 6, "curve takes 6 arguments");
    const Tensor *x = known(args[1]);
    const int64_t which = PyLong_AsLongLong(args[2]);
    double by[3];
    if (PyErr_Occurred()) return nullptr;
    TORCH_CHECK_INDEX(which >= 0 && which < CURVES, "no such curve");
    if (!x || !x->numel() || !x->is_floating_point() || !numbers(args + 3, by, 3)) Py_RETURN_NONE;
    const bool is_narrow = c10::elementSize(x->scalar_type()) < 4;
    if (which >= SOFTPLUS_FROM_OUTPUT && is_narrow) Py_RETURN_NONE;
    Made made;
    made.y = compute([&] {
        if (which == TANHSHRINK) return *x - x->tanh();
        if (which == ELU_FROM_OUTPUT) return at::elu(*x, by[0], by[1], by[2]);
        return which == SOFTPLUS_FROM_OUTPUT ? at::softplus(*x, by[0], by[1]) : log_sigmoid_of(*x);
    });
    made.kept = {which < ELU_FROM_OUTPUT ? *x : made.y};
    made.call["which"] = which;
    made.call["numbers"] = at::ArrayRef<double>(by, 3);
    return layer(args[0], *x, curve_backward, made);
    END_HANDLE_TH_ERRORS
}

/* (And what is kept is laid out as g.) */
bool is_final(const Tensor &g, const Tensor &kept) {
    return is_final(g) && is_plain(g) && is_plain(kept) && g.scalar_type() == kept.scalar_type() &&
           g.sizes() == kept.sizes() && g.strides() == kept.strides();
}

/* By a loop, if there is one. */
std::optional<Tensor> by_loop(Family family, const Tensor &g, const Tensor &kept, double factor = 0) {
    if (!is_final(g, kept) || !kept.is_non_overlapping_and_dense()) return std::nullopt;
    Loop *loop = loop_for(family_of[family], kept.scalar_type());
    if (!loop) return std::nullopt;
    const Tensor dx = memory_for(g);
    const Arrays arrays = {g.const_data_ptr(), dx.mutable_data_ptr(), nullptr, factor, 0, kept.const_data_ptr()};
    loops->run(loop, &arrays, g.numel(), at::get_num_threads());
    return dx;
}

/* Of a slope of 1 - exp(factor * y). */
Tensor times_rest(const Tensor &g, const Tensor &y, double factor) {
    if (auto dx = by_loop(REST, g, y, factor)) return *dx;
    return is_final(g, y) ? (y * factor).expm1_().neg_().mul_(g) : g * -(y * factor).expm1();
}

Tensor curve_backward(AutogradContext *ctx, const Tensor &g) {
    const Tensor kept = ctx->get_saved_variables()[0];
    const auto by = ctx->saved_data.at("numbers").toDoubleVector();
    switch ((Curve)ctx->saved_data.at("which").toInt()) {
        case LOGSIGMOID: {
            /* log_sigmoid(x) is -softplus(-x), in whose kernel this is the sign; from 40 on, the slope is 1. */
            auto dx = by_loop(LOGISTIC, g, kept);
            return dx ? *dx : at::softplus_backward(g, kept, -1, 40);
        }
        case TANHSHRINK: {
            auto dx = by_loop(TANH2, g, kept);
            if (dx) return *dx;
            return is_final(g, kept) ? kept.tanh().square_().mul_(g) : g * kept.tanh().square();
        }
        case ELU_FROM_OUTPUT: return at::elu_backward(g, by[0], by[1], by[2], true, kept);
        case SOFTPLUS_FROM_OUTPUT: return times_rest(g, kept, -by[0]);
        default: return times_rest(g, kept, 1);
    }
}

}  // namespace
