// What c10 and ATen ask of a device: the current device and stream, events, generators.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "memory.h"

namespace sim {

struct Event {
  StreamKey stream;
  uint64_t after = 0;  // tasks of the stream that had been submitted
  double milliseconds = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }

  c10::DeviceType type() const override { return kDeviceType; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kDeviceType, current_device); }
  void setDevice(Device device) const override {
    if (!device.has_index()) return;
    check_device(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override { return to_stream(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(Device device) const override { return to_stream({index_of(device), 0}); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    std::lock_guard guard(mutex);
    return to_stream({index_of(device), next_stream++});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    std::lock_guard guard(mutex);
    if (!*event) *event = new Event{};
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<Event*>(*event) = {to_key(stream), queue(to_key(stream)).submitted(), std::chrono::duration<double, std::milli>(now).count()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    std::lock_guard guard(mutex);
    queue(to_key(stream)).submit([recorded = *static_cast<Event*>(event)] { queue(recorded.stream).run(recorded.after); });
  }
  // A query lets a task run, so that a loop of queries ends.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard guard(mutex);
    auto& recorded = *static_cast<Event*>(event);
    auto& stream = queue(recorded.stream);
    if (stream.has_run(recorded.after)) return true;
    stream.run_next();
    return false;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard guard(mutex);
    auto& asked = queue(to_key(stream));
    if (asked.is_empty()) return true;
    asked.run_next();
    return false;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard guard(mutex);
    queue(to_key(stream)).run();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    std::lock_guard guard(mutex);
    auto& recorded = *static_cast<Event*>(event);
    queue(recorded.stream).run(recorded.after);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    std::lock_guard guard(mutex);
    synchronize(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { allocator.recordStream(data, stream); }
  double elapsedTime(void* from, void* to, DeviceIndex) const override { return static_cast<Event*>(to)->milliseconds - static_cast<Event*>(from)->milliseconds; }
};

// The CPU's generator, one for each device.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;

  explicit Generator(DeviceIndex device) : c10::GeneratorImpl(Device(kDeviceType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override {
    TORCH_CHECK(has_seed, "sim error: the generator has no seed");
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->host = host.clone();
    return copy;
  }
};

inline at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex each = 0; each < kMostDevices; each++) made.push_back(at::make_generator<Generator>(each));
    return made;
  }();
  if (device < 0) device = current_device;
  check_device(device);
  return all[device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return used_by != 0; }
  void init() const override { use(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override {
    use();
    check_device(device);
    current_device = device;
  }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return at::make_generator<Generator>(device < 0 ? current_device : device); }
  Device getDeviceFromPtr(void*) const override { return Device(kDeviceType, current_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    std::lock_guard guard(mutex);
    c10::OptionalDeviceGuard device(storage.device());
    auto memory = allocator.allocate(bytes);
    current_queue(storage.device().index()).run();
    if (bytes && storage.nbytes()) std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
};

}  // namespace sim
