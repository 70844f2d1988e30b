// The thread pool of a WebAssembly build: the host's workers, each an instance of the module on the same shared memory.
//
// A worker enters work() and never returns: it spins for a while after a job and then waits on the shared memory
// (memory.atomic.wait). The host terminates it. In a build without shared memory every task runs on the calling thread.
#include "runtime/thread_pool.h"

#include <atomic>
#include <cstdint>
#include <new>

#include "bindings/wasm/exports.h"

namespace whet {
namespace {

int n_workers = 1;  // threads, including the caller

#if defined(__wasm_atomics__)
constexpr int kSpins = 20000;  // checks before a worker sleeps: about 50 us

// As in runtime/thread_pool.cpp: the job's number above, the count of unclaimed tasks below.
constexpr int kJobShift = 32;
constexpr uint64_t kLeftMask = (uint64_t{1} << kJobShift) - 1;

struct Pool {
    void (*task)(void*, size_t) = nullptr;
    void* context = nullptr;
    uint64_t job = 0;
    bool is_busy = false;  // used by the calling thread only
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<uint32_t> done{0};
    alignas(64) std::atomic<int> sleeping{0};
    std::atomic<int> epoch{0};
    std::atomic<bool> failed{false};
};
Pool pool;
thread_local bool is_worker = false;

bool run_one() {
    uint64_t ticket = pool.ticket.load(std::memory_order_acquire);
    do {
        if ((ticket & kLeftMask) == 0) return false;
    } while (!pool.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire));
    pool.task(pool.context, static_cast<size_t>(ticket & kLeftMask) - 1);
    pool.done.fetch_add(1, std::memory_order_release);
    return true;
}

void wait_until_done(uint32_t n_tasks) {
    for (int spins = 0;; ++spins) {
        const uint32_t done = pool.done.load(std::memory_order_acquire);
        if (done == n_tasks) return;
        // The thread of a task may be waiting for a processor: sleep, to yield this one.
        constexpr int64_t kNanoseconds = 20000;
        if (spins > kSpins) {
            __builtin_wasm_memory_atomic_wait32(reinterpret_cast<int*>(&pool.done), static_cast<int>(done),
                                                kNanoseconds);
        }
    }
}

// A job of the pool. If a task of the calling thread throws, waits for the workers' tasks before the caller's objects
// are destroyed.
class SharedJob {
public:
    SharedJob(size_t n_tasks, void (*task)(void*, size_t), void* context) : n_tasks_(static_cast<uint32_t>(n_tasks)) {
        pool.is_busy = true;
        pool.task = task;
        pool.context = context;
        pool.failed.store(false);
        pool.done.store(0, std::memory_order_relaxed);
        ++pool.job;
        pool.ticket.store(pool.job << kJobShift | n_tasks);
        if (pool.sleeping.load() > 0) {
            pool.epoch.fetch_add(1);
            __builtin_wasm_memory_atomic_notify(reinterpret_cast<int*>(&pool.epoch), UINT32_MAX);
        }
    }
    SharedJob(const SharedJob&) = delete;
    ~SharedJob() {
        if (!is_over_) {  // a task of this thread has thrown: done_ counts neither it nor the unclaimed tasks
            const auto left = static_cast<uint32_t>(pool.ticket.exchange(pool.job << kJobShift) & kLeftMask);
            wait_until_done(n_tasks_ - left - 1);
        }
        pool.is_busy = false;
    }
    void run() {
        while (run_one()) {
        }
        wait_until_done(n_tasks_);
        is_over_ = true;
    }

private:
    const uint32_t n_tasks_;
    bool is_over_ = false;
};
#endif

}  // namespace

int num_threads() { return n_workers; }
void set_num_threads(int n, bool) { n_workers = n; }

void parallel_for(size_t n_tasks, void (*task)(void* context, size_t i), void* context) {
#if defined(__wasm_atomics__)
    if (n_workers > 1 && n_tasks > 1 && !is_worker && !pool.is_busy) {
        SharedJob job(n_tasks, task, context);
        job.run();
        if (pool.failed.load()) throw std::bad_alloc();  // thrown by a worker's task
        return;
    }
#endif
    for (size_t i = 0; i < n_tasks; ++i) task(context, i);
}

// Sets the number of threads, including the caller: the host has started one fewer worker.
WHET_EXPORT(set_threads) void set_threads(int n) { set_num_threads(n); }

#if defined(__wasm_atomics__)
WHET_EXPORT(work) void work() {
    is_worker = true;
    for (;;) {
        bool is_busy = false;
        for (int spins = 0; spins < kSpins && !is_busy; ++spins) is_busy = run_one();
        if (is_busy) continue;
        // The count of sleepers is incremented before the last check for tasks; see runtime/thread_pool.cpp.
        const int epoch = pool.epoch.load();
        pool.sleeping.fetch_add(1);
        if (!run_one()) __builtin_wasm_memory_atomic_wait32(reinterpret_cast<int*>(&pool.epoch), epoch, -1);
        pool.sleeping.fetch_sub(1);
    }
}

// Called by the host after a worker's task has thrown, before it calls work() again.
WHET_EXPORT(fail_task) void fail_task() {
    pool.failed.store(true);
    pool.done.fetch_add(1, std::memory_order_release);
}
#endif

}  // namespace whet
