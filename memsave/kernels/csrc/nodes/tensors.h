/* Tensors, as nodes look at them: what is memory and nothing else, how it is laid out, and new ones. */

#pragma once

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "../loops.h"

namespace {

using at::Tensor;

PyObject *device_context; /* the mode of torch.set_default_device, which says where tensors are made */

/* Whether no mode has to see every operation. */
bool is_unobserved() {
    using at::impl::PythonTorchFunctionTLS;
    if (c10::impl::TorchDispatchModeTLS::stack_len()) return false;
    for (int64_t k = 0; k < PythonTorchFunctionTLS::stack_len(); k++)
        if ((PyObject *)Py_TYPE(PythonTorchFunctionTLS::get_stack_at(k)->ptr(getPyInterpreter())) != device_context)
            return false;
    return true;
}

/* Whether it is memory and nothing else: strided, not negated, fake, wrapped or batched. */
bool is_memory(const Tensor &x, c10::DispatchKeySet keys) {
    return x.key_set() == keys && x.has_storage() && (!x.numel() || x.storage().data());
}

/* On CPU; on a CUDA device; on one of these. */
bool is_plain(const Tensor &x) {
    static const auto keys = [] { /* (not by at::empty, of which a transform may make something else) */
        const c10::InferenceMode off(false);
        return at::detail::empty_cpu({0}, at::kFloat).key_set();
    }();
    return is_memory(x, keys);
}

bool is_cuda(const Tensor &x) {
    using c10::DispatchKeySet, c10::BackendComponent, c10::getAutocastRelatedKeySetFromBackend;
    static const auto keys = [] { /* as those of the CPU, but for what names the device */
        const c10::InferenceMode off(false);
        const auto cpu = at::detail::empty_cpu({0}, at::kFloat).key_set();
        const auto others = (cpu - getAutocastRelatedKeySetFromBackend(BackendComponent::CPUBit))
                                .remove_backend(BackendComponent::CPUBit);
        return others | DispatchKeySet(BackendComponent::CUDABit) |
               getAutocastRelatedKeySetFromBackend(BackendComponent::CUDABit);
    }();
    return is_memory(x, keys);
}

bool is_known(const Tensor &x) { return is_plain(x) || is_cuda(x); }

bool is_wide(const Tensor &x) { return x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble; }

/* Beside another. */
bool is_beside(const Tensor &x, const Tensor &other) { return is_known(x) && x.device() == other.device(); }

/* Whether forward-mode AD is on, whose tangents do not show in the keys of tensors. */
bool has_tangents() { return (bool)torch::autograd::ForwardADLevel::try_get_by_idx(0); }

/* Whether nobody asks how what backward makes of g depends on g, or comes about; or on anything else. */
bool is_constant(const Tensor &g) {
    const bool differentiated = at::GradMode::is_enabled() && g.requires_grad();
    return !differentiated && is_known(g) && is_unobserved() && !has_tangents();
}
bool is_final(const Tensor &g) { return !at::GradMode::is_enabled() && is_constant(g); }

/* While it is there, operations are spared the look of autograd, if their gradient is final. */
struct BelowAutograd {
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;

    explicit BelowAutograd(const Tensor &g) {
        if (is_final(g)) guard.emplace();
    }
};

/* As at::empty and at::empty_strided, where nobody looks at how tensors are made. */
Tensor memory(at::IntArrayRef shape, at::ScalarType dtype) {
    return Tensor(at::detail::empty_cpu(shape, dtype));
}

Tensor memory(at::IntArrayRef shape, at::IntArrayRef stride, at::ScalarType dtype) {
    return Tensor(at::detail::empty_strided_cpu(shape, stride, dtype));
}

Tensor zeros(at::IntArrayRef shape, at::ScalarType dtype) {
    const Tensor x = memory(shape, dtype);
    std::memset(x.mutable_data_ptr(), 0, x.nbytes());
    return x;
}

Tensor memory_like(const Tensor &x, at::IntArrayRef stride) {
    if (x.is_cpu()) return memory(x.sizes(), stride, x.scalar_type());
    return at::empty_strided(x.sizes(), stride, x.options());
}

Tensor memory_like(const Tensor &x) { return memory_like(x, x.strides()); }

/* For what torch computes of each element, which is stored as x (that is dense), but for strides of axes of one
   place: these are those of a format, if x is in one. */
Tensor memory_of_result(const Tensor &x) {
    if (x.is_contiguous()) return x.is_cpu() ? memory(x.sizes(), x.scalar_type()) : at::empty(x.sizes(), x.options());
    if (!x.is_contiguous(at::MemoryFormat::ChannelsLast)) return memory_like(x);
    return memory_like(x, c10::get_channels_last_strides_2d(x.sizes()));
}

/* Whether only the node that is running has g, dense and in memory of torch's own, so that what it makes
   of g may take its place. (As torch's accumulation of gradients does. Who gave g, a hook, another branch
   of the graph: each would have a reference.) */
bool is_ours(const Tensor &g) {
    return g.use_count() == 1 && g.storage().use_count() == 1 && g.is_non_overlapping_and_dense() &&
           g.storage().data_ptr().get_deleter() == c10::GetAllocator(g.device().type())->raw_deleter();
}

/* For a gradient that is laid out as g and reads none of its elements after it has written it. */
Tensor memory_for(const Tensor &g) { return is_ours(g) ? g : memory_like(g); }

Tensor times(const Tensor &g, const Tensor &factor) { return is_ours(g) ? g.mul_(factor) : g * factor; }

/* As Tensor::to, but that a few take no longer than to write them. */
Tensor as_integers(const Tensor &x, at::ScalarType dtype) {
    const bool are_integers = at::isIntegralType(x.scalar_type(), false) && at::isIntegralType(dtype, false);
    if (x.scalar_type() == dtype || !are_integers || !is_plain(x)) return x.to(dtype);
    if (!x.is_contiguous() || x.numel() > GRAIN) return x.to(dtype);
    const Tensor y = memory(x.sizes(), dtype);
    AT_DISPATCH_INTEGRAL_TYPES(x.scalar_type(), "as_integers", [&] {
        const scalar_t *from = x.const_data_ptr<scalar_t>();
        AT_DISPATCH_INTEGRAL_TYPES(dtype, "as_integers", [&] {
            std::transform(from, from + x.numel(), y.mutable_data_ptr<scalar_t>(),
                           [](auto value) { return (scalar_t)value; });
        });
    });
    return y;
}

Tensor empty_bits(int64_t elements) { return memory({(elements + 7) / 8}, at::kByte); }

Tensor empty_bits(const Tensor &x) {
    if (x.is_cpu()) return empty_bits(x.numel());
    return at::empty({(x.numel() + 7) / 8}, x.options().dtype(at::kByte));
}

at::DimVector strides_of(at::IntArrayRef shape, at::MemoryFormat format) {
    if (format == at::MemoryFormat::ChannelsLast) return at::DimVector(c10::get_channels_last_strides_2d(shape));
    if (format == at::MemoryFormat::ChannelsLast3d) return at::DimVector(c10::get_channels_last_strides_3d(shape));
    return c10::contiguous_strides(shape);
}

/* How a batch of images is stored: its channels as the last axis, if they are several and the first ones are
   not, or as any tensor. (Of both where torch cannot tell, and of other tensors, nothing.) */
std::optional<at::MemoryFormat> format_of(const Tensor &x, int64_t dims) {
    const bool first = x.is_contiguous();
    const auto only_first = first ? std::optional(at::MemoryFormat::Contiguous) : std::nullopt;
    if (x.dim() != dims + 2) return only_first;
    if (dims == 1) return x.size(1) > 1 ? only_first : std::nullopt;
    const auto last = dims == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
    if (first == x.is_contiguous(last)) return std::nullopt;
    if (first) return at::MemoryFormat::Contiguous;
    return x.suggest_memory_format() == last ? std::optional(last) : std::nullopt;
}

/* That, or, where torch cannot tell, its default. */
std::optional<at::MemoryFormat> any_format_of(const Tensor &x, int64_t dims) {
    if (x.is_contiguous()) return at::MemoryFormat::Contiguous;
    return dims == 2 || dims == 3 ? format_of(x, dims) : std::nullopt;
}

/* A gradient in a format; but of what is no memory of its own, vmap knows none. */
Tensor in_format(const Tensor &g, at::MemoryFormat format) { return is_known(g) ? g.contiguous(format) : g; }

/* As Tensor::detach, where nobody looks on. */
Tensor shallow(const Tensor &x) {
    return Tensor(x.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

/* An input, of which an operation on its gradient reads the shape alone: of the memory of the gradient, if
   that has as many elements, so that an operation that wants it contiguous makes no copy. (Kernels of CUDA
   want all inputs so, but never read this one; nor may a hook, as where its graph is made, too.) */
Tensor stand_in(const Tensor &g, at::IntArrayRef shape, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
    if (!is_known(g) || !is_unobserved()) return at::empty({1}, g.options()).expand(shape);
    const bool is_unread = g.is_cuda() && is_final(g);
    const bool fits = g.is_contiguous(format) && (is_unread || c10::multiply_integers(shape) <= g.numel());
    if (!fits && g.is_cuda()) return at::empty({1}, g.options()).expand(shape);
    const Tensor x = fits ? shallow(g) : memory({1}, g.scalar_type());
    x.unsafeGetTensorImpl()->set_sizes_and_strides(
        shape, fits ? strides_of(shape, format) : at::DimVector(shape.size(), 0));
    return x;
}

/* The gradient itself, yet to be written, where nobody looks on: that of CPU kernels, which write it into
   what is given. Undefined elsewhere. */
Tensor to_be_written(const Tensor &g, at::IntArrayRef shape, at::MemoryFormat format) {
    return is_plain(g) && is_final(g) ? memory(shape, strides_of(shape, format), g.scalar_type()) : Tensor();
}

/* Whether it begins at an address that 16 divides, as all that loops of CUDA take. */
bool is_aligned(const Tensor &x) { return !((uintptr_t)x.const_data_ptr() % 16); }

/* (A copy begins at one.) */
Tensor aligned(const Tensor &x) { return is_aligned(x) ? x : x.clone(); }

/* Whether a loop may read them: hooks of saved tensors may give back anything. */
bool are_bits(const Tensor &bits, const Tensor &of, int64_t elements) {
    return is_beside(bits, of) && (bits.is_cpu() || is_aligned(bits)) && bits.scalar_type() == at::kByte &&
           bits.is_contiguous() && bits.numel() == (elements + 7) / 8;
}

/* Of two axes, of which the first has one place. */
at::DimVector with_one_place(at::DimVector shape) {
    shape.insert(shape.end() - 1, 1);
    return shape;
}

/* Operations on plain tensors, of which no mode, transform or autograd hears. */
struct Unheard {
    const c10::impl::ExcludeDispatchKeyGuard guard{
        c10::DispatchKeySet(c10::DispatchKeySet::FULL) - c10::DispatchKeySet(c10::DispatchKey::CPU)};
};

}  // namespace
