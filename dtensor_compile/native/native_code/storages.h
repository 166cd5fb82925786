// Functions of all tensors that go into a call: whether they have distinct storages, and recording their mutation.
#pragma once

#include "tensors.h"

#include <torch/csrc/autograd/variable.h>

#include <bit>

namespace {

// A set of addresses that only supports insertion.
class Addresses {
 public:
  explicit Addresses(size_t count) : shift_(64 - std::bit_width(2 * count)), table_(size_t(1) << (64 - shift_)) {}

  bool insert(const void* address) {
    size_t place = (reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u) >> shift_;
    for (; table_[place] != nullptr; place = (place + 1) & (table_.size() - 1)) {
      if (table_[place] == address) {
        return false;
      }
    }
    table_[place] = address;
    return true;
  }

 private:
  int shift_;
  std::vector<const void*> table_;
};

// own_storages(values): whether all tensors of a tuple, or local tensors of DTensors, are known to have distinct storages.
PyObject* own_storages(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  if (!PyTuple_CheckExact(values)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of values");
    return nullptr;
  }
  Py_ssize_t count = PyTuple_GET_SIZE(values);
  Addresses seen(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyTuple_GET_ITEM(values, i);
    if (Py_TYPE(value) == dtensor.type) {
      value = slot(value, dtensor.local);
    }
    if (value == nullptr || !THPVariable_Check(value)) {
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (!tensor.has_storage() || !seen.insert(tensor.storage().unsafeGetStorageImpl())) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// increment_versions(values): records that the graph mutates these tensors. torch's version runs Python for each DTensor.
PyObject* increment_versions(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  for (Py_ssize_t i = 0; PyTuple_CheckExact(values) && i < PyTuple_GET_SIZE(values); ++i) {
    PyObject* value = PyTuple_GET_ITEM(values, i);
    if (Py_TYPE(value) != dtensor.type && !THPVariable_Check(value)) {
      PyErr_Format(PyExc_TypeError, "expected a tensor, got %R", Py_TYPE(value));
      return nullptr;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (!tensor.is_inference()) {
      torch::autograd::impl::bump_version(tensor);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace
