// Arguments and results that a call keeps for its backward, each handled in one pass.
#pragma once

#include "tensors.h"

namespace {

bool is_tensor(PyObject* value) {
  return Py_TYPE(value) == dtensor.type || THPVariable_Check(value);
}

// without_wrappers(arguments): whether no tensor of a tuple is a torch.func wrapper, alive or dead.
PyObject* without_wrappers(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  if (!PyTuple_CheckExact(arguments)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of arguments");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
    PyObject* value = PyTuple_GET_ITEM(arguments, i);
    if (is_tensor(value) && THPVariable_Unpack(value).key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// detached_views(tensors): a list of the tensors of a list or tuple, with views detached.
PyObject* detached_views(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  if (!PyList_CheckExact(tensors) && !PyTuple_CheckExact(tensors)) {
    PyErr_SetString(PyExc_TypeError, "expected a list or a tuple of tensors");
    return nullptr;
  }
  Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
  Ref list = Ref::steal(PyList_New(count));
  for (Py_ssize_t i = 0; list && i < count; ++i) {
    PyObject* value = PySequence_Fast_GET_ITEM(tensors, i);
    if (!is_tensor(value)) {
      PyErr_Format(PyExc_TypeError, "expected a tensor to keep for the backward pass, got %R", Py_TYPE(value));
      return nullptr;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    bool view = tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr && tensor.is_view();
    Ref kept = view ? Ref::steal(PyObject_CallMethodNoArgs(value, names.detach)) : Ref::copy(value);
    if (!kept) {
      return nullptr;
    }
    PyList_SET_ITEM(list.get(), i, kept.release());
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// One argument of a call: a weak reference to a tensor and its version; or another object, which is kept alive.
struct Argument {
  Weak tensor;  // undefined for other objects
  uint32_t version;
  Ref other;
};

struct Arguments {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Argument>* values;
  PyObject* held;  // the tuple of all arguments if tensors are kept alive, too; else null
};

uint32_t version_of(c10::TensorImpl& tensor) {
  return tensor.is_inference() ? 0 : tensor.version_counter().current_version();
}

// Returns a list of them; None if one was freed, or mutated since.
PyObject* arguments_call(PyObject* self, PyObject* const*, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(nargs) != 0) {
    PyErr_SetString(PyExc_TypeError, "takes no arguments");
    return nullptr;
  }
  auto& values = *reinterpret_cast<Arguments*>(self)->values;
  Ref list = Ref::steal(PyList_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; list && i < values.size(); ++i) {
    Ref value = values[i].other;
    if (!value) {
      at::Tensor tensor(values[i].tensor.lock());
      if (!tensor.defined() || version_of(*tensor.unsafeGetTensorImpl()) != values[i].version) {
        Py_RETURN_NONE;
      }
      value = Ref::steal(THPVariable_Wrap(tensor));
    }
    if (!value) {
      return nullptr;
    }
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), value.release());
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

// Arguments(values, hold): see loader.py.
PyObject* arguments_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* given;
  int hold;
  if (!PyArg_ParseTuple(args, "O!p", &PyTuple_Type, &given, &hold)) {
    return nullptr;
  }
  auto values = std::make_unique<std::vector<Argument>>();
  values->reserve(static_cast<size_t>(PyTuple_GET_SIZE(given)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    PyObject* value = PyTuple_GET_ITEM(given, i);
    if (is_tensor(value)) {
      const at::Tensor& tensor = THPVariable_Unpack(value);
      values->push_back({Weak(tensor.getIntrusivePtr()), version_of(*tensor.unsafeGetTensorImpl()), Ref()});
    } else {
      values->push_back({Weak(at::Tensor().getIntrusivePtr()), 0, Ref::copy(value)});
    }
  }
  auto* self = reinterpret_cast<Arguments*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->call = arguments_call;
    self->values = values.release();
    self->held = hold != 0 ? Ref::copy(given).release() : nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

int arguments_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* arguments = reinterpret_cast<Arguments*>(self);
  for (const Argument& value : *arguments->values) {
    Py_VISIT(value.other.get());
  }
  Py_VISIT(arguments->held);
  return 0;
}

int arguments_clear(PyObject* self) {
  auto* arguments = reinterpret_cast<Arguments*>(self);
  std::vector<Argument> gone;
  std::swap(gone, *arguments->values);
  Py_CLEAR(arguments->held);
  return 0;
}

void arguments_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  arguments_clear(self);
  delete reinterpret_cast<Arguments*>(self)->values;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject arguments_type() {
  PyTypeObject type = callable_type<Arguments>("dtensor_compile.Arguments", arguments_new, arguments_dealloc);
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = arguments_traverse;
  type.tp_clear = arguments_clear;
  return type;
}

}  // namespace
