/* Max pooling, by windows and adaptive. */

#pragma once

#include <ATen/native/Pool.h>

#include "arguments.h"
#include "bits.h"
#include "layer.h"

namespace {

/* Of which a window consists. */
constexpr size_t SIZES = sizeof(Window) / sizeof(ptrdiff_t);
static_assert(sizeof(ptrdiff_t) == sizeof(int64_t));

/* By axis, from the six tuples of kernels.reference.Windows. */
bool window_of(PyObject *windows, int64_t dims, Window &window) {
    auto *all = (ptrdiff_t *)&window;
    for (int field = 0; field < 6; field++) {
        PyObject *sizes = PyTuple_GetItem(windows, field);
        if (!sizes || !PyTuple_CheckExact(sizes) || PyTuple_GET_SIZE(sizes) != dims) return false;
        for (int axis = 0; axis < 3; axis++) {
            const Py_ssize_t place = axis - (3 - dims);
            all[3 * field + axis] = place < 0 ? &window.padding[0] != all + 3 * field
                                              : PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, place));
        }
    }
    return !PyErr_Occurred();
}

/* What programs of a CUDA device have, together, and how many they are; backwards by stretches of a stride along
   two axes, as triton_loops.py says. */
struct Grid {
    int64_t size, programs;

    Grid(DeviceLoop loop, int64_t elements, const Window &w) : size(elements) {
        int64_t times = 1;
        for (int axis = 0; axis < 2 && loop == UNPOOLING; axis++) {
            const int64_t in = w.in[axis], stride = w.stride[axis], padding = w.padding[axis];
            size = size / in * ((in - 1 + padding) / stride - padding / stride + 1);
            times *= stride;
        }
        programs = (size + POOLED_BY_PROGRAM - 1) / POOLED_BY_PROGRAM * times;
    }
};

/* On a CUDA device: by one that is compiled for the windows, and for what is 1. */
const Kernel *kernel_of_pool(DeviceLoop loop, const Tensor &x, int64_t elements, int64_t channels,
                             const Window &w) {
    const Grid grid(loop, elements, w);
    const bool is_far = elements > MOST_ELEMENTS || x.numel() > MOST_ELEMENTS || grid.size > MOST_ELEMENTS;
    if (is_far || grid.programs > MOST_ELEMENTS || !is_aligned(x)) return nullptr;
    const auto ones = [](const ptrdiff_t *sizes) { return (sizes[0] == 1) + 2 * (sizes[1] == 1) + 4 * (sizes[2] == 1); };
    const int64_t alignment = channels == 1 ? 2 : is_even(channels);
    const auto *k = w.kernel, *s = w.stride, *p = w.padding, *d = w.dilation;
    return kernel_for(x, {loop, (int64_t)x.scalar_type(), alignment, ones(w.in), ones(w.out), k[0], k[1], k[2],
                          s[0], s[1], s[2], p[0], p[1], p[2], d[0], d[1], d[2]});
}

void run(const Kernel &kernel, DeviceLoop loop, const Tensor &x, const Tensor &y, const Tensor &offsets,
         int64_t channels, const Window &window) {
    const Grid grid(loop, y.numel(), window);
    Arguments arguments;
    arguments.read(x);
    arguments.write(y);
    arguments.write(offsets);
    arguments.add((int32_t)grid.size);
    if (channels != 1) arguments.add((int32_t)channels);
    for (const ptrdiff_t *sizes : {window.in, window.out})
        for (int axis = 0; axis < 3; axis++)
            if (sizes[axis] != 1) arguments.add((int32_t)sizes[axis]);
    arguments.run(kernel, x, grid.programs);
}

void pool(bool backwards, const Tensor &x, const Tensor &y, const Tensor &offsets, const Window &window,
          int64_t dims, at::MemoryFormat format) {
    const bool first = format == at::MemoryFormat::Contiguous;
    const int64_t planes = first ? c10::multiply_integers(x.sizes().slice(0, x.dim() - dims)) : x.size(0);
    loops->pool(backwards, kind_of(x.scalar_type()), x.const_data_ptr(), y.mutable_data_ptr(),
                offsets.mutable_data_ptr<uint8_t>(), planes, first ? 1 : x.size(1), &window,
                at::get_num_threads());
}

Backward max_pool_backward;

PyObject *pooled(PyObject *row, const Tensor &x, int64_t dims, const Window &window) {
    const ptrdiff_t *kernel = window.kernel;
    for (int axis = 0; axis < 3; axis++)
        if (kernel[axis] > LARGEST_WINDOW) Py_RETURN_NONE;
    if (!x.numel() || kernel[0] * kernel[1] * kernel[2] > LARGEST_WINDOW) Py_RETURN_NONE;
    const auto format = format_of(x, dims);
    const bool is_device = x.is_cuda();
    if (!format || !has_loops(x)) Py_RETURN_NONE;
    at::DimVector shape(x.sizes());
    for (int64_t axis = 0; axis < dims; axis++) shape[x.dim() - dims + axis] = window.out[3 - dims + axis];
    const int64_t channels = *format == at::MemoryFormat::Contiguous ? 1 : x.size(1);
    const Kernel *on_device = nullptr;
    if (is_device) {
        on_device = kernel_of_pool(MAX_POOLING, x, c10::multiply_integers(shape), channels, window);
        if (!on_device) Py_RETURN_NONE;
    }
    Made made;
    compute([&] {
        made.y = at::empty(shape, x.options(), *format);
        made.kept = {at::empty(shape, x.options().dtype(at::kByte), *format)};
        if (on_device) run(*on_device, MAX_POOLING, x, made.y, made.kept[0], channels, window);
        else pool(false, x, made.y, made.kept[0], window, dims, *format);
    });
    Numbers options = {dims, (int64_t)*format};
    options.append((const int64_t *)&window, (const int64_t *)&window + SIZES);
    options.append(x.sizes().begin(), x.sizes().end());
    made.call["options"] = at::IntArrayRef(options);
    return layer(row, x, max_pool_backward, made);
}

/* By windows of Python, which may be those of adaptive pooling. */
PyObject *max_pool_by_windows(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3 && PyTuple_Check(args[2]) && PyTuple_GET_SIZE(args[2]) == 6 &&
                         PyTuple_Check(PyTuple_GET_ITEM(args[2], 0)),
                     "max_pool_by_windows takes a name, a tensor and windows");
    const Tensor *x = known(args[1]);
    const int64_t dims = PyTuple_GET_SIZE(PyTuple_GET_ITEM(args[2], 0));
    Window window;
    if (dims < 1 || dims > 3 || !window_of(args[2], dims, window)) return nullptr;
    return x ? pooled(args[0], *x, dims, window) : Py_NewRef(Py_None);
    END_HANDLE_TH_ERRORS
}

/* By options, of which it takes nothing that torch may refuse. */
PyObject *max_pool(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "max_pool takes 9 arguments");
    const Tensor *x = known(args[1]);
    const int64_t dims = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    at::DimVector by[4];
    bool rounding[2]; /* up, and whether the places are wanted */
    if (!x || (x->dim() != dims + 1 && x->dim() != dims + 2) || !flags(args + 7, rounding, 2)) Py_RETURN_NONE;
    if (rounding[1]) Py_RETURN_NONE;
    for (int k = 0; k < 4; k++)
        if (!sizes(args[k == 1 && is_absent(args[4]) ? 3 : 3 + k], dims, by[k])) Py_RETURN_NONE;
    Window window = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}};
    for (int64_t axis = 0; axis < dims; axis++) {
        const int64_t kernel = by[0][axis], stride = by[1][axis], padding = by[2][axis], dilation = by[3][axis];
        if (kernel < 1 || stride < 1 || dilation < 1 || padding < 0 || padding > kernel / 2) Py_RETURN_NONE;
        const int64_t in = x->size(x->dim() - dims + axis), at = 3 - dims + axis;
        /* (Of others, sums might have no room.) */
        if (kernel > LARGEST_WINDOW || dilation > in + 2 * padding || stride > INT32_MAX) Py_RETURN_NONE;
        const int64_t out = at::native::pooling_output_shape(in, kernel, padding, stride, dilation, rounding[0]);
        if (out < 1) Py_RETURN_NONE;
        window.in[at] = in, window.out[at] = out, window.kernel[at] = kernel;
        window.stride[at] = stride, window.padding[at] = padding, window.dilation[at] = dilation;
    }
    return pooled(args[0], *x, dims, window);
    END_HANDLE_TH_ERRORS
}

/* Windows of planes: where each begins, by axis, and how large they are at most. Offsets count what is in a
   window, places what is in a plane. */
struct Windows {
    int64_t in[3] = {1, 1, 1}, kernel[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};
    at::DimVector starts[3] = {{0}, {0}, {0}};

    explicit Windows(const Window &w) {
        for (int axis = 0; axis < 3; axis++) {
            in[axis] = w.in[axis], kernel[axis] = w.kernel[axis], dilation[axis] = w.dilation[axis];
            starts[axis].clear();
            for (int64_t k = 0; k < w.out[axis]; k++)
                starts[axis].push_back(k * w.stride[axis] - w.padding[axis]);
        }
    }

    /* Of adaptive pooling, by torch. */
    Windows(at::IntArrayRef inputs, at::IntArrayRef outputs, at::IntArrayRef kernels) {
        const size_t absent = 3 - kernels.size();
        for (size_t axis = absent; axis < 3; axis++) {
            kernel[axis] = kernels[axis - absent];
            in[axis] = inputs[inputs.size() - 3 + axis];
            const int64_t out = outputs[outputs.size() - 3 + axis];
            starts[axis].clear();
            for (int64_t k = 0; k < out; k++) starts[axis].push_back(k * in[axis] / out);
        }
    }

    int64_t places() const { return in[0] * in[1] * in[2]; }
    int64_t outputs() const { return starts[0].size() * starts[1].size() * starts[2].size(); }

    /* Each of some values, by one from the start of its window. */
    template <typename Change>
    void change(const Tensor &values, Change by) const {
        int64_t *value = values.mutable_data_ptr<int64_t>();
        const int64_t *end = value + values.numel();
        while (value < end)
            for (const int64_t start0 : starts[0])
                for (const int64_t start1 : starts[1])
                    for (const int64_t start2 : starts[2]) {
                        *value = by(*value, (start0 * in[1] + start1) * in[2] + start2);
                        value++;
                    }
    }

    /* (Not dilated.) */
    void to_offsets(const Tensor &places) const {
        const int64_t last = kernel[0] * kernel[1] * kernel[2] - 1;
        change(places, [&](int64_t place, int64_t start) {
            int64_t k2 = place - start, k0 = 0, k1 = 0;
            if (kernel[0] > 1) k0 = k2 / (in[1] * in[2]), k2 %= in[1] * in[2];
            if (kernel[1] > 1) k1 = k2 / in[2], k2 %= in[2];
            /* (Torch's place of nothing but -inf, channels last, lies outside of a window in 3d.) */
            return std::clamp<int64_t>((k0 * kernel[1] + k1) * kernel[2] + k2, 0, last);
        });
    }

    /* Of planes as one axis: where the offsets are, with no look at them. (Not of adaptive pooling.) */
    Tensor places_by_operations(const Tensor &offsets) const {
        const auto integers = offsets.options().dtype(at::kLong);
        Tensor moves = at::zeros({}, integers), first = moves;
        for (int axis = 0; axis < 3; axis++) {
            const auto &begins = starts[axis];
            const int64_t step = begins.size() > 1 ? begins[1] - begins[0] : 0;
            moves = (moves * in[axis]).unsqueeze(-1) + at::arange(kernel[axis], integers) * dilation[axis];
            first = (first * in[axis]).unsqueeze(-1) + (at::arange((int64_t)begins.size(), integers) * step + begins[0]);
        }
        const Tensor known = offsets.to(at::kLong).clamp(0, moves.numel() - 1);
        return (moves.reshape({-1}).take(known) + first.reshape({-1})).clamp(0, places() - 1);
    }

    Tensor places_of(const Tensor &offsets) const {
        const int64_t per_plane = outputs(), given = offsets.numel();
        TORCH_CHECK(per_plane ? given % per_plane == 0 : !given, "what was kept has another shape now");
        std::vector<int64_t> moves;
        for (int64_t k0 = 0; k0 < kernel[0]; k0++)
            for (int64_t k1 = 0; k1 < kernel[1]; k1++)
                for (int64_t k2 = 0; k2 < kernel[2]; k2++)
                    moves.push_back((k0 * dilation[0] * in[1] + k1 * dilation[1]) * in[2] + k2 * dilation[2]);
        const Tensor values = memory(offsets.sizes(), at::kLong);
        const auto unheard = is_plain(offsets) ? std::make_optional<Unheard>() : std::nullopt;
        values.copy_(offsets);
        change(values, [&](int64_t offset, int64_t start) {
            const int64_t move = moves[std::clamp<int64_t>(offset, 0, moves.size() - 1)];
            return std::clamp<int64_t>(start + move, 0, places() - 1);
        });
        return values;
    }
};

Tensor max_pool_backward(AutogradContext *ctx, const Tensor &g) {
    const auto kept = ctx->get_saved_variables();
    const Tensor &offsets = kept[0];
    const auto options = options_of(ctx);
    const int64_t dims = options[0];
    const auto format = (at::MemoryFormat)options[1];
    Window window;
    std::copy_n(options.begin() + 2, SIZES, (ptrdiff_t *)&window);
    const at::DimVector shape(at::IntArrayRef(options).slice(2 + SIZES));
    const int64_t channels = format == at::MemoryFormat::Contiguous ? 1 : offsets.size(1);
    const Kernel *kernel = nullptr;
    bool fast = is_beside(offsets, g) && offsets.scalar_type() == at::kByte && offsets.sizes() == g.sizes() &&
                offsets.is_contiguous(format) && (offsets.is_cpu() || is_aligned(offsets)) && is_constant(g);
    Tensor in_order = fast ? g.contiguous(format) : g;
    if (fast && g.is_cuda()) {
        in_order = aligned(in_order);
        fast = (kernel = kernel_of_pool(UNPOOLING, in_order, c10::multiply_integers(shape), channels, window));
    }
    if (!fast) {
        const Windows windows(window);
        at::DimVector from(shape.begin(), shape.end() - dims), to = from;
        from.push_back(windows.outputs());
        to.push_back(windows.places());
        const Tensor places = g.is_cpu() ? windows.places_of(offsets).view(from)
                                         : windows.places_by_operations(offsets.reshape(from));
        return at::zeros(to, g.options()).scatter_add(-1, places, g.reshape(from)).view(shape);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor dx = at::empty(shape, g.options(), format);
    if (kernel) run(*kernel, UNPOOLING, in_order, dx, offsets, channels, window);
    else pool(true, in_order, dx, offsets, window, dims, format);
    return dx;
}

Backward adaptive_max_pool_backward;

PyObject *adaptive_max_pool(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 5, "adaptive_max_pool takes a name, a tensor, two tuples and bits");
    const Tensor *x = plain(args[1]);
    const size_t dims = PyTuple_Size(args[2]), absent = 3 - dims;
    const int64_t bits = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return nullptr;
    at::DimVector kernel, out;
    if (!x || !x->is_contiguous() || !x->numel()) Py_RETURN_NONE;
    if (dims == 2 && x->suggest_memory_format() != at::MemoryFormat::Contiguous) Py_RETURN_NONE;
    if (!sizes(args[2], dims, out) || !sizes(args[3], dims, kernel)) Py_RETURN_NONE;
    if (x->scalar_type() != at::kFloat && x->scalar_type() != at::kDouble) Py_RETURN_NONE;
    Made made;
    compute([&] {
        at::DimVector shape(x->sizes());
        std::copy(out.begin(), out.end(), shape.end() - dims);
        made.y = memory(shape, x->scalar_type());
        const Tensor places = memory(shape, at::kLong);
        Adaptive work = {x->const_data_ptr(), made.y.mutable_data_ptr(), places.mutable_data_ptr<int64_t>(),
                         {1, 1, 1}, {1, 1, 1}};
        int64_t planes = x->numel();
        for (size_t axis = 0; axis < dims; axis++) {
            work.in[absent + axis] = x->size(x->dim() - dims + axis);
            work.out[absent + axis] = out[axis];
            planes /= work.in[absent + axis];
        }
        loops->adaptive_pool(&work, x->scalar_type() == at::kDouble, planes, at::get_num_threads());
        Windows(x->sizes(), shape, kernel).to_offsets(places);
        const auto dtype = bits == 8 ? at::kByte : bits == 16 ? at::kShort : bits == 32 ? at::kInt : at::kLong;
        made.kept = {as_integers(places, dtype)};
    });
    made.call["kernel"] = at::IntArrayRef(kernel);
    made.call["shape"] = x->sizes();
    return layer(args[0], *x, adaptive_max_pool_backward, made);
    END_HANDLE_TH_ERRORS
}

Tensor adaptive_max_pool_backward(AutogradContext *ctx, const Tensor &g) {
    const Tensor offsets = ctx->get_saved_variables()[0];
    const auto kernel = ctx->saved_data.at("kernel").toDimVector();
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    TORCH_CHECK(offsets.dim() == (int64_t)shape.size(), "what was kept has another shape now");
    const Windows windows(shape, offsets.sizes(), kernel);
    const Tensor places = windows.places_of(offsets);
    if (!is_final(g) || g.sizes() != places.sizes()) {
        const Tensor x = stand_in(g, shape);
        if (kernel.size() == 3) return at::adaptive_max_pool3d_backward(g, x, places);
        if (kernel.size() == 2) return at::adaptive_max_pool2d_backward(g, x, places);
        const Tensor flat = places.unsqueeze(-2);
        return at::adaptive_max_pool2d_backward(g.unsqueeze(-2), x.unsqueeze(-2), flat).squeeze(-2);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor dx = memory(shape, g.scalar_type()).zero_(), in_order = g.contiguous();
    const int64_t *place = places.const_data_ptr<int64_t>(), per_plane = windows.outputs();
    AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "adaptive_max_pool", [&] {
        const scalar_t *given = in_order.const_data_ptr<scalar_t>();
        scalar_t *plane = dx.mutable_data_ptr<scalar_t>();
        for (int64_t k = 0; k < g.numel(); k += per_plane, plane += windows.places())
            for (int64_t j = k; j < k + per_plane; j++) plane[place[j]] += given[j];
    });
    return dx;
}

}  // namespace
