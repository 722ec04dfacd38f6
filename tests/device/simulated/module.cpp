// The Python module: registers the device and gives `simulated.py` what it needs.
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "kernels.h"

namespace sim {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Return whether streams were lazy before; all tasks run first.
static bool set_lazy(bool on) {
  std::lock_guard guard(mutex);
  synchronize_all();
  std::swap(lazy, on);
  return on;
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::register_privateuse1_backend("sim");
  c10::SetAllocator(sim::kDeviceType, &sim::allocator);
  at::setHostAllocator(sim::kDeviceType, &sim::pinned_allocator, 0);
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks());
  m.def("device_count", [] { return int(sim::device_count()); });
  m.def("generator", [](int device) { return sim::default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("is_used", [] { return sim::used_by != 0; });
  m.def("use", &sim::use);
  m.def("is_forked", [] { return sim::used_by != 0 && sim::used_by != getpid(); });
  m.def("use_cpu_kernels", &sim::use_cpu_kernels);
  m.def("calls", [] { return sim::calls; });
  m.def("set_lazy", &sim::set_lazy);
  m.def("memory_limit", [] {
    sim::use();
    return sim::memory_limit;
  });
  m.def("communicator", [](c10::intrusive_ptr<c10d::Backend> gloo) { return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<sim::Communicator>(std::move(gloo))); });
}
