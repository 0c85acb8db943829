// A simulated accelerator: PrivateUse1 with two devices, whose kernels are those of the CPU.
//
// Its memory is one memory file, mapped twice. Tensors have addresses of the first mapping, which cannot be read or
// written; the kernels use the second. Host code that touches device memory ends with a segmentation fault.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <list>
#include <mutex>
#include <set>

namespace {

using at::IntArrayRef, at::Scalar, at::ScalarType, at::Tensor;  // names that autocast's macros use
#if __has_include(<ATen/core/Dimname.h>)
using at::DimnameList;
#endif
using c10::Device, c10::DeviceIndex, c10::Storage, c10::Stream;
constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr DeviceIndex COUNT = 2;

// ---- Waits of the host -----------------------------------------------------------------------------------------------

enum Wait { ITEM, SHAPE, TO_HOST, TO_DEVICE, SYNCHRONIZE, EVENT, KINDS };
constexpr const char* WORDS[KINDS] = {
    "a value is read", "a shape or an answer depends on values", "a copy to the host blocks",
    "a copy to the device blocks", "synchronize is called", "an event is waited for"};
std::atomic<int64_t> waits[KINDS];
std::atomic<bool> forbidden{false};

// Waiting for an event avoids waiting for everything, so it is allowed, as under torch.cuda.set_sync_debug_mode.
void host_waits(Wait kind) {
  ++waits[kind];
  TORCH_CHECK(!forbidden || kind == EVENT, "the host waits for the device: ", WORDS[kind]);
}

// ---- Devices, streams and events -------------------------------------------------------------------------------------

thread_local DeviceIndex current = 0;
thread_local c10::StreamId current_stream[COUNT] = {0, 0};
std::atomic<c10::StreamId> streams{0};

void check_index(DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < COUNT, "sim has ", int(COUNT), " devices, and none has the index ", int(index));
}

// Kernels run immediately. Only non-blocking copies to pinned memory are delayed, because the host could see them early.
struct Work {
  int64_t ticket;
  DeviceIndex device;
  c10::StreamId stream;
  std::function<void()> run;
};
std::list<Work> pending;
std::recursive_mutex pending_mutex;
int64_t tickets = 0;

void put_off(Stream stream, std::function<void()> run) {
  std::lock_guard lock(pending_mutex);
  pending.push_back({++tickets, stream.device_index(), stream.id(), std::move(run)});
}

// Run the delayed work of a stream (without one: of all streams of the device) in order. Return whether there was any.
bool finish(DeviceIndex device, std::optional<c10::StreamId> stream, int64_t last) {
  std::lock_guard lock(pending_mutex);
  std::list<Work> found;
  for (auto it = pending.begin(); it != pending.end();) {
    auto next = std::next(it);
    if (it->device == device && it->ticket <= last && (!stream || it->stream == *stream))
      found.splice(found.end(), pending, it);
    it = next;
  }
  for (auto& work : found) work.run();
  return !found.empty();
}

struct Event {
  int64_t ticket;
  Stream stream;
  std::chrono::steady_clock::time_point at;
  bool finish() { return ::finish(stream.device_index(), stream.id(), ticket); }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(SIM, current); }
  void setDevice(Device device) const override {
    check_index(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }

  static Device whole(Device device) { return device.has_index() ? device : Device(SIM, current); }
  Stream getStream(Device device) const override {
    device = whole(device);
    return Stream(Stream::UNSAFE, device, current_stream[device.index()]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, whole(device)); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::UNSAFE, whole(device), ++streams); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  // A query reports progress: unfinished work is complete at the next query.
  bool queryStream(const Stream& stream) const override {
    return !finish(stream.device_index(), stream.id(), INT64_MAX);
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits(SYNCHRONIZE);
    finish(stream.device_index(), stream.id(), INT64_MAX);
  }
  void synchronizeDevice(DeviceIndex index) const override {
    host_waits(SYNCHRONIZE);
    finish(index, std::nullopt, INT64_MAX);
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    std::lock_guard lock(pending_mutex);
    delete static_cast<Event*>(*event);
    *event = new Event{tickets, stream, std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const Stream& stream) const override {
    if (event) put_off(stream, [e = *static_cast<Event*>(event)]() mutable { e.finish(); });
  }
  bool queryEvent(void* event) const override { return !event || !static_cast<Event*>(event)->finish(); }
  void synchronizeEvent(void* event) const override {
    if (event && static_cast<Event*>(event)->finish()) host_waits(EVENT);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(
               static_cast<Event*>(second)->at - static_cast<Event*>(first)->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Memory ----------------------------------------------------------------------------------------------------------

constexpr size_t ARENA = size_t(1) << 36;  // reserved addresses; only used pages take memory
constexpr int SMALLEST = 6;                // 64 bytes, torch's alignment
char *shown = nullptr, *real = nullptr;    // addresses of tensors, and of the same bytes for kernels
size_t used = 0;
std::vector<size_t> unused[64];  // offsets of freed blocks, by the logarithm of their size
std::mutex memory_mutex;
c10::CachingDeviceAllocator::DeviceStats stats[COUNT];
bool forked = false;  // in a fork of a process that has used the device; they share its memory

struct Block {
  size_t offset, bytes;
  int size;
  DeviceIndex device;
};

void map_memory() {
  int file = memfd_create("castwise sim", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, ARENA) == 0, "no memory for the simulated device");
  shown = static_cast<char*>(mmap(nullptr, ARENA, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
  real = static_cast<char*>(mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
  TORCH_CHECK(shown != MAP_FAILED && real != MAP_FAILED, "no addresses for the simulated device");
  close(file);
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

void count_bytes(DeviceIndex device, int64_t bytes) {
  for (auto* array : {&stats[device].allocated_bytes, &stats[device].reserved_bytes, &stats[device].active_bytes,
                      &stats[device].requested_bytes})
    bytes > 0 ? (*array)[0].increase(bytes) : (*array)[0].decrease(-bytes);
  for (auto* array : {&stats[device].allocation, &stats[device].active})
    bytes > 0 ? (*array)[0].increase(1) : (*array)[0].decrease(1);
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard lock(memory_mutex);
  unused[block->size].push_back(block->offset);
  count_bytes(block->device, -int64_t(block->bytes));
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!forked, "the sim device cannot be used in a forked process; start it by spawn or forkserver");
    Device device(SIM, current);
    if (bytes == 0) return {nullptr, device};
    std::lock_guard lock(memory_mutex);
    if (!shown) map_memory();
    int size = std::max(SMALLEST, int(std::bit_width(bytes - 1)));
    size_t offset = used;
    if (!unused[size].empty()) {
      offset = unused[size].back();
      unused[size].pop_back();
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, used + (size_t(1) << size) <= ARENA, "the sim device is out of memory");
      used += size_t(1) << size;
    }
    count_bytes(current, bytes);
    return {shown + offset, new Block{offset, bytes, size, current}, free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(static_cast<char*>(to) - shown + real, static_cast<const char*>(from) - shown + real, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(memory_mutex);
    return stats[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    for (auto* array : {&stats[device].allocated_bytes, &stats[device].allocation}) (*array)[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard lock(memory_mutex);
    for (auto* array : {&stats[device].allocated_bytes, &stats[device].reserved_bytes, &stats[device].active_bytes,
                        &stats[device].requested_bytes, &stats[device].allocation, &stats[device].active})
      (*array)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {ARENA - used, ARENA}; }
};
Memory memory;
REGISTER_ALLOCATOR(SIM, &memory)

// Pinned memory is ordinary memory whose address is recorded. Only copies to it are delayed.
std::set<const void*> pinned;
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    std::lock_guard lock(memory_mutex);
    pinned.insert(data.get());
    void* at = data.get();
    return {at, new c10::DataPtr(std::move(data)), [](void* context) {
              std::unique_ptr<c10::DataPtr> whole(static_cast<c10::DataPtr*>(context));
              std::lock_guard lock(memory_mutex);
              pinned.erase(whole->get());
            }, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Pinned pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard lock(memory_mutex);
  return pinned.contains(data);
}

// ---- Random numbers --------------------------------------------------------------------------------------------------

// A CPU generator for the device: kernels draw from it, and it gives the CPU's numbers for the same seed.
struct Generator final : c10::GeneratorImpl {
  c10::intrusive_ptr<at::CPUGeneratorImpl> inner = c10::make_intrusive<at::CPUGeneratorImpl>();
  explicit Generator(DeviceIndex index) : GeneratorImpl(Device(SIM, index), c10::DispatchKeySet(KEY)) {}
  void set_current_seed(uint64_t seed) override { inner->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner->set_offset(offset); }
  uint64_t get_offset() const override { return inner->get_offset(); }
  uint64_t current_seed() const override { return inner->current_seed(); }
  uint64_t seed() override { return inner->seed(); }
  void set_state(const c10::TensorImpl& state) override { inner->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->inner->set_state(*inner->get_state());
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static at::Generator each[COUNT] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  index = index < 0 ? current : index;
  check_index(index);
  return each[index];
}

// While it exists, the CPU's default generator has the state of the device's, for kernels without a generator argument.
struct Drawing {
  static inline std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock{one_at_a_time};
  at::CPUGeneratorImpl& cpu = *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  at::CPUGeneratorImpl& device;
  explicit Drawing(const at::Generator& generator)
      : device(*static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner) { exchange(); }
  ~Drawing() { exchange(); }
  void exchange() {
    auto engine = cpu.engine();
    auto f = cpu.next_float_normal_sample();
    auto d = cpu.next_double_normal_sample();
    cpu.set_engine(device.engine());
    cpu.set_next_float_normal_sample(device.next_float_normal_sample());
    cpu.set_next_double_normal_sample(device.next_double_normal_sample());
    device.set_engine(engine);
    device.set_next_float_normal_sample(f);
    device.set_next_double_normal_sample(d);
  }
};

// ---- Hooks -----------------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return shown != nullptr; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(SIM, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(SIM, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto data = memory.allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) memory.copy_data(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
// Torch's static objects register default hooks; a library loaded later may replace them once.
[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- Tensors as the kernels see them ---------------------------------------------------------------------------------

std::atomic<bool> has_fp64{true};

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(has_fp64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
                   "this sim device has no float64; use float32 instead");
}

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, Device device) {
  check_dtype(dtype);
  check_index(device.index());
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(KEY), dtype);
}

// CPU tensors on the memory of device tensors, for one kernel call.
struct Aliases {
  std::vector<std::pair<Storage, Storage>> storages;  // device, CPU
  std::vector<std::pair<Tensor, Tensor>> tensors;
  std::optional<Device> device;

  Storage host(const Storage& storage) {
    for (auto& [ours, theirs] : storages)
      if (ours.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return theirs;
    char* at = static_cast<char*>(const_cast<void*>(storage.data()));
    Storage alias(Storage::use_byte_size_t(), storage.nbytes(),
                  c10::DataPtr(at ? at - shown + real : nullptr, c10::DeviceType::CPU), c10::GetCPUAllocator(), true);
    storages.emplace_back(storage, alias);
    return alias;
  }

  Tensor host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    device = device.value_or(tensor.device());
    for (auto& [ours, theirs] : tensors)
      if (ours.is_same(tensor)) return theirs;
    auto alias = like(tensor, host(tensor.storage()), c10::DispatchKey::CPU);
    tensors.emplace_back(tensor, alias);
    return alias;
  }

  static Tensor like(const Tensor& tensor, Storage storage, c10::DispatchKey key) {
    return shaped(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype()), tensor);
  }

  // In inference mode, a view of a normal tensor is a normal tensor; its dispatch keys decide that.
  static Tensor view(const Tensor& of, const Tensor& result) {
    return shaped(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, Storage(of.storage()), of.key_set(), result.dtype()), result);
  }

  static Tensor shaped(Tensor made, const Tensor& tensor) {
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
  }

  // Return the device tensor for a kernel's result: an argument, a view of one, or a new tensor.
  Tensor ours(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [ours, theirs] : tensors)
      if (theirs.is_same(result)) return ours;
    for (auto& [ours, theirs] : tensors)
      if (theirs.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) return view(ours, result);
    if (!result.device().is_cpu() || result.unsafeGetTensorImpl()->is_wrapped_number()) return result;
    auto made = empty(result.sizes(), result.strides(), result.scalar_type(), device.value_or(Device(SIM, current)));
    fill(made.storage(), result);
    return made;
  }

  static void fill(const Storage& storage, const Tensor& from) {
    if (size_t bytes = std::min(storage.nbytes(), from.storage().nbytes() - from.storage_offset() * from.itemsize()))
      std::memcpy(static_cast<char*>(storage.mutable_data()) - shown + real,
                  static_cast<const char*>(from.storage().data()) + from.storage_offset() * from.itemsize(), bytes);
  }

  // Apply to the device tensors what a kernel has resized or given another storage.
  void settle() {
    for (auto& [ours, theirs] : tensors) {
      Storage now = theirs.storage();
      bool known = false;
      for (auto& [storage, alias] : storages) {
        if (alias.unsafeGetStorageImpl() != now.unsafeGetStorageImpl()) continue;
        known = true;
        const char* at = static_cast<const char*>(storage.data());
        if (now.data() != (at ? at - shown + real : nullptr)) {
          c10::OptionalDeviceGuard guard(storage.device());
          auto data = memory.allocate(now.nbytes());
          std::memcpy(static_cast<char*>(data.get()) - shown + real, now.data(), now.nbytes());
          storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
          storage.unsafeGetStorageImpl()->set_nbytes(now.nbytes());
        }
        if (!ours.storage().is_alias_of(storage)) ours.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
      }
      if (!known) {
        auto made = empty({int64_t(now.nbytes())}, {1}, at::kByte, ours.device());
        if (now.nbytes()) std::memcpy(static_cast<char*>(made.storage().mutable_data()) - shown + real, now.data(), now.nbytes());
        ours.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
      }
      if (ours.sizes() != theirs.sizes() || ours.strides() != theirs.strides() ||
          ours.storage_offset() != theirs.storage_offset())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }
};

// ---- Every operator: the kernel of the CPU ---------------------------------------------------------------------------

// Like CUDA's kernels, accept 0-dim tensors and indices on the host, but no 0-dim tensors of optimizers and scalers.
void check_devices(const c10::OperatorHandle& op, const Tensor& tensor, std::optional<Device>& device) {
  if (!tensor.defined()) return;
  const auto& name = op.schema().name();
  bool strict = name.starts_with("aten::_amp_") || name.starts_with("aten::_fused_");
  if (tensor.device().is_cpu() && ((tensor.dim() == 0 && !strict) || name.starts_with("aten::index") ||
                                   name.starts_with("aten::_index_put") || name.starts_with("aten::set_")))
    return;
  if (device)
    TORCH_CHECK(tensor.device() == *device, "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", tensor.device(), "! (when calling ", name, ")");
  device = tensor.device();
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  for (auto tag : op.getTags())
    if (tag == at::Tag::data_dependent_output || tag == at::Tag::dynamic_output_shape) host_waits(SHAPE);
  Aliases aliases;
  std::optional<Device> device;
  auto arguments = torch::jit::last(stack, schema.arguments().size());
  const size_t begin = stack->size() - arguments.size();
  std::optional<at::Generator> generator;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[begin + i];
    if (value.isTensor()) {
      check_devices(op, value.toTensor(), device);
      value = aliases.host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList()) {
        check_devices(op, each, device);
        list.push_back(aliases.host(each));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList()) {
        if (each) check_devices(op, *each, device);
        list.push_back(each ? std::optional(aliases.host(*each)) : each);
      }
      value = list;
    } else if (value.isStorage()) {
      value = aliases.host(value.toStorage());
    } else if (value.isDevice() && value.toDevice().type() == SIM) {
      aliases.device = Guard::whole(value.toDevice());
      value = Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(generator->device().type() == SIM, "Expected a 'sim' device type for generator but found '",
                  generator->device().type(), "'");
      value = c10::IValue();
    }
  }
  {
    // autocast of the caller does not apply to the CPU kernel's inner calls
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded))
      drawing.emplace(generator.value_or(default_generator(aliases.device ? aliases.device->index() : -1)));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.ours(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList()) list.push_back(aliases.ours(each));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Torch's default would write these to a preallocated output, and warn if the kernel changes its shape.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (op && name.name.starts_with("aten::") && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      m.impl((name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

// ---- Creating, copying and reading tensors ---------------------------------------------------------------------------

Tensor empty_memory_format(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto where = Guard::whole(device.value_or(Device(SIM, current)));
  check_dtype(c10::dtype_or_default(dtype));
  check_index(where.index());
  c10::DeviceGuard guard(where);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, c10::DispatchKeySet(KEY),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(dtype),
               Guard::whole(device.value_or(Device(SIM, current))));
}

// A tensor of zeros without memory, as forward-mode differentiation creates.
Tensor zero_tensor(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                   std::optional<Device> device, std::optional<bool>) {
  at::native::ZeroTensorAllocator none(Guard::whole(device.value_or(Device(SIM, current))));
  auto keys = c10::DispatchKeySet(KEY) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &none, keys, c10::dtype_or_default(dtype), std::nullopt);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Aliases aliases;
  if (to.is_privateuseone()) {
    // CUDA also has read all of a pageable source when the call returns
    if (!from.is_privateuseone() && !(non_blocking && is_pinned(from.storage().data()))) host_waits(TO_DEVICE);
    aliases.host(to).copy_(aliases.host(from));
  } else {
    auto stream = Guard().getStream(from.device());
    if (non_blocking && is_pinned(to.storage().data())) {
      // uses the current values, because later kernels run after the copy
      put_off(stream, [to, values = aliases.host(from).clone()] { to.copy_(values); });
    } else {
      host_waits(TO_HOST);
      finish(stream.device_index(), stream.id(), INT64_MAX);
      to.copy_(aliases.host(from));
    }
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  host_waits(ITEM);
  auto stream = Guard().getStream(tensor.device());
  finish(stream.device_index(), stream.id(), INT64_MAX);
  Aliases aliases;
  return at::_local_scalar_dense(aliases.host(tensor));
}

void record_stream(Tensor&, Stream) {}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  Aliases aliases;
  std::optional<Tensor> added = bias ? std::optional(aliases.host(*bias)) : bias;
  return aliases.ours(at::convolution_symint(aliases.host(input), aliases.host(weight), added, stride, padding, dilation,
                                             transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  Aliases aliases;
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [a, b, c] = at::convolution_backward_symint(
      aliases.host(grad), aliases.host(input), aliases.host(weight), bias, stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  return {aliases.ours(a), aliases.ours(b), aliases.ours(c)};
}

// On an accelerator, torch uses fused kernels for cells of recurrent layers; the CPU has none.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto each = gates.chunk(4, 1);
  auto i = each[0].sigmoid(), f = each[1].sigmoid(), g = each[2].tanh(), o = each[3].sigmoid();
  auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy,
                                                      const std::optional<Tensor>& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto each = workspace.chunk(4, 1);
  auto i = each[0], f = each[1], g = each[2], o = each[3];
  auto tanh = cy.tanh();
  auto hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  auto c = hy * o * (1 - tanh * tanh);
  if (grad_cy && grad_cy->defined()) c = c + *grad_cy;
  auto gates = at::cat({c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), hy * tanh * o * (1 - o)}, 1);
  return {gates, c * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  bool biased = input_bias && input_bias->defined();
  auto x = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto h = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace,
                                                                     bool has_bias) {
  auto each = workspace.chunk(5, 1);
  auto r = each[0], z = each[1], n = each[2], hx = each[3], hidden = each[4];
  auto gn = grad * (1 - z) * (1 - n * n), gz = grad * (hx - n) * z * (1 - z), gr = gn * hidden * r * (1 - r);
  auto x = at::cat({gr, gz, gn}, 1), h = at::cat({gr, gz, gn * r}, 1);
  return {x, h, grad * z, has_bias ? x.sum(0) : Tensor(), has_bias ? h.sum(0) : Tensor()};
}

// With momentum, the CPU's fused SGD loses updates of low-format weights (torch 2.13); an accelerator's does not.
void fused_sgd(at::TensorList self, at::TensorList grads, at::TensorList momenta, double weight_decay, double momentum,
               double lr, double dampening, bool nesterov, bool maximize, bool first, const std::optional<Tensor>& scale,
               const std::optional<Tensor>& found_inf) {
  auto run = at::native::call_fallback_fn<&run_on_cpu, ATEN_OP(_fused_sgd_)>::call;
  if (self.empty() || !c10::isReducedFloatingType(self[0].scalar_type()))
    return run(self, grads, momenta, weight_decay, momentum, lr, dampening, nesterov, maximize, first, scale, found_inf);
  std::vector<Tensor> wide[3];
  const at::TensorList narrow[3] = {self, grads, momenta};
  for (int i = 0; i < 3; ++i)
    for (const Tensor& each : narrow[i]) wide[i].push_back(each.to(at::kFloat));
  run(wide[0], wide[1], wide[2], weight_decay, momentum, lr, dampening, nesterov, maximize, first, scale, found_inf);
  for (int i = 0; i < 3; ++i)
    for (size_t k = 0; k < wide[i].size(); ++k) narrow[i][k].copy_(wide[i][k]);
}

// Like CUDA's, it also counts integers.
Tensor histc(const Tensor& input, int64_t bins, const Scalar& min, const Scalar& max) {
  auto run = at::native::call_fallback_fn<&run_on_cpu, ATEN_OP(histc)>::call;
  return at::isIntegralType(input.scalar_type(), false)
      ? run(input.to(at::kFloat), bins, min, max).to(input.scalar_type()) : run(input, bins, min, max);
}

int64_t attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zero_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_fused_sgd_", fused_sgd);
  m.impl("_fused_sdp_choice", attention);
  m.impl("histc", histc);
  // Torch's default for these is a composition that accepts any mix of dtypes; the kernels of devices refuse fp32 inputs with low weights.
  for (auto name : {"native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// The copy kernel resolves conjugation and negation itself; torch's kernels for such tensors would copy and recurse.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ---- Autocast with CUDA's lists --------------------------------------------------------------------------------------

Tensor binary_cross_entropy_banned(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
  KERNEL_PRIVATEUSEONE(stack, promote)
  KERNEL_PRIVATEUSEONE(cat, promote)
  m.impl("binary_cross_entropy", binary_cross_entropy_banned);
}

// ---- Functions for Python ---------------------------------------------------------------------------------------------

TORCH_LIBRARY(castwise_sim, m) {
  m.def("waits() -> int[]", [] { return std::vector<int64_t>(waits, waits + KINDS); });
  m.def("forbid_waits(bool on) -> bool", [](bool on) { return forbidden.exchange(on); });
  m.def("set_fp64(bool on) -> bool", [](bool on) { return has_fp64.exchange(on); });
  m.def("is_in_bad_fork() -> bool", [] { return forked; });
  m.def("default_generator(int index) -> Generator?", [](int64_t index) -> std::optional<at::Generator> { return default_generator(index); });
  m.def("as_kernels_see(Tensor tensor) -> Tensor");
}
TORCH_LIBRARY_IMPL(castwise_sim, PrivateUse1, m) {
  // The result shares and keeps the memory of its argument, for code that runs on the host for the device, such as gloo.
  m.impl("as_kernels_see", [](const Tensor& tensor) {
    Aliases aliases;
    auto alias = aliases.host(tensor);
    auto* kept = new Storage(tensor.storage());
    auto data = alias.storage().mutable_data();
    alias.storage().set_data_ptr_noswap(
        {data, kept, [](void* context) { delete static_cast<Storage*>(context); }, c10::DeviceType::CPU});
    return alias;
  });
}

}  // namespace
