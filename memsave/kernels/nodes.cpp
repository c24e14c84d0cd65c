/* Layers as autograd functions of C++: no Python runs in forward or backward of the most frequent ones.

   Compiled against the torch that is installed (setup.py), and only loaded by that very version. A
   function here takes a call or returns None: nodes.py says what they compute, and everything else, as
   what they leave, are the rules in Python. Bits are those of native.c, by its loops. */

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <map>
#include <mutex>

#ifdef __linux__
#include <dlfcn.h>
#endif

extern "C" {
#include "loops.h"
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Function;
using torch::autograd::variable_list;

const Loops *loops;

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

Loop *loop_for(int64_t family, at::ScalarType dtype) {
    const int code = dtype == at::kBFloat16 ? 4 : at::isFloatingType(dtype) ? 2 : 1; /* of DLPack */
    return loops->of(family, code, 8 * (int)c10::elementSize(dtype));
}

void run(Loop *loop, const Tensor &x, const Tensor &y, const Tensor &bits, double a, double b) {
    const Arrays arrays = {x.const_data_ptr(), y.defined() ? y.mutable_data_ptr() : nullptr,
                           (uint8_t *)bits.mutable_data_ptr(), a, b, nullptr};
    loops->run(loop, &arrays, x.numel(), at::get_num_threads());
}

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

/* An input, of which an operation on its gradient reads the shape alone: of the memory of the gradient, if
   that has as many elements, so that an operation that wants it contiguous makes no copy. (Kernels of CUDA
   want all inputs so, but never read this one; nor may a hook, as where its graph is made, too.) */
Tensor stand_in(const Tensor &g, at::IntArrayRef shape, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
    if (!is_known(g) || !is_unobserved()) return at::empty({1}, g.options()).expand(shape);
    const bool is_unread = g.is_cuda() && is_final(g);
    const bool fits = g.is_contiguous(format) && (is_unread || c10::multiply_integers(shape) <= g.numel());
    if (!fits && g.is_cuda()) return at::empty({1}, g.options()).expand(shape);
    const Tensor x = fits ? g.detach() : memory({1}, g.scalar_type());
    x.unsafeGetTensorImpl()->set_sizes_and_strides(
        shape, fits ? strides_of(shape, format) : at::DimVector(shape.size(), 0));
    return x;
}

/* Of x, as a node remembers it. */
at::MemoryFormat format_in(AutogradContext *ctx) {
    return (at::MemoryFormat)ctx->saved_data.at("format").toInt();
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

/* Loops of native.c. Backward of activations that are linear in pieces: what of g passes, and what becomes
   of the rest; one makes bits of booleans; backward of curves. */
enum Family : int64_t { SELECT, PART, SCALE, NONZERO, REST, TANH2, LOGISTIC, FAMILIES };
int64_t family_of[FAMILIES];

/* Loops of CUDA devices, by their number in cuda.py, which has them compiled: for a device, and by what is
   constant in them. They are launched by the driver, as no header of CUDA is at hand here. */
enum DeviceLoop : int64_t { TO_BITS, FROM_BITS, MAX_POOLING, UNPOOLING, NORM_OF_ROWS };
/* Of its kinds of bits: those that are here apart; ReLU and leaky ReLU (in any dtype) come first. */
constexpr int64_t NOTHING = -1, LEAKY_RELU = 1, NONZERO_BITS = 5, WITHIN = 6, NOT_INSIDE = 7;
constexpr int64_t BITS_OF_PROGRAM = 2048, ELEMENTS_OF_PROGRAM = 1024;
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
    int32_t (*stream)(int32_t device, void **stream) = nullptr;
    bool is_whole = false;

    Driver() {
#ifdef __linux__
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY), *torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        if (!driver || !torch) return;
        is_whole = find(driver, "cuLaunchKernel", launch) && find(driver, "cuCtxGetCurrent", context) &&
                   find(driver, "cuCtxSetCurrent", set_context) && find(driver, "cuDeviceGet", device) &&
                   find(driver, "cuDevicePrimaryCtxRetain", context_of) &&
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
};

const Driver &driver() {
    static const Driver found;
    return found;
}

/* A loop on the device of x, or none where there is no compiler. */
const Kernel *kernel_for(const Tensor &x, std::initializer_list<int64_t> constants) {
    static std::mutex mutex;
    static std::map<std::vector<int64_t>, Kernel> known; /* whose values stay where they are */
    if (compiler == Py_None || !driver().is_whole) return nullptr;
    std::vector<int64_t> key = {x.device().index()};
    key.insert(key.end(), constants);
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

void run(const Kernel &kernel, const Tensor &x, const Tensor &y, const Tensor &bits, double a, double b) {
    Arguments arguments;
    arguments.read(x);
    arguments.write(y);
    arguments.write(bits);
    arguments.add((int32_t)x.numel());
    arguments.add((float)a);
    arguments.add((float)b);
    if (x.numel()) arguments.run(kernel, x, (x.numel() + BITS_OF_PROGRAM - 1) / BITS_OF_PROGRAM);
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
        if (family == SCALE) return at::where(mask, a == 1 ? g : g * a, g * b);
        const Tensor selected = at::where(mask, g, at::zeros({}, g.options()));
        return family == PART ? selected * a : selected;
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool in_order = g.strides() == stride;
    const Tensor dx = in_order ? memory_for(g) : memory_like(g, stride).copy_(g);
    if (kernel) run(*kernel, in_order ? g : dx, dx, bits, a, b);
    else run(loop_for(family_of[family], g.scalar_type()), in_order ? g : dx, dx, bits, a, b);
    return dx;
}

/* Bits of whether random numbers are below p, as bernoulli_ says, drawn by random.c from a generator of
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

/* Operations on plain tensors, of which no mode, transform or autograd hears. */
struct Unheard {
    const c10::impl::ExcludeDispatchKeyGuard guard{
        c10::DispatchKeySet(c10::DispatchKeySet::FULL) - c10::DispatchKeySet(c10::DispatchKey::CPU)};
};

/* While no other thread draws. (Vmap would say how to draw.) */
Tensor draw(at::Generator generator, int64_t elements, double p, Tensor *state = nullptr) {
    const Unheard unheard;
    if (!loop_draws_as_torch()) return Tensor();
    const std::scoped_lock lock(generator.mutex());
    if (state) *state = generator.get_state();
    return by_loop(generator, elements, p);
}

/* A layer, computed already: what is kept and remembered for backward, as an autograd function. */
struct Made {
    Tensor y, also; /* the statistics that come with y, of Norms */
    variable_list kept;
    ska::flat_hash_map<std::string, at::IValue> call;
    bool inplace = false;

    Made() { call.reserve(6); }
};

Tensor bits_backward(AutogradContext *, const Tensor &);
Tensor dropout_from_rng_backward(AutogradContext *, const Tensor &);
Tensor feature_dropout_backward(AutogradContext *, const Tensor &);
Tensor batch_norm_eval_backward(AutogradContext *, const Tensor &);
Tensor curve_backward(AutogradContext *, const Tensor &);
Tensor embedding_backward(AutogradContext *, const Tensor &);
Tensor pad_backward(AutogradContext *, const Tensor &);
Tensor avg_pool_backward(AutogradContext *, const Tensor &);
Tensor adaptive_avg_pool_backward(AutogradContext *, const Tensor &);
Tensor convolution_backward(AutogradContext *, const Tensor &);
Tensor max_pool_backward(AutogradContext *, const Tensor &);
Tensor instance_norm_backward(AutogradContext *, const Tensor &);
Tensor cross_entropy_backward(AutogradContext *, const Tensor &);
Tensor adaptive_max_pool_backward(AutogradContext *, const Tensor &);
enum Kind : int64_t {
    BITS, DROPOUT_FROM_RNG, FEATURE_DROPOUT, BATCH_NORM_EVAL, CURVE, EMBEDDING, PAD, AVG_POOL,
    ADAPTIVE_AVG_POOL, CONVOLUTION, MAX_POOL, INSTANCE_NORM, CROSS_ENTROPY, ADAPTIVE_MAX_POOL
};
Tensor (*const BACKWARD[])(AutogradContext *, const Tensor &) = {
    bits_backward, dropout_from_rng_backward, feature_dropout_backward, batch_norm_eval_backward,
    curve_backward, embedding_backward, pad_backward, avg_pool_backward,
    adaptive_avg_pool_backward, convolution_backward, max_pool_backward, instance_norm_backward,
    cross_entropy_backward, adaptive_max_pool_backward};

struct Layer : Function<Layer> {
    static variable_list backward(AutogradContext *ctx, const variable_list &gs) {
        if (!gs[0].defined()) return variable_list(2);
        /* The caller may run backward under autocast; gradients have the dtypes of forward. */
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        return {BACKWARD[ctx->saved_data.at("kind").toInt()](ctx, gs[0]), Tensor()};
    }
};

/* Whether x, which wants a gradient, may be overwritten: where it may not, stock says why, before it does. */
bool is_writable(const Tensor &x) {
    const auto *view = torch::autograd::impl::get_view_autograd_meta(x);
    if (!view || !view->has_bw_view()) return !x.is_leaf();
    return view->get_creation_meta() == torch::autograd::CreationMeta::DEFAULT && !x._base().is_leaf();
}

bool name(PyObject *row, Made &made) {
    Py_ssize_t length;
    const char *name = PyUnicode_AsUTF8AndSize(row, &length);
    if (name) made.call["row"] = std::string(name, length);
    return name;
}

/* A node, as this version of torch holds one. */
template <typename Handle, typename T>
auto make_node() {
    if constexpr (std::is_same_v<Handle, std::shared_ptr<torch::autograd::Node>>)
        return std::shared_ptr<CppNode<T>>(new CppNode<T>, [](auto *node) { deleteNode(node); });
    else return c10::make_intrusive<CppNode<T>>();
}

/* As T::apply, of a few inputs, which may be absent, and of new outputs (or, in place, the one input): most
   of what that does is to find out which outputs are inputs. */
template <typename T>
void link(std::initializer_list<Tensor> inputs, std::initializer_list<Tensor> outputs, Made &made) {
    const auto node = make_node<decltype(torch::autograd::Edge::function), T>();
    torch::autograd::edge_list edges;
    bool wanted = false;
    for (const Tensor &input : inputs) {
        node->is_variable_input_.push_back(input.defined());
        if (!input.defined()) continue;
        wanted |= input.requires_grad();
        edges.push_back(torch::autograd::impl::gradient_edge(input));
        node->input_info_.emplace_back(input);
    }
    if (!wanted || !at::GradMode::is_enabled()) return;
    node->is_variable_input_.push_back(false); /* made */
    node->set_ctx_grad_fn(node);
    node->set_next_edges(std::move(edges));
    node->ctx_.set_materialize_grads(false);
    node->ctx_.save_for_backward(std::move(made.kept));
    node->ctx_.saved_data = std::move(made.call);
    for (const Tensor &output : outputs) {
        if (made.inplace) {
            output.unsafeGetTensorImpl()->bump_version();
            torch::autograd::impl::rebase_history(output, {node, node->add_input_metadata(output)});
        } else torch::autograd::set_history(output, node);
        node->output_info_.emplace_back(output);
    }
    try {
        node->save_variables_to_ctx();
    } catch (...) { /* of a hook. What was overwritten has the node already: its backward is to say so. */
        node->release_variables();
        node->ctx_.save_for_backward({}); /* of which some may be outputs, which have the node */
        throw;
    }
}

/* The layer of a row, differentiable in x. */
PyObject *layer(PyObject *row, const Tensor &x, Kind kind, Made &made) {
    if (!name(row, made)) return nullptr;
    made.call["kind"] = (int64_t)kind;
    link<Layer>({x}, {made.y}, made);
    return THPVariable_Wrap(made.y);
}

/* As the Python class of an autograd function is named. */
template <typename T>
PyObject *name_of(PyObject *self, PyObject *) {
    HANDLE_TH_ERRORS
    const auto *node = (CppNode<T> *)((torch::autograd::THPCppFunction *)self)->cdata.get();
    std::string name = "Memsave";
    bool starts = true;
    for (const char letter : node->ctx_.saved_data.at("row").toStringRef()) {
        if (letter != '_' && letter != '.') name += starts ? (char)std::toupper(letter) : letter;
        starts = letter == '_' || letter == '.';
    }
    return PyUnicode_FromString((name + "Backward").c_str());
    END_HANDLE_TH_ERRORS
}

/* Of torch's own classes, and such that a loop can run over it: on CPU or a CUDA device; on CPU. */
const Tensor *known(PyObject *x) {
    if (!THPVariable_CheckExact(x) || !is_unobserved()) return nullptr;
    const Tensor &tensor = THPVariable_Unpack(x);
    return is_known(tensor) && tensor.is_non_overlapping_and_dense() ? &tensor : nullptr;
}

const Tensor *plain(PyObject *x) {
    const Tensor *tensor = known(x);
    return tensor && tensor->is_cpu() ? tensor : nullptr;
}

/* Whether operations mean nothing else now: no transform, no forward-mode AD, no tracing. */
bool is_usual() {
    using c10::DispatchKey;
    return is_unobserved() && !has_tangents() &&
           !c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
           !torch::jit::tracer::isTracing();
}

/* Whether autocast gives them another dtype. */
bool is_autocast(const Tensor &x) {
    return at::autocast::is_autocast_enabled(x.device().type()) &&
           !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset);
}

/* Of the arguments at some places, whose gradients are wanted, as bits; None unless all are known, and none
   is cast. */
PyObject *wanted(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3 && PyTuple_Check(args[0]) && PyTuple_Check(args[1]),
                     "wanted takes two tuples and the devices");
    if (!is_usual()) Py_RETURN_NONE;
    const long casts = PyLong_AsLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    long bits = 0;
    const bool enabled = at::GradMode::is_enabled();
    for (Py_ssize_t place = 0, k = 0; place < PyTuple_GET_SIZE(args[1]); place++) {
        const bool counts = k < PyTuple_GET_SIZE(args[0]) && PyLong_AsLong(PyTuple_GET_ITEM(args[0], k)) == place;
        PyObject *arg = PyTuple_GET_ITEM(args[1], place);
        if (arg != Py_None) {
            if (!THPVariable_CheckExact(arg)) Py_RETURN_NONE;
            const Tensor &tensor = THPVariable_Unpack(arg);
            if (!is_known(tensor) || tensor.is_complex()) Py_RETURN_NONE;
            if (casts & (tensor.is_cuda() ? 2 : 1) && is_autocast(tensor)) Py_RETURN_NONE;
            if (counts && enabled && tensor.requires_grad()) bits |= 1l << k;
        }
        k += counts;
    }
    return PyLong_FromLong(bits);
    END_HANDLE_TH_ERRORS
}

/* The weight and the bias of a module that may call its stock op at once: see function.py. */
PyObject *for_stock(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 5 && PyDict_Check(args[0]), "for_stock takes a dict, bits, a tensor and two flags");
    static PyObject *const names[] = {PyUnicode_InternFromString("weight"), PyUnicode_InternFromString("bias")};
    static PyObject *const home = PyUnicode_InternFromString("_parameters");
    PyObject *parameters = PyDict_GetItemWithError(args[0], home);
    if (!parameters && PyErr_Occurred()) return nullptr;
    if (!parameters || !PyDict_CheckExact(parameters)) Py_RETURN_NONE;
    const auto &autocast = c10::autocast_dispatch_keyset;
    const bool casts = args[3] == Py_True && !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(autocast);
    if (torch::jit::tracer::isTracing() || casts) Py_RETURN_NONE;
    const bool enabled = at::GradMode::is_enabled();
    PyObject *found[] = {args[2], nullptr, Py_None};
    long wanted = 0;
    for (int k = 0; k < (args[4] == Py_True ? 3 : 2); k++) {
        if (k) {
            const int is_hidden = PyDict_Contains(args[0], names[k - 1]);
            if (is_hidden) return is_hidden < 0 ? nullptr : Py_NewRef(Py_None);
            found[k] = PyDict_GetItemWithError(parameters, names[k - 1]);
            if (!found[k] && PyErr_Occurred()) return nullptr;
        }
        if (found[k] == Py_None) continue;
        if (!found[k] || !THPVariable_CheckExact(found[k])) Py_RETURN_NONE;
        const Tensor &tensor = THPVariable_Unpack(found[k]);
        if (k && !tensor.is_leaf()) Py_RETURN_NONE;
        if (enabled && tensor.requires_grad()) wanted |= 1l << k;
    }
    if (wanted && !(wanted & PyLong_AsLong(args[1]))) Py_RETURN_NONE;
    return PyTuple_Pack(2, found[1], found[2]);
    END_HANDLE_TH_ERRORS
}

bool numbers(PyObject *const *args, double *out, int count) {
    for (int k = 0; k < count; k++) {
        if (!PyFloat_CheckExact(args[k]) && !PyLong_CheckExact(args[k])) return false;
        out[k] = PyFloat_AsDouble(args[k]);
        if (out[k] == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
    }
    return true;
}

/* How many values a tuple or a list has; of anything else -1. */
Py_ssize_t count_of(PyObject *arg) {
    return PyTuple_Check(arg) || PyList_Check(arg) ? PySequence_Fast_GET_SIZE(arg) : -1;
}

/* As options of layers are: a number for all axes, or one for each; none stands for those given. */
bool sizes(PyObject *arg, size_t dims, at::DimVector &out, at::IntArrayRef absent = {}) {
    const bool are_several = count_of(arg) >= 0;
    const size_t given = are_several ? count_of(arg) : 1;
    if (given != 1 && given != dims) return false;
    out.resize(dims);
    for (size_t axis = 0; axis < dims; axis++) {
        PyObject *one = are_several ? PySequence_Fast_GET_ITEM(arg, given == 1 ? 0 : axis) : arg;
        if (one == Py_None && !absent.empty()) {
            out[axis] = absent[axis];
            continue;
        }
        if (!PyLong_CheckExact(one)) return false;
        out[axis] = PyLong_AsLongLong(one);
        if (out[axis] == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
    }
    return true;
}

/* With no graph made of operations, while other threads of Python run. */
template <typename Operations>
auto compute(const Operations &operations) {
    pybind11::gil_scoped_release unlocked;
    at::AutoDispatchBelowADInplaceOrView guard;
    return operations();
}

/* What by_bits reads. */
void to_go_by_bits(Made &made, Family family, double a, double b) {
    made.call["family"] = (int64_t)family;
    if (family != SELECT) made.call["a"] = a, made.call["b"] = b;
    if (!made.y.is_contiguous()) made.call["stride"] = made.y.strides();
}

/* Where the output lies: in new memory, which is stored as torch stores results, or exactly as x; or torch
   makes it. */
enum Output : int64_t { AS_RESULT, AS_X, BY_SOFTSHRINK };

PyObject *bits(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 12, "bits takes 12 arguments");
    PyObject *also = args[10];
    const Tensor *x = known(args[1]);
    double number[4];
    const int64_t forward = PyLong_AsLongLong(args[2]), family = PyLong_AsLongLong(args[6]);
    const int64_t output = PyLong_AsLongLong(args[9]);
    if (PyErr_Occurred()) return nullptr;
    TORCH_CHECK_INDEX(family >= 0 && family <= SCALE, "no such family");
    if (!x || !numbers(args + 4, number, 2) || !numbers(args + 7, number + 2, 2)) Py_RETURN_NONE;
    const int inplace = PyObject_IsTrue(args[3]);
    const int64_t kind = PyLong_AsLongLong(args[11]);
    if (inplace < 0 || PyErr_Occurred()) return nullptr;
    Loop *loop = nullptr;
    const Kernel *kernel = nullptr;
    if (x->is_cuda()) {
        const bool in_any_dtype = kind <= LEAKY_RELU || kind == WITHIN, writes = kind < WITHIN;
        if (kind == NOTHING || !has_loops(*x) || (inplace && !writes)) Py_RETURN_NONE;
        if (!in_any_dtype && x->scalar_type() != at::kFloat) Py_RETURN_NONE;
        if (!from_bits(*x, family) || !(kernel = to_bits(*x, kind, writes))) Py_RETURN_NONE;
    } else {
        loop = loop_for(forward, x->scalar_type());
        if (!loop || !loop_for(family_of[family], x->scalar_type())) Py_RETURN_NONE;
    }
    if (inplace && !is_writable(*x)) Py_RETURN_NONE;
    Made made;
    if (also != Py_None && !THPVariable_CheckExact(also)) Py_RETURN_NONE;
    if (output == BY_SOFTSHRINK && inplace) Py_RETURN_NONE;
    compute([&] {
        if (output == BY_SOFTSHRINK || (kernel && kind == NOT_INSIDE)) made.y = at::softshrink(*x, number[1]);
        else if (kernel && kind == WITHIN) made.y = at::hardsigmoid(*x);
        else made.y = inplace ? *x : output == AS_X ? memory_like(*x) : memory_of_result(*x);
        if (also != Py_None) made.kept.push_back(THPVariable_Unpack(also));
        made.kept.push_back(empty_bits(*x));
        if (kernel) run(*kernel, *x, made.y, made.kept.back(), number[0], number[1]);
        else run(loop, *x, made.y, made.kept.back(), number[0], number[1]);
    });
    made.inplace = inplace;
    to_go_by_bits(made, (Family)family, number[2], number[3]);
    return layer(args[0], *x, BITS, made);
    END_HANDLE_TH_ERRORS
}

Tensor by_bits(AutogradContext *ctx, const Tensor &g, const Tensor &bits) {
    auto &call = ctx->saved_data;
    const auto family = (Family)call.at("family").toInt();
    const double a = family == SELECT ? 1 : call.at("a").toDouble();
    const double b = family == SELECT ? 0 : call.at("b").toDouble();
    const auto found = call.find("stride");
    const auto stride = found == call.end() ? c10::contiguous_strides(g.sizes())
                                            : found->second.toDimVector();
    return from_bits(family, g, bits, stride, a, b);
}

Tensor bits_backward(AutogradContext *ctx, const Tensor &g) {
    return by_bits(ctx, g, ctx->get_saved_variables().back());
}

/* Dropout of CUDA devices: torch's own kernel draws. (It multiplies by the reciprocal, of floats.) */
PyObject *fused_dropout(PyObject *row, const Tensor &x, double p) {
    if (!has_loops(x) || x.scalar_type() == at::kDouble || x.numel() > MOST_ELEMENTS || !from_bits(x, SCALE)) Py_RETURN_NONE;
    const Kernel *kernel = kernel_for(x, {TO_BITS, (int64_t)at::kBool, NONZERO_BITS, 0, is_even(x.numel())});
    if (!kernel) Py_RETURN_NONE;
    Made made;
    compute([&] {
        const auto [y, kept] = at::native_dropout(x, p, true);
        made.kept = {empty_bits(x)};
        run(*kernel, kept, kept, made.kept[0], 0, 0);
        made.y = y;
    });
    to_go_by_bits(made, SCALE, 1 / (1 - p), 0);
    return layer(row, x, BITS, made);
}

/* Dropout that keeps bits, or the state of the generator to draw them again. */
PyObject *dropout(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 6, "dropout takes 6 arguments");
    const Tensor *x = known(args[1]);
    double p, factor;
    if (!x || !numbers(args + 2, &p, 1) || !numbers(args + 3, &factor, 1)) Py_RETURN_NONE;
    const int inplace = PyObject_IsTrue(args[4]), from_rng = PyObject_IsTrue(args[5]);
    if (inplace < 0 || from_rng < 0) return nullptr;
    if (x->is_cuda()) {
        if (inplace || from_rng) Py_RETURN_NONE;
        return fused_dropout(args[0], *x, p);
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
    return layer(args[0], *x, from_rng ? DROPOUT_FROM_RNG : BITS, made);
    END_HANDLE_TH_ERRORS
}

Tensor dropout_from_rng_backward(AutogradContext *ctx, const Tensor &g) {
    at::Generator generator = at::detail::createCPUGenerator();
    generator.set_state(ctx->get_saved_variables()[0]);
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
    AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, noise.scalar_type(), "feature_dropout", [&] {
        scalar_t *values = noise.mutable_data_ptr<scalar_t>();
        const scalar_t on = 1 / (at::opmath_type<scalar_t>)(1 - p);
        for (int64_t k = 0; k < noise.numel(); k++) values[k] = bytes[k / 8] >> k % 8 & 1 ? on : (scalar_t)0;
    });
    return noise;
}

PyObject *feature_dropout(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3, "feature_dropout takes 3 arguments");
    const Tensor *x = known(args[1]);
    double p;
    if (!x || !numbers(args + 2, &p, 1)) Py_RETURN_NONE;
    const auto type = x->scalar_type();
    const bool is_wide = type == at::kFloat || type == at::kDouble;
    if (!is_wide && !(type == at::kBFloat16 && x->is_cpu())) Py_RETURN_NONE;
    const auto shape = channels(*x);
    Made made;
    if (x->is_cuda()) {
        const int64_t count = shape[0] * shape[1], dtype = (int64_t)x->scalar_type();
        const Kernel *kernel = nullptr;
        if (count <= MOST_ELEMENTS) kernel = kernel_for(*x, {TO_BITS, dtype, NONZERO_BITS, 0, is_even(count)});
        if (!kernel) Py_RETURN_NONE;
        compute([&] {
            const Tensor noise = at::empty(shape, x->options()).bernoulli_(1 - p).div_(1 - p);
            made.y = *x * noise;
            made.kept = {empty_bits(noise)};
            run(*kernel, noise, noise, made.kept[0], 0, 0);
        });
    } else {
        compute([&] {
            made.kept = {draw(at::detail::getDefaultCPUGenerator(), shape[0] * shape[1], 1 - p)};
            if (made.kept[0].defined()) made.y = *x * noise_of(made.kept[0], shape, p, x->scalar_type());
        });
    }
    if (!made.y.defined()) Py_RETURN_NONE;
    made.call["p"] = p;
    return layer(args[0], *x, FEATURE_DROPOUT, made);
    END_HANDLE_TH_ERRORS
}

Tensor feature_dropout_backward(AutogradContext *ctx, const Tensor &g) {
    const Tensor bits = ctx->get_saved_variables()[0];
    const double p = ctx->saved_data.at("p").toDouble();
    const auto shape = channels(g);
    const bool fits = are_bits(bits, g, shape[0] * shape[1]) && is_unobserved();
    if (fits && g.is_cuda() && is_final(g)) {
        at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor noise = at::ones(shape, g.options());
        if (const Kernel *kernel = from_bits(noise, SCALE)) {
            run(*kernel, noise, noise, bits, 1 / (float)(1 - p), 0);
            return times(g, noise);
        }
    }
    if (!fits || g.is_cuda())
        return g * unpack(bits, shape, c10::contiguous_strides(shape)).to(g.scalar_type()).div(1 - p);
    const Tensor noise = noise_of(bits, shape, p, g.scalar_type());
    if (!is_final(g)) return g * noise;
    at::AutoDispatchBelowADInplaceOrView guard;
    return times(g, noise);
}

/* Max pooling. A window is as many integers. */
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

/* The same on a CUDA device; by one that is compiled for the windows, and for what is 1. */
const Kernel *kernel_of_pool(DeviceLoop loop, const Tensor &x, int64_t elements, int64_t channels,
                             const Window &w) {
    if (elements > MOST_ELEMENTS || x.numel() > MOST_ELEMENTS || !is_aligned(x)) return nullptr;
    const auto ones = [](const ptrdiff_t *sizes) { return (sizes[0] == 1) + 2 * (sizes[1] == 1) + 4 * (sizes[2] == 1); };
    const int64_t alignment = channels == 1 ? 2 : is_even(channels);
    const auto *k = w.kernel, *s = w.stride, *p = w.padding, *d = w.dilation;
    return kernel_for(x, {loop, (int64_t)x.scalar_type(), alignment, ones(w.in), ones(w.out), k[0], k[1], k[2],
                          s[0], s[1], s[2], p[0], p[1], p[2], d[0], d[1], d[2]});
}

void run(const Kernel &kernel, const Tensor &x, const Tensor &y, const Tensor &offsets, int64_t channels,
         const Window &window) {
    Arguments arguments;
    arguments.read(x);
    arguments.write(y);
    arguments.write(offsets);
    arguments.add((int32_t)y.numel());
    if (channels != 1) arguments.add((int32_t)channels);
    for (const ptrdiff_t *sizes : {window.in, window.out})
        for (int axis = 0; axis < 3; axis++)
            if (sizes[axis] != 1) arguments.add((int32_t)sizes[axis]);
    arguments.run(kernel, x, (y.numel() + ELEMENTS_OF_PROGRAM - 1) / ELEMENTS_OF_PROGRAM);
}

void pool(bool backwards, const Tensor &x, const Tensor &y, const Tensor &offsets, const Window &window,
          int64_t dims, at::MemoryFormat format) {
    const bool first = format == at::MemoryFormat::Contiguous;
    const int64_t planes = first ? c10::multiply_integers(x.sizes().slice(0, x.dim() - dims)) : x.size(0);
    const auto dtype = x.scalar_type();
    const int kind = dtype == at::kDouble ? OF_DOUBLE : dtype == at::kFloat ? OF_FLOAT : OF_BFLOAT16;
    loops->pool(backwards, kind, x.const_data_ptr(), y.mutable_data_ptr(),
                offsets.mutable_data_ptr<uint8_t>(), planes, first ? 1 : x.size(1), &window,
                at::get_num_threads());
}

PyObject *max_pool(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3 && PyTuple_Check(args[2]) && PyTuple_GET_SIZE(args[2]) == 6 &&
                         PyTuple_Check(PyTuple_GET_ITEM(args[2], 0)),
                     "max_pool takes a name, a tensor and windows");
    const Tensor *x = known(args[1]);
    const int64_t dims = PyTuple_GET_SIZE(PyTuple_GET_ITEM(args[2], 0));
    Window window;
    if (dims < 1 || dims > 3 || !window_of(args[2], dims, window)) return nullptr;
    const ptrdiff_t *kernel = window.kernel;
    for (int axis = 0; axis < 3; axis++)
        if (kernel[axis] > LARGEST_WINDOW) Py_RETURN_NONE;
    if (!x || !x->numel() || kernel[0] * kernel[1] * kernel[2] > LARGEST_WINDOW) Py_RETURN_NONE;
    const auto format = format_of(*x, dims);
    const auto dtype = x->scalar_type();
    const bool is_device = x->is_cuda();
    const bool is_pooled = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
    if (!format || !(is_device ? has_loops(*x) : is_pooled)) Py_RETURN_NONE;
    at::DimVector shape(x->sizes());
    for (int64_t axis = 0; axis < dims; axis++) shape[x->dim() - dims + axis] = window.out[3 - dims + axis];
    const int64_t channels = *format == at::MemoryFormat::Contiguous ? 1 : x->size(1);
    const Kernel *on_device = nullptr;
    if (is_device) {
        on_device = kernel_of_pool(MAX_POOLING, *x, c10::multiply_integers(shape), channels, window);
        if (!on_device) Py_RETURN_NONE;
    }
    Made made;
    compute([&] {
        made.y = at::empty(shape, x->options(), *format);
        made.kept = {at::empty(shape, x->options().dtype(at::kByte), *format)};
        if (on_device) run(*on_device, *x, made.y, made.kept[0], channels, window);
        else pool(false, *x, made.y, made.kept[0], window, dims, *format);
    });
    made.call["window"] = at::IntArrayRef((const int64_t *)&window, SIZES);
    made.call["shape"] = x->sizes();
    made.call["dims"] = dims;
    return layer(args[0], *x, MAX_POOL, made);
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
    const int64_t dims = ctx->saved_data.at("dims").toInt();
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    const auto sizes = ctx->saved_data.at("window").toDimVector();
    Window window;
    std::copy(sizes.begin(), sizes.end(), (ptrdiff_t *)&window);
    const auto format = offsets.is_contiguous() ? at::MemoryFormat::Contiguous
                        : dims == 2             ? at::MemoryFormat::ChannelsLast
                                                : at::MemoryFormat::ChannelsLast3d;
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
    if (kernel) run(*kernel, in_order, dx, offsets, channels, window);
    else pool(true, in_order, dx, offsets, window, dims, format);
    return dx;
}

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
        made.kept = {as_integers(places, bits == 8 ? at::kByte : bits == 16 ? at::kShort : at::kInt)};
    });
    made.call["kernel"] = at::IntArrayRef(kernel);
    made.call["shape"] = x->sizes();
    return layer(args[0], *x, ADAPTIVE_MAX_POOL, made);
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

/* Batch normalization by constants: the variance, and the weight if there is one. */
Tensor batch_norm_eval_backward(AutogradContext *ctx, const Tensor &g) {
    const auto kept = ctx->get_saved_variables();
    const double eps = ctx->saved_data.at("eps").toDouble();
    at::DimVector shape(g.dim(), 1);
    shape[1] = kept[0].numel();
    const bool is_narrow = c10::elementSize(g.scalar_type()) < 4;
    const auto wide = is_narrow ? at::kFloat : g.scalar_type(), dtype = kept[0].scalar_type();
    bool fast = is_final(g) && (dtype == wide || (g.is_cpu() && dtype == g.scalar_type()));
    for (const Tensor &one : kept)
        fast = fast && is_beside(one, g) && one.is_contiguous() && one.numel() == shape[1] &&
               one.scalar_type() == dtype;
    /* (On CUDA its gradient is always contiguous.) */
    const bool by_torch = fast && (g.is_cuda() ? g.is_contiguous() : is_narrow);
    if (!fast || (g.is_cuda() && !by_torch)) {
        Tensor scale = kept[0].to(wide).add(eps).rsqrt();
        if (kept.size() > 1) scale = scale * kept[1].to(wide);
        if (!fast) return (g * scale.view(shape)).to(g.scalar_type());
        Tensor dx = at::empty_like(g);
        return at::mul_out(dx, g, scale.view(shape)); /* in one pass, also where g is narrower */
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    if (by_torch) { /* It reads x, the mean and the statistics for other gradients alone. */
        const auto weight = kept.size() > 1 ? std::optional<Tensor>(kept[1]) : std::nullopt;
        const Tensor none = at::empty({0}, kept[0].options()); /* of statistics of a batch */
        return std::get<0>(at::native_batch_norm_backward(g, g, weight, kept[0], kept[0], none, none, false, eps,
                                                          {true, false, false}));
    }
    const Tensor scale = memory(shape, g.scalar_type());
    AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "batch_norm_eval", [&] {
        const scalar_t *var = kept[0].const_data_ptr<scalar_t>();
        const scalar_t *weight = kept.size() > 1 ? kept[1].const_data_ptr<scalar_t>() : nullptr;
        scalar_t *by = scale.mutable_data_ptr<scalar_t>();
        for (int64_t k = 0; k < shape[1]; k++)
            by[k] = 1 / std::sqrt(var[k] + (scalar_t)eps) * (weight ? weight[k] : 1);
    });
    return times(g, scale);
}

/* Of two axes, of which the first has one place. */
at::DimVector with_one_place(at::DimVector shape) {
    shape.insert(shape.end() - 1, 1);
    return shape;
}

/* Convolutions, transposed or not, by what is no parameter. The gradient is the other of the two; of few
   elements, and of several groups, stock's kernel is the faster. They cast as autocast says. */
constexpr int64_t FEW_ELEMENTS = 1 << 15;
enum Sizes { STRIDE, PADDING, DILATION, LEFT_OVER };

PyObject *convolution(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 10, "convolution takes 10 arguments");
    const Tensor *x = known(args[1]), *weight = known(args[2]);
    const bool has_bias = args[3] != Py_None, transposed = args[7] == Py_True;
    const Tensor *bias = has_bias ? known(args[3]) : nullptr;
    const int64_t groups = PyLong_AsLongLong(args[9]);
    if (PyErr_Occurred()) return nullptr;
    if (!x || !weight || (has_bias && !bias) || !x->numel()) Py_RETURN_NONE;
    if (x->dim() != weight->dim() || x->dim() < 3 || x->dim() > 5) Py_RETURN_NONE;
    const size_t dims = x->dim() - 2;
    const auto format = any_format_of(*x, dims);
    if (x->is_cpu() && !format) Py_RETURN_NONE;
    at::DimVector by[4];
    for (int k = 0; k < 4; k++)
        if (!sizes(args[k == LEFT_OVER ? 8 : 4 + k], dims, by[k])) Py_RETURN_NONE;
    const bool casts = is_autocast(*x);
    const auto dtype = casts ? at::autocast::get_autocast_dtype(x->device().type()) : x->scalar_type();
    const auto cast = [&](const Tensor &t) {
        return casts && t.is_floating_point() && t.scalar_type() != at::kDouble ? t.to(dtype) : t;
    };
    Made made;
    made.y = compute([&] {
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const auto given = has_bias ? std::optional<Tensor>(cast(*bias)) : std::nullopt;
        made.kept = {cast(*weight)};
        return at::convolution(cast(*x), made.kept[0], given, by[STRIDE], by[PADDING], by[DILATION], transposed,
                               by[LEFT_OVER], groups);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    for (size_t axis = 0; axis < dims && !transposed; axis++)
        by[LEFT_OVER][axis] = (x->size(2 + axis) + 2 * by[PADDING][axis] -
                               by[DILATION][axis] * (weight->size(2 + axis) - 1) - 1) % by[STRIDE][axis];
    at::DimVector options = {transposed, groups};
    for (const auto &one : by) options.append(one.begin(), one.end());
    made.call["options"] = at::IntArrayRef(options);
    made.call["shape"] = x->sizes();
    if (x->is_cpu()) made.call["format"] = (int64_t)*format;
    return layer(args[0], *x, CONVOLUTION, made);
    END_HANDLE_TH_ERRORS
}

Tensor convolution_backward(AutogradContext *ctx, const Tensor &given) {
    const Tensor weight = ctx->get_saved_variables()[0];
    const auto options = ctx->saved_data.at("options").toDimVector();
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    const size_t dims = shape.size() - 2;
    const auto by = [&](Sizes one) { return at::IntArrayRef(options).slice(2 + one * dims, dims); };
    const bool transposed = options[0];
    const at::DimVector zeros(dims, 0);
    const bool few = c10::multiply_integers(shape) < FEW_ELEMENTS;
    Tensor g = given, x;
    if (g.is_cpu()) { /* whose gradient is stored as x */
        const auto format = format_in(ctx);
        g = g.contiguous(format);
        const bool is_last = format != at::MemoryFormat::Contiguous, fits = c10::multiply_integers(shape) <= g.numel();
        /* (oneDNN takes twice as long for the transposed one of several groups of channels that are last.) */
        const bool in_groups = is_last && options[1] > 1 && options[1] < shape[1] && g.scalar_type() == at::kFloat;
        if (!transposed && (is_last ? fits && (few || in_groups) : few)) x = stand_in(g, shape, format);
    } else if (!transposed && options[1] > 1 && g.is_contiguous()) {
        /* (It copies x where cuDNN is not at hand; and that of one axis always, but not of two.) */
        x = at::empty({1}, g.options()).expand(dims == 1 ? with_one_place(shape) : shape);
    }
    if (!x.defined())
        return at::convolution(g, weight, {}, by(STRIDE), by(PADDING), by(DILATION), !transposed,
                               transposed ? at::IntArrayRef(zeros) : by(LEFT_OVER), options[1]);
    const bool flat = x.dim() > g.dim();
    const auto along = [&](Sizes one, int64_t first) {
        at::DimVector sizes(by(one));
        if (flat) sizes.insert(sizes.begin(), first);
        return sizes;
    };
    const Tensor dx = std::get<0>(at::convolution_backward(
        flat ? g.unsqueeze(-2) : g, x, flat ? weight.unsqueeze(-2) : weight, at::OptionalIntArrayRef(), along(STRIDE, 1),
        along(PADDING, 0), along(DILATION, 1), false, at::DimVector(x.dim() - 2, 0), options[1], {true, false, false}));
    return flat ? dx.squeeze(-2) : dx;
}

/* Padding by reflection and replication. */
using Pad = Tensor(const Tensor &, at::IntArrayRef);
using PadBackward = Tensor(const Tensor &, const Tensor &, at::IntArrayRef);
using WritePadBackward = Tensor &(const Tensor &, const Tensor &, at::IntArrayRef, Tensor &);
Pad *const PADS[][3] = {{at::reflection_pad1d, at::reflection_pad2d, at::reflection_pad3d},
                        {at::replication_pad1d, at::replication_pad2d, at::replication_pad3d}};
PadBackward *const PADS_BACKWARD[][3] = {
    {at::reflection_pad1d_backward, at::reflection_pad2d_backward, at::reflection_pad3d_backward},
    {at::replication_pad1d_backward, at::replication_pad2d_backward, at::replication_pad3d_backward}};
WritePadBackward *const WRITE_PADS_BACKWARD[][3] = {
    {at::reflection_pad1d_backward_outf, at::reflection_pad2d_backward_outf, at::reflection_pad3d_backward_outf},
    {at::replication_pad1d_backward_outf, at::replication_pad2d_backward_outf, at::replication_pad3d_backward_outf}};

PyObject *pad(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 4, "pad takes 4 arguments");
    const Tensor *x = known(args[1]);
    const bool replicates = args[2] == Py_True;
    const size_t ends = std::max<Py_ssize_t>(count_of(args[3]), 0), dims = ends / 2;
    at::DimVector edges;
    if (!x || !x->numel() || ends % 2 || !dims || dims > 3) Py_RETURN_NONE;
    if ((size_t)x->dim() - dims - 1 > 1 || !sizes(args[3], ends, edges)) Py_RETURN_NONE;
    const auto format = any_format_of(*x, dims);
    if (!format || (x->is_cuda() && !x->is_contiguous())) Py_RETURN_NONE;
    Made made;
    made.y = compute([&] { return PADS[replicates][dims - 1](*x, edges); });
    if (!made.y.numel()) Py_RETURN_NONE;
    made.call["format"] = (int64_t)*format;
    made.call["replicates"] = replicates;
    made.call["edges"] = at::IntArrayRef(edges);
    made.call["shape"] = x->sizes();
    return layer(args[0], *x, PAD, made);
    END_HANDLE_TH_ERRORS
}

Tensor pad_backward(AutogradContext *ctx, const Tensor &g) {
    ctx->get_saved_variables(); /* none; but a second time is an error, as in stock */
    const auto edges = ctx->saved_data.at("edges").toDimVector();
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    const bool replicates = ctx->saved_data.at("replicates").toBool();
    const auto format = format_in(ctx);
    if (Tensor dx = to_be_written(g, shape, format); dx.defined()) {
        at::AutoDispatchBelowADInplaceOrView guard;
        return WRITE_PADS_BACKWARD[replicates][edges.size() / 2 - 1](g.contiguous(format), dx, edges, dx);
    }
    return PADS_BACKWARD[replicates][edges.size() / 2 - 1](g, stand_in(g, shape), edges);
}

/* Average pooling. Of one axis, as torch: of two, of which the first has one place. */
PyObject *avg_pool(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "avg_pool takes 9 arguments");
    const Tensor *x = known(args[1]);
    const size_t dims = PyLong_AsSize_t(args[2]);
    const int ceil = PyObject_IsTrue(args[6]), includes = PyObject_IsTrue(args[7]);
    const int64_t divisor = args[8] == Py_None ? 0 : PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred()) return nullptr;
    at::DimVector by[3];
    if (!x || !x->numel() || (args[8] != Py_None && !divisor)) Py_RETURN_NONE;
    const auto format = dims == 2 && x->is_cpu() ? any_format_of(*x, dims) : std::nullopt;
    if (!format && !x->is_contiguous()) Py_RETURN_NONE;
    for (int k = 0; k < 3; k++)
        if (!sizes(args[3 + k], dims, by[k])) Py_RETURN_NONE;
    const auto given = divisor ? std::optional<int64_t>(divisor) : std::nullopt;
    Made made;
    made.y = compute([&] {
        if (dims == 1) return at::avg_pool1d(*x, by[0], by[1], by[2], ceil, includes);
        if (dims == 2) return at::avg_pool2d(*x, by[0], by[1], by[2], ceil, includes, given);
        return at::avg_pool3d(*x, by[0], by[1], by[2], ceil, includes, given);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    at::DimVector options = {ceil, includes, divisor};
    const int64_t absent[] = {1, 1, 0};
    for (int k = 0; k < 3; k++) {
        if (dims == 1) options.push_back(absent[k]);
        options.append(by[k].begin(), by[k].end());
    }
    made.call["options"] = at::IntArrayRef(options);
    made.call["shape"] = x->sizes();
    made.call["flat"] = dims == 1;
    if (format) made.call["format"] = (int64_t)*format;
    return layer(args[0], *x, AVG_POOL, made);
    END_HANDLE_TH_ERRORS
}

Tensor avg_pool_backward(AutogradContext *ctx, const Tensor &g) {
    ctx->get_saved_variables(); /* (as above) */
    const auto options = ctx->saved_data.at("options").toDimVector();
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    const size_t dims = options.size() / 3 - 1;
    const auto by = [&](int k) { return at::IntArrayRef(options).slice(3 + k * dims, dims); };
    const auto divisor = options[2] ? std::optional<int64_t>(options[2]) : std::nullopt;
    const bool flat = ctx->saved_data.at("flat").toBool();
    if (ctx->saved_data.count("format")) {
        const auto format = format_in(ctx);
        if (Tensor dx = to_be_written(g, shape, format); dx.defined()) {
            at::AutoDispatchBelowADInplaceOrView guard;
            return at::avg_pool2d_backward_outf(g.contiguous(format), dx, by(0), by(1), by(2), options[0], options[1],
                                                divisor, dx);
        }
    }
    const Tensor x = stand_in(g, flat ? with_one_place(shape) : shape);
    const Tensor dx = (dims == 3 ? at::avg_pool3d_backward : at::avg_pool2d_backward)(
        flat ? g.unsqueeze(-2) : g, x, by(0), by(1), by(2), options[0], options[1], divisor);
    return flat ? dx.squeeze(-2) : dx;
}

PyObject *adaptive_avg_pool(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 4, "adaptive_avg_pool takes 4 arguments");
    const Tensor *x = known(args[1]);
    const size_t dims = PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred()) return nullptr;
    at::DimVector out;
    const Py_ssize_t given = count_of(args[3]);
    if (given < 0 ? args[3] == Py_None : (size_t)given != dims) Py_RETURN_NONE;
    if (!x || !x->numel() || (size_t)x->dim() < dims) Py_RETURN_NONE;
    const auto format = any_format_of(*x, dims);
    if (!format || (x->is_cuda() && !x->is_contiguous())) Py_RETURN_NONE;
    if (!sizes(args[3], dims, out, x->sizes().slice(x->dim() - dims))) Py_RETURN_NONE;
    Made made;
    made.y = compute([&] {
        if (dims == 1) return at::adaptive_avg_pool1d(*x, out);
        return dims == 2 ? at::adaptive_avg_pool2d(*x, out) : at::adaptive_avg_pool3d(*x, out);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    made.call["dims"] = (int64_t)dims;
    made.call["shape"] = x->sizes();
    made.call["format"] = (int64_t)*format;
    return layer(args[0], *x, ADAPTIVE_AVG_POOL, made);
    END_HANDLE_TH_ERRORS
}

Tensor adaptive_avg_pool_backward(AutogradContext *ctx, const Tensor &g) {
    ctx->get_saved_variables(); /* (as above) */
    const auto shape = ctx->saved_data.at("shape").toDimVector();
    const int64_t dims = ctx->saved_data.at("dims").toInt();
    const auto format = format_in(ctx);
    if (dims == 1) return at::_adaptive_avg_pool2d_backward(g.unsqueeze(-2), stand_in(g, with_one_place(shape))).squeeze(-2);
    const auto backward = dims == 2 ? at::_adaptive_avg_pool2d_backward : at::_adaptive_avg_pool3d_backward;
    Tensor dx = format == at::MemoryFormat::Contiguous ? Tensor() : to_be_written(g, shape, format);
    if (!dx.defined()) return backward(g, stand_in(g, shape));
    const Tensor last = g.contiguous(format);
    /* The kernel for channels that are last wants x in this format; another takes the gradient itself for x. */
    const int64_t windows[] = {shape[2] / g.size(2), shape[3] / g.size(3)}, none[] = {0, 0};
    if (dims == 3 || shape[2] % g.size(2) || shape[3] % g.size(3)) return backward(last, dx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::avg_pool2d_backward_outf(last, dx, windows, windows, none, false, true, std::nullopt, dx);
}

/* Embeddings, which keep their indices as the smallest integers. */
PyObject *embedding(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 6 && THPDtype_Check(args[3]), "embedding takes 6 arguments, the fourth a dtype");
    const Tensor *weight = known(args[1]), *indices = known(args[2]);
    const int64_t padding = PyLong_AsLongLong(args[4]);
    const bool by_freq = args[5] == Py_True;
    if (PyErr_Occurred()) return nullptr;
    if (!weight || !indices || !weight->is_contiguous() || !weight->numel()) Py_RETURN_NONE;
    Made made;
    const auto dtype = ((THPDtype *)args[3])->scalar_type;
    made.y = compute([&] {
        made.kept = {as_integers(*indices, dtype)};
        return at::embedding(*weight, *indices, padding, by_freq);
    });
    if (!made.y.numel()) Py_RETURN_NONE;
    const int64_t options[] = {weight->size(0), padding, by_freq};
    made.call["options"] = at::IntArrayRef(options);
    return layer(args[0], *weight, EMBEDDING, made);
    END_HANDLE_TH_ERRORS
}

Tensor embedding_backward(AutogradContext *ctx, const Tensor &g) {
    const Tensor kept = ctx->get_saved_variables()[0]; /* (the kernel takes no smaller integers) */
    const Tensor indices = kept.scalar_type() == at::kLong ? kept : as_integers(kept, at::kInt);
    const auto options = ctx->saved_data.at("options").toDimVector();
    return at::embedding_dense_backward(g, indices, options[0], options[1], options[2]);
}

/* Activations that are curves. From x: log-sigmoid, x - tanh(x); from y: elu and its kin, and what has a
   slope of 1 - exp(factor * y): softplus and log-sigmoid. */
enum Curve : int64_t { LOGSIGMOID, TANHSHRINK, ELU_FROM_OUTPUT, SOFTPLUS_FROM_OUTPUT, LOGSIGMOID_FROM_OUTPUT, CURVES };

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
        return which == SOFTPLUS_FROM_OUTPUT ? at::softplus(*x, by[0], by[1]) : at::log_sigmoid(*x);
    });
    made.kept = {which < ELU_FROM_OUTPUT ? *x : made.y};
    made.call["which"] = which;
    made.call["numbers"] = at::ArrayRef<double>(by, 3);
    return layer(args[0], *x, CURVE, made);
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

/* Instance normalization: as torch does it, batch normalization of one example that has all channels. */
Tensor as_one(const Tensor &x) {
    at::DimVector shape(x.sizes());
    shape[0] = 1, shape[1] = x.size(0) * x.size(1);
    return x.contiguous().view(shape);
}

std::optional<Tensor> for_each_example(const Tensor &vector, const Tensor &x) {
    if (!vector.defined()) return std::nullopt;
    return x.size(0) == 1 ? vector : vector.repeat(x.size(0));
}

PyObject *instance_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 5, "instance_norm takes 5 arguments");
    const Tensor *x = plain(args[1]);
    double eps;
    Tensor vectors[2];
    if (!x || !numbers(args + 4, &eps, 1)) Py_RETURN_NONE;
    if (x->dim() < 3 || x->numel() < 2 * x->size(0) * x->size(1) || !x->numel()) Py_RETURN_NONE;
    for (int k = 0; k < 2; k++) {
        if (args[2 + k] == Py_None) continue;
        const Tensor *vector = plain(args[2 + k]);
        if (!vector || vector->scalar_type() != x->scalar_type() || vector->dim() != 1 ||
            vector->numel() != x->size(1) || vector->requires_grad())
            Py_RETURN_NONE;
        vectors[k] = *vector;
    }
    Made made;
    compute([&] {
        const auto weight = for_each_example(vectors[0], *x), bias = for_each_example(vectors[1], *x);
        const auto [y, mean, rstd] = at::native_batch_norm(as_one(*x), weight, bias, {}, {}, true, 0, eps);
        const at::IntArrayRef shape = x->sizes().slice(0, 2);
        made.y = y.view(x->sizes());
        made.kept = {*x, vectors[0], mean.view(shape), rstd.view(shape)};
    });
    made.call["eps"] = eps;
    return layer(args[0], *x, INSTANCE_NORM, made);
    END_HANDLE_TH_ERRORS
}

/* (The derivative of torch's operation accounts for the statistics as functions of x.) */
Tensor instance_norm_backward(AutogradContext *ctx, const Tensor &g) {
    const auto kept = ctx->get_saved_variables();
    const double eps = ctx->saved_data.at("eps").toDouble();
    const auto weight = for_each_example(kept[1], g);
    const auto grads = at::native_batch_norm_backward(as_one(g), as_one(kept[0]), weight, {}, {},
                                                      kept[2].flatten(), kept[3].flatten(), true, eps,
                                                      {true, false, false});
    return std::get<0>(grads).view(g.sizes());
}

/* Normalization of each example over its last axis, or over groups of channels: from x (without a mean)
   or from y. What y and the statistics are of x tells the second derivative, so both are results. */
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

/* A parameter of so many features that a loop can read beside x. */
const Tensor *vector_of(PyObject *arg, const Tensor &x, int64_t features) {
    const Tensor *vector = known(arg);
    const bool fits = vector && vector->device() == x.device() && vector->scalar_type() == x.scalar_type() &&
                      vector->is_contiguous() && vector->sizes() == at::IntArrayRef(features);
    return fits ? vector : nullptr;
}

PyObject *norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9, "norm takes 9 arguments");
    const Tensor *x = known(args[1]);
    const int64_t groups = PyLong_AsLongLong(args[4]);
    const bool from_y = args[5] == Py_True, centered = args[6] == Py_True, wants_x = args[7] == Py_True;
    double eps = 0;
    if (PyErr_Occurred()) return nullptr;
    if (!x || !x->is_contiguous() || !x->numel() || x->dim() < (groups ? 2 : 1)) Py_RETURN_NONE;
    const bool is_wide = x->scalar_type() == at::kFloat || x->scalar_type() == at::kDouble;
    if (!is_wide && !(x->is_cuda() && has_loops(*x))) Py_RETURN_NONE;
    if (args[8] != Py_None && !numbers(args + 8, &eps, 1)) Py_RETURN_NONE;
    const int64_t features = groups ? x->size(1) : x->size(-1), examples = groups ? x->size(0) : 0;
    if (groups && x->is_cuda()) Py_RETURN_NONE;
    if (groups && (groups < 0 || features % groups || x->numel() == groups)) Py_RETURN_NONE;
    std::optional<Tensor> vectors[2];
    for (int k = 0; k < 2; k++) {
        if (args[2 + k] == Py_None) continue;
        const Tensor *vector = vector_of(args[2 + k], *x, features);
        if (!vector) Py_RETURN_NONE;
        vectors[k] = *vector;
    }
    Made made;
    compute([&] {
        if (groups) {
            const int64_t places = x->numel() / (examples * features);
            std::tie(made.y, std::ignore, made.also) =
                at::native_group_norm(*x, vectors[0], vectors[1], examples, features, places, groups, eps);
        } else if (centered) {
            std::tie(made.y, std::ignore, made.also) =
                at::native_layer_norm(*x, {features}, vectors[0], vectors[1], eps);
        } else {
            const auto least = args[8] == Py_None ? std::nullopt : std::optional<double>(eps);
            std::tie(made.y, made.also) = at::_fused_rms_norm(*x, {features}, vectors[0], least);
            made.also = made.also.squeeze(-1);
        }
        made.kept.resize(RSTD + 1);
        made.kept[from_y ? Y : X] = from_y ? made.y : *x;
        if (wants_x || !from_y) made.kept[RSTD] = made.also;
        if (wants_x || from_y) made.kept[WEIGHT] = vectors[0].value_or(Tensor());
        if (from_y) made.kept[BIAS] = vectors[1].value_or(Tensor());
    });
    made.call["groups"] = groups;
    made.call["from_y"] = from_y;
    made.call["centered"] = centered;
    made.call["has_weight"] = vectors[0].has_value();
    made.call["has_bias"] = vectors[1].has_value();
    if (!name(args[0], made)) return nullptr;
    const auto given = [](const std::optional<Tensor> &vector) { return vector.value_or(Tensor()); };
    link<Norms>({*x, given(vectors[0]), given(vectors[1])}, {made.y, made.also}, made);
    return THPVariable_Wrap(made.y);
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
        if (args[k] != Py_None && !vector_of(args[k], *x, features)) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

/* Whether the output of a norm tells the normalized input: see norm.py. None where it takes more than a look
   to say so. */
PyObject *is_invertible(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 5, "is_invertible takes 5 arguments");
    const Tensor *x = is_usual() ? plain(args[0]) : nullptr, *vectors[2] = {};
    double least, ratio;
    if (!x || is_autocast(*x) || !numbers(args + 3, &least, 1) || !numbers(args + 4, &ratio, 1)) Py_RETURN_NONE;
    if (x->scalar_type() != at::kFloat && x->scalar_type() != at::kDouble) Py_RETURN_NONE;
    for (int k = 0; k < 2; k++) {
        if (args[1 + k] == Py_None) continue;
        const Tensor *vector = vectors[k] = plain(args[1 + k]);
        if (!vector || vector->scalar_type() != x->scalar_type() || !vector->is_contiguous()) Py_RETURN_NONE;
        if (vector->numel() > MOST_FEATURES || (k && vectors[0] && vectors[0]->sizes() != vector->sizes()))
            Py_RETURN_NONE;
    }
    if (!vectors[0]) return PyBool_FromLong(!vectors[1]);
    bool is = true;
    AT_DISPATCH_FLOATING_TYPES(x->scalar_type(), "is_invertible", [&] {
        const scalar_t *weight = vectors[0]->const_data_ptr<scalar_t>();
        const scalar_t *bias = vectors[1] ? vectors[1]->const_data_ptr<scalar_t>() : nullptr;
        const scalar_t low = least, high = 1 / least;
        const int64_t features = vectors[0]->numel();
        for (int64_t k = 0; k < features; k++) is &= std::abs(weight[k]) >= low && std::abs(weight[k]) <= high;
        for (int64_t k = 0; bias && k < features; k++)
            is &= std::abs(bias[k]) <= (scalar_t)ratio * std::abs(weight[k]);
    });
    return PyBool_FromLong(is);
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
    const auto wide = c10::elementSize(array.scalar_type()) < 4 ? at::kFloat : array.scalar_type();
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
                           bool from_y, bool centered) {
    const Tensor &array = kept[from_y ? Y : X];
    const Rows of(array, groups);
    at::AutoDispatchBelowADInplaceOrView guard;
    /* (Another reference to what is contiguous would be one too many for is_ours.) */
    const Tensor copied = given.is_contiguous() ? Tensor() : given.contiguous();
    const Tensor &g = copied.defined() ? copied : given;
    const int64_t threads = g.numel() > GRAIN ? at::get_num_threads() : 1;
    variable_list grads(3);
    if (wanted[0]) grads[0] = memory_for(g);
    for (int k = 1; k < 3; k++)
        if (wanted[k]) grads[k] = zeros({threads, of.features}, g.scalar_type());
    const Tensor inverse = from_y && !groups && kept[WEIGHT].defined() ? inverse_of(kept[WEIGHT]) : Tensor();
    const auto read = [](const Tensor &t) { return t.defined() ? t.const_data_ptr() : nullptr; };
    const auto write = [](const Tensor &t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
    const Norm norm = {g.const_data_ptr(), array.const_data_ptr(), nullptr, read(kept[RSTD]),
                       read(kept[WEIGHT]), read(kept[BIAS]), read(inverse),
                       write(grads[0]), write(grads[1]), write(grads[2]),
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
    const auto wide = c10::elementSize(array.scalar_type()) < 4 ? at::kFloat : array.scalar_type();
    const int64_t itemsize = c10::elementSize(wide);
    int64_t block = 1;
    while (block < features) block *= 2;
    const Tensor vectors[] = {kept[RSTD], kept[WEIGHT], kept[BIAS]};
    bool fits = block * itemsize <= BYTES_OF_ROW && array.numel() <= MOST_ELEMENTS && is_aligned(g) && is_aligned(array);
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
    const auto wide = c10::elementSize(array.scalar_type()) < 4 ? at::kFloat : array.scalar_type();
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

constexpr int64_t FEW_PLACES = 32; /* of which a loop over images makes no vectors */

/* Cross-entropy of rows of logits, or of images of many places, by indices of classes. */
bool fits(const Tensor &x, const Tensor &target) {
    const auto dtype = x.scalar_type();
    const bool is_served = dtype == at::kFloat || dtype == at::kDouble || (dtype == at::kBFloat16 && x.is_cpu());
    if (!is_known(x) || !is_served || x.dim() < 2 || (x.is_cuda() && x.dim() > 2) || !x.numel()) return false;
    const auto shape = x.sizes();
    const bool are_many = x.dim() == 2 || c10::multiply_integers(shape.slice(2)) >= FEW_PLACES;
    return are_many && x.is_contiguous() && is_beside(target, x) && target.scalar_type() == at::kLong &&
           target.is_contiguous() && target.dim() == x.dim() - 1 && target.size(0) == shape[0] &&
           target.sizes().slice(1) == shape.slice(2);
}

PyObject *cross_entropy(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 7, "cross_entropy takes 7 arguments");
    const Tensor *x = known(args[1]), *target = known(args[2]);
    double smoothing;
    if (!x || !target || !fits(*x, *target) || !PyLong_CheckExact(args[4])) Py_RETURN_NONE;
    if (!numbers(args + 6, &smoothing, 1) || smoothing < 0 || smoothing > 1) Py_RETURN_NONE;
    const int64_t ignored = PyLong_AsLongLong(args[4]), reduction = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return nullptr;
    std::optional<Tensor> weight;
    if (args[3] != Py_None) {
        const Tensor *given = known(args[3]);
        const bool is_like_x = given && is_beside(*given, *x) && given->scalar_type() == x->scalar_type();
        if (!is_like_x || given->dim() != 1 || given->size(0) != x->size(1) || !given->is_contiguous()) Py_RETURN_NONE;
        weight = *given;
    }
    if ((weight || smoothing) && (x->is_cuda() || (weight && smoothing))) Py_RETURN_NONE;
    Made made;
    compute([&] {
        made.y = at::cross_entropy_loss(*x, *target, weight, reduction, ignored, smoothing);
        made.kept = {*x, *target};
        if (weight) made.kept.push_back(*weight);
    });
    made.call["ignored"] = ignored;
    made.call["is_mean"] = reduction == at::Reduction::Mean;
    made.call["smoothing"] = smoothing;
    return layer(args[0], *x, CROSS_ENTROPY, made);
    END_HANDLE_TH_ERRORS
}

/* That of x is (softmax(x) - q) * h for each row, of which q is 1 for the class of the target, or that
   smoothed over all classes. (Under autocast the loss, and so g, is wider than x.) */
Tensor cross_entropy_backward(AutogradContext *ctx, const Tensor &g) {
    const auto kept = ctx->get_saved_variables();
    const Tensor &x = kept[0], &target = kept[1], weight = kept.size() > 2 ? kept[2] : Tensor();
    const int64_t ignored = ctx->saved_data.at("ignored").toInt();
    const bool is_mean = ctx->saved_data.at("is_mean").toBool();
    const double smoothing = ctx->saved_data.at("smoothing").toDouble();
    const bool of_rows = g.dim() && g.is_contiguous() && g.sizes() == target.sizes();
    const auto own = x.scalar_type(), wide = own == at::kBFloat16 ? at::kFloat : own;
    const bool fast = is_final(g) && fits(x, target) && x.device() == g.device() &&
                      (g.scalar_type() == own || g.scalar_type() == wide) &&
                      (!weight.defined() || (is_known(weight) && weight.is_contiguous()));
    if (!fast || !(of_rows || !g.dim()) || g.is_cuda()) {
        const Tensor counts = target != ignored, index = target * counts;
        const auto dtype = g.scalar_type();
        const Tensor of_target = weight.defined() ? weight.index({index}).to(dtype) * counts : counts;
        const Tensor each = is_mean ? g / of_target.sum(dtype) : g;
        const Tensor zero = at::zeros({}, g.options());
        const Tensor h = at::where(counts, weight.defined() ? each * of_target : each, zero).unsqueeze(1);
        const Tensor p = at::softmax(x, 1, dtype), hard = smoothing ? h * (1 - smoothing) : h, column = index.unsqueeze(1);
        if (fast && !smoothing) return p.mul_(h).scatter_add_(1, column, hard.neg()).to(own);
        const Tensor dx = p * h - at::zeros_like(p).scatter(1, column, hard);
        return (smoothing ? dx - h * (smoothing / x.size(1)) : dx).to(own);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    const int64_t rows = target.numel(), classes = x.size(1), places = rows / x.size(0);
    const int64_t *classed = target.const_data_ptr<int64_t>();
    const bool is_double = own == at::kDouble;
    const Tensor dx = is_double ? at::_softmax(x, 1, false) : memory_like(x);
    const Tensor h = memory(target.sizes(), wide), given = g.to(wide);
    AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, own, "cross_entropy", [&] {
        using wide_t = at::opmath_type<scalar_t>;
        const wide_t *of = given.const_data_ptr<wide_t>();
        const scalar_t *weights = weight.defined() ? weight.const_data_ptr<scalar_t>() : nullptr;
        wide_t *each = h.mutable_data_ptr<wide_t>(), total = 0;
        for (int64_t row = 0; row < rows; row++) {
            const bool is_ignored = classed[row] == ignored;
            TORCH_CHECK_INDEX(is_ignored || (classed[row] >= 0 && classed[row] < classes), "Target ", classed[row],
                              " is out of bounds.");
            each[row] = is_ignored ? 0 : weights ? (wide_t)weights[classed[row]] : 1;
            total += each[row];
        }
        for (int64_t row = 0; row < rows; row++)
            if (classed[row] != ignored) each[row] *= of[of_rows ? row : 0] / (is_mean ? total : 1);
    });
    if (!is_double) {
        const Softmax softmax = {x.const_data_ptr(), h.const_data_ptr<float>(), classed, dx.mutable_data_ptr(), classes,
                                 places, smoothing};
        loops->softmax(&softmax, own == at::kFloat ? OF_FLOAT : OF_BFLOAT16, rows, at::get_num_threads());
        return dx;
    }
    dx.mul_(h.unsqueeze(1));
    if (smoothing) dx.sub_(h.unsqueeze(1), smoothing / (double)classes);
    const double *each = h.const_data_ptr<double>();
    double *gradient = dx.mutable_data_ptr<double>();
    for (int64_t row = 0; row < rows; row++)
        if (classed[row] != ignored)
            gradient[(row / places * classes + classed[row]) * places + row % places] -= each[row] * (1 - smoothing);
    return dx;
}

PyObject *batch_norm_eval(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 7, "batch_norm_eval takes 7 arguments");
    const Tensor *x = known(args[1]);
    double eps;
    if (!x || !x->numel() || !numbers(args + 6, &eps, 1) || eps < 0) Py_RETURN_NONE;
    if (x->dim() < 2 || !THPVariable_CheckExact(args[2])) Py_RETURN_NONE;
    const auto own = x->scalar_type(), wide = c10::elementSize(own) < 4 ? at::kFloat : own;
    /* (On CPU they may have 16 bits, too, all of them.) */
    const bool are_narrow = x->is_cpu() && THPVariable_Unpack(args[2]).scalar_type() == own;
    const auto dtype = are_narrow ? own : wide;
    enum { MEAN, VAR, SCALE_BY, SHIFT_BY };
    std::optional<Tensor> vectors[4];
    for (int k = 0; k < 4; k++) {
        if (args[2 + k] == Py_None && k > VAR) continue;
        const Tensor *vector = THPVariable_CheckExact(args[2 + k]) ? &THPVariable_Unpack(args[2 + k]) : nullptr;
        if (!vector || !is_beside(*vector, *x) || vector->scalar_type() != dtype) Py_RETURN_NONE;
        vectors[k] = *vector;
    }
    Made made;
    made.y = compute([&] {
        return at::batch_norm(*x, vectors[SCALE_BY], vectors[SHIFT_BY], vectors[MEAN], vectors[VAR], false, 0, eps,
                              x->is_cuda() && at::globalContext().userEnabledCuDNN());
    });
    made.kept = {*vectors[VAR]};
    if (vectors[SCALE_BY]) made.kept.push_back(*vectors[SCALE_BY]);
    made.call["eps"] = eps;
    return layer(args[0], *x, BATCH_NORM_EVAL, made);
    END_HANDLE_TH_ERRORS
}

/* To Python, as the functions of torch itself. */
template <typename T>
PyTypeObject *show() {
    using namespace torch::autograd;
    static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    static PyGetSetDef properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES, {nullptr}};
    static PyMethodDef functions[] = {
        {"name", name_of<T>, METH_NOARGS, nullptr},
        {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
        {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
        {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
        {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
        {nullptr}};
    _initFunctionPyTypeObject(type, "MemsaveLayerBackward", properties, functions);
    registerCppFunction(typeid(CppNode<T>), &type);
    return &type;
}

PyObject *connect(PyObject *, PyObject *args) {
    PyObject *capsule, *families;
    if (!PyArg_ParseTuple(args, "OO!OO:connect", &capsule, &PyTuple_Type, &families, &device_context, &compiler))
        return nullptr;
    Py_INCREF(device_context);
    Py_INCREF(compiler);
    for (int family = 0; family < FAMILIES; family++) {
        PyObject *number = PyTuple_GetItem(families, family);
        family_of[family] = number ? PyLong_AsLongLong(number) : 0;
        if (PyErr_Occurred()) return nullptr;
    }
    loops = (const Loops *)PyCapsule_GetPointer(capsule, LOOPS);
    if (!loops) return nullptr;

    return PyTuple_Pack(2, show<Layer>(), show<Norms>());
}

#define FAST(NAME) {#NAME, (PyCFunction)(void (*)())NAME, METH_FASTCALL, nullptr} /* see nodes.py */
PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS,
     "connect(loops, families, DeviceContext, compiled): to loops of native.c, and what has those of cuda.py "
     "compiled (or None). The types of nodes, as Python sees them"},
    FAST(wanted),
    FAST(for_stock),
    FAST(bits),
    FAST(dropout),
    FAST(bernoulli),
    FAST(feature_dropout),
    FAST(max_pool),
    FAST(adaptive_max_pool),
    FAST(instance_norm),
    FAST(norm),
    FAST(is_over_last),
    FAST(is_invertible),
    FAST(cross_entropy),
    FAST(curve),
    FAST(embedding),
    FAST(pad),
    FAST(avg_pool),
    FAST(adaptive_avg_pool),
    FAST(convolution),
    FAST(batch_norm_eval),
    {nullptr, nullptr, 0, nullptr},
};

const std::pair<const char *, long> constants[] = {
    {"INTERFACE", INTERFACE},
    {"TO_BITS", TO_BITS},
    {"FROM_BITS", FROM_BITS},
    {"MAX_POOLING", MAX_POOLING},
    {"UNPOOLING", UNPOOLING},
    {"NORM_OF_ROWS", NORM_OF_ROWS},
    {"BITS_OF_PROGRAM", BITS_OF_PROGRAM},
    {"ELEMENTS_OF_PROGRAM", ELEMENTS_OF_PROGRAM},
    {"BYTES_OF_ROW", BYTES_OF_ROW},
    {"PROGRAMS_OF_NORM", PROGRAMS_OF_NORM},
    {"LEAKY_RELU", LEAKY_RELU},
    {"NONZERO_BITS", NONZERO_BITS},
    {"WITHIN", WITHIN},
    {"NOT_INSIDE", NOT_INSIDE},
    {"AS_RESULT", AS_RESULT},
    {"AS_X", AS_X},
    {"BY_SOFTSHRINK", BY_SOFTSHRINK},
    {"LOGSIGMOID", LOGSIGMOID},
    {"TANHSHRINK", TANHSHRINK},
    {"ELU_FROM_OUTPUT", ELU_FROM_OUTPUT},
    {"SOFTPLUS_FROM_OUTPUT", SOFTPLUS_FROM_OUTPUT},
    {"LOGSIGMOID_FROM_OUTPUT", LOGSIGMOID_FROM_OUTPUT},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_nodes", "Layers as nodes.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

#define JOINED(A, B) A##B
#define INIT(NAME) JOINED(PyInit_, NAME)
PyMODINIT_FUNC INIT(MEMSAVE_NODES)() {
    PyObject *module = PyModule_Create(&definition);
    for (const auto &[name, value] : constants)
        if (module && PyModule_AddIntConstant(module, name, value)) Py_CLEAR(module);
    return module;
}
