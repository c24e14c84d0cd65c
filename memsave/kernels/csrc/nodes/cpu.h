/* Loops of native.c, over tensors. */

#pragma once

#include <ATen/Parallel.h>

#include "tensors.h"

namespace {

const Loops *loops;

/* Their families. Backward of activations that are linear in pieces: what of g passes, and what becomes
   of the rest; two make bits, of booleans and of what bounds do not enclose; backward of curves. */
enum Family : int64_t { SELECT, PART, SCALE, SCALE_CHANNELS, NONZERO, NOT_INSIDE, REST, TANH2, LOGISTIC, FAMILIES };
int64_t family_of[FAMILIES];

/* Of DLPack. */
int code_of(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 4 : at::isFloatingType(dtype) ? 2 : 1; }

/* As loops come in. */
int kind_of(at::ScalarType dtype) {
    if (dtype == at::kDouble) return OF_DOUBLE;
    return dtype == at::kFloat ? OF_FLOAT : dtype == at::kBFloat16 ? OF_BFLOAT16 : OF_FLOAT16;
}

Loop *loop_for(int64_t family, at::ScalarType dtype) {
    return loops->of(family, code_of(dtype), 8 * (int)c10::elementSize(dtype));
}

void run(Loop *loop, const Tensor &x, const Tensor &y, const Tensor &bits, double a, double b) {
    const Arrays arrays = {x.const_data_ptr(), y.defined() ? y.mutable_data_ptr() : nullptr,
                           (uint8_t *)bits.mutable_data_ptr(), a, b, nullptr};
    loops->run(loop, &arrays, x.numel(), at::get_num_threads());
}

/* As Tensor::contiguous. (Whose copy is slower, but has a derivative.) */
Tensor contiguous(const Tensor &x, bool is_constant) {
    const auto last = x.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
    const bool has_last = (x.dim() == 4 || x.dim() == 5) && !x.is_contiguous() && x.is_contiguous(last);
    const bool is_served = x.numel() > GRAIN && at::isFloatingType(x.scalar_type()) && x.element_size() > 1;
    if (!has_last || !is_served || !is_plain(x) || !is_constant) return x.contiguous();
    const Tensor y = memory(x.sizes(), x.scalar_type());
    const int64_t images = x.size(0), channels = x.size(1);
    loops->channels_first(x.const_data_ptr(), y.mutable_data_ptr(), x.element_size(), images, channels,
                          x.numel() / images / channels, at::get_num_threads());
    return y;
}

/* The gradient in the order of these strides, and memory for what a loop makes of it, which may be the same. */
std::pair<Tensor, Tensor> in_order(const Tensor &g, at::IntArrayRef stride) {
    if (g.strides() == stride) {
        Tensor dx = memory_for(g); /* before there is another reference to it */
        return {g, dx};
    }
    const bool is_first = !g.is_contiguous() && stride == at::IntArrayRef(c10::contiguous_strides(g.sizes()));
    const Tensor copy = is_first ? contiguous(g, true) : memory_like(g, stride).copy_(g);
    return {copy, copy};
}

}  // namespace
