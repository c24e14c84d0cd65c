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

Loop *loop_for(int64_t family, at::ScalarType dtype) {
    const int code = dtype == at::kBFloat16 ? 4 : at::isFloatingType(dtype) ? 2 : 1; /* of DLPack */
    return loops->of(family, code, 8 * (int)c10::elementSize(dtype));
}

void run(Loop *loop, const Tensor &x, const Tensor &y, const Tensor &bits, double a, double b) {
    const Arrays arrays = {x.const_data_ptr(), y.defined() ? y.mutable_data_ptr() : nullptr,
                           (uint8_t *)bits.mutable_data_ptr(), a, b, nullptr};
    loops->run(loop, &arrays, x.numel(), at::get_num_threads());
}

}  // namespace
