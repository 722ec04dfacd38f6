// Operators of the simulated accelerator: one boxed fallback that runs the CPU's kernels, so that results have the CPU's bits.
//
// With SIM_LAZY=1 a call waits in its stream where its results' shapes are known beforehand, from the operator's meta kernel.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <unordered_set>

#include "aliases.h"
#include "kernels.h"

namespace sim {
namespace {

using Stack = torch::jit::Stack;

std::string name_of(const c10::FunctionSchema& schema) {
  const auto& name = schema.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool begins(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// Operators that take tensors of the host beside those of the device.
bool mixes_devices(const std::string& name) {
  return begins(name, "aten::index") || begins(name, "aten::_index") || begins(name, "aten::_unsafe_index") || begins(name, "aten::set_") ||
         name == "aten::_amp_foreach_non_finite_check_and_unscale_";
}

// Operators whose meta kernels give other shapes or types than the CPU's kernels; more are added as they are met.
std::unordered_set<std::string>& never_later() {
  static std::unordered_set<std::string> names{"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit.no_stats"};
  return names;
}

void check_devices(const Device& device, const Tensor& tensor, const std::string& name) {
  const bool fits = !tensor.defined() || tensor.dim() == 0 || tensor.device() == device;
  TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ", tensor.device(), "! (sim, ", name, ")");
}

// The device of a call: that of its tensors, which must have one, or of its `device` argument.
Device device_of(const std::vector<c10::IValue>& arguments, const std::string& name) {
  std::optional<Device> found;
  for (auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_privateuseone() && (!found || tensor.dim() > 0)) {
        if (found) check_devices(*found, tensor, name);
        if (!found) found = tensor.device();
      }
      return tensor;
    });
    if (argument.isDevice() && argument.toDevice().is_privateuseone()) found = argument.toDevice();
  }
  if (!found || !found->has_index()) return Device(kDeviceType, current_device);
  if (!mixes_devices(name)) {
    for (auto& argument : arguments) each_tensor(argument, [&](const Tensor& tensor) { check_devices(*found, tensor, name); return tensor; });
  }
  return *found;
}

// The device's generator in place of the CPU's, for operators that take none as an argument.
class AsDefaultGenerator {
 public:
  AsDefaultGenerator(DeviceIndex device, bool needed) : own_(default_generator(device)), needed_(needed) {
    if (!needed_) return;
    kept_ = host().get_state();
    host().set_state(*own_.unsafeGetGeneratorImpl()->get_state());
  }
  ~AsDefaultGenerator() {
    if (!needed_) return;
    own_.unsafeGetGeneratorImpl()->set_state(*host().get_state());
    host().set_state(*kept_);
  }

 private:
  static c10::GeneratorImpl& host() { return *at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl(); }
  at::Generator own_;
  bool needed_;
  c10::intrusive_ptr<c10::TensorImpl> kept_;
};

// One call of an operator on a device.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<c10::IValue> arguments, on_host;
  Device device;
  Aliases aliases;
  bool draws = false, takes_generator = false;

  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op(op), schema(op.schema()), name(name_of(schema)), arguments(stack.end() - static_cast<int64_t>(schema.arguments().size()), stack.end()), device(device_of(arguments, name)) {}

  void lower() {
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& argument = arguments[i];
      const bool is_default = argument.isNone() && schema.arguments()[i].name() == "generator";
      if (argument.isGenerator() || is_default) {
        takes_generator = draws = true;
        const auto& generator = is_default ? default_generator(device.index()) : argument.toGenerator();
        on_host.emplace_back(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host);
      } else if (argument.isDevice()) {
        on_host.emplace_back(Device(c10::kCPU));
      } else {
        on_host.push_back(each_tensor(argument, [&](const Tensor& tensor) { return aliases.on_host(tensor); }));
      }
    }
    for (auto tag : op.getTags()) draws |= tag == at::Tag::nondeterministic_seeded;
  }

  bool returns_views() const {
    for (auto& result : schema.returns()) {
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    }
    return false;
  }

  // Such a copy ends before the host goes on, unless it is `non_blocking`.
  bool copies_to_host() const {
    return name == "aten::_foreach_copy_" && arguments[0].toTensorVector()[0].is_cpu() && !arguments[2].toBool();
  }

  bool may_wait() const {
    if (copies_to_host()) return false;
    if (!lazy || draws || returns_views() || never_later().count(name) || begins(name, "aten::set_") || begins(name, "aten::resize")) return false;
    for (auto tag : op.getTags()) {
      if (tag == at::Tag::data_dependent_output || tag == at::Tag::dynamic_output_shape) return false;
    }
    for (auto& result : schema.returns()) {
      if (result.type()->kind() != c10::TypeKind::TensorType) return false;
    }
    return true;
  }

  // The argument that result `index` is, where the operator writes to it.
  const c10::IValue* written_argument(size_t index) const {
    const auto* info = schema.returns()[index].alias_info();
    if (!info || !info->isWrite()) return nullptr;
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && *other == *info) return &arguments[i];
    }
    return nullptr;
  }

  // The results' shapes and types by the meta kernel; nothing where it cannot tell.
  std::optional<Stack> described() const {
    Stack stack;
    for (auto& argument : arguments) {
      if (argument.isDevice()) {
        stack.emplace_back(Device(c10::kMeta));
        continue;
      }
      stack.push_back(each_tensor(argument, [](const Tensor& tensor) {
        return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(false)) : tensor;
      }));
    }
    try {
      if (!schema.returns().empty()) op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      never_later().insert(name);
      return std::nullopt;
    }
    return stack;
  }

  // Submit the kernel to the current stream and return results that it will write; nothing where that cannot be.
  std::optional<Stack> submit() {
    auto shapes = described();
    if (!shapes) return std::nullopt;
    Stack results;
    std::vector<std::pair<size_t, Tensor>> to_write;
    for (size_t i = 0; i < schema.returns().size(); i++) {
      const Tensor shape = (*shapes)[i].toTensor();
      if (const auto* argument = written_argument(i)) {
        const Tensor own = argument->toTensor();
        if (own.sizes() != shape.sizes() || !own.numel()) return std::nullopt;  // the kernel will resize it
        results.push_back(*argument);
      } else if (!shape.defined()) {
        results.emplace_back(Tensor());
      } else {
        auto made = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
        to_write.emplace_back(i, aliases.on_host(made));
        results.emplace_back(made);
      }
    }
    auto keys = c10::impl::tls_local_dispatch_key_set();
    current_queue(device.index()).submit([op = op, stack = Stack(on_host.begin(), on_host.end()), to_write, keys, name = name]() mutable {
      c10::impl::ForceDispatchKeyGuard restored(keys);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      at::AutoDispatchBelowAutograd below;
      for (auto& [i, target] : to_write) {
        const Tensor made = stack[i].toTensor();
        TORCH_CHECK(made.sizes() == target.sizes() && made.dtype() == target.dtype(), "sim: the meta kernel of ", name, " gives another shape or type than the CPU's");
        target.copy_(made);
      }
    });
    return results;
  }

  Stack run() {
    if (!returns_views()) current_queue(device.index()).run();
    Stack stack(on_host.begin(), on_host.end());
    {
      AsDefaultGenerator generator(device.index(), draws && !takes_generator);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* info = schema.arguments()[i].alias_info();
      if (!info || !info->isWrite() || !arguments[i].isTensor()) continue;
      const Tensor own = arguments[i].toTensor();
      if (own.defined() && own.is_privateuseone()) aliases.take_size(own, on_host[i].toTensor());
    }
    Stack results;
    for (size_t i = 0; i < schema.returns().size(); i++) {
      if (const auto* argument = written_argument(i)) {
        results.push_back(*argument);
      } else {
        results.push_back(each_tensor(stack[i], [&](const Tensor& tensor) { return aliases.on_device(tensor, device.index()); }));
      }
    }
    return results;
  }
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  std::lock_guard guard(mutex);
  use();
  Call call(op, *stack);
  c10::OptionalDeviceGuard device(call.device);
  call.lower();
  std::optional<Stack> results;
  if (call.may_wait()) results = call.submit();
  calls[(results ? "later " : "now ") + call.name]++;
  if (!results) results = call.run();
  torch::jit::drop(*stack, call.arguments.size());
  for (auto& result : *results) stack->push_back(result);
}

// ---- Operators that the fallback cannot do: they make or move memory.

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// As CUDA's: from pageable memory the bytes are taken at once; into it, the host waits; between pinned memory and the device a
// `non_blocking` copy waits in the stream.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  std::lock_guard guard(mutex);
  if (self.is_same(source)) return self;
  const bool to_host = self.is_cpu(), from_host = source.is_cpu();
  const Device device = to_host ? source.device() : self.device();
  c10::OptionalDeviceGuard on(device);
  Aliases aliases;
  Tensor target = aliases.on_host(self), from = aliases.on_host(source);
  if (!to_host && !from_host && self.device() != source.device()) current_queue(source.device().index()).run();
  if (from_host && !(non_blocking && source.is_pinned())) from = from.clone();
  const bool waits = to_host ? !(non_blocking && self.is_pinned()) : from_host && !non_blocking;
  auto keys = c10::impl::tls_local_dispatch_key_set();
  auto& stream = current_queue(device.index());
  stream.submit([target, from, keys]() mutable {
    c10::impl::ForceDispatchKeyGuard restored(keys);
    at::AutoDispatchBelowAutograd below;
    target.copy_(from);
  });
  if (waits) stream.run();
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  auto written = target;
  copy_(written, self, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

void record_stream(Tensor& tensor, c10::Stream stream) { allocator.recordStream(tensor.storage().data_ptr(), stream); }

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  std::lock_guard guard(mutex);
  c10::OptionalDeviceGuard on(input.device());
  current_queue(input.device().index()).run();
  Aliases aliases;
  auto host_bias = bias ? std::optional<Tensor>(aliases.on_host(*bias)) : std::nullopt;
  auto result = at::convolution_symint(aliases.on_host(input), aliases.on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return aliases.on_device(result, input.device().index());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  std::lock_guard guard(mutex);
  c10::OptionalDeviceGuard on(input.device());
  const auto device = input.device().index();
  current_queue(device).run();
  Aliases aliases;
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward_symint(aliases.on_host(gradient), aliases.on_host(input), aliases.on_host(weight), c10::OptionalArrayRef<c10::SymInt>(bias), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {aliases.on_device(of_input, device), aliases.on_device(of_weight, device), aliases.on_device(of_bias, device)};
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef strides) {
  auto* own = tensor.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(storage));
  auto contiguous = c10::contiguous_strides(size);
  own->set_sizes_and_strides(size, strides.size() == size.size() ? strides : c10::IntArrayRef(contiguous), offset);
  return tensor;
}

const Tensor& resize_(const Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(tensor.device());
  return at::native::resize_(tensor, size, format);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("record_stream", &record_stream);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("set_.source_Tensor", [](Tensor& tensor, const Tensor& source) -> Tensor& { return at::native::set_tensor_(tensor, source); });
  library.impl("set_.source_Storage", [](Tensor& tensor, c10::Storage source) -> Tensor& { return at::native::set_(tensor, source); });
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("resize_", &resize_);
}

}  // namespace

std::map<std::string, int64_t> calls;

void use_cpu_kernels(const std::vector<std::string>& names) {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto& name : names) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sim
