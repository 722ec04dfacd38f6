// Devices and streams of the simulated accelerator.
//
// A stream is a queue of tasks. With SIM_LAZY=1 a task runs only when something waits for it: an event, a copy to the host, a
// synchronization. That is the latest schedule which a program allows, so a missing wait reads memory that has not been written.
// Without SIM_LAZY a task runs when it is submitted, except for collectives, which always wait for their `Work`.
#pragma once

#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

namespace sim {

using c10::Device;
using c10::DeviceIndex;

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMostDevices = 16;

inline std::recursive_mutex mutex;  // one for all: what is simulated is the order of work, not its speed

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

// Like CUDA: variables count until the first use of a device, and a process that has used one must not be forked.
inline bool lazy = false;
inline int64_t memory_limit = 0;
inline int64_t broken_device = -1;  // it is listed, and can be made the current one
inline bool has_seed = true;
inline pid_t used_by = 0;
inline DeviceIndex count_when_used = 0;

inline DeviceIndex visible_devices() {
  const auto all = static_cast<DeviceIndex>(std::min<int64_t>(setting("SIM_DEVICES", 4), kMostDevices));
  const char* listed = std::getenv("SIM_VISIBLE_DEVICES");
  if (!listed) return all;
  DeviceIndex found = 0;
  std::stringstream text(listed);
  for (std::string part; std::getline(text, part, ',') && !part.empty(); found++) {
    if (std::atoi(part.c_str()) < 0 || std::atoi(part.c_str()) >= all) break;  // as CUDA reads its variable
  }
  return found;
}

inline DeviceIndex device_count() { return used_by ? count_when_used : visible_devices(); }

inline void use() {
  if (used_by == getpid()) return;
  TORCH_CHECK(!used_by, "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the 'spawn' start method");
  count_when_used = visible_devices();
  lazy = setting("SIM_LAZY", 0) != 0;
  memory_limit = setting("SIM_MEMORY", int64_t(8) << 30);
  broken_device = setting("SIM_BROKEN", -1);
  has_seed = setting("SIM_SEEDS", 1) != 0;
  used_by = getpid();
}

inline void check_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "sim error: invalid device ordinal ", int(index), " of ", int(device_count()));
}

class Queue {
 public:
  bool waits_for_work = false;  // a communicator's: its tasks run when their `Work` is waited for, also without SIM_LAZY

  void submit(std::function<void()> task) {
    tasks_.push_back(std::move(task));
    submitted_++;
    if (!lazy && !waits_for_work) run();
  }
  void run(uint64_t until) {
    while (finished_ < until && !tasks_.empty()) {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      finished_++;
      task();
    }
  }
  void run() { run(submitted_); }
  void run_next() { run(finished_ + 1); }
  bool has_run(uint64_t until) const { return finished_ >= until; }
  bool is_empty() const { return tasks_.empty(); }
  uint64_t submitted() const { return submitted_; }

 private:
  std::deque<std::function<void()>> tasks_;
  uint64_t submitted_ = 0, finished_ = 0;
};

using StreamKey = std::pair<DeviceIndex, int64_t>;  // stream 0 is the default stream

inline std::map<StreamKey, Queue> queues;
inline int64_t next_stream = 1;
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<int64_t, kMostDevices> current_streams{};

inline Queue& queue(StreamKey key) { return queues[key]; }
inline StreamKey current_stream(DeviceIndex device) { return {device, current_streams[device]}; }
inline Queue& current_queue(DeviceIndex device) { return queue(current_stream(device)); }
inline c10::Stream to_stream(StreamKey key) { return c10::Stream(c10::Stream::UNSAFE, Device(kDeviceType, key.first), key.second); }
inline StreamKey to_key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

inline void synchronize(DeviceIndex device) {
  for (auto& [key, each] : queues) {
    if (key.first == device) each.run();
  }
}

inline void synchronize_all() {
  for (auto& [key, each] : queues) each.run();
}

}  // namespace sim
