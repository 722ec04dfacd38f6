// `simccl`: collectives over Gloo with NCCL's rules. They run on a stream of the communicator, after what the current stream had
// submitted, and `wait()` makes the current stream wait, not the host.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "aliases.h"

namespace sim {

class Work final : public c10d::Work {
 public:
  Work(StreamKey stream, std::vector<Tensor> outputs, bool holds_host) : stream_(stream), outputs_(std::move(outputs)), holds_host_(holds_host) {}

  bool isCompleted() override { return gloo->isCompleted(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    std::lock_guard guard(mutex);
    if (!lazy || holds_host_) {
      queue(stream_).run(after);
    } else {
      current_queue(stream_.first).submit([stream = stream_, until = after] { queue(stream).run(until); });
    }
  }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  int sourceRank() const override { return gloo->sourceRank(); }

  c10::intrusive_ptr<c10d::Work> gloo;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  uint64_t after = 0;

 private:
  StreamKey stream_;
  std::vector<Tensor> outputs_;
  bool holds_host_;
};

class Communicator final : public c10d::Backend {
  using Tensors = std::vector<Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

 public:
  explicit Communicator(c10::intrusive_ptr<c10d::Backend> gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run({}, tensors, [&](Tensors&, Tensors& out) { return gloo_->broadcast(out, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto [summed, divisor] = without_average(options);
    return run({}, tensors, [&, &summed = summed](Tensors&, Tensors& out) { return gloo_->allreduce(out, summed); }, divisor);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return run({}, tensors, [&](Tensors&, Tensors& out) { return gloo_->allreduce_coalesced(out, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run({}, tensors, [&](Tensors&, Tensors& out) { return gloo_->reduce(out, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(inputs, flat(outputs), [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return gloo_->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run({input}, {output}, [&](Tensors& in, Tensors& out) { return gloo_->_allgather_base(out[0], in[0], options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(inputs, outputs, [&](Tensors& in, Tensors& out) { return gloo_->allgather_into_tensor_coalesced(out, in, options); });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return run(inputs, flat(outputs), [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!out.empty()) lists.push_back(out);
      return gloo_->gather(lists, in, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return run(flat(inputs), outputs, [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!in.empty()) lists.push_back(in);
      return gloo_->scatter(out, lists, options);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [summed, divisor] = without_average(options);
    return run(flat(inputs), outputs, [&, &summed = summed](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{in};
      return gloo_->reduce_scatter(out, lists, summed);
    }, divisor);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto [summed, divisor] = without_average(options);
    return run({input}, {output}, [&, &summed = summed](Tensors& in, Tensors& out) { return gloo_->_reduce_scatter_base(out[0], in[0], summed); }, divisor);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(inputs, outputs, [&](Tensors& in, Tensors& out) { return gloo_->reduce_scatter_tensor_coalesced(out, in, options); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    return run({input}, {output}, [&](Tensors& in, Tensors& out) { return gloo_->alltoall_base(out[0], in[0], to_sizes, from_sizes, options); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return run(inputs, outputs, [&](Tensors& in, Tensors& out) { return gloo_->alltoall(out, in, options); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return run(tensors, {}, [&](Tensors& in, Tensors&) { return gloo_->send(in, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return run({}, tensors, [&](Tensors&, Tensors& out) { return gloo_->recv(out, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return run({}, {}, [&](Tensors&, Tensors&) { return gloo_->barrier(c10d::BarrierOptions()); }, 1, /*holds_host=*/true);
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { gloo_->abort(); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<DeviceIndex, int64_t> streams_;

  // Gloo has no average.
  template <class Options>
  std::pair<Options, int> without_average(Options options) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return {options, 1};
    options.reduceOp = c10d::ReduceOp::SUM;
    return {options, getSize()};
  }

  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (auto& each : lists) all.insert(all.end(), each.begin(), each.end());
    return all;
  }

  static Device common_device(const Tensors& inputs, const Tensors& outputs) {
    std::optional<Device> found;
    for (auto* list : {&inputs, &outputs}) {
      for (auto& tensor : *list) {
        TORCH_CHECK(tensor.is_privateuseone(), "simccl: a tensor on ", tensor.device(), "; expected one on sim");
        TORCH_CHECK(tensor.is_contiguous() || tensor.is_non_overlapping_and_dense(), "simccl: Tensors must be contiguous");
        TORCH_CHECK(!found || *found == tensor.device(), "simccl: tensors on two devices");
        found = tensor.device();
      }
    }
    return found.value_or(Device(kDeviceType, current_device));
  }

  StreamKey stream_on(DeviceIndex device) {
    auto [found, is_new] = streams_.emplace(device, next_stream);
    if (is_new) queue({device, next_stream++}).waits_for_work = true;
    return {device, found->second};
  }

  // Start `collective` on copies in host memory. Its results come to `outputs` when the communicator's stream runs the task.
  template <class Collective>
  WorkPtr run(const Tensors& inputs, const Tensors& outputs, Collective collective, int divisor = 1, bool holds_host = false) {
    std::unique_lock guard(mutex);
    use();
    const Device device = common_device(inputs, outputs);
    c10::OptionalDeviceGuard on(device);
    const StreamKey stream = stream_on(device.index());
    current_queue(device.index()).run();
    at::AutoDispatchBelowAutograd below;
    Aliases aliases;
    std::map<void*, Tensor> copies;
    auto copied = [&](const Tensors& tensors) {
      Tensors result;
      for (auto& each : tensors) {
        auto& copy = copies[each.unsafeGetTensorImpl()];
        if (!copy.defined()) copy = aliases.on_host(each).clone();
        result.push_back(copy);
      }
      return result;
    };
    Tensors in = copied(inputs), out = copied(outputs), targets;
    for (auto& each : outputs) {
      targets.push_back(aliases.on_host(each));
      allocator.recordStream(each.storage().data_ptr(), to_stream(stream));
    }
    auto work = c10::make_intrusive<Work>(stream, outputs, holds_host);
    work->gloo = collective(in, out);
    auto keys = c10::impl::tls_local_dispatch_key_set();
    queue(stream).submit([gloo = work->gloo, in, out, targets, keys, divisor] {
      c10::impl::ForceDispatchKeyGuard restored(keys);
      at::AutoDispatchBelowAutograd below;
      gloo->wait();
      for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(divisor > 1 ? out[i].div_(divisor) : out[i]);
    });
    work->after = queue(stream).submitted();
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<Device>{device});
    guard.unlock();
    c10::StreamGuard current(to_stream(stream));
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }
};

}  // namespace sim
