// A CUDA device that is not there, for libtorch: loaded before `import torch`, it makes the CPU wheel take its CUDA branches.
//
// The autograd engine asks the device guard for streams and events: it runs a backward function on the stream of its forward and joins
// streams by events. Here a stream is a number, and what the engine records and waits for goes into a log that Python reads
// (`engine_log_*`). Nothing is executed: what the tensors "on" the device hold is up to Python (device.py).
// Interfaces: c10/core/impl/DeviceGuardImplInterface.h, ATen/detail/CUDAHooksInterface.h.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace {

constexpr c10::DeviceIndex num_devices = 8;

struct Entry {
  char kind;  // 'r': event recorded on stream, 'w': stream waits for event, 's': host waits for stream, 'e': host waits for event
  int64_t event;
  int64_t stream;
};

std::mutex mutex;
std::vector<Entry> entries;
std::atomic<int64_t> next_event{1};
thread_local int64_t current_stream = 0;
thread_local c10::DeviceIndex current_device = 0;

void log(char kind, int64_t event, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  entries.push_back({kind, event, stream});
}

int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = device.index();
    return before;
  }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }

  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, current_stream); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream;
    current_stream = stream.id();
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), before);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { log('s', 0, stream.id()); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(next_event++);
    log('r', number(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override { log('w', number(event), stream.id()); }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { log('e', number(event), 0); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

namespace at {

// the registry looks for a class of this name
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

extern "C" {

int64_t stream_get() { return current_stream; }
void stream_set(int64_t stream) { current_stream = stream; }

// Copies up to `capacity` entries into `out` (three numbers each) and forgets them; returns how many there were.
int64_t engine_log_take(int64_t* out, int64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex);
  auto count = std::min<int64_t>(capacity, static_cast<int64_t>(entries.size()));
  for (int64_t i = 0; i < count; ++i) {
    out[3 * i] = entries[i].kind;
    out[3 * i + 1] = entries[i].event;
    out[3 * i + 2] = entries[i].stream;
  }
  entries.erase(entries.begin(), entries.begin() + count);
  return count;
}

}  // extern "C"
