/* Bits of tensors, and what becomes of gradients by them. */

#pragma once

#include "cpu.h"
#include "cuda.h"

namespace {

/* Of a loop over bits. */
int64_t programs_of(const Tensor &x) { return (x.numel() + BITS_OF_PROGRAM - 1) / BITS_OF_PROGRAM; }

void run(const Kernel &kernel, const Tensor &x, const Tensor &y, const Tensor &bits, double a, double b) {
    Arguments arguments;
    arguments.read(x);
    arguments.write(y);
    arguments.write(bits);
    arguments.add((int32_t)x.numel());
    arguments.add((float)a);
    arguments.add((float)b);
    if (x.numel()) arguments.run(kernel, x, programs_of(x));
}

const Kernel *to_bits(const Tensor &x, int64_t kind, bool writes) {
    if (x.numel() > MOST_ELEMENTS || !is_aligned(x)) return nullptr;
    return kernel_for(x, {TO_BITS, (int64_t)x.scalar_type(), kind, writes, is_even(x.numel())});
}

const Kernel *from_bits(const Tensor &x, int64_t family) {
    const bool rounds = x.scalar_type() == at::kDouble && family != SELECT;
    if (x.numel() > MOST_ELEMENTS || !is_aligned(x) || rounds) return nullptr;
    return kernel_for(x, {FROM_BITS, (int64_t)x.scalar_type(), family, is_even(x.numel())});
}

/* As a tensor of booleans, by operations that every mode can see. */
Tensor unpack(const Tensor &bits, at::IntArrayRef shape, at::IntArrayRef stride) {
    const Tensor eight = at::arange(8, bits.options());
    const Tensor booleans = bits.unsqueeze(-1).bitwise_right_shift(eight).bitwise_and(1).to(at::kBool);
    return booleans.view(-1).as_strided(shape, stride);
}

Tensor from_bits(Family family, const Tensor &g, const Tensor &bits, at::IntArrayRef stride, double a,
                 double b) {
    if (is_cuda(g) && is_constant(g) && !is_aligned(g)) return from_bits(family, g.clone(), bits, stride, a, b);
    const Kernel *kernel = nullptr;
    bool fast = is_constant(g) && are_bits(bits, g, g.numel());
    if (fast && g.is_cuda()) fast = (kernel = from_bits(g, family));
    if (!fast) {
        const Tensor mask = unpack(bits, g.sizes(), stride);
        if (family == SCALE) { /* (As a product, which a sparse gradient has, too.) */
            const auto options = g.options().layout(at::kStrided).dtype(at::toOpMathType(g.scalar_type()));
            return (g * at::where(mask, at::full({}, a, options), at::full({}, b, options))).to(g.scalar_type());
        }
        const Tensor selected = at::where(mask, g, at::zeros({}, g.options()));
        return family == PART ? selected * a : selected;
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [from, dx] = in_order(g, stride);
    if (kernel) run(*kernel, from, dx, bits, a, b);
    else run(loop_for(family_of[family], g.scalar_type()), from, dx, bits, a, b);
    return dx;
}

}  // namespace
