// Guard: whether a tensor is what a graph was compiled for.
//
// It compares what torch's guard of a plain tensor compares; for a DTensor also that of its local tensor, and the spec, first by
// identity.
// The cost is dominated by cache misses. So all that a guard always needs is contiguous, with sizes and strides at the end, and
// each guard prefetches what the next one will read.
#pragma once

#include "tensors.h"

#include <memory>

namespace {

// What the guard of a plain tensor compares, except sizes and strides.
struct TensorFacts {
  uint64_t keys;
  c10::ScalarType dtype;
  c10::Device device = c10::kCPU;
  bool requires_grad;
  uint8_t dims;

  static TensorFacts of(PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    TORCH_CHECK(tensor.dim() <= UINT8_MAX, "more dims than a guard can hold");
    return {keys_of(tensor, c10::impl::tls_local_dispatch_key_set()), tensor.scalar_type(), tensor.device(),
            tensor.requires_grad(), static_cast<uint8_t>(tensor.dim())};
  }

  static uint64_t keys_of(const at::Tensor& tensor, const c10::impl::LocalDispatchKeySet& thread) {
    return ((tensor.key_set() | thread.included_) - thread.excluded_).raw_repr();
  }

  // Compares sizes and strides as well (`extents`: sizes, then strides); -1 matches anything.
  bool match(const at::Tensor& tensor, const c10::impl::LocalDispatchKeySet& thread, const int64_t* extents) const {
    return tensor.defined() && keys_of(tensor, thread) == keys && tensor.scalar_type() == dtype && tensor.device() == device &&
        tensor.requires_grad() == requires_grad && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
        fit(extents, tensor.sizes()) && fit(extents + dims, tensor.strides());
  }

 private:
  bool fit(const int64_t* expected, c10::IntArrayRef found) const {
    if (found.size() != dims) {
      return false;
    }
    for (size_t i = 0; i < dims; ++i) {
      if (expected[i] != found[i] && expected[i] != -1) {
        return false;
      }
    }
    return true;
  }
};

// The attribute dict of an object; null if there is none.
PyObject* attributes_of(PyObject* object) {
  PyObject** place = _PyObject_GetDictPtr(object);
  return place == nullptr ? nullptr : *place;
}

// Checks that a tensor has none of the attributes by which a program marks sizes as dynamic or static.
class Unmarked {
 public:
  bool match(PyObject* tensor) {
    PyObject* dict = attributes_of(tensor);
    if (dict == nullptr || PyDict_GET_SIZE(dict) == 0) {
      return true;
    }
#if PY_VERSION_HEX < 0x030C0000
    // The version is unique among all dicts and all their states.
    uint64_t version = reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
    if (version == version_) {
      return true;
    }
#endif
    for (PyObject* name : names.marks) {
      if (PyDict_Contains(dict, name) != 0) {
        PyErr_Clear();
        return false;
      }
    }
#if PY_VERSION_HEX < 0x030C0000
    version_ = version;
#endif
    return true;
  }

 private:
  uint64_t version_ = 0;  // of the last attribute dict without any of them
};

struct SpecFacts {
  Ref mesh, placements, shard_order, tensor_meta;
  bool any_size;  // sizes and strides are not compared

  static SpecFacts of(PyObject* spec, bool any_size) {
    auto field = [&](PyObject* name) {
      Ref value = Ref::steal(PyObject_GetAttr(spec, name));
      if (!value) {
        throw python_error();
      }
      return value;
    };
    return {field(names.mesh), field(names.placements), field(names.shard_order), field(names.tensor_meta), any_size};
  }

  bool match(PyObject* found) const {
    bool equal = has(found, names.mesh, mesh) && has(found, names.placements, placements) &&
        has(found, names.shard_order, shard_order) && same_meta(found);
    PyErr_Clear();
    return equal;
  }

 private:
  static bool has(PyObject* found, PyObject* name, const Ref& expected) {
    Ref value = Ref::steal(PyObject_GetAttr(found, name));
    return value && same(value.get(), expected.get());
  }

  bool same_meta(PyObject* found) const {
    Ref meta = Ref::steal(PyObject_GetAttr(found, names.tensor_meta));
    if (!meta || !any_size || meta.get() == Py_None || tensor_meta.get() == Py_None) {
      return meta && same(meta.get(), tensor_meta.get());
    }
    Ref a = Ref::steal(PyObject_GetAttr(meta.get(), names.dtype));
    Ref b = Ref::steal(PyObject_GetAttr(tensor_meta.get(), names.dtype));
    return a && b && a.get() == b.get();
  }
};

// Addresses that a guard reads. They are only prefetched, and may belong to freed objects.
struct Footprint {
  const void *object, *attributes, *impl, *autograd, *local, *local_impl;

  void prefetch() const {
    static_assert(sizeof(c10::TensorImpl) <= 3 * kLine);
    lines<2>(object), lines<1>(attributes), lines<3>(impl), lines<2>(autograd), lines<1>(local), lines<3>(local_impl);
  }

 private:
  static constexpr size_t kLine = 64;

  template <int count>
  static void lines(const void* address) {
    for (int i = 0; i < count; ++i) {
      __builtin_prefetch(static_cast<const char*>(address) + i * kLine);
    }
  }
};

struct Guard {
  PyObject_VAR_HEAD
  vectorcallfunc call;
  PyTypeObject *type, *local_type;  // kept alive by the modules that define them; no local type: a plain tensor
  PyObject* spec;                   // owned; this and the local and spec fields below are used for DTensors only
  TensorFacts outer, local;
  Unmarked marks, local_marks;
  SpecFacts* facts;
  Footprint next;  // of the guard that was called after this one last time
  int64_t extents[1];  // sizes and strides of the DTensor, sizes and strides of its local tensor

  bool match(PyObject* object) {
    if (Py_TYPE(object) != type) {
      return false;
    }
    if (local_type == nullptr) {
      return outer.match(THPVariable_Unpack(object), c10::impl::tls_local_dispatch_key_set(), extents) && marks.match(object);
    }
    PyObject* inner = slot(object, dtensor.local);
    if (inner == nullptr || Py_TYPE(inner) != local_type) {
      return false;
    }
    const at::Tensor &whole = THPVariable_Unpack(object), &shard = THPVariable_Unpack(inner);
    auto thread = c10::impl::tls_local_dispatch_key_set();
    look_ahead(object, whole, inner, shard);
    return outer.match(whole, thread, extents) && local.match(shard, thread, extents + 2 * outer.dims) &&
        marks.match(object) && local_marks.match(inner) && match_spec(slot(object, dtensor.spec));
  }

  // The guard that was called last; a guard tree calls them in the same order each time.
  static inline Guard* last = nullptr;

 private:
  void look_ahead(PyObject* object, const at::Tensor& whole, PyObject* inner, const at::Tensor& shard) {
    next.prefetch();
    if (last != nullptr && last->next.object != object) {
      auto* impl = whole.unsafeGetTensorImpl();
      last->next = {object, attributes_of(object), impl, impl->autograd_meta(), inner, shard.unsafeGetTensorImpl()};
    }
    last = this;
  }

  // A spec that compared equal is recognized by identity from then on: specs of tensors are immutable.
  // This guard may be freed afterwards.
  bool match_spec(PyObject* found) {
    if (found == spec) {
      return true;
    }
    if (found == nullptr || Py_TYPE(found) != Py_TYPE(spec)) {
      return false;
    }
    // The comparison runs Python, so another thread may free this guard meanwhile, or give the tensor another spec.
    Ref alive = Ref::copy(reinterpret_cast<PyObject*>(this)), kept = Ref::copy(found);
    if (!facts->match(found)) {
      return false;
    }
    Py_SETREF(spec, kept.release());
    return true;
  }
};

PyObject* guard_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  if (PyVectorcall_NARGS(nargs) != 1) {
    PyErr_SetString(PyExc_TypeError, "a guard takes one object");
    return nullptr;
  }
  return PyBool_FromLong(reinterpret_cast<Guard*>(self)->match(args[0]));
}

// Guard(example, sizes, strides, local_sizes, local_strides, any_size)
PyObject* guard_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *example, *given[4];
  int any_size;
  if (!PyArg_ParseTuple(args, "OOOOOp", &example, &given[0], &given[1], &given[2], &given[3], &any_size)) {
    return nullptr;
  }
  bool plain = Py_TYPE(example) != dtensor.type;
  if (!THPVariable_Check(example)) {
    PyErr_SetString(PyExc_TypeError, "the example of a guard is a tensor");
    return nullptr;
  }
  PyObject *local = plain ? nullptr : slot(example, dtensor.local), *spec = plain ? nullptr : slot(example, dtensor.spec);
  TensorFacts outer = TensorFacts::of(example), inner = plain ? TensorFacts{} : TensorFacts::of(local);
  Integers extents;
  for (int i = 0; i < 4; ++i) {
    Integers some = integers(given[i]);
    TORCH_CHECK_VALUE(some.size() == (i < 2 ? outer : inner).dims, "a guard takes one size and one stride for each dim");
    extents.append(some.begin(), some.end());
  }
  auto facts = plain ? nullptr : std::make_unique<SpecFacts>(SpecFacts::of(spec, any_size != 0));
  Ref self = Ref::steal(type->tp_alloc(type, static_cast<Py_ssize_t>(extents.size())));
  if (!self) {
    return nullptr;
  }
  auto* guard = reinterpret_cast<Guard*>(self.get());
  guard->call = guard_call;
  guard->type = Py_TYPE(example), guard->local_type = plain ? nullptr : Py_TYPE(local);
  guard->spec = Ref::copy(spec).release();
  guard->outer = outer, guard->local = inner;
  guard->facts = facts.release();
  std::copy(extents.begin(), extents.end(), guard->extents);
  return self.release();
  END_HANDLE_TH_ERRORS
}

void guard_dealloc(PyObject* self) {
  auto* guard = reinterpret_cast<Guard*>(self);
  if (Guard::last == guard) {
    Guard::last = nullptr;
  }
  Py_CLEAR(guard->spec);
  delete guard->facts;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject guard_type() {
  PyTypeObject type = callable_type<Guard>("dtensor_compile.Guard", guard_new, guard_dealloc);
  type.tp_basicsize = offsetof(Guard, extents);
  type.tp_itemsize = sizeof(int64_t);
  return type;
}

}  // namespace
