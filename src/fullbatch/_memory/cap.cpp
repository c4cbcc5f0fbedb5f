// A c10 CPU allocator that counts live and peak bytes to the byte and refuses what would pass a cap.
//
// Limit that forced it: PyTorch keeps no count of CPU memory, and an operating-system limit (RLIMIT_DATA) is neither
// exact nor limited to tensors. Shape of the answer: the same malloc and alignment as c10's default allocator, so
// numbers do not change, with the requested sizes kept beside it in a sharded table. A header in front of each block
// would be cheaper, but c10's raw_deallocate (used by oneDNN's scratch memory) may hand us blocks that the previous
// allocator made, and those must be recognised without touching memory in front of them.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

struct Shard {
  std::mutex mutex;
  std::unordered_map<void*, int64_t> sizes;
};

struct Event {
  int64_t time_ns;
  int64_t live;
};

// Leaked on purpose: tensors held by static objects are freed after any destructor of ours would have run.
auto& shards = *new std::array<Shard, 64>();
std::atomic<int64_t> live{0}, peak{0}, cap{-1}, refused{0};
std::atomic<Event*> events{nullptr};
std::atomic<int64_t> event_count{0}, event_capacity{0};

Shard& shard_of(void* data) {
  const auto bits = reinterpret_cast<uintptr_t>(data) >> 6;
  return shards[(bits ^ (bits >> 8)) & 63];
}

void record(int64_t level) {
  Event* buffer = events.load(std::memory_order_acquire);
  if (buffer == nullptr) return;
  const int64_t at = event_count.fetch_add(1);  // runs past the capacity when full: the excess is the number dropped
  if (at < event_capacity.load()) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    buffer[at] = {std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), level};
  }
}

void reserve(int64_t nbytes) {
  int64_t before = live.load();
  do {  // test and add in one atomic step, so that two threads cannot pass the cap together
    const int64_t limit = cap.load();
    if (limit >= 0 && before + nbytes > limit) {
      refused.store(nbytes);
      c10::profiledCPUMemoryReporter().OutOfMemory(static_cast<size_t>(nbytes));
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CPU memory cap reached: tried to allocate ", nbytes, " bytes with ", before,
          " bytes live under a cap of ", limit, " bytes (", before + nbytes - limit, " bytes too many).");
    }
  } while (!live.compare_exchange_weak(before, before + nbytes));
  const int64_t level = before + nbytes;
  int64_t seen = peak.load();
  while (seen < level && !peak.compare_exchange_weak(seen, level)) {
  }
  record(level);
}

void unreserve(int64_t nbytes) {
  record(live.fetch_sub(nbytes) - nbytes);
}

void release(void* data) {
  if (data == nullptr) return;
  int64_t nbytes = 0;
  {
    Shard& shard = shard_of(data);
    std::lock_guard<std::mutex> guard(shard.mutex);
    const auto found = shard.sizes.find(data);
    if (found != shard.sizes.end()) {  // absent: a block of the allocator before us, freed but never counted
      nbytes = found->second;
      shard.sizes.erase(found);  // before the free: the address may be handed out again at once
    }
  }
  if (nbytes != 0) unreserve(nbytes);
  c10::profiledCPUMemoryReporter().Delete(data);
  c10::free_cpu(data);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &release, device};
    reserve(static_cast<int64_t>(nbytes));
    void* data = nullptr;
    try {
      data = c10::alloc_cpu(nbytes);
    } catch (...) {
      unreserve(static_cast<int64_t>(nbytes));
      c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
      throw;
    }
    int64_t stale = 0;
    {
      Shard& shard = shard_of(data);
      std::lock_guard<std::mutex> guard(shard.mutex);
      auto& size = shard.sizes[data];
      stale = size;  // non-zero only if the block was freed behind our back, by the old raw deleter after uninstall
      size = static_cast<int64_t>(nbytes);
    }
    if (stale != 0) unreserve(stale);
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

auto& allocator = *new CountingAllocator();
c10::Allocator* previous = nullptr;

}  // namespace

extern "C" {
void fullbatch_install() {
  auto* current = c10::GetAllocator(c10::DeviceType::CPU);
  if (current == &allocator) return;
  previous = current;
  c10::SetAllocator(c10::DeviceType::CPU, &allocator, /*priority=*/255);
}
// SetAllocator ignores a lower priority than the highest ever given, so the old one goes back at 255 too.
void fullbatch_uninstall() {
  if (previous != nullptr && c10::GetAllocator(c10::DeviceType::CPU) == &allocator)
    c10::SetAllocator(c10::DeviceType::CPU, previous, /*priority=*/255);
}
int fullbatch_installed() { return c10::GetAllocator(c10::DeviceType::CPU) == &allocator; }
int64_t fullbatch_live() { return live.load(); }
int64_t fullbatch_peak() { return peak.load(); }
int64_t fullbatch_refused() { return refused.load(); }
void fullbatch_reset_peak() { peak.store(live.load()); }
int64_t fullbatch_cap() { return cap.load(); }
void fullbatch_set_cap(int64_t nbytes) { cap.store(nbytes); }
// The buffer belongs to the caller, who keeps it alive until recording is stopped (buffer null, capacity 0).
void fullbatch_record(int64_t* buffer, int64_t capacity) {
  events.store(nullptr);
  event_count.store(0);
  event_capacity.store(capacity);
  events.store(reinterpret_cast<Event*>(buffer), std::memory_order_release);
}
int64_t fullbatch_recorded() { return event_count.load(); }
int64_t fullbatch_now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}
}
