/* For function.py, the engine: whether a call is one that nodes take, or stock. */

#pragma once

#include <torch/csrc/Exceptions.h>

#include <map>

#include "arguments.h"

namespace {

/* Whether a gradient is wanted of an argument; nothing where it is neither None nor a tensor that a node may
   take, or is cast on its device: 1 for the CPU, 2 for CUDA. */
std::optional<bool> wants(PyObject *arg, long casts) {
    if (arg == Py_None) return false;
    if (!THPVariable_CheckExact(arg)) return std::nullopt;
    const Tensor &tensor = THPVariable_Unpack(arg);
    if (!is_known(tensor) || tensor.is_complex()) return std::nullopt;
    if (casts & (tensor.is_cuda() ? 2 : 1) && is_autocast(tensor)) return std::nullopt;
    return at::GradMode::is_enabled() && tensor.requires_grad();
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
    for (Py_ssize_t place = 0, k = 0; place < PyTuple_GET_SIZE(args[1]); place++) {
        const bool counts = k < PyTuple_GET_SIZE(args[0]) && PyLong_AsLong(PyTuple_GET_ITEM(args[0], k)) == place;
        const auto one = wants(PyTuple_GET_ITEM(args[1], place), casts);
        if (!one) Py_RETURN_NONE;
        if (counts && *one) bits |= 1l << k;
        k += counts;
    }
    return PyLong_FromLong(bits);
    END_HANDLE_TH_ERRORS
}

/* Of these, which gradients are wanted, as bits; none unless all are tensors that a node may take, and none is
   cast. */
std::optional<long> wanted_of(std::initializer_list<PyObject *> args, long casts = 0) {
    if (!is_usual()) return std::nullopt;
    long bits = 0, bit = 1;
    for (PyObject *arg : args) {
        const auto one = wants(arg, casts);
        if (!one) return std::nullopt;
        if (*one) bits |= bit;
        bit *= 2;
    }
    return bits;
}

/* Whether what torch would keep of these lives anyway: of parameters, not of what is computed. */
bool are_leaves(std::initializer_list<PyObject *> args) {
    return std::all_of(args.begin(), args.end(), [](PyObject *arg) {
        return arg == Py_None || THPVariable_Unpack(arg).is_leaf();
    });
}

/* What a module has, by its __dict__. (Borrowed; nullptr without an error where it is to be looked for by
   Python.) */
struct Module {
    PyObject *own;

    PyObject *option(const char *name) const { return get(own, name); }
    PyObject *parameter(const char *name) const { return tensor("_parameters", name); }
    PyObject *buffer(const char *name) const { return tensor("_buffers", name); }

  private:
    static PyObject *get(PyObject *dict, const char *name) {
        static std::map<const char *, PyObject *> interned;
        PyObject *&key = interned[name];
        if (!key) key = PyUnicode_InternFromString(name);
        PyObject *found = PyDict_GetItemWithError(dict, key);
        if (!found) PyErr_Clear();
        return found;
    }

    PyObject *tensor(const char *home, const char *name) const {
        PyObject *all = get(own, home);
        return all && PyDict_CheckExact(all) && !get(own, name) ? get(all, name) : nullptr;
    }
};

/* What a node makes of a module's input: of a function here, by which casts, and its further arguments, of which
   strings are names of attributes; a name in a tuple, the negative of a number. False where no gradient is
   wanted, which is stock's. */
PyObject *by_attributes(PyObject *, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    constexpr Py_ssize_t MOST = 14, FIRST = 2;
    TORCH_CHECK_TYPE(count == 4 && PyDict_Check(args[1]) && PyTuple_Check(args[3]),
                     "by_attributes takes a name, a dict, a tensor and a tuple");
    const Py_ssize_t given = PyTuple_GET_SIZE(args[3]) - FIRST;
    TORCH_CHECK_TYPE(given >= 0 && given <= MOST, "no such node");
    const long casts = PyLong_AsLong(PyTuple_GET_ITEM(args[3], 1));
    if (PyErr_Occurred()) return nullptr;
    const auto wanted = wanted_of({args[2]}, casts);
    if (!wanted) Py_RETURN_NONE;
    if (!*wanted) Py_RETURN_FALSE;
    PyObject *all[2 + MOST] = {args[0], args[2]};
    THPObjectPtr negatives[MOST];
    for (Py_ssize_t k = 0; k < given; k++) {
        PyObject *one = PyTuple_GET_ITEM(args[3], FIRST + k);
        const bool is_negative = PyTuple_CheckExact(one) && PyTuple_GET_SIZE(one) == 1;
        if (is_negative) one = PyTuple_GET_ITEM(one, 0);
        if (PyUnicode_CheckExact(one) && !(one = PyDict_GetItemWithError(args[1], one)))
            return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
        if (is_negative) {
            if (!PyFloat_CheckExact(one) && !PyLong_CheckExact(one)) Py_RETURN_NONE;
            negatives[k] = one = PyNumber_Negative(one);
            if (!one) return nullptr;
        }
        all[2 + k] = one;
    }
    return PyObject_Vectorcall(PyTuple_GET_ITEM(args[3], 0), all, 2 + given, nullptr);
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

}  // namespace
