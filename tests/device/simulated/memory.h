// Memory of the simulated accelerator: host memory, counted by device, with a limit, and used again as CUDA's allocator does.
//
// A freed block goes to the next tensor of its size on its stream at once, also while tasks of *other* streams still wait to read it.
// Only `record_stream` delays that. New memory is filled with NaN, in stream order.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "streams.h"

namespace sim {

struct Memory {
  void* data = nullptr;
  c10::DataPtr adopted;  // of the CPU's allocator, where a CPU kernel made the result
  std::vector<std::pair<StreamKey, uint64_t>> busy;  // streams that must come so far before the memory is used again

  bool is_free() const {
    for (auto& [key, until] : busy) {
      if (!queue(key).has_run(until)) return false;
    }
    return true;
  }
  ~Memory() {
    if (!adopted.get()) std::free(data);
  }
};

// The context of a device tensor's `DataPtr`.
struct Block {
  std::shared_ptr<Memory> memory;
  size_t bytes;
  StreamKey stream;
  std::set<StreamKey> recorded;  // by `record_stream`
};

struct Usage {
  int64_t now = 0, peak = 0, allocated = 0, freed = 0, out_of_memory = 0;
};
inline std::array<Usage, kMostDevices> usage;
inline std::map<std::pair<StreamKey, size_t>, std::vector<std::shared_ptr<Memory>>> freed_memory;

inline size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

inline void release(void* context) {
  std::lock_guard guard(mutex);
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  auto& used = usage[block->stream.first];
  used.now -= static_cast<int64_t>(block->bytes);
  used.freed += static_cast<int64_t>(block->bytes);
  if (block->memory->adopted.get() || !block->memory->data) return;
  for (auto& key : block->recorded) block->memory->busy.emplace_back(key, queue(key).submitted());
  freed_memory[{block->stream, rounded(block->bytes)}].push_back(std::move(block->memory));
}

// Raises torch's OutOfMemoryError above the limit.
inline void reserve(size_t bytes, DeviceIndex device) {
  auto& used = usage[device];
  if (used.now + static_cast<int64_t>(bytes) > memory_limit) {
    used.out_of_memory++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes. Device ", int(device), " has ", memory_limit, " bytes, of which ", used.now, " are in use");
  }
  used.now += static_cast<int64_t>(bytes);
  used.allocated += static_cast<int64_t>(bytes);
  used.peak = std::max(used.peak, used.now);
}

inline c10::DataPtr block_of(std::shared_ptr<Memory> memory, size_t bytes, DeviceIndex device) {
  std::lock_guard guard(mutex);
  reserve(bytes, device);
  void* data = memory->data;
  return {data, new Block{std::move(memory), bytes, current_stream(device), {}}, &release, Device(kDeviceType, device)};
}

inline std::shared_ptr<Memory> memory_for(size_t bytes, StreamKey stream) {
  auto& candidates = freed_memory[{stream, rounded(bytes)}];
  for (size_t i = candidates.size(); i-- > 0;) {  // the last that was freed: a missing `record_stream` shows at once
    auto memory = candidates[i];
    if (!memory->is_free()) continue;
    candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(i));
    memory->busy.clear();
    return memory;
  }
  auto memory = std::make_shared<Memory>();
  memory->data = std::aligned_alloc(64, rounded(bytes));
  return memory;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard guard(mutex);
    use();
    TORCH_CHECK(current_device != broken_device, "sim error: device ", int(current_device), " does not answer");
    if (!bytes || static_cast<int64_t>(bytes) > memory_limit) return block_of(std::make_shared<Memory>(), bytes, current_device);
    auto memory = memory_for(bytes, current_stream(current_device));
    auto result = block_of(memory, bytes, current_device);
    current_queue(current_device).submit([memory, bytes] { std::memset(memory->data, 0xFF, bytes); });
    return result;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::lock_guard guard(mutex);
    synchronize(current_device);
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return used_by != 0; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard guard(mutex);
    freed_memory.clear();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard guard(mutex);
    if (auto* block = static_cast<Block*>(data.get_context())) block->recorded.insert(to_key(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats result;
    auto& used = usage[device];
    for (auto* kind : {&result.allocated_bytes, &result.reserved_bytes, &result.active_bytes, &result.requested_bytes}) {
      auto& all = (*kind)[0];
      all.current = used.now;
      all.peak = used.peak;
      all.allocated = used.allocated;
      all.freed = used.freed;
    }
    result.num_ooms = used.out_of_memory;
    return result;
  }
  void resetAccumulatedStats(DeviceIndex device) override { usage[device].allocated = usage[device].freed = 0; }
  void resetPeakStats(DeviceIndex device) override { usage[device].peak = usage[device].now; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    use();
    return {memory_limit - usage[device].now, memory_limit};
  }
};
inline Allocator allocator;

// Host memory from which copies may be asynchronous.
inline std::map<char*, size_t> pinned_memory;
struct PinnedAllocator final : at::HostAllocator {
  static void drop(void* data) {
    std::lock_guard guard(mutex);
    pinned_memory.erase(static_cast<char*>(data));
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard guard(mutex);
    auto* data = static_cast<char*>(std::aligned_alloc(64, rounded(bytes + 1)));
    pinned_memory[data] = bytes;
    return {data, data, &drop, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* pointer) {
  std::lock_guard guard(mutex);
  auto next = pinned_memory.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (next == pinned_memory.begin()) return false;
  auto& [data, bytes] = *std::prev(next);
  return pointer < data + std::max<size_t>(bytes, 1);
}

}  // namespace sim
