/* operation.cpp - runs one operation of torch by the CPU's kernel.
 *
 *     device tensors -> CPU tensors over the same memory -> kernel -> device tensors
 *
 * Nothing is copied.  A result over the memory of an argument is a view of that
 * argument; a result with separate memory keeps it.  Changes that the kernel makes to
 * sizes or memory of an argument are applied to the device's tensor, too.
 */
#include "operation.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/CPUAllocator.h>

#include <set>

namespace devices
{
namespace
{
void let_go(void *storage)
{
    delete static_cast<c10::Storage *>(storage);
}

/* Return a storage over the memory of another one; it keeps the other alive. */
c10::Storage storage_over(const c10::Storage &other, Device device)
{
    const auto size = c10::Storage::use_byte_size_t();
    if (!device.is_cpu())
        return c10::Storage(size, other.nbytes(), data_over(other, device), allocator(),
                            other.resizable());
    auto *held = new c10::Storage(other);
    c10::DataPtr memory(other.mutable_data(), held, &let_go, device);
    return c10::Storage(size, other.nbytes(), std::move(memory), c10::GetCPUAllocator(),
                        other.resizable());
}

/* Return the same dispatch keys for the other kind of device. */
DispatchKeySet other_keys(DispatchKeySet keys)
{
    const bool is_cpu = keys.has_backend(c10::BackendComponent::CPUBit);
    const auto here =
        is_cpu ? c10::BackendComponent::CPUBit : c10::BackendComponent::PrivateUse1Bit;
    const auto there =
        is_cpu ? c10::BackendComponent::PrivateUse1Bit : c10::BackendComponent::CPUBit;
    return (keys - c10::autocast_dispatch_keyset).remove_backend(here) |
           DispatchKeySet(there) | c10::getAutocastRelatedKeySetFromBackend(there);
}

/* Return a tensor in a storage with the sizes, strides and offset of another tensor. */
Tensor tensor_like(const Tensor &other, c10::Storage storage)
{
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, std::move(storage), other_keys(other.key_set()),
        other.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(),
                                                      other.storage_offset());
    return made;
}

bool lies_alike(const Tensor &one, const Tensor &other)
{
    return one.sizes() == other.sizes() && one.strides() == other.strides() &&
           one.storage_offset() == other.storage_offset();
}

/* On a GPU too, these kernels take indices from the CPU. */
bool takes_cpu_tensors(const std::string &name)
{
    static const std::set<std::string> names = {
        "aten::index",          "aten::index_put",         "aten::index_put_",
        "aten::_unsafe_index",  "aten::_unsafe_index_put", "aten::_index_put_impl_",
        "aten::_index_put_impl"};
    return names.count(name) > 0;
}

class Operation
{
  public:
    explicit Operation(const std::string &name) : name(name) {}

    IValue to_cpu(const IValue &value);
    IValue to_device(const IValue &value);
    Tensor to_cpu(const Tensor &tensor);
    Tensor to_device(const Tensor &tensor);
    void write_back();

    DeviceIndex index() { return found < 0 ? current_device() : found; }

  private:
    struct Memory {
        c10::Storage device, cpu;
    };
    struct Pair {
        Tensor device, cpu, indices, values;
    };

    void check(const Tensor &tensor);
    Tensor sparse_to_cpu(const Tensor &tensor);
    Tensor sparse_to_device(const Tensor &tensor);
    c10::Storage cpu_storage(const c10::Storage &storage);
    c10::Storage device_storage(const c10::Storage &storage);

    const std::string &name;
    DeviceIndex found = -1; /* the device of the arguments so far; -1: none */
    bool has_cpu = false;   /* one of them is on the CPU */
    std::vector<Memory> memories;
    std::vector<Pair> pairs;
};

/* ---- arguments ------------------------------------------------------------------ */

void Operation::check(const Tensor &tensor)
{
    const Device mine = tensor.device();
    if (mine.is_cpu()) {
        has_cpu |= tensor.dim() > 0 && !takes_cpu_tensors(name);
    } else {
        TORCH_CHECK(found < 0 || found == mine.index(),
                    "Expected all tensors to be on the same device, but found at least "
                    "two devices, ",
                    Device(kPrivateUse1, found), " and ", mine, "! (", name, ")");
        found = mine.index();
    }
    TORCH_CHECK(!has_cpu || found < 0,
                "Expected all tensors to be on the same device, but found at least two "
                "devices, ",
                Device(kPrivateUse1, found), " and cpu! (", name, ")");
}

c10::Storage Operation::cpu_storage(const c10::Storage &storage)
{
    for (const Memory &memory : memories)
        if (memory.device.is_alias_of(storage))
            return memory.cpu;
    memories.push_back({storage, storage_over(storage, kCPU)});
    return memories.back().cpu;
}

Tensor Operation::sparse_to_cpu(const Tensor &tensor)
{
    const auto *held = sparse::get_sparse_impl(tensor);
    const Tensor indices = to_cpu(held->indices()), values = to_cpu(held->values());
    Tensor made = at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes());
    made._coalesced_(held->coalesced());
    return made;
}

Tensor Operation::to_cpu(const Tensor &tensor)
{
    if (!tensor.defined())
        return tensor;
    check(tensor);
    if (tensor.is_cpu())
        return tensor;
    for (const Pair &pair : pairs)
        if (pair.device.is_same(tensor))
            return pair.cpu;
    if (tensor.is_sparse()) {
        Tensor made = sparse_to_cpu(tensor);
        pairs.push_back({tensor, made, made._indices(), made._values()});
        return made;
    }
    Tensor made = tensor_like(tensor, cpu_storage(tensor.storage()));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        made.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.push_back({tensor, made, {}, {}});
    return made;
}

IValue Operation::to_cpu(const IValue &value)
{
    if (value.isTensor())
        return to_cpu(value.toTensor());
    if (value.isStorage())
        return cpu_storage(value.toStorage());
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
        const Device device = value.toDevice();
        found = device.has_index() ? device.index() : current_device();
        return Device(kCPU);
    }
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor &tensor : value.toTensorVector())
            list.push_back(to_cpu(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor> &tensor : value.toOptionalTensorVector())
            list.push_back(tensor ? std::optional(to_cpu(*tensor)) : std::nullopt);
        return list;
    }
    return value;
}

/* ---- results -------------------------------------------------------------------- */

c10::Storage Operation::device_storage(const c10::Storage &storage)
{
    for (const Memory &memory : memories)
        if (memory.cpu.is_alias_of(storage))
            return memory.device;
    memories.push_back({storage_over(storage, Device(kPrivateUse1, index())), storage});
    return memories.back().device;
}

Tensor Operation::sparse_to_device(const Tensor &tensor)
{
    const c10::DeviceGuard guard(Device(kPrivateUse1, index()));
    Tensor made = at::detail::make_tensor<SparseTensorImpl>(
        DispatchKeySet(DispatchKey::SparsePrivateUse1), tensor.dtype());
    auto *held = sparse::get_sparse_impl(made);
    held->raw_resize_(tensor.sparse_dim(), tensor.dense_dim(), tensor.sizes());
    held->set_indices_and_values_unsafe(to_device(tensor._indices()),
                                        to_device(tensor._values()));
    held->set_coalesced(tensor.is_coalesced());
    return made;
}

Tensor Operation::to_device(const Tensor &tensor)
{
    if (!tensor.defined())
        return tensor;
    for (const Pair &pair : pairs)
        if (pair.cpu.is_same(tensor))
            return pair.device;
    if (tensor.is_sparse())
        return sparse_to_device(tensor);
    return tensor_like(tensor, device_storage(tensor.storage()));
}

IValue Operation::to_device(const IValue &value)
{
    if (value.isTensor())
        return to_device(value.toTensor());
    if (!value.isTensorList())
        return value;
    c10::List<Tensor> list;
    for (const Tensor &tensor : value.toTensorVector())
        list.push_back(to_device(tensor));
    return list;
}

/* Apply to the arguments what the kernel did to their twins on the CPU. */
void Operation::write_back()
{
    for (const Memory &memory : std::vector<Memory>(memories)) {
        if (memory.cpu.data() == memory.device.data() &&
            memory.cpu.nbytes() == memory.device.nbytes())
            continue;
        c10::StorageImpl *device = memory.device.unsafeGetStorageImpl();
        device->set_data_ptr_noswap(data_over(memory.cpu, device->device()));
        device->set_nbytes(memory.cpu.nbytes());
    }
    for (const Pair &pair : std::vector<Pair>(pairs)) {
        if (pair.device.is_sparse()) {
            if (pair.indices.is_same(pair.cpu._indices()) &&
                pair.values.is_same(pair.cpu._values()))
                continue;
            auto *held = sparse::get_sparse_impl(pair.device);
            held->raw_resize_(pair.cpu.sparse_dim(), pair.cpu.dense_dim(),
                              pair.cpu.sizes());
            held->set_indices_and_values_unsafe(to_device(pair.cpu._indices()),
                                                to_device(pair.cpu._values()));
            held->set_coalesced(pair.cpu.is_coalesced());
            continue;
        }
        c10::TensorImpl *device = pair.device.unsafeGetTensorImpl();
        const c10::Storage storage = device_storage(pair.cpu.storage());
        if (!pair.device.storage().is_alias_of(storage))
            device->set_storage_keep_dtype(storage);
        if (!lies_alike(pair.device, pair.cpu))
            device->set_sizes_and_strides(pair.cpu.sizes(), pair.cpu.strides(),
                                          pair.cpu.storage_offset());
    }
}

/* ---- random numbers ------------------------------------------------------------- */

/* Lends a device's generator to a kernel that takes only the CPU's. */
class Lent
{
  public:
    explicit Lent(Generator generator)
        : own(std::move(generator)), hold(own.mutex()),
          twin(at::detail::createCPUGenerator(0))
    {
        twin.unsafeGetGeneratorImpl()->set_state(
            *own.unsafeGetGeneratorImpl()->get_state());
    }
    ~Lent()
    {
        own.unsafeGetGeneratorImpl()->set_state(
            *twin.unsafeGetGeneratorImpl()->get_state());
    }

    Generator own;
    std::lock_guard<std::mutex> hold;
    Generator twin;
};
} // namespace

/* ---- running -------------------------------------------------------------------- */

void run(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto &arguments = op.schema().arguments();
    Operation operation(op.schema().name());
    const size_t first = stack->size() - arguments.size();
    std::optional<Lent> lent;
    for (size_t i = first; i < stack->size(); i++)
        (*stack)[i] = operation.to_cpu((*stack)[i]);
    for (size_t i = 0; i < arguments.size(); i++) {
        IValue &value = (*stack)[first + i];
        if (arguments[i].name() != "generator")
            continue;
        lent.emplace(value.isNone() ? default_generator(operation.index())
                                    : value.toGenerator());
        value = lent->twin;
    }
    op.callBoxed(stack);
    operation.write_back();
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size();
         i++)
        (*stack)[i] = operation.to_device((*stack)[i]);
}

void copy_values(const Tensor &from, const Tensor &to)
{
    const AutoDispatchBelowADInplaceOrView below;
    static const std::string name = "copy";
    Operation source(name), target(name);
    target.to_cpu(to).copy_(source.to_cpu(from));
    target.write_back();
}
} // namespace devices
