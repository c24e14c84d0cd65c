/* Layers as autograd functions of C++: no Python runs in forward or backward of the most frequent ones.

   Compiled against the torch that is installed (setup.py), and only loaded by that very version. A
   function here takes a call or returns None: nodes.py says what they compute, and everything else, as
   what they leave, are the rules in Python. Bits are those of native.c, by its loops.

   All of nodes/ is compiled at once, as torch's headers take most of the time. */

#include <torch/csrc/autograd/python_cpp_function.h>

#include "nodes/activation.h"
#include "nodes/avg_pooling.h"
#include "nodes/batch_norm.h"
#include "nodes/conv.h"
#include "nodes/curve.h"
#include "nodes/dropout.h"
#include "nodes/embedding.h"
#include "nodes/function.h"
#include "nodes/instance_norm.h"
#include "nodes/loss.h"
#include "nodes/norm.h"
#include "nodes/padded_conv.h"
#include "nodes/padding.h"
#include "nodes/pooling.h"

namespace {

/* To Python, as the functions of torch itself. */
template <typename T>
PyTypeObject *show() {
    using namespace torch::autograd;
    static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    static PyGetSetDef properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES, {nullptr}};
    static PyMethodDef functions[] = {
        {"name", THPCppFunction_name, METH_NOARGS, nullptr},
        {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
        {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
        {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
        {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
        {nullptr}};
    _initFunctionPyTypeObject(type, "MemsaveLayerBackward", properties, functions);
    registerCppFunction(typeid(Named<T>), &type);
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

    return PyTuple_Pack(3, show<Layer>(), show<Norms>(), show<PaddedConvs>());
}

#define FAST(NAME) {#NAME, (PyCFunction)(void (*)())NAME, METH_FASTCALL, nullptr} /* see nodes.py */
PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS,
     "connect(loops, families, DeviceContext, compiled): to loops of native.c, and what has those of cuda.py "
     "compiled (or None). The types of nodes, as Python sees them"},
    FAST(wanted),
    FAST(for_stock),
    FAST(by_attributes),
    FAST(bits),
    FAST(prelu),
    FAST(dropout),
    FAST(bernoulli),
    FAST(feature_dropout),
    FAST(max_pool),
    FAST(max_pool_by_windows),
    FAST(adaptive_max_pool),
    FAST(instance_norm),
    FAST(norm),
    FAST(layer_norm_of),
    FAST(rms_norm_of),
    FAST(layer_norm_from_output_of),
    FAST(rms_norm_from_output_of),
    FAST(group_norm_of),
    FAST(is_over_last),
    FAST(is_invertible),
    FAST(cross_entropy),
    FAST(curve),
    FAST(embedding),
    FAST(pad),
    FAST(avg_pool),
    FAST(adaptive_avg_pool),
    FAST(convolution),
    FAST(convolution_of),
    FAST(padded_convolution),
    FAST(batch_norm_eval),
    FAST(batch_norm_of),
    {nullptr, nullptr, 0, nullptr},
};

const std::pair<const char *, long> constants[] = {
    {"INTERFACE", INTERFACE},
    {"FEW_ELEMENTS", FEW_ELEMENTS},
    {"LARGEST_WINDOW", LARGEST_WINDOW},
    {"MANY_PLACES", MANY_PLACES},
    {"TO_BITS", TO_BITS},
    {"FROM_BITS", FROM_BITS},
    {"MAX_POOLING", MAX_POOLING},
    {"UNPOOLING", UNPOOLING},
    {"NORM_OF_ROWS", NORM_OF_ROWS},
    {"WEIGHTS_OF_ROWS", WEIGHTS_OF_ROWS},
    {"LOSS_OF_ROWS", LOSS_OF_ROWS},
    {"DROPPING", DROPPING},
    {"SLOPING", SLOPING},
    {"SCALING_CHANNELS", SCALING_CHANNELS},
    {"BITS_OF_PROGRAM", BITS_OF_PROGRAM},
    {"POOLED_BY_PROGRAM", POOLED_BY_PROGRAM},
    {"ELEMENTS_OF_PROGRAM", ELEMENTS_OF_PROGRAM},
    {"MOST_PARTS", MOST_PARTS},
    {"BYTES_OF_ROW", BYTES_OF_ROW},
    {"PROGRAMS_OF_NORM", PROGRAMS_OF_NORM},
    {"HARDSIGMOID", HARDSIGMOID},
    {"HARDTANH", HARDTANH},
    {"NONZERO_BITS", NONZERO_BITS},
    {"AS_RESULT", AS_RESULT},
    {"AS_X", AS_X},
    {"OF_SOFTSHRINK", OF_SOFTSHRINK},
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
