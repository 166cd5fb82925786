// A CUDA device in name only, on a machine without one: autograd takes fake tensors that say they are on one.
//
// Autograd asks the guard of a tensor's device for streams, and the hooks of CUDA whether torch was built with it and whether a device
// is in use. A torch built without CUDA has no guard, and hooks that say no; a fake tensor that needs a gradient would end the process.
// One built for CUDA asks the driver, which is not there. Here is a guard that does nothing, and hooks that say yes to those two
// questions. The caller sees to it that autograd has started its threads, one a device, before, and runs in his own. And
// scaled_dot_product_attention, which asks a function of the device for its kernel, gets the one that it would get there. All is taken
// back by the same function, but for the clock of DistributedDataParallel: a torch built for CUDA has one that asks the driver.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/device_lazy_init.h>

#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
};

// Measures nothing: there is no time on a device.
struct Timer final : c10d::Timer {
  std::optional<int64_t> measureDifference(Event, Event) override {
    return std::nullopt;
  }
};

// Before any DistributedDataParallel is made. A registry keeps what was last put there for good; without a driver nobody can use the
// clock that it had.
void put_timer() {
  static bool done = false;
  if (!std::exchange(done, true) && c10d::TimerRegistry()->Has(c10::DeviceType::CUDA)) {
    c10d::TimerRegistry()->Register(
        c10::DeviceType::CUDA, [](c10::Device) -> std::unique_ptr<c10d::Timer> { return std::make_unique<Timer>(); },
        c10::REGISTRY_PREFERRED);
  }
}

// What torch takes on an architecture from sm_80 on, cuDNN's kernels aside: flash attention for narrow types without a mask, else
// memory-efficient attention, else operators of their own.
int64_t attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
                         double, bool, std::optional<double>, bool enable_gqa) {
  const auto& context = at::globalContext();
  const auto type = query.scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  const bool same_kind = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && key.scalar_type() == type && value.scalar_type() == type;
  if (same_kind && query.sym_size(-1) == value.sym_size(-1)) {
    if (context.userEnabledFlashSDP() && narrow && !mask && query.sym_size(-1) <= 256) {
      return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
    }
    if (context.userEnabledMemEfficientSDP() && (narrow || type == at::kFloat) && !enable_gqa &&
        query.sym_size(-1) % (narrow ? 8 : 4) == 0) {
      return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
    }
  }
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

// 1 where that was done; 0, and nothing, where it is done already (or, with on = 0, is not).
extern "C" int dtensor_compile_cuda_device(int on) {
  using at::native::_fused_sdp_choice_stub;
  using Choice = std::remove_reference_t<decltype(_fused_sdp_choice_stub)>;
  static_assert(std::is_standard_layout_v<Choice>, "the table of kernels is the first thing in it");
  static const Guard* guard = new Guard();
  static const Hooks* hooks = new Hooks();
  static const c10::impl::DeviceGuardImplInterface* stock_guard = nullptr;
  static void* stock_hooks = nullptr;
  static void* stock_choice = nullptr;
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if ((slot.load() == guard) == (on != 0)) {
    return 0;
  }
  void*& choice = reinterpret_cast<at::native::DispatchStubImpl&>(_fused_sdp_choice_stub).cuda_dispatch_ptr;
  // Torch keeps one object of hooks for good. It has no data, so that its type is all that it is: the pointer to its functions.
  void* object = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  if (on != 0) {
    put_timer();
    stock_guard = slot.exchange(guard);
    stock_choice = std::exchange(choice, reinterpret_cast<void*>(&attention_kernel));
    std::memcpy(&stock_hooks, object, sizeof(stock_hooks));
    std::memcpy(object, static_cast<const void*>(hooks), sizeof(stock_hooks));
  } else {
    slot.store(stock_guard);
    choice = stock_choice;
    std::memcpy(object, &stock_hooks, sizeof(stock_hooks));
    torch::utils::set_requires_device_init(c10::DeviceType::CUDA, true);  // torch may have taken it for found
  }
  return 1;
}
