// A nominal CUDA device on a machine without one: autograd accepts fake tensors on ``cuda``.
//
// Autograd queries the guard of a tensor's device for streams, and the CUDA hooks for whether torch was built with CUDA and whether a
// device is in use. A torch built without CUDA has no guard, and its hooks answer no; a fake tensor that requires a gradient would end
// the process. One built for CUDA queries the driver, which is missing. This file installs a guard that does nothing, and hooks that
// answer both with yes. The caller ensures that autograd has started its threads, one per device, before, and runs in the calling
// thread. scaled_dot_product_attention, which queries a function of the device for its kernel, gets the kernel of a real device. The
// same function undoes all of this, except for the timer of DistributedDataParallel, which queries the driver in a torch built for CUDA.

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

// Called before any DistributedDataParallel is made. A registry keeps its last entry for good; without a driver the previous timer is of
// no use.
void put_timer() {
  static bool done = false;
  if (!std::exchange(done, true) && c10d::TimerRegistry()->Has(c10::DeviceType::CUDA)) {
    c10d::TimerRegistry()->Register(
        c10::DeviceType::CUDA, [](c10::Device) -> std::unique_ptr<c10d::Timer> { return std::make_unique<Timer>(); },
        c10::REGISTRY_PREFERRED);
  }
}

// torch's choice on architectures from sm_80 on, except for cuDNN's kernels: flash attention for narrow types without a mask, else
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

// Returns 1 if it changed something; 0 if it was installed already (or, with on = 0, was not).
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
  // torch keeps one object of hooks for good. It has no data besides the pointer to its functions.
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
    torch::utils::set_requires_device_init(c10::DeviceType::CUDA, true);  // torch may have recorded that the device was initialized
  }
  return 1;
}
