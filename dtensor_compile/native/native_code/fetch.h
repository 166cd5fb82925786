// A walk: reads attributes, items and gradients, starting from a few objects, each once.
//
// Fetch: reads the inputs of a graph in one walk. GuardAll: checks everything that one walk finds.
#pragma once

#include "guard.h"

namespace {

enum class Step : int { attribute, item, gradient, value_at, key_at };

// One read. `from` is a root (-1 is the first one, -2 the second) or the index of an earlier read.
struct Read {
  Py_ssize_t from;
  Step step;
  Ref key;           // the name of an attribute, or the key of an item
  Py_ssize_t index;  // of an item with an integer key, or position in a dict; else -1
  bool wanted;
};

struct Plan {
  Py_ssize_t roots = 0, wanted = 0;
  std::vector<Read> reads;
};

// The current position of reads in a dict.
struct Cursor {
  Py_ssize_t place = 0, position = -1;  // state of PyDict_Next; index of the current item
  Ref key, value;
};

// Moves to a position of a dict; false with an error set. One pass over the dict if positions ascend.
bool move_to(PyObject* dict, Py_ssize_t position, Cursor& cursor) {
  if (dict == nullptr || !PyDict_Check(dict)) {
    PyErr_SetString(PyExc_TypeError, "expected a dict");
    return false;
  }
  if (cursor.position > position) {
    cursor = Cursor();
  }
  PyObject *key = nullptr, *value = nullptr;
  for (; cursor.position < position; ++cursor.position) {
    if (!PyDict_Next(dict, &cursor.place, &key, &value)) {
      PyErr_SetString(PyExc_IndexError, "a dict has fewer items than it had");
      return false;
    }
  }
  if (key != nullptr) {
    cursor.key = Ref::copy(key), cursor.value = Ref::copy(value);
  }
  return true;
}

Ref read(const Read& read, PyObject* object, Cursor& cursor) {
  switch (read.step) {
    case Step::attribute:
      return Ref::steal(PyObject_GetAttr(object, read.key.get()));
    case Step::gradient:
      if (Py_TYPE(object) != dtensor.type && !THPVariable_CheckExact(object)) {
        return Ref::steal(PyObject_GetAttr(object, read.key.get()));
      }
      return Ref::steal(THPVariable_Wrap(THPVariable_Unpack(object).grad()));
    case Step::value_at:
      return move_to(object, read.index, cursor) ? cursor.value : Ref();
    case Step::key_at:
      return move_to(object, read.index, cursor) ? cursor.key : Ref();
    case Step::item:
      break;
  }
  if (read.index >= 0 && PyList_CheckExact(object) && read.index < PyList_GET_SIZE(object)) {
    return Ref::copy(PyList_GET_ITEM(object, read.index));
  }
  return Ref::steal(PyObject_GetItem(object, read.key.get()));
}

// The result of each read of a plan; shorter, with an error set, if one fails.
std::vector<Ref> walk(const Plan& plan, PyObject* const* roots) {
  std::vector<Ref> found;
  found.reserve(plan.reads.size());
  std::vector<Cursor> cursors;  // of dicts that are read by position, one after the other
  Py_ssize_t dict = PY_SSIZE_T_MIN;
  for (const Read& one : plan.reads) {
    if (one.step >= Step::value_at && one.from != dict) {
      dict = one.from;
      cursors.emplace_back();
    }
    Cursor none;
    PyObject* object = one.from < 0 ? roots[-1 - one.from] : found[one.from].get();
    Ref value = read(one, object, one.step >= Step::value_at ? cursors.back() : none);
    if (!value) {
      break;
    }
    found.push_back(std::move(value));
  }
  return found;
}

// Parses a plan as described in loader.py.
Plan parse_plan(Py_ssize_t roots, PyObject* list) {
  Plan plan;
  plan.roots = roots;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    Py_ssize_t from;
    int step, wanted;
    PyObject* key;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "niOp", &from, &step, &key, &wanted)) {
      throw python_error();
    }
    TORCH_CHECK_VALUE(from >= -roots && from < i && step >= 0 && step <= int(Step::key_at), "read ", i, " of a plan is invalid");
    bool indexed = Step(step) >= Step::value_at || (Step(step) == Step::item && PyLong_CheckExact(key));
    Py_ssize_t index = indexed ? PyLong_AsSsize_t(key) : -1;
    if (PyErr_Occurred()) {
      throw python_error();
    }
    plan.reads.push_back({from, Step(step), Ref::copy(key), index, wanted != 0});
    plan.wanted += wanted;
  }
  return plan;
}

struct Fetch {
  PyObject_HEAD
  vectorcallfunc call;
  Plan* plan;
};

bool are_roots_of(const Plan& plan, size_t nargs) {
  if (PyVectorcall_NARGS(nargs) != plan.roots) {
    PyErr_Format(PyExc_TypeError, "expected %zd objects to read from", plan.roots);
    return false;
  }
  return true;
}

// Takes the roots; returns a tuple of the wanted reads.
PyObject* fetch_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  const Plan& plan = *reinterpret_cast<Fetch*>(self)->plan;
  if (!are_roots_of(plan, nargs)) {
    return nullptr;
  }
  std::vector<Ref> found = walk(plan, args);
  Ref tuple = found.size() == plan.reads.size() ? Ref::steal(PyTuple_New(plan.wanted)) : Ref();
  Py_ssize_t place = 0;
  for (size_t i = 0; tuple && i < found.size(); ++i) {
    if (plan.reads[i].wanted) {
      PyTuple_SET_ITEM(tuple.get(), place++, found[i].release());
    }
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

// Fetch(roots, plan): see loader.py.
PyObject* fetch_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* list;
  Py_ssize_t roots;
  if (!PyArg_ParseTuple(args, "nO!", &roots, &PyList_Type, &list)) {
    return nullptr;
  }
  auto plan = std::make_unique<Plan>(parse_plan(roots, list));
  auto* self = reinterpret_cast<Fetch*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->call = fetch_call;
    self->plan = plan.release();
  }
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

void fetch_dealloc(PyObject* self) {
  delete reinterpret_cast<Fetch*>(self)->plan;
  Py_TYPE(self)->tp_free(self);
}

// A check of a read: `guard` (a Guard or a type) accepts it, or it is the same object as another read.
struct Check {
  Py_ssize_t read;
  Ref guard;
  Py_ssize_t same;
};

struct GuardAll {
  PyObject_HEAD
  vectorcallfunc call;
  Plan* plan;
  std::vector<Check>* checks;
};

bool holds(const Check& check, const std::vector<Ref>& found) {
  PyObject* object = found[check.read].get();
  if (!check.guard) {
    return object == found[check.same].get();
  }
  if (PyType_Check(check.guard.get())) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == check.guard.get();
  }
  return reinterpret_cast<Guard*>(check.guard.get())->match(object);
}

// Takes the roots; whether all reads succeed and all checks hold.
PyObject* guard_all_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  auto& all = *reinterpret_cast<GuardAll*>(self);
  if (!are_roots_of(*all.plan, nargs)) {
    return nullptr;
  }
  Ref alive = Ref::copy(self);  // comparing specs runs Python, which may let another thread free this guard
  std::vector<Ref> found = walk(*all.plan, args);
  bool equal = found.size() == all.plan->reads.size();
  for (size_t i = 0; equal && i < all.checks->size(); ++i) {
    equal = holds((*all.checks)[i], found);
  }
  PyErr_Clear();
  return PyBool_FromLong(equal);
  END_HANDLE_TH_ERRORS
}

// GuardAll(roots, plan, checks): see loader.py.
PyObject* guard_all_new(PyTypeObject* type, PyObject* args, PyObject*);

void guard_all_dealloc(PyObject* self) {
  auto* all = reinterpret_cast<GuardAll*>(self);
  delete all->plan;
  delete all->checks;
  Py_TYPE(self)->tp_free(self);
}

}  // namespace
