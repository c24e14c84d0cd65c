/* Dropout. */

#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "activation.h"
#include "philox.h"

namespace {

/* Bits of whether random numbers are below p, as bernoulli_ says, drawn by random.h from a generator of
   the CPU, which its caller has locked. Undefined, with nothing drawn, where its state is none. */
Tensor by_loop(const at::Generator &generator, int64_t elements, double p) {
    auto *implementation = generator.get<at::CPUGeneratorImpl>();
    at::mt19937 engine = implementation->engine();
    at::mt19937_data_pod state = engine.data();
    if (!engine.is_valid() || state.next_ + state.left_ - 1 > TWISTER_WORDS) return Tensor();
    const Tensor bits = empty_bits(elements);
    Twister twister = {state.state_.data(), state.next_, state.left_};
    loops->bernoulli(&twister, bits.mutable_data_ptr<uint8_t>(), elements, p);
    state.next_ = twister.next, state.left_ = twister.left;
    engine.set_data(state);
    implementation->set_engine(engine);
    return bits;
}

/* (With MKL, on some processors, torch has the numbers of that library.) */
bool loop_draws_as_torch() {
    static const bool does = [] {
        at::Generator ours = at::detail::createCPUGenerator(0), theirs = at::detail::createCPUGenerator(0);
        const Tensor kept = memory({999}, at::kBool), expected = empty_bits(999);
        kept.bernoulli_(0.3, theirs);
        run(loop_for(family_of[NONZERO], at::kBool), kept, Tensor(), expected, 0, 0);
        const Tensor bits = by_loop(ours, 999, 0.3);
        return bits.defined() && bits.equal(expected) && ours.get_state().equal(theirs.get_state());
    }();
    return does;
}

/* While no other thread draws. (Vmap would say how to draw.) */
Tensor draw(at::Generator generator, int64_t elements, double p, Tensor *state = nullptr) {
    const Unheard unheard;
    if (!loop_draws_as_torch()) return Tensor();
    const std::scoped_lock lock(generator.mutex());
    if (state) *state = generator.get_state();
    return by_loop(generator, elements, p);
}

/* Dropout of CUDA devices: in one pass, or torch's own kernel draws. (It multiplies by the reciprocal, of floats.) */
PyObject *fused_dropout(PyObject *row, const Tensor &x, double p) {
    if (!has_loops(x) || x.scalar_type() == at::kDouble || x.numel() > MOST_ELEMENTS || !from_bits(x, SCALE)) Py_RETURN_NONE;
    Made made;
    compute([&] {
        Dropped dropped = drop(x, p, vectors_of_torch(x));
        if (!dropped.y.defined()) {
            const Kernel *kernel = kernel_for(x, {TO_BITS, (int64_t)at::kBool, NONZERO_BITS, 0, is_even(x.numel())});
            if (!kernel) return;
            const auto [y, kept] = at::native_dropout(x, p, true);
            dropped = {y, empty_bits(x)};
            run(*kernel, kept, kept, dropped.bits, 0, 0);
        }
        made.y = dropped.y;
        made.kept = {dropped.bits};
    });
    if (!made.y.defined()) Py_RETURN_NONE;
    to_go_by_bits(made, SCALE, 1 / (1 - p), 0);
    return layer(row, x, bits_backward, made);
}

/* In place torch draws apart what it multiplies by. */
PyObject *dropout_in_place(PyObject *row, const Tensor &x, double p, double factor) {
    const bool has_loop = has_loops(x) && x.scalar_type() != at::kDouble && x.numel() <= MOST_ELEMENTS;
    if (!has_loop || !is_writable(x)) Py_RETURN_NONE;
    const Kernel *scale = from_bits(x, SCALE), *kernel = to_bits(x, NONZERO_BITS, false);
    if (!scale || !kernel) Py_RETURN_NONE;
    Made made;
    compute([&] {
        const Tensor kept = at::empty_like(x).bernoulli_(1 - p);
        made.kept = {empty_bits(x)};
        run(*kernel, kept, kept, made.kept[0], 0, 0);
        made.y = x;
        run(*scale, x, x, made.kept[0], factor, 0);
    });
    made.inplace = true;
    to_go_by_bits(made, SCALE, factor, 0);
    return layer(row, x, bits_backward, made);
}

Backward dropout_from_rng_backward;

/* By which torch multiplies what is kept, but for its fused kernel. */
double factor_of(double p, at::ScalarType dtype) {
    return AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, "dropout", [&] {
        return (double)(scalar_t)(1 / (at::opmath_type<scalar_t>)(1 - p));
    });
}

/* Dropout, in training, that keeps bits, or the state of the generator to draw them again. */
PyObject *dropout(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 6, "dropout takes 6 arguments");
    const Tensor *x = known(args[1]);
    double p;
    if (!x || args[3] != Py_True || !numbers(args + 2, &p, 1) || !(0 < p && p < 1)) Py_RETURN_NONE;
    const int inplace = PyObject_IsTrue(args[4]), from_rng = PyObject_IsTrue(args[5]);
    if (inplace < 0 || from_rng < 0) return nullptr;
    if (!at::isFloatingType(x->scalar_type()) || x->element_size() < 2 || !x->numel()) Py_RETURN_NONE;
    const double factor = factor_of(p, x->scalar_type());
    if (x->is_cuda()) {
        if (from_rng) Py_RETURN_NONE;
        return inplace ? dropout_in_place(args[0], *x, p, factor) : fused_dropout(args[0], *x, p);
    }
    Loop *loop = loop_for(family_of[SCALE], x->scalar_type());
    if (!loop || (inplace && !is_writable(*x))) Py_RETURN_NONE;
    Made made;
    Tensor bits, state;
    compute([&] {
        bits = draw(at::detail::getDefaultCPUGenerator(), x->numel(), 1 - p, from_rng ? &state : nullptr);
        if (bits.defined()) {
            made.y = inplace ? *x : memory_of_result(*x);
            run(loop, *x, made.y, bits, factor, 0);
        }
    });
    if (!bits.defined()) Py_RETURN_NONE;
    made.kept = {from_rng ? state : bits};
    made.inplace = inplace;
    to_go_by_bits(made, SCALE, factor, 0);
    if (from_rng) made.call["p"] = 1 - p;
    return layer(args[0], *x, from_rng ? dropout_from_rng_backward : bits_backward, made);
    END_HANDLE_TH_ERRORS
}

Tensor dropout_from_rng_backward(AutogradContext *ctx, const Tensor &g) {
    at::Generator generator = at::detail::createCPUGenerator();
    generator.set_state(ctx->get_saved_variables()[0].contiguous());
    const Tensor bits = draw(generator, g.numel(), ctx->saved_data.at("p").toDouble());
    TORCH_CHECK(bits.defined(), "The kept state of the random generator is not one of forward.");
    return by_bits(ctx, g, bits);
}

/* The bits of numbers drawn for a tensor, in storage order. */
PyObject *bernoulli(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 2, "bernoulli takes 2 arguments");
    const Tensor *x = plain(args[0]);
    double p;
    if (!x || !numbers(args + 1, &p, 1)) Py_RETURN_NONE;
    Tensor bits;
    {
        pybind11::gil_scoped_release unlocked;
        bits = draw(at::detail::getDefaultCPUGenerator(), x->numel(), p);
    }
    if (!bits.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(bits);
    END_HANDLE_TH_ERRORS
}

/* Dropout of whole channels. The order of the operations is torch's, for the last bit. */
at::DimVector channels(const Tensor &x) {
    at::DimVector shape(x.dim(), 1);
    shape[0] = x.size(0), shape[1] = x.size(1);
    return shape;
}

Tensor noise_of(const Tensor &bits, at::IntArrayRef shape, double p, at::ScalarType dtype) {
    const Tensor noise = memory(shape, dtype);
    const uint8_t *bytes = bits.const_data_ptr<uint8_t>();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, noise.scalar_type(), "feature_dropout", [&] {
        scalar_t *values = noise.mutable_data_ptr<scalar_t>();
        const auto on = (scalar_t)factor_of(p, dtype);
        for (int64_t k = 0; k < noise.numel(); k++) values[k] = bytes[k / 8] >> k % 8 & 1 ? on : (scalar_t)0;
    });
    return noise;
}

/* Where results come to lie. */
using Place = Tensor(const Tensor &x);

/* By a kernel of Triton. */
Tensor scale_channels_on_cuda(const Tensor &x, const Tensor &bits, double p, Place &place) {
    using at::MemoryFormat;
    const bool is_first = x.is_contiguous(), narrow = x.scalar_type() != at::kDouble;
    const bool is_last = x.is_contiguous(MemoryFormat::ChannelsLast) || x.is_contiguous(MemoryFormat::ChannelsLast3d);
    if (!narrow || x.numel() > MOST_ELEMENTS || !(is_first || is_last) || !is_aligned(x)) return Tensor();
    const int64_t channels = x.size(1), inner = x.numel() / (is_first ? x.size(0) * channels : x.size(0));
    const auto dtype = (int64_t)x.scalar_type();
    const bool by_eights = (is_first ? inner : channels) % 8 == 0;
    const Kernel *kernel = kernel_for(x, {SCALING_CHANNELS, dtype, !is_first, by_eights, is_even(x.numel())});
    if (!kernel) return Tensor();
    const Tensor y = place(x);
    Arguments arguments;
    arguments.read(x);
    arguments.write(y);
    arguments.read(bits);
    arguments.add((int32_t)x.numel());
    arguments.add((int32_t)inner);
    arguments.add((int32_t)channels);
    arguments.add((float)factor_of(p, x.scalar_type()));
    arguments.run(*kernel, x, programs_of(x));
    return y;
}

/* x * noise_of(bits, ...), in one pass; undefined where there is no loop for it. */
Tensor scale_channels(const Tensor &x, const Tensor &bits, double p, Place &place) {
    if (!x.numel()) return Tensor();
    if (x.is_cuda()) return scale_channels_on_cuda(x, bits, p, place);
    Loop *loop = loop_for(family_of[SCALE_CHANNELS], x.scalar_type());
    const int64_t inner = x.numel() / (x.size(0) * x.size(1));
    if (!loop || inner < 16 || !x.is_contiguous()) return Tensor();
    const Tensor y = place(x);
    run(loop, x, y, bits, factor_of(p, x.scalar_type()), (double)inner);
    return y;
}

Backward feature_dropout_backward;

PyObject *feature_dropout(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3, "feature_dropout takes 3 arguments");
    const Tensor *x = known(args[1]);
    double p;
    if (!x || !numbers(args + 2, &p, 1)) Py_RETURN_NONE;
    if (!has_loops(*x)) Py_RETURN_NONE;
    const auto shape = channels(*x);
    Made made;
    if (x->is_cuda()) {
        const int64_t count = shape[0] * shape[1], dtype = (int64_t)x->scalar_type();
        const Kernel *kernel = nullptr;
        if (count <= MOST_ELEMENTS) kernel = kernel_for(*x, {TO_BITS, dtype, NONZERO_BITS, 0, is_even(count)});
        if (!kernel) Py_RETURN_NONE;
        compute([&] {
            const Tensor noise = at::empty(shape, x->options()).bernoulli_(1 - p);
            made.kept = {empty_bits(noise)};
            run(*kernel, noise, noise, made.kept[0], 0, 0);
            made.y = scale_channels(*x, made.kept[0], p, memory_of_result);
            if (!made.y.defined()) made.y = *x * noise.div_(1 - p);
        });
    } else {
        compute([&] {
            made.kept = {draw(at::detail::getDefaultCPUGenerator(), shape[0] * shape[1], 1 - p)};
            if (!made.kept[0].defined()) return;
            made.y = scale_channels(*x, made.kept[0], p, memory_of_result);
            if (!made.y.defined()) made.y = *x * noise_of(made.kept[0], shape, p, x->scalar_type());
        });
    }
    if (!made.y.defined()) Py_RETURN_NONE;
    made.call["p"] = p;
    return layer(args[0], *x, feature_dropout_backward, made);
    END_HANDLE_TH_ERRORS
}

Tensor feature_dropout_backward(AutogradContext *ctx, const Tensor &g) {
    const Tensor bits = ctx->get_saved_variables()[0];
    const double p = ctx->saved_data.at("p").toDouble();
    const auto shape = channels(g);
    const bool fits = are_bits(bits, g, shape[0] * shape[1]) && is_unobserved();
    const BelowAutograd guard(g);
    if (fits && is_final(g)) {
        const Tensor dx = scale_channels(g, bits, p, memory_for);
        if (dx.defined()) return dx;
    }
    if (!fits || g.is_cuda())
        return g * unpack(bits, shape, c10::contiguous_strides(shape)).to(g.scalar_type()).div(1 - p);
    return g * noise_of(bits, shape, p, g.scalar_type());
}

}  // namespace
