/* Layers as nodes of the graph. */

#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>

#include <ATen/autocast_mode.h>

#include "tensors.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Function;
using torch::autograd::variable_list;

/* A layer, computed already: what is kept and remembered for backward, as an autograd function. */
struct Made {
    Tensor y, also; /* the statistics that come with y, of Norms */
    variable_list kept;
    ska::flat_hash_map<std::string, at::IValue> call;
    bool inplace = false;

    Made() { call.reserve(6); }
};

/* The gradient of x, by what is kept and remembered. */
using Backward = Tensor(AutogradContext *, const Tensor &g);

struct Layer : Function<Layer> {
    static variable_list backward(AutogradContext *ctx, const variable_list &gs) {
        if (!gs[0].defined()) return variable_list(2);
        /* The caller may run backward under autocast; gradients have the dtypes of forward. */
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const auto backward = (Backward *)ctx->saved_data.at("backward").toInt();
        return {backward(ctx, gs[0]), Tensor()};
    }
};

/* What a node remembers, in one list. */
using Numbers = c10::SmallVector<int64_t, 24>;
Numbers options_of(AutogradContext *ctx) {
    Numbers options;
    for (const int64_t option : ctx->saved_data.at("options").toIntList()) options.push_back(option);
    return options;
}

/* Of x, as a node remembers it. */
at::MemoryFormat format_in(AutogradContext *ctx) {
    return (at::MemoryFormat)ctx->saved_data.at("format").toInt();
}

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

/* A node, named as the Python class of an autograd function is. */
template <typename T>
struct Named : CppNode<T> {
    std::string name() const override {
        std::string name = "Memsave";
        bool starts = true;
        for (const char letter : this->ctx_.saved_data.at("row").toStringRef()) {
            if (letter != '_' && letter != '.') name += starts ? (char)std::toupper(letter) : letter;
            starts = letter == '_' || letter == '.';
        }
        return name + "Backward";
    }
};

/* The same, as this version of torch holds one. */
template <typename Handle, typename T>
auto make_node() {
    if constexpr (std::is_same_v<Handle, std::shared_ptr<torch::autograd::Node>>)
        return std::shared_ptr<Named<T>>(new Named<T>, [](auto *node) { deleteNode(node); });
    else return c10::make_intrusive<Named<T>>();
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
PyObject *layer(PyObject *row, const Tensor &x, Backward *backward, Made &made) {
    if (!name(row, made)) return nullptr;
    made.call["backward"] = (int64_t)backward;
    link<Layer>({x}, {made.y}, made);
    return THPVariable_Wrap(made.y);
}

}  // namespace
