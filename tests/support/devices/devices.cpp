/* devices.cpp - a backend of torch with several devices whose memory is the host's.
 *
 * Torch treats them as accelerators: autograd has a thread for each, and every thread
 * has a current device, and a current stream on each device.  Streams are numbers.  All
 * work is done at once, so events are complete when they are recorded.
 *
 * An operation runs the CPU's kernel, on CPU tensors over the memory of the devices'
 * tensors (operation.h).  So results have the CPU's bits, and every write of a kernel,
 * declared in its schema or not, reaches the right memory.
 */
#include "operation.h"

#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>

using namespace devices;

extern "C" void devices_record(const void *memory, int64_t stream);

namespace
{
/* ---- current devices and streams ----------------------------------------------- */

thread_local DeviceIndex current = 0;
thread_local c10::StreamId streams[N_DEVICES] = {0};
std::atomic<int> n_visible{0};
std::atomic<c10::StreamId> n_streams{0};

DeviceIndex index_of(Device device)
{
    return device.has_index() ? device.index() : current;
}

c10::Stream stream_of(Device device, c10::StreamId id)
{
    return c10::Stream(c10::Stream::UNSAFE, Device(kPrivateUse1, index_of(device)), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return kPrivateUse1; }
    Device exchangeDevice(Device device) const override
    {
        const Device before = getDevice();
        current = device.index();
        return before;
    }
    Device getDevice() const override { return Device(kPrivateUse1, current); }
    void setDevice(Device device) const override { current = device.index(); }
    void uncheckedSetDevice(Device device) const noexcept override
    {
        current = device.index();
    }
    /* Called once, by the first backward, which starts as many threads. */
    DeviceIndex deviceCount() const noexcept override { return N_DEVICES; }
    c10::Stream getStream(Device device) const override
    {
        return stream_of(device, streams[index_of(device)]);
    }
    c10::Stream getDefaultStream(Device device) const override
    {
        return stream_of(device, 0);
    }
    c10::Stream getNewStream(Device device, int) const override
    {
        return stream_of(device, ++n_streams);
    }
    c10::Stream getStreamFromGlobalPool(Device device, bool) const override
    {
        return stream_of(device, ++n_streams);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        const c10::Stream before = getStream(stream.device());
        streams[stream.device_index()] = stream.id();
        return before;
    }
    void record(void **event, const c10::Stream &, const DeviceIndex,
                const c10::EventFlag) const override
    {
        *event = &streams; /* any event is already complete */
    }
    void block(void *, const c10::Stream &) const override {}
    void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override
    {
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

/* ---- memory and generators ------------------------------------------------------ */

/* Memory of a tensor, and the streams that its next user will follow: that of the
 * allocation, then those of record_stream(). */
struct Block {
    c10::Storage memory; /* the CPU's */
    std::vector<int64_t> streams;
};

/* fake_allocated() and fake_freed(); NULL: no order is checked. */
using Allocated = void (*)(const void *, size_t, int, int64_t);
using Freed = int (*)(const void *, const int64_t *, int);
std::atomic<Allocated> allocated{nullptr};
std::atomic<Freed> freed{nullptr};
std::mutex blocks_lock;
std::unordered_map<const void *, Block *> blocks;
std::vector<Block *> in_flight; /* freed, while work touches them */

/* Frees a block, or keeps it until its work is done.  Values that are read too late are
 * not numbers. */
void give_back(Block *block)
{
    void *memory = block->memory.mutable_data();
    const Freed asked = freed;
    const auto &streams = block->streams;
    if (asked && memory && asked(memory, streams.data(), int(streams.size()))) {
        const std::lock_guard guard(blocks_lock);
        in_flight.push_back(block);
        return;
    }
    if (asked && memory && block->memory.use_count() == 1)
        memset(memory, 0xff, block->memory.nbytes());
    delete block;
}

void give_back_again()
{
    std::vector<Block *> waiting;
    {
        const std::lock_guard guard(blocks_lock);
        waiting.swap(in_flight);
    }
    for (Block *block : waiting)
        give_back(block);
}

void release(void *held)
{
    auto *block = static_cast<Block *>(held);
    {
        const std::lock_guard guard(blocks_lock);
        blocks.erase(block->memory.data());
    }
    give_back(block);
    give_back_again();
}

struct HostMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t n_bytes) override
    {
        void *memory = nullptr;
        if (n_bytes > 0 && posix_memalign(&memory, 512, n_bytes) != 0)
            memory = nullptr;
        TORCH_CHECK_WITH(OutOfMemoryError, n_bytes == 0 || memory != nullptr,
                         "out of memory: ", n_bytes, " bytes");
        return {memory, memory, &free, Device(kPrivateUse1, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void *to, const void *from, size_t n_bytes) const override
    {
        default_copy_data(to, from, n_bytes);
    }
};
HostMemory memory;
REGISTER_ALLOCATOR(kPrivateUse1, &memory);

/* The CPU's generator, on another device. */
struct Randoms final : CPUGeneratorImpl {
    Randoms(DeviceIndex index, uint64_t seed) : CPUGeneratorImpl(seed)
    {
        device_ = Device(kPrivateUse1, index);
    }
    Randoms *clone_impl() const override
    {
        auto *twin = new Randoms(device_.index(), 0);
        twin->set_state(*get_state());
        return twin;
    }
};

Generator generators[N_DEVICES]; /* by device; made in Python */

struct Hooks final : PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return n_visible > 0; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return DeviceIndex(n_visible); }
    void setCurrentDevice(DeviceIndex index) const override { current = index; }
    DeviceIndex getCurrentDevice() const override { return current; }
    DeviceIndex exchangeDevice(DeviceIndex index) const override
    {
        return std::exchange(current, index);
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override
    {
        return std::exchange(current, index);
    }
    const Generator &getDefaultGenerator(DeviceIndex index) const override
    {
        return generators[index_of(Device(kPrivateUse1, index))];
    }
    Generator getNewGenerator(DeviceIndex index) const override
    {
        return make_generator<Randoms>(index < 0 ? current : index,
                                       default_rng_seed_val);
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage,
                                size_t n_bytes) const override
    {
        c10::StorageImpl *held = storage.unsafeGetStorageImpl();
        const c10::DeviceGuard guard(held->device());
        c10::DataPtr larger = memory.allocate(n_bytes);
        if (n_bytes > 0 && held->nbytes() > 0)
            memcpy(larger.get(), held->data(), std::min(n_bytes, held->nbytes()));
        held->set_data_ptr_noswap(std::move(larger));
        held->set_nbytes(n_bytes);
    }
};
Hooks hooks;
const bool is_registered = (RegisterPrivateUse1HooksInterface(&hooks), true);

/* ---- operations without a kernel on the CPU ------------------------------------- */

Tensor copy_from(const Tensor &from, const Tensor &to, bool)
{
    copy_values(from, to);
    return to;
}

Tensor copy_from_and_resize(const Tensor &from, const Tensor &to)
{
    if (from.sizes() != to.sizes())
        to.resize_(from.sizes());
    copy_values(from, to);
    return to;
}

Tensor &copy_sparse(Tensor &to, const Tensor &from, bool)
{
    copy_values(from, to);
    return to;
}

Tensor dropout(const Tensor &x, double p, bool is_training)
{
    if (!is_training || p == 0 || x.numel() == 0)
        return x;
    if (p == 1)
        return x * at::zeros_like(x);
    return x * at::empty_like(x).bernoulli_(1 - p).div_(1 - p);
}

using Optional = std::optional<Tensor>;

Tensor sum_of(Tensor gates, const Optional &one, const Optional &other)
{
    for (const Optional &bias : {one, other})
        if (bias && bias->defined())
            gates = gates + *bias;
    return gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor &input, const Tensor &hidden,
                                             const Tensor &cx, const Optional &one,
                                             const Optional &other)
{
    const Tensor gates = sum_of(input + hidden, one, other);
    const auto of = gates.chunk(4, 1);
    const Tensor cy = of[1].sigmoid() * cx + of[0].sigmoid() * of[2].tanh();
    return {of[3].sigmoid() * cy.tanh(), cy, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor &input, const Tensor &hidden,
                                    const Tensor &hx, const Optional &one,
                                    const Optional &other)
{
    const auto in = sum_of(input, one, {}).chunk(3, 1);
    const auto of = sum_of(hidden, other, {}).chunk(3, 1);
    const Tensor reset = (of[0] + in[0]).sigmoid(), kept = (of[1] + in[1]).sigmoid();
    const Tensor made = (in[2] + of[2] * reset).tanh();
    return {(hx - made) * kept + made, reset};
}

void record_stream(Tensor &tensor, c10::Stream stream)
{
    devices_record(tensor.storage().data(), stream.id());
}

/* The CPU's result has no memory, and so could not become a tensor of this backend. */
Tensor zeros(c10::SymIntArrayRef size, std::optional<ScalarType> dtype,
             std::optional<Layout> layout, std::optional<Device> device,
             std::optional<bool> is_pinned)
{
    return at::zeros_symint(size, dtype, layout, device, is_pinned);
}

int64_t choose_attention(const Tensor &, const Tensor &, const Tensor &,
                         const std::optional<Tensor> &, double, bool,
                         std::optional<double>, bool)
{
    return 0; /* plain operations */
}

const auto boxed = [] { return torch::CppFunction::makeFromBoxedFunction<&run>(); };

TORCH_LIBRARY_IMPL(_, PrivateUse1, m)
{
    m.fallback(boxed());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m)
{
    m.fallback(boxed());
}

/* Else torch would run each of these in parts, and each part by the fallback. */
void run_whole(torch::Library &m, DispatchKey cpu)
{
    for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findSchema(name);
        if (op && name.getNamespace() == "aten" && name.name != "aten::copy_" &&
            op->hasKernelForDispatchKey(cpu) &&
            (op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
             op->hasKernelForDispatchKey(
                 DispatchKey::CompositeExplicitAutogradNonFunctional)))
            m.impl(c10::toString(name).c_str(), boxed());
    }
}

/* These have no separate backward: autograd goes through their parts. */
void add_composites(torch::Library &m)
{
    m.impl("dropout", &dropout);
    m.impl("_thnn_fused_lstm_cell", &lstm_cell);
    m.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    run_whole(m, DispatchKey::CPU);
    add_composites(m);
    m.impl("convolution", boxed());
    m.impl("convolution_backward", boxed());
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_efficientzerotensor", &zeros);
    m.impl("record_stream", &record_stream);
    m.impl("_fused_sdp_choice", &choose_attention);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m)
{
    run_whole(m, DispatchKey::SparseCPU);
    m.impl("copy_", &copy_sparse);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m)
{
    add_composites(m);
}

/* A copy handles conjugates itself; else torch would first make one to copy from. */
TORCH_LIBRARY_IMPL(aten, Conjugate, m)
{
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m)
{
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFallthrough());
}

/* The operations that autocast on the CPU also runs in lower precision. */
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m)
{
    KERNEL_PRIVATEUSEONE(conv1d, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(conv3d, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}
} // namespace

Generator devices::default_generator(DeviceIndex index)
{
    return hooks.getDefaultGenerator(index);
}

DeviceIndex devices::current_device()
{
    return current;
}

c10::DataPtr devices::data_over(const c10::Storage &memory, Device device)
{
    const int64_t stream = streams[device.index()];
    void *data = memory.mutable_data();
    auto *block = new Block{memory, {stream}};
    if (const Allocated told = allocated; told && data)
        told(data, memory.nbytes(), device.index(), stream);
    const std::lock_guard guard(blocks_lock);
    blocks[data] = block;
    return c10::DataPtr(data, block, &release, device);
}

c10::Allocator *devices::allocator()
{
    return &memory;
}

/* ---- the interface to Python ---------------------------------------------------- */

extern "C" {
void devices_show(int n)
{
    n_visible = n;
}

int devices_current(void)
{
    return current;
}

void devices_set_current(int index)
{
    current = DeviceIndex(index);
}

int64_t devices_stream(int index)
{
    return streams[index];
}

void devices_set_stream(int index, int64_t stream)
{
    streams[index] = stream;
}

/* Have a tensor's memory outlive the work that a stream has when it is freed. */
void devices_record(const void *memory, int64_t stream)
{
    const std::lock_guard guard(blocks_lock);
    const auto found = blocks.find(memory);
    if (found != blocks.end())
        found->second->streams.push_back(stream);
}

/* Check the order of uses of all memory allocated from now on; NULL: of none. */
void devices_watch(Allocated told, Freed asked)
{
    allocated = told;
    freed = asked;
    give_back_again();
}

/* Make a device draw from the generator at this address. */
void devices_set_generator(int index, void *generator)
{
    using Held = c10::intrusive_ptr<c10::GeneratorImpl>;
    auto *given = static_cast<c10::GeneratorImpl *>(generator);
    generators[index] = Generator(Held::reclaim_copy(given));
}
}
