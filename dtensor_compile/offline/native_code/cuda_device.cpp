// A CUDA device in name only, for a torch that was built without CUDA: autograd takes fake tensors that say they are on one.
//
// Autograd asks the guard of a tensor's device for streams, and the hooks of CUDA whether torch was built with it. A torch without
// CUDA has no guard, and hooks that say no; a fake tensor that needs a gradient would end the process. Here is a guard that does
// nothing, and hooks that say yes to that one question. The caller sees to it that autograd has started its threads, one a device, before,
// and runs in his own. And scaled_dot_product_attention, which asks a function of the device for its kernel, gets the one that it would
// get there. All is taken back by the same function.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <cstring>

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

// What torch takes on an architecture from sm_80 on, cuDNN's kernels aside: flash attention for narrow types without a mask, else
// memory-efficient attention, else operators of their own.
int64_t attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
                         double, bool, std::optional<double>, bool enable_gqa) {
  const auto& context = at::globalContext();
  const auto type = query.scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  const bool alike = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && key.scalar_type() == type && value.scalar_type() == type;
  if (alike && query.sym_size(-1) == value.sym_size(-1)) {
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

// 1 where that was done; 0, and nothing, where there is another device (or, with on = 0, not ours).
extern "C" int dtensor_compile_cuda_device(int on) {
  static const Guard* guard = new Guard();
  static const Hooks* hooks = new Hooks();
  static void* stock = nullptr;
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  const c10::impl::DeviceGuardImplInterface* expected = on != 0 ? nullptr : guard;
  if (!slot.compare_exchange_strong(expected, on != 0 ? guard : nullptr)) {
    return 0;
  }
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(on != 0 ? &attention_kernel : nullptr);
  // Torch keeps one object of hooks for good. It has no data, so that its type is all that it is: the pointer to its functions.
  void* object = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  if (on != 0) {
    std::memcpy(&stock, object, sizeof(stock));
    std::memcpy(object, static_cast<const void*>(hooks), sizeof(stock));
  } else {
    std::memcpy(object, &stock, sizeof(stock));
    torch::utils::set_requires_device_init(c10::DeviceType::CUDA, true);  // torch may have taken it for found
  }
  return 1;
}
