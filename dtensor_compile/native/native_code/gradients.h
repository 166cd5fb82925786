// Wrap with `accumulate`: accumulates gradients of a backward graph directly into .grad of their parameters.
//
// The gradient of a leaf normally goes to its AccumulateGrad node, which detaches it, or adds it to .grad: two operators on
// DTensors, dispatched in Python. If that node would do nothing else, the same is done here on local tensors, and the node gets
// no gradient.
//
// Another thread may run the same node: it then holds the node's lock and waits for the GIL. So the lock is only tried here, and
// the gradient goes to autograd if that fails.
#pragma once

#include "results.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_function.h>

#include <mutex>

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// The lock that AccumulateGrad holds while it reads and writes .grad.
struct Lock : Node {
  static std::mutex& of(Node& node) { return node.*(&Lock::mutex_); }
};

// Whether the engine runs for plain .backward(), and `node` has no post hooks.
bool accumulates(const Node& node) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && wanted->empty() && !at::GradMode::is_enabled() && node.post_hooks().empty();
}

AccumulateGrad* plain_accumulation(Node* node) {
  auto* accumulate = dynamic_cast<AccumulateGrad*>(node);
  bool plain = accumulate != nullptr && accumulate->variable.defined() && accumulate->pre_hooks().empty() &&
      accumulate->post_hooks().empty() && accumulate->tensor_pre_hooks().empty() &&
      accumulate->retains_grad_hooks().empty() && accumulate->tensor_post_acc_grad_hooks() == nullptr;
  return plain ? accumulate : nullptr;
}

// Whether `dtype` is the gradient dtype of a leaf, and the leaf still gets a gradient.
bool takes(const AccumulateGrad& accumulate, c10::ScalarType dtype) {
  std::optional<c10::ScalarType> wanted = accumulate.input_metadata(0).grad_dtype();
  return wanted.value_or(dtype) == dtype && accumulate.variable.requires_grad() && accumulate.variable.is_leaf();
}

// The Python object of `tensor` if it is a DTensor; else null.
Ref python_dtensor(const at::Tensor& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && Py_TYPE(object) == dtensor.type ? Ref::copy(object) : Ref();
}

bool is_plain(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == like.scalar_type() &&
      !tensor.is_inference() && tensor.sizes() == like.sizes();
}

bool is_exactly_tensor(PyObject* object) {
  return object != nullptr && Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

bool equal(const std::vector<Extent>& extents, c10::IntArrayRef found) {
  if (extents.size() != found.size()) {
    return false;
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (extents[i].is_result || extents[i].value != found[i]) {
      return false;
    }
  }
  return true;
}

// Takes the local tensor at `index` out of `results`. If something else refers to that tensor or its memory (another gradient,
// the tangent), returns a copy, as AccumulateGrad makes one. With `like`, its strides are those that the gradient of `like`
// should have.
Ref take(PyObject* results, Py_ssize_t index, const at::Tensor* like) {
  Ref found = Ref::steal(PyList_GET_ITEM(results, index));
  PyList_SET_ITEM(results, index, Ref::copy(Py_None).release());
  const at::Tensor& local = THPVariable_Unpack(found.get());
  bool alone = Py_REFCNT(found.get()) == 1 && local.use_count() == 1 && local.storage().use_count() == 1;
  if (alone && (like == nullptr || torch::autograd::utils::obeys_layout_contract(local, *like))) {
    return found;
  }
  using torch::autograd::utils::clone_obey_contract;
  return Ref::steal(THPVariable_Wrap(like != nullptr ? clone_obey_contract(local, *like) : local.clone()));
}

enum class Done { no, yes, failed };

// Accumulates the local tensor at output.index of `results`, or changes nothing.
Done accumulate_local(Output& output, PyObject* results, Node* node) {
  AccumulateGrad* accumulation = plain_accumulation(node);
  PyObject* found = PyList_GET_ITEM(results, output.index);
  if (accumulation == nullptr || !is_exactly_tensor(found)) {
    return Done::no;
  }
  const at::Tensor& variable = accumulation->variable;
  Ref parameter = python_dtensor(variable);
  if (!parameter || !equal(output.sizes, variable.sizes()) || !equal(output.strides, variable.strides())) {
    return Done::no;
  }
  const at::Tensor& local = THPVariable_Unpack(found);
  Ref local_parameter = Ref::copy(slot(parameter.get(), dtensor.local));
  const at::Tensor& local_variable = THPVariable_Unpack(local_parameter.get());
  if (!takes(*accumulation, local.scalar_type()) || !is_plain(local, local_variable)) {
    return Done::no;
  }
  std::shared_ptr<const Made> made = made_for(output, results);
  if (!made) {
    return Done::failed;
  }
  std::unique_lock<std::mutex> lock(Lock::of(*accumulation), std::try_to_lock);
  if (!lock.owns_lock()) {
    return Done::no;
  }
  // Python code below may let another thread run, which may write to .grad without the lock.
  at::Tensor gradient = variable.grad();
  if (gradient.defined()) {
    Ref sum = python_dtensor(gradient);
    if (!sum || gradient.requires_grad() || gradient.is_inference()) {
      return Done::no;
    }
    Ref local_sum = Ref::copy(slot(sum.get(), dtensor.local)), sum_spec = Ref::copy(slot(sum.get(), dtensor.spec));
    if (!is_exactly_tensor(local_sum.get()) || !is_plain(THPVariable_Unpack(local_sum.get()), local) ||
        !same(sum_spec.get(), made->spec.get())) {
      PyErr_Clear();
      return Done::no;
    }
    at::Tensor(THPVariable_Unpack(local_sum.get())).add_(local);
    torch::autograd::impl::bump_version(gradient);
    return Done::yes;
  }
  Ref own = take(results, output.index, &local_variable);
  Ref whole = own ? make_dtensor(own.get(), *made, false) : Ref();
  if (!whole) {
    return Done::failed;
  }
  variable.mutable_grad() = THPVariable_Unpack(whole.get());
  return Done::yes;
}

// The gradient to pass to autograd.
Ref wrapped_gradient(Output& output, PyObject* results) {
  if (!output.is_dtensor || !is_exactly_tensor(PyList_GET_ITEM(results, output.index))) {
    return wrapped(output, results);
  }
  std::shared_ptr<const Made> made = made_for(output, results);
  Ref own = made ? take(results, output.index, nullptr) : Ref();
  return own ? make_dtensor(own.get(), *made, output.requires_grad) : Ref();
}

// Takes the list of gradients of a backward graph; returns a tuple with None for those accumulated already.
PyObject* accumulate_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject* keywords) {
  HANDLE_TH_ERRORS
  auto& wrap = *reinterpret_cast<Wrap*>(self);
  auto& outputs = *wrap.outputs;
  if (PyVectorcall_NARGS(nargs) != 1 || !PyList_CheckExact(args[0])) {
    return wrap_call(self, args, nargs, keywords);
  }
  if (!are_results_of(wrap, args[0])) {
    return nullptr;
  }
  c10::intrusive_ptr<Node> node = torch::autograd::get_current_node();
  PyObject* python = node.get() != nullptr ? node->pyobj_slot()->load_pyobj() : nullptr;
  bool known = python != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(python)) == wrap.owner;
  std::vector<bool> nothing(outputs.size(), false);
  const auto& is_variable = known ? reinterpret_cast<THPFunction*>(python)->is_variable_input : nothing;
  bool direct = known && is_variable.size() == outputs.size() && accumulates(*node);
  Ref tuple = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
  size_t edge = 0;
  for (size_t i = 0; tuple && i < outputs.size(); ++i) {
    Node* next = direct && is_variable[i] && edge < node->num_outputs() ? node->next_edge(edge).function.get() : nullptr;
    edge += direct && is_variable[i];
    Done done = outputs[i].is_dtensor && next != nullptr ? accumulate_local(outputs[i], args[0], next) : Done::no;
    Ref value = done == Done::no ? wrapped_gradient(outputs[i], args[0]) : done == Done::yes ? Ref::copy(Py_None) : Ref();
    if (!value) {
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), value.release());
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace
