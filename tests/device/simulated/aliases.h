// CPU tensors over the memory of device tensors, for one call of a CPU kernel, and device tensors over what it returned.
#pragma once

#include <unordered_map>

#include "device.h"

namespace sim {

using at::Tensor;

class Aliases {
 public:
  // The CPU tensor with the memory of a device tensor; a tensor of the CPU as it is.
  Tensor on_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    auto* own = tensor.storage().unsafeGetStorageImpl();
    keys_.emplace(own, tensor.key_set());
    auto found = pairs_.find(own);
    if (found == pairs_.end()) found = pairs_.emplace(own, std::make_pair(tensor.storage(), host_storage(tensor))).first;
    auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second.second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    copy_geometry(tensor, result);
    return result;
  }

  // The device tensor for what a CPU kernel returned: a view of an argument, or memory that becomes the device's without a copy.
  Tensor on_device(const Tensor& tensor, DeviceIndex device) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [own, pair] : pairs_) {
      if (pair.second.unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl()) continue;
      auto key = keys_.find(own);
      if (key == keys_.end()) return wrap(pair.first, tensor);
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(pair.first), key->second, tensor.dtype());
      copy_geometry(tensor, view);
      return view;
    }
    c10::Storage adopted(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(), adopt(tensor.storage(), device), &allocator, true);
    pairs_.emplace(adopted.unsafeGetStorageImpl(), std::make_pair(adopted, tensor.storage()));
    return wrap(std::move(adopted), tensor);
  }

  // After a kernel that may have resized `host`, an alias of `own` (`out=` arguments).
  void take_size(const Tensor& own, const Tensor& host) {
    auto& storage = pairs_.at(own.storage().unsafeGetStorageImpl()).second;
    if (storage.data() != own.storage().data() || storage.nbytes() != own.storage().nbytes()) {
      own.storage().set_data_ptr_noswap(adopt(storage, own.device().index()));
      own.storage().set_nbytes(storage.nbytes());
    }
    if (own.sizes() != host.sizes() || own.strides() != host.strides()) copy_geometry(host, own);
  }

 private:
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> pairs_;  // of the device, of the host
  std::unordered_map<c10::StorageImpl*, c10::DispatchKeySet> keys_;

  static void copy_geometry(const Tensor& from, const Tensor& to) {
    to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
    if (from.is_conj() != to.is_conj()) to._set_conj(from.is_conj());
    if (from.is_neg() != to.is_neg()) to._set_neg(from.is_neg());
  }
  static Tensor wrap(c10::Storage storage, const Tensor& like) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
    copy_geometry(like, result);
    return result;
  }
  static c10::Storage host_storage(const Tensor& tensor) {
    c10::DataPtr data(nullptr, Device(c10::kCPU));
    if (auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context())) {
      auto* owner = new std::shared_ptr<Memory>(block->memory);
      data = {tensor.storage().mutable_data(), owner, [](void* context) { delete static_cast<std::shared_ptr<Memory>*>(context); }, Device(c10::kCPU)};
    }
    return c10::Storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(), std::move(data), at::getCPUAllocator(), true);
  }
  static c10::DataPtr adopt(const c10::Storage& host, DeviceIndex device) {
    auto memory = std::make_shared<Memory>();
    memory->data = const_cast<void*>(host.data());
    void* not_null = memory->data ? memory->data : reinterpret_cast<void*>(1);
    memory->adopted = {not_null, new c10::Storage(host), [](void* context) { delete static_cast<c10::Storage*>(context); }, Device(c10::kCPU)};
    return block_of(std::move(memory), host.nbytes(), device);
  }
};

// Apply `change` to each tensor of an argument.
template <class Change>
c10::IValue each_tensor(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (const Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& each : value.toOptionalTensorVector()) changed.push_back(each ? std::optional<Tensor>(change(*each)) : each);
    return changed;
  }
  return value;
}

}  // namespace sim
