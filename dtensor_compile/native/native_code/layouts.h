// Layouts: checks sizes and strides of the inputs of a graph.
#pragma once

#include "tensors.h"

namespace {

struct Layouts {
  PyObject_HEAD
  vectorcallfunc call;
  struct Fields {
    std::vector<Integers> extents;  // sizes, then strides, of each
    Ref expected, complain;         // a tuple of (sizes, strides); the function called for a mismatch
  }* fields;
};

bool fits(const Integers& extents, const c10::TensorImpl& tensor) {
  c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  return extents.size() == 2 * sizes.size() && std::equal(sizes.begin(), sizes.end(), extents.begin()) &&
      std::equal(strides.begin(), strides.end(), extents.begin() + sizes.size());
}

// Takes a tuple of tensors; raises what `complain` raises for a mismatch.
PyObject* layouts_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  auto& fields = *reinterpret_cast<Layouts*>(self)->fields;
  size_t count = fields.extents.size();
  if (PyVectorcall_NARGS(nargs) != 1 || !PyTuple_CheckExact(args[0]) || size_t(PyTuple_GET_SIZE(args[0])) != count) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of %zd tensors", count);
    return nullptr;
  }
  for (size_t i = 0; i < count; ++i) {
    PyObject* value = PyTuple_GET_ITEM(args[0], i);
    if (THPVariable_CheckExact(value) && fits(fields.extents[i], *THPVariable_Unpack(value).unsafeGetTensorImpl())) {
      continue;
    }
    PyObject* expected = PyTuple_GET_ITEM(fields.expected.get(), i);
    PyObject *sizes = PyTuple_GET_ITEM(expected, 0), *strides = PyTuple_GET_ITEM(expected, 1);
    if (!Ref::steal(PyObject_CallFunctionObjArgs(fields.complain.get(), value, sizes, strides, names.input, nullptr))) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Layouts(expected, complain): see loader.py.
PyObject* layouts_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *expected, *complain;
  if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &expected, &complain)) {
    return nullptr;
  }
  auto fields = std::make_unique<Layouts::Fields>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(expected); ++i) {
    PyObject *sizes, *strides;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(expected, i), "O!O!", &PyTuple_Type, &sizes, &PyTuple_Type, &strides)) {
      return nullptr;
    }
    Integers extents = integers(sizes), rest = integers(strides);
    extents.append(rest.begin(), rest.end());
    fields->extents.push_back(std::move(extents));
  }
  fields->expected = Ref::copy(expected), fields->complain = Ref::copy(complain);
  auto* self = reinterpret_cast<Layouts*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->call = layouts_call;
    self->fields = fields.release();
  }
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

void layouts_dealloc(PyObject* self) {
  delete reinterpret_cast<Layouts*>(self)->fields;
  Py_TYPE(self)->tp_free(self);
}

}  // namespace
