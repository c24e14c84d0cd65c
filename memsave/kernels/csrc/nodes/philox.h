/* Dropout on CUDA devices in one pass, with the random numbers that torch's own kernel would draw: those of
   Philox, by fours. Which element has which is asked of torch itself. */

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/cuda/PhiloxCudaState.h>

#include "bits.h"

namespace at {
struct CUDAGeneratorImpl;
}

namespace {

/* The generator of a device, by the functions of torch's that have no part in what else it remembers. (They are
   looked up, as torch for the CPU has none of them.) */
struct Philox {
    at::PhiloxCudaState (*draw)(at::CUDAGeneratorImpl *, uint64_t count) = nullptr;
    void (*set_offset)(at::CUDAGeneratorImpl *, uint64_t offset) = nullptr;
    uint64_t (*offset)(const at::CUDAGeneratorImpl *) = nullptr;
    bool is_whole = false;

    Philox() {
#ifdef __linux__
        void *torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        is_whole = torch && Driver::find(torch, "_ZN2at17CUDAGeneratorImpl17philox_cuda_stateEm", draw) &&
                   Driver::find(torch, "_ZN2at17CUDAGeneratorImpl28set_philox_offset_per_threadEm", set_offset) &&
                   Driver::find(torch, "_ZNK2at17CUDAGeneratorImpl24philox_offset_per_threadEv", offset);
#endif
    }
};

const Philox &philox() {
    static const Philox found;
    return found;
}

at::Generator generator_of(const Tensor &x) { return at::globalContext().defaultGenerator(x.device()); }
at::CUDAGeneratorImpl *implementation(const at::Generator &generator) {
    return (at::CUDAGeneratorImpl *)generator.unsafeGetGeneratorImpl();
}

struct Dropped {
    Tensor y, bits; /* or undefined, with nothing drawn */
};

enum { THREADS_OF_BLOCK = 256, FOUR = 4 }; /* of torch's kernel */
int64_t most_blocks(const Tensor &x) { return driver().blocks(x.device().index(), THREADS_OF_BLOCK); }

/* Each thread takes vectors of at most so many elements. */
Dropped drop(const Tensor &x, double p, int64_t most) {
    int64_t vector = most;
    while (vector >= FOUR && (x.numel() % vector || (uintptr_t)x.const_data_ptr() % (vector * x.element_size())))
        vector /= 2;
    if (vector < FOUR || !x.numel() || x.numel() > MOST_ELEMENTS || !is_aligned(x)) return {};
    const int64_t blocks = std::min((x.numel() + THREADS_OF_BLOCK - 1) / THREADS_OF_BLOCK, most_blocks(x));
    const Kernel *kernel = kernel_for(x, {DROPPING, (int64_t)x.scalar_type(), vector, is_even(x.numel())});
    if (!blocks || !kernel) return {};
    const int64_t threads = blocks * THREADS_OF_BLOCK;
    at::Generator generator = generator_of(x);
    at::PhiloxCudaState state;
    {
        const std::scoped_lock lock(generator.mutex());
        state = philox().draw(implementation(generator), ((x.numel() - 1) / (threads * FOUR) + 1) * FOUR);
    }
    TORCH_CHECK(!state.captured_, "a CUDA graph captures what the device was not doing for one");
    const Dropped dropped = {memory_of_result(x), empty_bits(x)};
    const float keep = 1 - p, scale = 1. / keep;
    Arguments arguments;
    arguments.read(x);
    arguments.write(dropped.y);
    arguments.write(dropped.bits);
    arguments.add((int32_t)x.numel());
    arguments.add(keep);
    arguments.add(scale);
    arguments.add((int64_t)state.seed_.val);
    arguments.add((int64_t)state.offset_.val / FOUR);
    arguments.add((int32_t)threads);
    arguments.run(*kernel, x, programs_of(x));
    return dropped;
}

/* Of that kernel the most elements in a vector, as it drops some of more numbers than its threads take at once; 0
   where ours drops others. */
int64_t ask_for_vectors(const Tensor &x) {
    enum { LARGEST = 8 };
    auto *generator = implementation(generator_of(x));
    const double p = 0.3;
    const Tensor ones = at::ones({LARGEST * 2 * THREADS_OF_BLOCK * most_blocks(x)}, x.options());
    const uint64_t before = philox().offset(generator);
    const auto [y, kept] = at::native_dropout(ones, p, true);
    const uint64_t after = philox().offset(generator);
    int64_t found = 0;
    for (int64_t most = LARGEST; most >= FOUR && !found; most /= 2) {
        philox().set_offset(generator, before);
        const Dropped ours = drop(ones, p, most);
        if (!ours.y.defined() || philox().offset(generator) != after) continue;
        const bool are_bits = unpack(ours.bits, kept.sizes(), kept.strides()).equal(kept);
        if (are_bits && ours.y.equal(y)) found = most;
    }
    philox().set_offset(generator, before);
    return found;
}

/* The same, asked once of each device and dtype. (While another thread draws from the same generator, its numbers
   may be drawn twice.) */
int64_t vectors_of_torch(const Tensor &x) {
    static std::mutex mutex;
    static std::map<std::pair<int, at::ScalarType>, int64_t> known;
    const int device = x.device().index();
    if (!driver().is_whole || !philox().is_whole || driver().is_capturing(device)) return 0;
    if (!x.is_contiguous() && !x.is_contiguous(at::MemoryFormat::ChannelsLast)) return 0;
    const std::pair<int, at::ScalarType> key(device, x.scalar_type());
    {
        const std::scoped_lock lock(mutex);
        const auto found = known.find(key);
        if (found != known.end()) return found->second;
    }
    const int64_t most = ask_for_vectors(x);
    const std::scoped_lock lock(mutex);
    return known[key] = most;
}

}  // namespace
