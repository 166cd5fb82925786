// What a compiled call does with each DTensor that goes in or comes out, in C++: see native.py for what each type is for.
//
// Every function here holds the GIL. References that an object owns are Ref; plain PyObject* are borrowed.

#include <torch/csrc/python_headers.h>  // before all others

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>
#include <optional>
#include <vector>

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// ---- Python ----------------------------------------------------------------------------------------------------------------

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
  PyObject *mesh, *placements, *shard_order, *tensor_meta, *dtype;
  PyObject* marks[5];
  PyObject* requires_grad;  // a tuple of one keyword
} names;

// What is known of DTensor: set once, by configure().
struct {
  PyTypeObject* type = nullptr;
  PyObject* construct = nullptr;  // torch.Tensor._dtensor__new__
  Py_ssize_t local = 0, spec = 0;  // offsets of its slots
} dtensor;

PyObject* slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

std::optional<Py_ssize_t> offset_of_slot(PyObject* type, const char* name) {
  PyObject* found = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(type)->tp_dict, name);
  if (found == nullptr || Py_TYPE(found) != &PyMemberDescr_Type) {
    return std::nullopt;
  }
  return reinterpret_cast<PyMemberDescrObject*>(found)->d_member->offset;
}

bool is_marked(PyObject* tensor) {
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  if (dict == nullptr || *dict == nullptr || PyDict_GET_SIZE(*dict) == 0) {
    return false;
  }
  for (PyObject* name : names.marks) {
    if (PyDict_Contains(*dict, name) != 0) {
      return true;
    }
  }
  return false;
}

using Integers = c10::SmallVector<int64_t, 4>;

// -1 where an item is None.
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

// ---- guards ----------------------------------------------------------------------------------------------------------------

// What the guard of a plain tensor compares; -1 stands for a size or stride that is free.
struct TensorFacts {
  PyTypeObject* type;
  uint64_t keys;
  c10::ScalarType dtype;
  c10::Device device = c10::kCPU;
  bool requires_grad;
  Integers sizes, strides;

  static uint64_t keys_of(const at::Tensor& tensor) {
    auto tls = c10::impl::tls_local_dispatch_key_set();
    return ((tensor.key_set() | tls.included_) - tls.excluded_).raw_repr();
  }

  static TensorFacts of(PyObject* object, PyObject* sizes, PyObject* strides) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    return {Py_TYPE(object), keys_of(tensor), tensor.scalar_type(), tensor.device(), tensor.requires_grad(),
            integers(sizes), integers(strides)};
  }

  static bool fit(const Integers& expected, c10::IntArrayRef found) {
    if (expected.size() != found.size()) {
      return false;
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] != found[i] && expected[i] != -1) {
        return false;
      }
    }
    return true;
  }

  bool match(PyObject* object) const {
    if (Py_TYPE(object) != type) {
      return false;
    }
    const at::Tensor& tensor = THPVariable_Unpack(object);
    return tensor.defined() && keys_of(tensor) == keys && tensor.scalar_type() == dtype && tensor.device() == device &&
        tensor.requires_grad() == requires_grad && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
        fit(sizes, tensor.sizes()) && fit(strides, tensor.strides()) && !is_marked(object);
  }
};

struct SpecFacts {
  Ref spec, mesh, placements, shard_order, tensor_meta;
  bool any_size = false;  // sizes and strides are free

  static SpecFacts of(PyObject* spec, bool any_size) {
    auto field = [&](PyObject* name) {
      Ref value = Ref::steal(PyObject_GetAttr(spec, name));
      if (!value) {
        throw python_error();
      }
      return value;
    };
    return {Ref::copy(spec), field(names.mesh), field(names.placements), field(names.shard_order), field(names.tensor_meta),
            any_size};
  }

  // A spec that was found equal is recognized by its identity from then on: nobody writes to the spec of a tensor.
  bool match(PyObject* found) {
    if (found == spec.get()) {
      return true;
    }
    if (found == nullptr || Py_TYPE(found) != Py_TYPE(spec.get())) {
      return false;
    }
    bool equal = has(found, names.mesh, mesh) && has(found, names.placements, placements) &&
        has(found, names.shard_order, shard_order) && same_meta(found);
    PyErr_Clear();
    if (equal) {
      spec = Ref::copy(found);
    }
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

struct Guard {
  PyObject_HEAD
  vectorcallfunc call;
  struct Facts {
    TensorFacts outer, local;
    SpecFacts spec;
  }* facts;  // in one piece: what a guard costs is memory that is not in the cache

  bool match(PyObject* object) {
    if (Py_TYPE(object) != dtensor.type) {
      return false;
    }
    PyObject* local = slot(object, dtensor.local);
    return local != nullptr && facts->outer.match(object) && facts->spec.match(slot(object, dtensor.spec)) &&
        facts->local.match(local);
  }
};

PyObject* guard_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  if (PyVectorcall_NARGS(nargs) != 1) {
    PyErr_SetString(PyExc_TypeError, "a guard takes one object");
    return nullptr;
  }
  return PyBool_FromLong(reinterpret_cast<Guard*>(self)->match(args[0]));
}

// ---- into the graph --------------------------------------------------------------------------------------------------------

struct Input {
  bool is_dtensor = false;
  Ref spec, mesh;  // of the last call
  Integers sizes, strides;  // dims whose size, whose stride is an input of the graph
};

struct Unwrap {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Input>* inputs;
  Py_ssize_t results;  // how many inputs of the graph they become
};

// Writes what stands for `value` in the graph from `place` of `list` on; false with an error set.
bool put_input(PyObject* list, Py_ssize_t& place, Input& input, PyObject* value) {
  if (Py_TYPE(value) != dtensor.type) {
    PyErr_Format(PyExc_AssertionError, "expected a DTensor, got %R", Py_TYPE(value));
    return false;
  }
  PyObject* spec = slot(value, dtensor.spec);
  if (spec != input.spec.get()) {
    input.mesh = Ref::steal(PyObject_GetAttr(spec, names.mesh));
    input.spec = input.mesh ? Ref::copy(spec) : Ref();
    if (!input.mesh) {
      return false;
    }
  }
  PyList_SET_ITEM(list, place++, Ref::copy(slot(value, dtensor.local)).release());
  PyList_SET_ITEM(list, place++, Ref::copy(input.mesh.get()).release());
  if (input.sizes.empty() && input.strides.empty()) {
    return true;
  }
  const at::Tensor& tensor = THPVariable_Unpack(value);
  for (int64_t dim : input.sizes) {
    PyList_SET_ITEM(list, place++, PyLong_FromLongLong(tensor.size(dim)));
  }
  for (int64_t dim : input.strides) {
    PyList_SET_ITEM(list, place++, PyLong_FromLongLong(tensor.stride(dim)));
  }
  return true;
}

// Takes a list of arguments, and empties it.
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

// ---- out of the graph ------------------------------------------------------------------------------------------------------

// A size or stride: a number, or where in the graph's results it is.
struct Extent {
  bool is_result;
  int64_t value;
};

struct Output {
  Py_ssize_t index;  // of the value, or of the local tensor; the mesh is the next one
  bool is_dtensor = false, requires_grad = false;
  std::vector<Extent> sizes, strides;
  Ref make_spec;  // (mesh, shape, stride) -> spec
  Ref spec, mesh, shape, stride;  // of the last call
  bool fixed = true;  // no size or stride is a result
};

struct Wrap {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Output>* outputs;
  PyObject* owner;  // of gradients: the class of the autograd node that they come from
};

Ref tuple_of(const std::vector<Extent>& extents, PyObject* results) {
  Ref tuple = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(extents.size())));
  for (size_t i = 0; tuple && i < extents.size(); ++i) {
    PyObject* item = extents[i].is_result ? Ref::copy(PySequence_Fast_GET_ITEM(results, extents[i].value)).release()
                                          : PyLong_FromLongLong(extents[i].value);
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), item);
  }
  return tuple;
}

// The spec of an output: the one of the last call where mesh and sizes are the same. Borrowed; null with an error set.
PyObject* spec_of(Output& output, PyObject* results) {
  PyObject* mesh = PySequence_Fast_GET_ITEM(results, output.index + 1);
  if (output.spec && output.fixed && mesh == output.mesh.get()) {
    return output.spec.get();
  }
  Ref shape = tuple_of(output.sizes, results), stride = tuple_of(output.strides, results);
  if (!shape || !stride) {
    return nullptr;
  }
  if (output.spec && mesh == output.mesh.get() && same(shape.get(), output.shape.get()) && same(stride.get(), output.stride.get())) {
    return output.spec.get();
  }
  output.spec = Ref::steal(PyObject_CallFunctionObjArgs(output.make_spec.get(), mesh, shape.get(), stride.get(), nullptr));
  output.mesh = Ref::copy(mesh), output.shape = std::move(shape), output.stride = std::move(stride);
  return output.spec.get();
}

Ref make_dtensor(PyObject* local, PyObject* spec, bool requires_grad) {
  PyObject* args[] = {reinterpret_cast<PyObject*>(dtensor.type), local, spec, requires_grad ? Py_True : Py_False};
  return Ref::steal(PyObject_Vectorcall(dtensor.construct, args, 3, names.requires_grad));
}

Ref wrapped(Output& output, PyObject* results) {
  PyObject* value = PySequence_Fast_GET_ITEM(results, output.index);
  if (!output.is_dtensor || value == Py_None) {
    return Ref::copy(value);
  }
  PyObject* spec = spec_of(output, results);
  return spec != nullptr ? make_dtensor(value, spec, output.requires_grad) : Ref();
}

// Takes the results of a graph, a list or a tuple; gives a tuple.
PyObject* wrap_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  auto& outputs = *reinterpret_cast<Wrap*>(self)->outputs;
  if (PyVectorcall_NARGS(nargs) != 1 || !(PyList_CheckExact(args[0]) || PyTuple_CheckExact(args[0]))) {
    PyErr_SetString(PyExc_TypeError, "expected the results of a graph");
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

// ---- gradients -------------------------------------------------------------------------------------------------------------
//
// The gradient of a leaf normally goes to its AccumulateGrad node, which detaches it, or adds it to .grad: two operators on
// DTensors, by way of Python. Where that node would do nothing else, the same happens here with local tensors, and the node gets
// nothing.

// The lock that AccumulateGrad holds while it reads and writes .grad.
struct Lock : Node {
  static std::mutex& of(Node& node) { return node.*(&Lock::mutex_); }
};

// Whether the engine runs for plain .backward(), and nobody looks at what comes out of `node`.
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

PyObject* python_dtensor(const at::Tensor& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && Py_TYPE(object) == dtensor.type ? object : nullptr;
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

// Takes the local tensor at `index` out of `results`, which gives up its reference. Where something else shows that tensor or its
// memory (another gradient, the gradient that came in), it is a copy, as AccumulateGrad makes one. With `like`, its strides are
// those that the gradient of `like` should have.
Ref take(PyObject* results, Py_ssize_t index, const at::Tensor* like) {
  Ref found = Ref::steal(PyList_GET_ITEM(results, index));
  PyList_SET_ITEM(results, index, Ref::copy(Py_None).release());
  const at::Tensor& local = THPVariable_Unpack(found.get());
  bool alone = Py_REFCNT(found.get()) == 1 && local.use_count() == 1 && local.storage().use_count() == 1;
  if (alone && (like == nullptr || torch::autograd::utils::obeys_layout_contract(local, *like))) {
    return found;
  }
  return Ref::steal(THPVariable_Wrap(like != nullptr ? torch::autograd::utils::clone_obey_contract(local, *like) : local.clone()));
}

enum class Done { no, yes, failed };

// Accumulates the local tensor at output.index of `results`, or leaves everything as it is.
Done accumulate_local(Output& output, PyObject* results, Node* node) {
  AccumulateGrad* accumulation = plain_accumulation(node);
  PyObject* found = PyList_GET_ITEM(results, output.index);
  if (accumulation == nullptr || !is_exactly_tensor(found)) {
    return Done::no;
  }
  at::Tensor& variable = accumulation->variable;
  PyObject* parameter = python_dtensor(variable);
  if (parameter == nullptr || !equal(output.sizes, variable.sizes()) || !equal(output.strides, variable.strides())) {
    return Done::no;
  }
  const at::Tensor& local = THPVariable_Unpack(found);
  const at::Tensor& local_variable = THPVariable_Unpack(slot(parameter, dtensor.local));
  if (!is_plain(local, local_variable)) {
    return Done::no;
  }
  PyObject* spec = spec_of(output, results);
  if (spec == nullptr) {
    return Done::failed;
  }
  std::lock_guard<std::mutex> lock(Lock::of(*accumulation));
  at::Tensor& gradient = variable.mutable_grad();
  if (gradient.defined()) {
    PyObject* sum = python_dtensor(gradient);
    if (sum == nullptr || gradient.requires_grad() || gradient.is_inference()) {
      return Done::no;
    }
    PyObject* local_sum = slot(sum, dtensor.local);
    if (!is_exactly_tensor(local_sum) || !is_plain(THPVariable_Unpack(local_sum), local) ||
        !same(slot(sum, dtensor.spec), spec)) {
      PyErr_Clear();
      return Done::no;
    }
    at::Tensor(THPVariable_Unpack(local_sum)).add_(local);
    torch::autograd::impl::bump_version(gradient);
    return Done::yes;
  }
  Ref own = take(results, output.index, &local_variable);
  Ref made = make_dtensor(own.get(), spec, false);
  if (!made) {
    return Done::failed;
  }
  gradient = THPVariable_Unpack(made.get());
  return Done::yes;
}

// The gradient for autograd to deal with.
Ref wrapped_gradient(Output& output, PyObject* results) {
  if (!output.is_dtensor || !is_exactly_tensor(PyList_GET_ITEM(results, output.index))) {
    return wrapped(output, results);
  }
  PyObject* spec = spec_of(output, results);
  Ref own = spec != nullptr ? take(results, output.index, nullptr) : Ref();
  return own ? make_dtensor(own.get(), spec, output.requires_grad) : Ref();
}

// Takes the list of gradients of a backward graph; gives a tuple with None for what was accumulated already.
PyObject* accumulate_call(PyObject* self, PyObject* const* args, size_t nargs, PyObject* keywords) {
  HANDLE_TH_ERRORS
  auto& wrap = *reinterpret_cast<Wrap*>(self);
  auto& outputs = *wrap.outputs;
  if (PyVectorcall_NARGS(nargs) != 1 || !PyList_CheckExact(args[0])) {
    return wrap_call(self, args, nargs, keywords);
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

// ---- the module ------------------------------------------------------------------------------------------------------------

template <typename T, typename Field>
void release(PyObject* self, Field T::*field) {
  delete (reinterpret_cast<T*>(self)->*field);
  Py_TYPE(self)->tp_free(self);
}

PyObject* guard_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *example, *sizes, *strides, *local_sizes, *local_strides;
  int any_size;
  if (!PyArg_ParseTuple(args, "OOOOOp", &example, &sizes, &strides, &local_sizes, &local_strides, &any_size)) {
    return nullptr;
  }
  if (Py_TYPE(example) != dtensor.type) {
    PyErr_SetString(PyExc_TypeError, "the example of a guard is a DTensor");
    return nullptr;
  }
  Ref self = Ref::steal(type->tp_alloc(type, 0));
  auto* guard = reinterpret_cast<Guard*>(self.get());
  guard->call = guard_call;
  guard->facts = new Guard::Facts{
      TensorFacts::of(example, sizes, strides), TensorFacts::of(slot(example, dtensor.local), local_sizes, local_strides),
      SpecFacts::of(slot(example, dtensor.spec), any_size != 0)};
  return self.release();
  END_HANDLE_TH_ERRORS
}

PyObject* unwrap_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* plan;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &plan)) {
    return nullptr;
  }
  Ref self = Ref::steal(type->tp_alloc(type, 0));
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
      input.sizes = integers(sizes);
      input.strides = integers(strides);
    }
    unwrap->results += input.is_dtensor ? 2 + static_cast<Py_ssize_t>(input.sizes.size() + input.strides.size()) : 1;
    unwrap->inputs->push_back(std::move(input));
  }
  return self.release();
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

PyObject* wrap_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* plan;
  int accumulate;
  if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &plan, &accumulate)) {
    return nullptr;
  }
  Ref self = Ref::steal(type->tp_alloc(type, 0));
  auto* wrap = reinterpret_cast<Wrap*>(self.get());
  wrap->call = accumulate != 0 ? accumulate_call : wrap_call;
  wrap->outputs = new std::vector<Output>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(plan); ++i) {
    PyObject* item = PyList_GET_ITEM(plan, i);
    Output output;
    if (PyLong_Check(item)) {
      output.index = PyLong_AsSsize_t(item);
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
    }
    wrap->outputs->push_back(std::move(output));
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

void guard_dealloc(PyObject* self) {
  release(self, &Guard::facts);
}

void unwrap_dealloc(PyObject* self) {
  release(self, &Unwrap::inputs);
}

void wrap_dealloc(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Wrap*>(self)->owner);
  release(self, &Wrap::outputs);
}

PyMemberDef wrap_members[] = {{"owner", T_OBJECT, offsetof(Wrap, owner), 0, nullptr}, {nullptr}};

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

PyTypeObject guard_type = callable_type<Guard>("dtensor_compile.Guard", guard_new, guard_dealloc);
PyTypeObject unwrap_type = callable_type<Unwrap>("dtensor_compile.Unwrap", unwrap_new, unwrap_dealloc);
PyTypeObject wrap_type = callable_type<Wrap>("dtensor_compile.Wrap", wrap_new, wrap_dealloc);

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

PyMethodDef methods[] = {{"configure", configure, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "dtensor_compile_native", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_dtensor_compile_native() {
  names.mesh = PyUnicode_InternFromString("mesh");
  names.placements = PyUnicode_InternFromString("placements");
  names.shard_order = PyUnicode_InternFromString("shard_order");
  names.tensor_meta = PyUnicode_InternFromString("tensor_meta");
  names.dtype = PyUnicode_InternFromString("dtype");
  const char* marks[] = {"_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices",
                         "_dynamo_strict_unbacked_indices", "_dynamo_static_indices"};
  for (size_t i = 0; i < 5; ++i) {
    names.marks[i] = PyUnicode_InternFromString(marks[i]);
  }
  names.requires_grad = Py_BuildValue("(s)", "requires_grad");
  wrap_type.tp_members = wrap_members;
  PyObject* made = PyModule_Create(&module);
  for (auto [name, type] : {std::pair{"Guard", &guard_type}, {"Unwrap", &unwrap_type}, {"Wrap", &wrap_type}}) {
    if (made == nullptr || PyType_Ready(type) != 0 || PyModule_AddObjectRef(made, name, reinterpret_cast<PyObject*>(type)) != 0) {
      return nullptr;
    }
  }
  return made;
}
