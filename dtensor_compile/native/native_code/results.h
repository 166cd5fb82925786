// Wrap: turns the results of a graph into those of the compiled call, with DTensors made of local tensors.
#pragma once

#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>

#include <memory>

namespace {

// A size or stride: an integer, or its index in the graph's results.
struct Extent {
  bool is_result;
  int64_t value;
};

// A spec, and what it was made of. Shared, because another thread may replace it wherever Python code runs.
struct Made {
  Ref spec, mesh, shape, stride;
  Integers sizes, strides;  // shape and stride
};

struct Output {
  Py_ssize_t index;  // of the value, or of the local tensor, which is followed by the mesh
  bool is_dtensor = false, requires_grad = false;
  std::vector<Extent> sizes, strides;
  Ref make_spec;  // (mesh, shape, stride) -> spec
  std::shared_ptr<const Made> last;
  bool fixed = true;  // no size or stride is a result
};

struct Wrap {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Output>* outputs;
  Py_ssize_t results;  // number of results of the graph that are read
  PyObject* owner;  // of gradients: the class of the autograd node that computes them
};

// Whether there are as many results as the plan reads; false with an error set.
bool are_results_of(const Wrap& wrap, PyObject* results) {
  if (PySequence_Fast_GET_SIZE(results) < wrap.results) {
    PyErr_Format(PyExc_AssertionError, "the graph returned %zd values, but the plan needs %zd",
                 PySequence_Fast_GET_SIZE(results), wrap.results);
    return false;
  }
  return true;
}

Ref tuple_of(const std::vector<Extent>& extents, PyObject* results) {
  Ref tuple = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(extents.size())));
  for (size_t i = 0; tuple && i < extents.size(); ++i) {
    PyObject* item = extents[i].is_result ? Ref::copy(PySequence_Fast_GET_ITEM(results, extents[i].value)).release()
                                          : PyLong_FromLongLong(extents[i].value);
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), item);
  }
  return tuple;
}

// The spec of the DTensor of an output, reused from the last call if mesh and sizes are the same; null with an error set.
std::shared_ptr<const Made> made_for(Output& output, PyObject* results) {
  std::shared_ptr<const Made> last = output.last;
  PyObject* mesh = PySequence_Fast_GET_ITEM(results, output.index + 1);
  if (last && output.fixed && mesh == last->mesh.get()) {
    return last;
  }
  Ref shape = tuple_of(output.sizes, results), stride = tuple_of(output.strides, results);
  if (!shape || !stride) {
    return nullptr;
  }
  if (last && mesh == last->mesh.get() && same(shape.get(), last->shape.get()) && same(stride.get(), last->stride.get())) {
    return last;
  }
  Integers sizes = integers(shape.get()), strides = integers(stride.get());
  Ref spec = Ref::steal(PyObject_CallFunctionObjArgs(output.make_spec.get(), mesh, shape.get(), stride.get(), nullptr));
  if (!spec) {
    return nullptr;
  }
  Made made{std::move(spec), Ref::copy(mesh), std::move(shape), std::move(stride), std::move(sizes), std::move(strides)};
  return output.last = std::make_shared<const Made>(std::move(made));
}

// Equivalent to torch.Tensor._dtensor__new__: a tensor of the global sizes without memory, with the local tensor and the spec in
// its slots. Calls the original for unusual local tensors.
Ref make_dtensor(PyObject* local, const Made& made, bool requires_grad) {
  const at::Tensor& shard = THPVariable_Unpack(local);
  if (shard.layout() != at::kStrided || (shard.requires_grad() && !requires_grad)) {
    PyObject* args[] = {reinterpret_cast<PyObject*>(dtensor.type), local, made.spec.get(), requires_grad ? Py_True : Py_False};
    return Ref::steal(PyObject_Vectorcall(dtensor.construct, args, 3, names.requires_grad));
  }
  int64_t offset = shard.storage_offset();
  size_t bytes = at::detail::computeStorageNbytes(made.sizes, made.strides, shard.dtype().itemsize(), offset);
  at::DataPtr nothing(nullptr, shard.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(nothing), c10::GetAllocator(c10::kMeta), true);
  c10::DispatchKeySet keys(c10::computeDispatchKey(shard.scalar_type(), shard.layout(), shard.device()));
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    keys = shard.key_set().has(key) ? keys.add(key) : keys;
  }
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, shard.dtype());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(made.sizes, made.strides, offset);
  impl->set_python_dispatch(true);
  if (requires_grad) {
    tensor.set_requires_grad(true);
  }
  Ref object = Ref::steal(THPVariable_Wrap(tensor, dtensor.type));
  if (object) {
    put_slot(object.get(), dtensor.spec, made.spec);
    put_slot(object.get(), dtensor.local, Ref::copy(local));
  }
  return object;
}

Ref wrapped(Output& output, PyObject* results) {
  PyObject* value = PySequence_Fast_GET_ITEM(results, output.index);
  if (!output.is_dtensor || value == Py_None) {
    return Ref::copy(value);
  }
  std::shared_ptr<const Made> made = made_for(output, results);
  return made ? make_dtensor(value, *made, output.requires_grad) : Ref();
}

// Takes the results of a graph, a list or a tuple; returns a tuple.
PyObject* wrap_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  auto& wrap = *reinterpret_cast<Wrap*>(self);
  auto& outputs = *wrap.outputs;
  if (PyVectorcall_NARGS(nargs) != 1 || !(PyList_CheckExact(args[0]) || PyTuple_CheckExact(args[0]))) {
    PyErr_SetString(PyExc_TypeError, "expected the results of a graph");
    return nullptr;
  }
  if (!are_results_of(wrap, args[0])) {
    return nullptr;
  }
  Ref tuple = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
  for (size_t i = 0; tuple && i < outputs.size(); ++i) {
    Ref value = wrapped(outputs[i], args[0]);
    if (!value) {
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), value.release());
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

std::vector<Extent> extents(PyObject* pairs, bool& fixed) {
  std::vector<Extent> result;
  for (Py_ssize_t i = 0; i < PyTuple_Size(pairs); ++i) {
    int is_result;
    long long value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "pL", &is_result, &value)) {
      throw python_error();
    }
    result.push_back({is_result != 0, value});
    fixed = fixed && is_result == 0;
  }
  return result;
}

}  // namespace
