/* Normalization of each example over its last axis, or over groups of channels: from x (without a mean)
   or from y. What y and the statistics are of x tells the second derivative, so both are results. */

#pragma once

#include "arguments.h"
#include "cpu.h"
#include "cuda.h"
#include "function.h"
#include "layer.h"

namespace {

struct Norms : Function<Norms> {
    static variable_list backward(AutogradContext *ctx, const variable_list &gs) {
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const bool has_weight = ctx->saved_data.at("has_weight").toBool();
        const bool has_bias = ctx->saved_data.at("has_bias").toBool();
        const bool wanted[] = {ctx->needs_input_grad(0), has_weight && ctx->needs_input_grad(1),
                               has_bias && ctx->needs_input_grad(1 + has_weight)};
        auto grads = norm_backward(ctx, gs, wanted);
        grads.emplace_back();
        return grads;
    }

    static variable_list norm_backward(AutogradContext *ctx, const variable_list &gs, const bool *wanted);
};

enum Kept { X, WEIGHT, BIAS, Y, RSTD }; /* in the order of the rule; of X and Y one */
constexpr int64_t BYTES_OF_ROW = 1 << 15, PROGRAMS_OF_NORM = 512; /* as in cuda.py */
enum { MOST_FEATURES = 16384 }; /* of parameters whose values are looked at by each call */

using Vectors = std::array<std::optional<Tensor>, 2>; /* a weight and a bias, where there are */

/* Whether both are, or are absent, as Python passes them. */
bool vectors_of(PyObject *const *args, Vectors &vectors) {
    for (int k = 0; k < 2; k++) {
        if (args[k] == Py_None) continue;
        const Tensor *vector = known(args[k]);
        if (!vector) return false;
        vectors[k] = *vector;
    }
    return true;
}

/* A parameter of so many features that a loop can read beside x. */
bool is_vector_of(const Tensor &vector, const Tensor &x, int64_t features) {
    return vector.device() == x.device() && vector.scalar_type() == x.scalar_type() && vector.is_contiguous() &&
           vector.sizes() == at::IntArrayRef(features);
}

/* Computed, where it can be, with a node: of the last axis, or of groups of channels. */
PyObject *normalized(PyObject *row, const Tensor &x, const Vectors &vectors, int64_t groups,
                     bool from_y, bool centered, bool wants_x, std::optional<double> eps) {
    if (!x.is_contiguous() || !x.numel() || x.dim() < (groups ? 2 : 1)) Py_RETURN_NONE;
    if (!is_wide(x) && !(x.is_cuda() && has_loops(x))) Py_RETURN_NONE;
    const int64_t features = groups ? x.size(1) : x.size(-1), examples = groups ? x.size(0) : 0;
    if (groups && x.is_cuda()) Py_RETURN_NONE;
    if (groups && (groups < 0 || features % groups || x.numel() == groups)) Py_RETURN_NONE;
    for (const auto &vector : vectors)
        if (vector && !is_vector_of(*vector, x, features)) Py_RETURN_NONE;
    Made made;
    compute([&] {
        if (groups) {
            const int64_t places = x.numel() / (examples * features);
            std::tie(made.y, std::ignore, made.also) =
                at::native_group_norm(x, vectors[0], vectors[1], examples, features, places, groups, eps.value_or(0));
        } else if (centered) {
            std::tie(made.y, std::ignore, made.also) =
                at::native_layer_norm(x, {features}, vectors[0], vectors[1], eps.value_or(0));
        } else {
            std::tie(made.y, made.also) = at::_fused_rms_norm(x, {features}, vectors[0], eps);
            made.also = made.also.squeeze(-1);
        }
        made.kept.resize(RSTD + 1);
        made.kept[from_y ? Y : X] = from_y ? made.y : x;
        if (wants_x || !from_y) made.kept[RSTD] = made.also;
        if (wants_x || from_y) made.kept[WEIGHT] = vectors[0].value_or(Tensor());
        if (from_y) made.kept[BIAS] = vectors[1].value_or(Tensor());
    });
    made.call["groups"] = groups;
    made.call["from_y"] = from_y;
    made.call["centered"] = centered;
    made.call["has_weight"] = vectors[0].has_value();
    made.call["has_bias"] = vectors[1].has_value();
    if (!name(row, made)) return nullptr;
    const auto given = [](const std::optional<Tensor> &vector) { return vector.value_or(Tensor()); };
    link<Norms>({x, given(vectors[0]), given(vectors[1])}, {made.y, made.also}, made);
    return THPVariable_Wrap(made.y);
}

PyObject *norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "norm takes 9 arguments");
    const Tensor *x = known(args[1]);
    const int64_t groups = PyLong_AsLongLong(args[4]);
    double eps = 0;
    if (PyErr_Occurred()) return nullptr;
    if (!x || (args[8] == Py_None ? args[6] == Py_True : !numbers(args + 8, &eps, 1))) Py_RETURN_NONE;
    Vectors vectors;
    if (!vectors_of(args + 2, vectors)) Py_RETURN_NONE;
    return normalized(args[0], *x, vectors, groups, args[5] == Py_True, args[6] == Py_True, args[7] == Py_True,
                      args[8] == Py_None ? std::nullopt : std::optional<double>(eps));
    END_HANDLE_TH_ERRORS
}

/* Whether the output of a norm tells the normalized input: see invertible.py. Nothing where it takes more than a
   look to say so. */
std::optional<bool> tells_its_input(const Tensor &x, const Vectors &vectors, double ratio) {
    const auto &[weight, bias] = vectors;
    if (!x.is_cpu() || is_autocast(x)) return std::nullopt;
    if (!is_wide(x)) return std::nullopt;
    for (const auto &vector : vectors)
        if (vector && (!vector->is_cpu() || vector->scalar_type() != x.scalar_type() || !vector->is_contiguous() ||
                       vector->numel() > MOST_FEATURES))
            return std::nullopt;
    if (!weight) return !bias;
    if (bias && bias->sizes() != weight->sizes()) return std::nullopt;
    bool is = true;
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "tells_its_input", [&] {
        using Limits = std::numeric_limits<scalar_t>;
        const scalar_t low = Limits::min() / Limits::epsilon(), high = 1 / low;
        const scalar_t *w = weight->const_data_ptr<scalar_t>();
        const scalar_t *b = bias ? bias->const_data_ptr<scalar_t>() : nullptr;
        const int64_t features = weight->numel();
        for (int64_t k = 0; k < features; k++) is &= std::abs(w[k]) >= low && std::abs(w[k]) <= high;
        for (int64_t k = 0; b && k < features; k++) is &= std::abs(b[k]) <= (scalar_t)ratio * std::abs(w[k]);
    });
    return is;
}

PyObject *is_invertible(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 4, "is_invertible takes 4 arguments");
    const Tensor *x = is_usual() ? plain(args[0]) : nullptr;
    Vectors vectors;
    double ratio;
    if (!x || !numbers(args + 3, &ratio, 1)) Py_RETURN_NONE;
    if (!vectors_of(args + 1, vectors)) Py_RETURN_NONE;
    const auto is = tells_its_input(*x, vectors, ratio);
    return is ? PyBool_FromLong(*is) : Py_NewRef(Py_None);
    END_HANDLE_TH_ERRORS
}

/* A module whose norm torch itself may compute, if that keeps the same: where a gradient is wanted of x or of the
   weight, or none. */
struct OfTorch {
    const Tensor *x = nullptr; /* or nullptr, where it may not */
    long wanted = 0;
    Vectors vectors;
    std::optional<double> eps;
    at::DimVector shape;

    OfTorch(PyObject *const *args, Py_ssize_t count, bool has_bias, long casts, const char *sizes) {
        TORCH_CHECK_TYPE(count == 3 && PyDict_Check(args[1]), "a norm takes a name, a dict and a tensor");
        const Module module = {args[1]};
        PyObject *parameters[] = {module.parameter("weight"), has_bias ? module.parameter("bias") : Py_None};
        PyObject *given = module.option("eps"), *of_shape = module.option(sizes);
        if (!parameters[0] || !parameters[1] || !given || !of_shape || args[2] == Py_None) return;
        const auto bits = wanted_of({args[2], parameters[0], parameters[1]}, casts);
        if (!bits || (*bits && !(*bits & 3)) || !are_leaves({parameters[0], parameters[1]})) return;
        double number;
        if (given != Py_None && !numbers(&given, &number, 1)) return;
        if (given != Py_None) eps = number;
        const Py_ssize_t axes = count_of(of_shape);
        if (axes == 0 || !::sizes(of_shape, std::max<Py_ssize_t>(axes, 1), shape)) return;
        for (int k = 0; k < 2; k++)
            if (parameters[k] != Py_None) vectors[k] = THPVariable_Unpack(parameters[k]);
        wanted = *bits;
        x = &THPVariable_Unpack(args[2]);
    }

    /* Whether x is normalized over its last axis alone. */
    bool is_over_last() const { return shape.size() == 1 && x->dim() && x->size(-1) == shape[0]; }

    template <typename Norm>
    PyObject *wrapped(const Norm &norm) const {
        Tensor y;
        {
            pybind11::gil_scoped_release unlocked;
            y = norm();
        }
        return THPVariable_Wrap(y);
    }
};

PyObject *layer_norm_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    const OfTorch of(args, count, true, 0, "normalized_shape");
    if (!of.x || !of.eps) Py_RETURN_NONE;
    return of.wrapped([&] { return at::layer_norm(*of.x, of.shape, of.vectors[0], of.vectors[1], *of.eps); });
    END_HANDLE_TH_ERRORS
}

/* On CUDA, or where no gradient is wanted, by torch's own operation, which keeps more on CPU: there by a node. */
PyObject *rms_norm_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    const OfTorch of(args, count, false, 3, "normalized_shape");
    if (!of.x || !of.x->is_contiguous() || !of.x->dim()) Py_RETURN_NONE;
    if (of.wanted && of.x->is_cpu()) {
        if (!of.is_over_last()) Py_RETURN_NONE;
        return normalized(args[0], *of.x, of.vectors, 0, false, false, of.wanted & 1, of.eps);
    }
    const auto &weight = of.vectors[0];
    const bool is_fused = !weight || (weight->scalar_type() == of.x->scalar_type() &&
                                      weight->sizes() == of.x->sizes().slice(of.x->dim() - 1));
    if (!is_fused) Py_RETURN_NONE;
    return of.wrapped([&] { return at::rms_norm(*of.x, of.shape, weight, of.eps); });
    END_HANDLE_TH_ERRORS
}

/* From the output, where a gradient is wanted and it tells the input. (Else layer normalization as torch has it.) */
PyObject *norm_from_output(PyObject *const *args, Py_ssize_t count, bool centered) {
    const OfTorch of(args, count - 1, centered, 3, "normalized_shape");
    double ratio;
    if (!of.x || (centered && !of.eps) || !numbers(args + 3, &ratio, 1)) Py_RETURN_NONE;
    if (of.wanted) {
        const auto is = of.is_over_last() ? tells_its_input(*of.x, of.vectors, ratio) : std::nullopt;
        if (!is || (!*is && !centered)) Py_RETURN_NONE;
        if (*is) return normalized(args[0], *of.x, of.vectors, 0, true, centered, of.wanted & 1, of.eps);
    }
    return of.wrapped([&] {
        if (centered) return at::layer_norm(*of.x, of.shape, of.vectors[0], of.vectors[1], *of.eps);
        return at::rms_norm(*of.x, of.shape, of.vectors[0], of.eps);
    });
}

PyObject *layer_norm_from_output_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    return norm_from_output(args, count, true);
    END_HANDLE_TH_ERRORS
}

PyObject *rms_norm_from_output_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    return norm_from_output(args, count, false);
    END_HANDLE_TH_ERRORS
}

constexpr int64_t MANY_PLACES = 2048; /* of an image, as in group_norm.py */

/* By torch's kernel of group normalization, which crashes, in torch 2.13, if it is asked for gradients of parameters
   alone, where channels are last and images have few places. */
bool is_taken_as_it_is(const Tensor &x) {
    if (x.is_contiguous()) return true;
    const auto format = x.suggest_memory_format();
    const bool has_format = format != at::MemoryFormat::Contiguous && x.is_contiguous(format);
    return x.is_cpu() && has_format && (x.requires_grad() || x.numel() / x.size(0) / x.size(1) >= MANY_PLACES);
}

/* (Of other layouts torch keeps a copy.) */
PyObject *group_norm_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    const OfTorch of(args, count, true, 0, "num_groups");
    if (!of.x || !of.eps || of.shape.size() != 1 || of.shape[0] < 1) Py_RETURN_NONE;
    const int64_t groups = of.shape[0], dims = of.x->dim();
    if (!of.x->numel() || dims < 2 || !is_taken_as_it_is(*of.x)) Py_RETURN_NONE;
    if (of.x->size(0) * of.x->size(1) / groups * c10::multiply_integers(of.x->sizes().slice(2)) == 1)
        Py_RETURN_NONE; /* for Python to refuse */
    return of.wrapped([&] {
        return at::group_norm(*of.x, groups, of.vectors[0], of.vectors[1], *of.eps,
                              at::globalContext().userEnabledCuDNN());
    });
    END_HANDLE_TH_ERRORS
}

/* Whether a norm of plain tensors (an input, a shape, parameters) is over the last axis; no, too, where it
   takes more than a look to say so. */
PyObject *is_over_last(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count >= 2, "is_over_last takes a tensor, a shape and parameters");
    const Tensor *x = is_usual() ? known(args[0]) : nullptr;
    if (!x || !x->dim() || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != 1) Py_RETURN_FALSE;
    const int64_t features = x->size(-1);
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], 0)) != features) return PyErr_Clear(), Py_NewRef(Py_False);
    for (int k = 2; k < count; k++)
        if (args[k] != Py_None && !(known(args[k]) && is_vector_of(*known(args[k]), *x, features))) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

/* What a norm of so many groups of channels (0: of the last axis) has a mean of each. */
struct Rows {
    int64_t features, groups, places, count;

    Rows(const Tensor &x, int64_t of_channels) : groups(std::max<int64_t>(of_channels, 1)) {
        features = of_channels ? x.size(1) : x.size(-1);
        TORCH_CHECK(x.numel() && features >= groups, "what was kept has another shape now");
        places = of_channels ? x.numel() / (x.size(0) * features) : 1;
        count = x.numel() / (features / groups * places);
    }
};

/* By operations that have derivatives: of (n, groups, k, places). */
variable_list norm_by_operations(const variable_list &gs, const variable_list &kept, const bool *wanted,
                                 int64_t groups, bool from_y, bool centered) {
    const Tensor &array = kept[from_y ? Y : X];
    const Rows of(array, groups);
    const int64_t g0 = of.groups, n = of.count / g0, per = of.features / g0;
    const auto wide = at::toOpMathType(array.scalar_type());
    const auto grouped = [&](const Tensor &t) { return t.to(wide).reshape({n, g0, per, -1}); };
    const auto spread = [&](const Tensor &t) { return t.to(wide).reshape({g0, per, 1}); };
    const auto narrow = [&](const Tensor &t, at::IntArrayRef shape) {
        return t.reshape(shape).to(array.scalar_type());
    };
    const Tensor g = grouped(gs[0].defined() ? gs[0] : at::zeros_like(array));
    const Tensor rstd = kept[RSTD].defined() ? kept[RSTD].reshape({n, g0, 1, 1}) : Tensor();
    Tensor xhat = grouped(array);
    if (!from_y) xhat = xhat * rstd;
    if (kept[BIAS].defined()) xhat = xhat - spread(kept[BIAS]);
    if (from_y && kept[WEIGHT].defined()) xhat = xhat / spread(kept[WEIGHT]);
    variable_list grads(3);
    const at::DimVector others = {0, 3};
    if (wanted[2]) grads[2] = narrow(g.sum(others), {-1});
    if (wanted[1]) grads[1] = narrow((g * xhat).sum(others), {-1});
    if (!wanted[0]) return grads;
    const Tensor gw = kept[WEIGHT].defined() ? g * spread(kept[WEIGHT]) : g;
    Tensor dx = gw - xhat * (gw * xhat).mean({2, 3}, true);
    if (centered) dx = dx - gw.mean({2, 3}, true);
    dx = dx * rstd;
    if (gs[1].defined()) /* of rstd, whose derivative is -rstd^2 xhat / N */
        dx = dx - gs[1].reshape({n, g0, 1, 1}) * rstd.square() / (double)(per * g.size(3)) * xhat;
    grads[0] = narrow(dx, array.sizes());
    return grads;
}

Tensor inverse_of(const Tensor &vector) {
    const Tensor inverse = memory_like(vector);
    AT_DISPATCH_FLOATING_TYPES(vector.scalar_type(), "inverse_of", [&] {
        const scalar_t *from = vector.const_data_ptr<scalar_t>();
        std::transform(from, from + vector.numel(), inverse.mutable_data_ptr<scalar_t>(),
                       [](scalar_t value) { return 1 / value; });
    });
    return inverse;
}

variable_list norm_by_loop(const Tensor &given, const variable_list &kept, const bool *wanted, int64_t groups,
                           bool from_y, bool centered, const Tensor &mean = {}) {
    const Tensor &array = kept[from_y ? Y : X];
    const Rows of(array, groups);
    at::AutoDispatchBelowADInplaceOrView guard;
    /* (Another reference to what is contiguous would be one too many for is_ours.) */
    const Tensor copied = given.is_contiguous() ? Tensor() : contiguous(given, true);
    const Tensor &g = copied.defined() ? copied : given;
    const int64_t threads = g.numel() > GRAIN ? at::get_num_threads() : 1;
    variable_list grads(3);
    if (wanted[0]) grads[0] = memory_for(g);
    for (int k = 1; k < 3; k++)
        if (wanted[k]) grads[k] = zeros({threads, of.features}, g.scalar_type());
    const Tensor inverse = from_y && !groups && kept[WEIGHT].defined() ? inverse_of(kept[WEIGHT]) : Tensor();
    const auto read = [](const Tensor &t) { return t.defined() ? t.const_data_ptr() : nullptr; };
    const auto write = [](const Tensor &t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
    const Norm norm = {g.const_data_ptr(), array.const_data_ptr(), read(mean), read(kept[RSTD]),
                       read(kept[WEIGHT]), read(kept[BIAS]), read(inverse),
                       write(grads[0]), write(grads[1]), write(grads[2]), nullptr,
                       of.features / of.groups, of.groups, of.places, 0, from_y, centered};
    loops->norm(&norm, g.scalar_type() == at::kDouble, groups > 0, of.count, threads);
    for (int k = 1; k < 3; k++)
        if (wanted[k]) grads[k] = threads > 1 ? grads[k].sum(0) : grads[k].view(-1);
    return grads;
}

/* On a CUDA device, of the last axis; nothing where no kernel applies. */
variable_list norm_of_rows(const Tensor &given, const variable_list &kept, const bool *wanted, bool from_y,
                           bool centered) {
    const Tensor &array = kept[from_y ? Y : X];
    const int64_t features = array.size(-1), rows = array.numel() / features;
    const Tensor copied = given.is_contiguous() ? Tensor() : given.contiguous(); /* as in norm_by_loop */
    const Tensor &g = copied.defined() ? copied : given;
    variable_list grads(3);
    if (!from_y) { /* of root mean squares, as others keep y */
        Tensor weight = kept[WEIGHT];
        if (!weight.defined() && wanted[1]) weight = at::ones({features}, g.options());
        const auto scale = weight.defined() ? std::optional<Tensor>(weight) : std::nullopt;
        at::DimVector shape(array.sizes());
        shape.back() = 1;
        std::tie(grads[0], grads[1]) = at::_fused_rms_norm_backward(g, array, {features}, kept[RSTD].view(shape), scale,
                                                                    {wanted[0], wanted[1]});
        return grads;
    }
    const auto wide = at::toOpMathType(array.scalar_type());
    const int64_t itemsize = c10::elementSize(wide);
    int64_t block = 1;
    while (block < features) block *= 2;
    const Tensor vectors[] = {kept[RSTD], kept[WEIGHT], kept[BIAS]};
    bool fits = block * itemsize <= BYTES_OF_ROW && array.numel() <= MOST_ELEMENTS;
    fits = fits && is_aligned(g) && is_aligned(array);
    for (const Tensor &one : vectors) fits = fits && (!one.defined() || is_aligned(one));
    const int64_t at_once = std::max<int64_t>(1, ELEMENTS_OF_PROGRAM / block);
    int64_t programs = (rows + at_once - 1) / at_once;
    if (wanted[1] || wanted[2]) programs = std::min(programs, PROGRAMS_OF_NORM);
    const Kernel *kernel = nullptr;
    if (fits)
        kernel = kernel_for(g, {NORM_OF_ROWS, (int64_t)g.scalar_type(), true, kept[WEIGHT].defined(),
                                kept[BIAS].defined(), centered, wanted[0], wanted[1], wanted[2], at_once, block,
                                is_even(features)});
    if (!kernel) return {};
    if (wanted[0]) grads[0] = memory_for(g);
    for (int k = 1; k < 3; k++)
        if (wanted[k]) grads[k] = at::empty({programs, features}, g.options().dtype(wide));
    Arguments arguments;
    for (const Tensor &one : {g, array, vectors[0], vectors[1], vectors[2]}) arguments.read(one.defined() ? one : g);
    for (const Tensor &one : grads) arguments.add(one.defined() ? one.mutable_data_ptr() : g.const_data_ptr());
    arguments.add((int32_t)rows);
    if (features != 1) arguments.add((int32_t)features);
    arguments.add(0.0f);
    arguments.run(*kernel, g, programs);
    for (int k = 1; k < 3; k++)
        if (wanted[k]) grads[k] = grads[k].sum(0).to(g.scalar_type());
    return grads;
}

variable_list Norms::norm_backward(AutogradContext *ctx, const variable_list &gs, const bool *wanted) {
    if (!gs[0].defined() && !gs[1].defined()) return variable_list(3);
    const auto kept = ctx->get_saved_variables();
    const int64_t groups = ctx->saved_data.at("groups").toInt();
    const bool from_y = ctx->saved_data.at("from_y").toBool();
    const bool centered = ctx->saved_data.at("centered").toBool();
    const Tensor &array = kept[from_y ? Y : X];
    bool fast = !gs[1].defined() && is_final(gs[0]) &&
                gs[0].sizes() == array.sizes() && gs[0].scalar_type() == array.scalar_type();
    const Rows of(array, groups);
    const auto wide = at::toOpMathType(array.scalar_type());
    for (int k = X; k <= RSTD; k++) {
        const Tensor &one = kept[k];
        const int64_t elements = k == X || k == Y ? array.numel() : k == RSTD ? of.count : of.features;
        const auto dtype = k == RSTD ? wide : array.scalar_type();
        fast = fast && (!one.defined() || (is_beside(one, gs[0]) && one.is_contiguous() && one.numel() == elements &&
                                           one.scalar_type() == dtype));
    }
    if (fast && gs[0].is_cuda()) {
        at::AutoDispatchBelowADInplaceOrView guard;
        auto grads = norm_of_rows(gs[0], kept, wanted, from_y, centered);
        if (!grads.empty()) return grads;
    } else if (fast) return norm_by_loop(gs[0], kept, wanted, groups, from_y, centered);
    return norm_by_operations(gs, kept, wanted, groups, from_y, centered);
}

}  // namespace
