/* What Python passes: whether a node can take it, and in which form. */

#pragma once

#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/autocast_mode.h>

#include "tensors.h"

namespace {

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

bool numbers(PyObject *const *args, double *out, int count) {
    for (int k = 0; k < count; k++) {
        if (!PyFloat_CheckExact(args[k]) && !PyLong_CheckExact(args[k])) return false;
        out[k] = PyFloat_AsDouble(args[k]);
        if (out[k] == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
    }
    return true;
}

/* Not what Python takes for true or false: stock refuses it. */
bool flags(PyObject *const *args, bool *out, int count) {
    for (int k = 0; k < count; k++) {
        if (!PyBool_Check(args[k])) return false;
        out[k] = args[k] == Py_True;
    }
    return true;
}

/* How many values a tuple or a list has; of anything else -1. */
Py_ssize_t count_of(PyObject *arg) {
    return PyTuple_Check(arg) || PyList_Check(arg) ? PySequence_Fast_GET_SIZE(arg) : -1;
}

/* Of a stride, which then is as long as the kernel. */
bool is_absent(PyObject *stride) { return stride == Py_None || count_of(stride) == 0; }

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

}  // namespace
