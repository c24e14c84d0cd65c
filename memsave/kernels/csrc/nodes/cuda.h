/* Loops of Triton on CUDA devices, which are launched without a header of CUDA. */

#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <c10/core/DeviceGuard.h>

#include <map>
#include <mutex>

#ifdef __linux__
#include <dlfcn.h>
#endif
#include "tensors.h"

namespace {

/* Loops of CUDA devices, by their number in cuda.py, which has them compiled: for a device, and by what is
   constant in them. They are launched by the driver, as no header of CUDA is at hand here. */
enum DeviceLoop : int64_t { TO_BITS, FROM_BITS, MAX_POOLING, UNPOOLING, NORM_OF_ROWS, WEIGHTS_OF_ROWS, LOSS_OF_ROWS,
                           DROPPING, SLOPING, SCALING_CHANNELS };
/* Of its kinds of bits: those that are here apart. In any dtype are what comes first, up to hardtanh, but from
   hardsigmoid on only where a float has all numbers of x. */
constexpr int64_t NOTHING = -1, HARDSIGMOID = 2, HARDTANH = 3, NONZERO_BITS = 7;
constexpr int64_t BITS_OF_PROGRAM = 2048, POOLED_BY_PROGRAM = 256, ELEMENTS_OF_PROGRAM = 1024;
constexpr int64_t MOST_PARTS = 64; /* of a sum */
constexpr int64_t MOST_ELEMENTS = INT32_MAX - BITS_OF_PROGRAM; /* that its indices count */
PyObject *compiler; /* of cuda.py, or None */

struct Kernel {
    void *function;
    unsigned threads, shared;
};

struct Driver {
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **) = nullptr;
    int (*context)(void **) = nullptr;
    int (*set_context)(void *) = nullptr;
    int (*device)(int *, int number) = nullptr;
    int (*context_of)(void **, int device) = nullptr;
    int (*attribute)(int *, int attribute, int device) = nullptr;
    int (*capturing)(void *stream, int *status) = nullptr;
    int32_t (*stream)(int32_t device, void **stream) = nullptr;
    bool is_whole = false;

    Driver() {
#ifdef __linux__
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY), *torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        if (!driver || !torch) return;
        is_whole = find(driver, "cuLaunchKernel", launch) && find(driver, "cuCtxGetCurrent", context) &&
                   find(driver, "cuCtxSetCurrent", set_context) && find(driver, "cuDeviceGet", device) &&
                   find(driver, "cuDevicePrimaryCtxRetain", context_of) &&
                   find(driver, "cuDeviceGetAttribute", attribute) &&
                   find(driver, "cuStreamIsCapturing", capturing) &&
                   find(torch, "aoti_torch_get_current_cuda_stream", stream);
#endif
    }

#ifdef __linux__
    template <typename T>
    static bool find(void *library, const char *name, T &function) {
        return (function = (T)dlsym(library, name));
    }
#endif

    /* Has this thread work on a device of that number, where nothing has before: torch's own calls would do so,
       but those of the driver do not. (The device is retained, once for each thread.) */
    bool has_context(int number) const {
        void *current = nullptr;
        int found = 0;
        if (context(&current)) return false;
        return current || !(device(&found, number) || context_of(&current, found) || set_context(current));
    }

    /* Blocks of so many threads that run at once, by their number alone; 0 where that cannot be said. */
    int64_t blocks(int number, int threads) const {
        enum { PROCESSORS = 16, THREADS_OF_PROCESSOR = 39 };
        int found = 0, processors = 0, threads_of_each = 0;
        if (device(&found, number) || attribute(&processors, PROCESSORS, found)) return 0;
        return attribute(&threads_of_each, THREADS_OF_PROCESSOR, found) ? 0 : processors * (threads_of_each / threads);
    }

    /* Whether a CUDA graph is being made of what this thread has the device do. */
    bool is_capturing(int number) const {
        void *found = nullptr;
        int status = 0;
        return !has_context(number) || stream(number, &found) || capturing(found, &status) || status;
    }
};

const Driver &driver() {
    static const Driver found;
    return found;
}

/* A loop on the device of x, or none where there is no compiler. */
const Kernel *kernel_for(const Tensor &x, std::initializer_list<int64_t> constants) {
    static std::mutex mutex;
    using Key = c10::SmallVector<int64_t, 20>;
    static std::map<Key, Kernel> known; /* whose values stay where they are */
    if (compiler == Py_None || !driver().is_whole) return nullptr;
    Key key = {x.device().index()};
    key.append(constants.begin(), constants.end());
    {
        const std::scoped_lock lock(mutex);
        const auto found = known.find(key);
        if (found != known.end()) return found->second.function ? &found->second : nullptr;
    }
    const pybind11::gil_scoped_acquire locked;
    THPObjectPtr args(PyTuple_New(key.size()));
    if (!args) throw python_error();
    for (size_t k = 0; k < key.size(); k++) PyTuple_SET_ITEM(args.get(), k, PyLong_FromLongLong(key[k]));
    THPObjectPtr made(PyObject_CallObject(compiler, args));
    if (!made) throw python_error();
    if (made.get() == Py_None) return nullptr; /* not now */
    unsigned long long function = 0;
    Kernel kernel = {};
    if (!PyArg_ParseTuple(made.get(), "KII", &function, &kernel.threads, &kernel.shared)) throw python_error();
    kernel.function = (void *)(uintptr_t)function;
    const std::scoped_lock lock(mutex);
    const Kernel &kept = known.emplace(key, kernel).first->second;
    return kept.function ? &kept : nullptr;
}

/* Whether there are loops of numbers like its own. */
bool has_loops(const Tensor &x) {
    const auto dtype = x.scalar_type();
    return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble;
}

int64_t is_even(int64_t size) { return size % 16 == 0; }

/* What a kernel takes. (After these, versions of Triton have it take addresses of memory that ours have
   none of: there is room for them.) */
struct Arguments {
    int64_t values[32] = {};
    void *places[32];
    int count = 0;

    template <typename T>
    void add(T value) { std::memcpy(&values[count++], &value, sizeof value); }
    void read(const Tensor &x) { add(x.const_data_ptr()); }
    void write(const Tensor &x) { add(x.mutable_data_ptr()); }

    void run(const Kernel &kernel, const Tensor &on, int64_t programs) {
        const c10::DeviceGuard guard(on.device());
        void *stream = nullptr;
        for (int k = 0; k < 32; k++) places[k] = &values[k];
        const int device = on.device().index();
        TORCH_CHECK(driver().has_context(device) && !driver().stream(device, &stream), "CUDA has no context");
        const int error = driver().launch(kernel.function, programs, 1, 1, kernel.threads, 1, 1, kernel.shared,
                                          stream, places, nullptr);
        TORCH_CHECK(!error, "CUDA did not launch a kernel of memsave (error ", error, "): an earlier one may have failed");
    }
};

}  // namespace
