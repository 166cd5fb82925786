// Unwrap: turns the arguments of a compiled call into inputs of its graph, local tensors and meshes instead of DTensors.
#pragma once

#include "tensors.h"

#include <memory>

namespace {

struct Input {
  bool is_dtensor = false;
  Ref spec, mesh;  // of the last call
  struct Dims {
    Integers sizes, strides;  // dims whose size, whose stride is an input of the graph
  };
  std::unique_ptr<Dims> free;  // null without any
};

struct Unwrap {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Input>* inputs;
  Py_ssize_t results;  // number of the resulting inputs of the graph
};

// Writes the graph inputs for `value` into `list`, from `place` on; false with an error set.
bool put_input(PyObject* list, Py_ssize_t& place, Input& input, PyObject* value) {
  if (Py_TYPE(value) != dtensor.type) {
    PyErr_Format(PyExc_AssertionError, "expected a DTensor, got %R", Py_TYPE(value));
    return false;
  }
  PyObject* spec = slot(value, dtensor.spec);
  if (spec != input.spec.get()) {
    Ref found = Ref::copy(spec), mesh = Ref::steal(spec != nullptr ? PyObject_GetAttr(spec, names.mesh) : nullptr);
    if (!mesh) {
      PyErr_SetString(PyExc_AssertionError, "a DTensor without a mesh");
      return false;
    }
    std::swap(input.spec, found), std::swap(input.mesh, mesh);  // the previous ones are released once both are set
  }
  PyList_SET_ITEM(list, place++, Ref::copy(slot(value, dtensor.local)).release());
  PyList_SET_ITEM(list, place++, Ref::copy(input.mesh.get()).release());
  if (input.free == nullptr) {
    return true;
  }
  const at::Tensor& tensor = THPVariable_Unpack(value);
  for (int64_t dim : input.free->sizes) {
    PyList_SET_ITEM(list, place++, PyLong_FromLongLong(tensor.size(dim)));
  }
  for (int64_t dim : input.free->strides) {
    PyList_SET_ITEM(list, place++, PyLong_FromLongLong(tensor.stride(dim)));
  }
  return true;
}

// Takes a list of arguments and empties it; returns the list of graph inputs.
PyObject* unwrap_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(nargs) != 1 || !PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "expected a list of arguments");
    return nullptr;
  }
  auto* unwrap = reinterpret_cast<Unwrap*>(self);
  auto& inputs = *unwrap->inputs;
  Py_ssize_t given = PyList_GET_SIZE(args[0]), known = static_cast<Py_ssize_t>(inputs.size()), place = 0;
  if (given < known) {
    PyErr_SetString(PyExc_AssertionError, "too few arguments for the compiled graph");
    return nullptr;
  }
  Ref list = Ref::steal(PyList_New(unwrap->results + given - known));
  for (Py_ssize_t i = 0; list && i < given; ++i) {
    PyObject* value = PyList_GET_ITEM(args[0], i);
    if (i >= known || !inputs[i].is_dtensor) {
      PyList_SET_ITEM(list.get(), place++, Ref::copy(value).release());
    } else if (!put_input(list.get(), place, inputs[i], value)) {
      return nullptr;
    }
  }
  if (!list || PyList_SetSlice(args[0], 0, given, nullptr) != 0) {
    return nullptr;
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

// Unwrap(plan): see loader.py.
PyObject* unwrap_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* plan;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &plan)) {
    return nullptr;
  }
  Ref self = Ref::steal(type->tp_alloc(type, 0));
  if (!self) {
    return nullptr;
  }
  auto* unwrap = reinterpret_cast<Unwrap*>(self.get());
  unwrap->call = unwrap_call;
  unwrap->inputs = new std::vector<Input>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(plan); ++i) {
    PyObject* item = PyList_GET_ITEM(plan, i);
    Input input;
    PyObject *sizes, *strides;
    if (item != Py_None) {
      if (!PyArg_ParseTuple(item, "OO", &sizes, &strides)) {
        return nullptr;
      }
      input.is_dtensor = true;
      Input::Dims dims{integers(sizes), integers(strides)};
      size_t free = dims.sizes.size() + dims.strides.size();
      input.free = free == 0 ? nullptr : std::make_unique<Input::Dims>(std::move(dims));
      unwrap->results += 1 + static_cast<Py_ssize_t>(free);
    }
    unwrap->results += 1;
    unwrap->inputs->push_back(std::move(input));
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

void unwrap_dealloc(PyObject* self) {
  delete reinterpret_cast<Unwrap*>(self)->inputs;
  Py_TYPE(self)->tp_free(self);
}

}  // namespace
