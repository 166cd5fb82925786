// The C++ part of a compiled call, one extension; ../loader.py describes each type.

#include "tensors.h"  // before all others

#include "arguments.h"
#include "calls.h"
#include "fetch.h"
#include "gradients.h"
#include "guard.h"
#include "layouts.h"
#include "results.h"
#include "storages.h"

namespace {

// Wrap(plan, accumulate): see loader.py.
PyObject* wrap_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* plan;
  int accumulate;
  if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &plan, &accumulate)) {
    return nullptr;
  }
  Ref self = Ref::steal(type->tp_alloc(type, 0));
  if (!self) {
    return nullptr;
  }
  auto* wrap = reinterpret_cast<Wrap*>(self.get());
  wrap->call = accumulate != 0 ? accumulate_call : wrap_call;
  wrap->outputs = new std::vector<Output>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(plan); ++i) {
    PyObject* item = PyList_GET_ITEM(plan, i);
    Output output;
    if (PyLong_Check(item)) {
      output.index = PyLong_AsSsize_t(item);
      wrap->results = std::max(wrap->results, output.index + 1);
    } else {
      PyObject *sizes, *strides, *make_spec;
      int requires_grad;
      if (!PyArg_ParseTuple(item, "nO!O!Op", &output.index, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &make_spec,
                            &requires_grad)) {
        return nullptr;
      }
      output.is_dtensor = true;
      output.sizes = extents(sizes, output.fixed);
      output.strides = extents(strides, output.fixed);
      output.make_spec = Ref::copy(make_spec);
      output.requires_grad = requires_grad != 0;
      wrap->results = std::max(wrap->results, output.index + 2);
      for (const auto* some : {&output.sizes, &output.strides}) {
        for (const Extent& extent : *some) {
          wrap->results = std::max<Py_ssize_t>(wrap->results, extent.is_result ? extent.value + 1 : 0);
        }
      }
    }
    wrap->outputs->push_back(std::move(output));
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

// `owner` refers to the Wrap that refers to it: a cycle for the garbage collector.
int wrap_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Wrap*>(self)->owner);
  return 0;
}

int wrap_clear(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Wrap*>(self)->owner);
  return 0;
}

void wrap_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  wrap_clear(self);
  delete reinterpret_cast<Wrap*>(self)->outputs;
  Py_TYPE(self)->tp_free(self);
}

PyMemberDef wrap_members[] = {{"owner", T_OBJECT, offsetof(Wrap, owner), 0, nullptr}, {nullptr}};

PyTypeObject arguments = arguments_type();
PyTypeObject fetches = callable_type<Fetch>("dtensor_compile.Fetch", fetch_new, fetch_dealloc);
PyTypeObject guards = guard_type();
PyTypeObject guards_of_all = callable_type<GuardAll>("dtensor_compile.GuardAll", guard_all_new, guard_all_dealloc);

PyObject* guard_all_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *list, *given;
  Py_ssize_t roots;
  if (!PyArg_ParseTuple(args, "nO!O!", &roots, &PyList_Type, &list, &PyList_Type, &given)) {
    return nullptr;
  }
  auto plan = std::make_unique<Plan>(parse_plan(roots, list));
  auto checks = std::make_unique<std::vector<Check>>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
    Py_ssize_t read, same = 0, reads = static_cast<Py_ssize_t>(plan->reads.size());
    PyObject* expected;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(given, i), "nO", &read, &expected)) {
      return nullptr;
    }
    bool is_place = PyLong_CheckExact(expected);
    if (is_place) {
      same = PyLong_AsSsize_t(expected);
    }
    TORCH_CHECK_VALUE(0 <= read && read < reads && 0 <= same && same < reads, "check ", i, " has an invalid index");
    TORCH_CHECK_TYPE(is_place || PyType_Check(expected) || Py_TYPE(expected) == &guards, "check ", i, " is invalid");
    checks->push_back({read, is_place ? Ref() : Ref::copy(expected), same});
  }
  auto* self = reinterpret_cast<GuardAll*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->call = guard_all_call;
    self->plan = plan.release();
    self->checks = checks.release();
  }
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

PyTypeObject layouts = callable_type<Layouts>("dtensor_compile.Layouts", layouts_new, layouts_dealloc);
PyTypeObject unwraps = callable_type<Unwrap>("dtensor_compile.Unwrap", unwrap_new, unwrap_dealloc);
PyTypeObject wraps = callable_type<Wrap>("dtensor_compile.Wrap", wrap_new, wrap_dealloc);

// configure(DTensor, torch.Tensor._dtensor__new__)
PyObject* configure(PyObject*, PyObject* args) {
  PyObject *type, *construct;
  if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &construct)) {
    return nullptr;
  }
  auto local = offset_of_slot(type, "_local_tensor"), spec = offset_of_slot(type, "_spec");
  if (!local || !spec) {
    PyErr_SetString(PyExc_TypeError, "DTensor has no slots for its local tensor and its spec");
    return nullptr;
  }
  dtensor.type = reinterpret_cast<PyTypeObject*>(Ref::copy(type).release());
  dtensor.construct = Ref::copy(construct).release();
  dtensor.local = *local;
  dtensor.spec = *spec;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"configure", configure, METH_VARARGS, nullptr},
                         {"detached_views", detached_views, METH_O, nullptr},
                         {"own_storages", own_storages, METH_O, nullptr},
                         {"increment_versions", increment_versions, METH_O, nullptr},
                         {"without_wrappers", without_wrappers, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "dtensor_compile_native", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_dtensor_compile_native() {
  names.mesh = PyUnicode_InternFromString("mesh");
  names.placements = PyUnicode_InternFromString("placements");
  names.shard_order = PyUnicode_InternFromString("shard_order");
  names.tensor_meta = PyUnicode_InternFromString("tensor_meta");
  names.dtype = PyUnicode_InternFromString("dtype");
  names.detach = PyUnicode_InternFromString("detach");
  names.input = PyUnicode_InternFromString("input");
  const char* marks[] = {"_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices",
                         "_dynamo_strict_unbacked_indices", "_dynamo_static_indices"};
  for (size_t i = 0; i < 5; ++i) {
    names.marks[i] = PyUnicode_InternFromString(marks[i]);
  }
  names.requires_grad = Py_BuildValue("(s)", "requires_grad");
  wraps.tp_members = wrap_members;
  wraps.tp_flags |= Py_TPFLAGS_HAVE_GC;
  wraps.tp_traverse = wrap_traverse;
  wraps.tp_clear = wrap_clear;
  PyObject* made = PyModule_Create(&module);
  for (auto [name, type] : {std::pair{"Arguments", &arguments}, {"Fetch", &fetches}, {"Guard", &guards},
                            {"GuardAll", &guards_of_all}, {"Layouts", &layouts}, {"Unwrap", &unwraps}, {"Wrap", &wraps}}) {
    if (made == nullptr || PyType_Ready(type) != 0 || PyModule_AddObjectRef(made, name, reinterpret_cast<PyObject*>(type)) != 0) {
      return nullptr;
    }
  }
  return made;
}
