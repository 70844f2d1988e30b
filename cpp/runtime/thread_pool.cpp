#include "runtime/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "runtime/processors.h"
#include "runtime/errors.h"
#include "runtime/system.h"

namespace whet {
namespace {

constexpr int kSpins = 1000;  // pauses before a worker sleeps: about 30 us

std::atomic<Fork> borrowed{nullptr};
std::atomic<JobHook> job_hook{nullptr};
std::atomic<int> hook_threads{0};  // 0: no hook

// A job on borrowed threads: each thread claims tasks until none are left.
struct ForkedJob {
    size_t n_tasks;
    void (*task)(void*, size_t);
    void* context;
    std::atomic<size_t> next{0};

    static void run(void* self) {
        auto& job = *static_cast<ForkedJob*>(self);
        for (size_t i = job.next++; i < job.n_tasks; i = job.next++) job.task(job.context, i);
    }
};

// Stores the first exception of a job's tasks until all have ended: it must not unwind a worker, nor the caller while
// workers still use the caller's objects.
struct Guarded {
    void (*task)(void*, size_t);
    void* context;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};

    static void run(void* self, size_t i) {
        auto& job = *static_cast<Guarded*>(self);
        try {
            job.task(job.context, i);
        } catch (...) {
            if (!job.failed.exchange(true)) job.error = std::current_exception();
        }
    }
};

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

class ThreadPool {
public:
    explicit ThreadPool(int n_threads) {
        workers_.reserve(static_cast<size_t>(n_threads));
        try {
            for (int i = 1; i < n_threads; ++i) workers_.emplace_back([this] { work(); });
        } catch (...) {  // the limit on threads is reached
            stop();
            throw;
        }
    }

    ~ThreadPool() { stop(); }

    int n_threads() const { return static_cast<int>(workers_.size()) + 1; }

    void run(size_t n_tasks, void (*task)(void*, size_t), void* context) {
        const std::unique_lock lock(job_mutex_, std::try_to_lock);
        if (!lock || workers_.empty() || n_tasks < 2 || n_tasks > kLeftMask) {
            for (size_t i = 0; i < n_tasks; ++i) task(context, i);
            return;
        }
        if (const Fork fork = borrowed.load()) {
            ForkedJob job{n_tasks, task, context};
            fork(ForkedJob::run, &job, static_cast<unsigned>(n_threads()), 0);
            return;
        }
        task_ = task;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        ++job_;
        ticket_.store(job_ << kJobShift | n_tasks);
        wake_one();
        while (run_one()) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != n_tasks; ++spins) {
            spins < kSpins ? pause_briefly() : std::this_thread::yield();
        }
    }

private:
    // The ticket has the job's number in its high bits and the count of unclaimed tasks in its low bits: a successful
    // claim belongs to the job in task_ and context_, since a job does not end before its claimed tasks are done.
    static constexpr int kJobShift = 32;
    static constexpr uint64_t kLeftMask = (uint64_t{1} << kJobShift) - 1;

    void stop() {
        stop_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (std::thread& t : workers_) t.join();
    }

    bool has_tasks() const { return (ticket_.load() & kLeftMask) != 0; }

    // One by one: waking all of them takes the caller longer than a small job, and a job of few tasks needs few.
    void wake_one() {
        if (sleeping_.load() == 0) return;
        epoch_.fetch_add(1);
        epoch_.notify_one();
    }

    bool run_one() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        do {
            if ((ticket & kLeftMask) == 0) return false;
        } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire));
        task_(context_, (ticket & kLeftMask) - 1);
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void work() {
        while (!stop_.load(std::memory_order_relaxed)) {
            bool busy = false;
            for (int spins = 0; spins < kSpins && !busy; ++spins) {
                busy = run_one();
                pause_briefly();
            }
            if (busy) continue;
            // Increment the count of sleepers before the last check for tasks: either the caller sees the count and
            // wakes this thread, or this thread sees the caller's tasks.
            const uint32_t epoch = epoch_.load();
            sleeping_.fetch_add(1);
            if (!has_tasks() && !stop_.load()) epoch_.wait(epoch);
            sleeping_.fetch_sub(1);
            // Two each: the number of awake workers doubles at each turn.
            for (int i = 0; i < 2 && has_tasks(); ++i) wake_one();
        }
    }

    std::mutex job_mutex_;
    void (*task_)(void*, size_t) = nullptr;
    void* context_ = nullptr;
    uint64_t job_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<size_t> done_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<uint32_t> epoch_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

bool has_siblings = false;  // this process is a worker of a pool of processes

int default_n_threads() {
    if (const char* wanted = std::getenv("WHET_NUM_THREADS"); wanted != nullptr && *wanted != '\0') {
        char* end = nullptr;
        const long n = std::strtol(wanted, &end, 10);
        if (*end != '\0' || n < 1 || n > 1024) {
            throw VariableError("WHET_NUM_THREADS=" + std::string(wanted) +
                                " is not a number from 1 to 1024. Unset it to use all processors.");
        }
        return static_cast<int>(n);
    }
    // torchrun, joblib and Ray divide the processors among their workers by this variable; "4,2": levels of nesting.
    const char* openmp = std::getenv("OMP_NUM_THREADS");
    const long given = openmp == nullptr ? 0 : std::strtol(openmp, nullptr, 10);
    if (given > 0) return static_cast<int>(std::min<long>(given, n_processors()));
    return has_siblings ? 1 : n_processors();
}

std::mutex pool_mutex;
// A job owns a reference to its pool, so that another thread may replace the pool by one of another size during the
// job. Never destroyed at exit: a daemon thread of the host program may still be using it. A forked child has none of
// its parent's threads: it starts a new pool, does not destroy the parent's, and borrows no threads.
auto& pool = *new std::shared_ptr<ThreadPool>;
int wanted_threads = 0;  // 0: default
bool may_oversubscribe = false;

// Under pool_mutex.
int usable_threads() {
    const int wanted = wanted_threads > 0 ? wanted_threads : default_n_threads();
    return may_oversubscribe ? wanted : std::min(wanted, max_processors());
}

void end_fork_in_child() {
    ::new (static_cast<void*>(&pool)) std::shared_ptr<ThreadPool>;
    borrowed.store(nullptr);
    has_siblings = true;
    pool_mutex.unlock();
}

[[maybe_unused]] const bool watches_forks =
    (at_fork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); }, end_fork_in_child), true);

std::shared_ptr<ThreadPool> the_pool() {
    const std::lock_guard lock(pool_mutex);
    if (pool == nullptr) {
        pool = std::make_shared<ThreadPool>(usable_threads());
    }
    return pool;
}

}  // namespace

int num_threads() {
    const int threads = hook_threads.load(std::memory_order_relaxed);
    return threads > 0 ? threads : the_pool()->n_threads();
}

void set_num_threads(int n, bool oversubscribe) {
    std::shared_ptr<ThreadPool> before;  // destroyed outside the lock, by its last job
    const std::lock_guard lock(pool_mutex);
    wanted_threads = n;
    may_oversubscribe = oversubscribe;
    if (pool != nullptr && pool->n_threads() != usable_threads()) before.swap(pool);
}

void expect_siblings() {
    const std::lock_guard lock(pool_mutex);
    has_siblings = true;
}

void borrow_threads(Fork fork) { borrowed.store(fork); }

void set_job_hook(JobHook hook, int threads) {
    job_hook.store(hook);
    hook_threads.store(threads);
}

void parallel_for(size_t n_tasks, void (*task)(void* context, size_t i), void* context) {
    if (const JobHook hook = job_hook.load(std::memory_order_relaxed)) return hook(n_tasks, task, context);
    Guarded job{task, context};
    the_pool()->run(n_tasks, Guarded::run, &job);
    if (job.error) std::rethrow_exception(job.error);
}

}  // namespace whet
