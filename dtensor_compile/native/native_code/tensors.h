// Helpers for Python objects and DTensors.
//
// All functions of all files hold the GIL. Owned references are Ref; plain PyObject* are borrowed.
#pragma once

#include <torch/csrc/python_headers.h>  // before all others

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace {

class Ref {
 public:
  Ref() = default;
  static Ref steal(PyObject* object) {
    Ref ref;
    ref.object_ = object;
    return ref;
  }
  static Ref copy(PyObject* object) {
    Py_XINCREF(object);
    return steal(object);
  }
  Ref(const Ref& other) : object_(other.object_) { Py_XINCREF(object_); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

struct Names {
  PyObject *mesh, *placements, *shard_order, *tensor_meta, *dtype, *detach, *input;
  PyObject* marks[5];
  PyObject* requires_grad;  // a tuple of one keyword
} names;

// DTensor's layout: set once, by configure().
struct {
  PyTypeObject* type = nullptr;
  PyObject* construct = nullptr;  // torch.Tensor._dtensor__new__
  Py_ssize_t local = 0, spec = 0;  // offsets of its slots
} dtensor;

PyObject* slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// Sets a slot that is still empty.
void put_slot(PyObject* object, Py_ssize_t offset, Ref value) {
  *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset) = value.release();
}

std::optional<Py_ssize_t> offset_of_slot(PyObject* type, const char* name) {
  PyObject* found = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(type)->tp_dict, name);
  if (found == nullptr || Py_TYPE(found) != &PyMemberDescr_Type) {
    return std::nullopt;
  }
  return reinterpret_cast<PyMemberDescrObject*>(found)->d_member->offset;
}

using Integers = c10::SmallVector<int64_t, 4>;

// The integers of a sequence; -1 for None.
Integers integers(PyObject* sequence) {
  Integers result;
  Ref fast = Ref::steal(PySequence_Fast(sequence, "expected a sequence of integers"));
  if (!fast) {
    throw python_error();
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.get()); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(fast.get(), i);
    result.push_back(item == Py_None ? -1 : PyLong_AsLongLong(item));
  }
  if (PyErr_Occurred()) {
    throw python_error();
  }
  return result;
}

bool same(PyObject* a, PyObject* b) {
  return a == b || PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

// A type of callable, otherwise opaque objects. T has a `vectorcallfunc call`.
template <typename T>
PyTypeObject callable_type(const char* name, newfunc construct, destructor destroy) {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = name;
  type.tp_basicsize = sizeof(T);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(T, call);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = construct;
  type.tp_dealloc = destroy;
  return type;
}

}  // namespace
