// Bindings of the machine probes: rates at which threads read, copy and scale memory, and multiply and add; the cost of
// allocating and freeing memory; and the tasks of the pool's jobs.
//
// All threads start together and work for a batch of at least a millisecond, timed from the first start to the last
// end. Batches are repeated for the requested time, and the fastest counts: a probe measures a ceiling, and
// disturbances only slow a batch down. src/whet/ops/probe.py checks the arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "engine/kv_memory.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/job_trace.h"
#include "runtime/system.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

namespace whet {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
    return std::chrono::duration<double>(end - start).count();
}

// Calls body(i) once per thread, concurrently; returns the seconds from the first start to the last end.
//
// A thread may run two tasks if another does not wake, so no task waits for longer than kPatience.
template <class Body>
double run_together(size_t n_threads, const Body& body) {
    constexpr double kPatience = 0.02;
    std::vector<Clock::time_point> start(n_threads), end(n_threads);
    std::atomic<size_t> arrived{0};
    auto task = [&](size_t i) {
        arrived.fetch_add(1);
        const Clock::time_point arrival = Clock::now();
        while (arrived.load() < n_threads && seconds_between(arrival, Clock::now()) < kPatience) {
            std::this_thread::yield();
        }
        start[i] = Clock::now();
        body(i);
        end[i] = Clock::now();
    };
    parallel_for(n_threads, task);
    return seconds_between(*std::min_element(start.begin(), start.end()), *std::max_element(end.begin(), end.end()));
}

// The highest rate, in units of work(repeats) per second. The first batch is a warm-up.
template <class Batch>
double best_rate(double seconds, const Batch& batch) {
    constexpr double kBatch = 1e-3;
    constexpr int kBatches = 3;
    const Clock::time_point start = Clock::now();
    batch(1);
    double best = 0.0;
    size_t repeats = 1;
    for (int done = 0; done < kBatches || seconds_between(start, Clock::now()) < seconds;) {
        const double elapsed = batch(repeats);
        if (elapsed < kBatch) {
            repeats *= 2;
            continue;
        }
        best = std::max(best, static_cast<double>(repeats) / elapsed);
        ++done;
    }
    return best;
}

// Memory on huge pages if available, so that address translation does not limit the rate.
class Memory {
public:
    static constexpr size_t kHugePage = size_t{2} << 20;

    explicit Memory(size_t n_bytes) {
        const size_t size = ceil_div(n_bytes, kHugePage) * kHugePage;
        data_.reset(static_cast<char*>(allocate_aligned(kHugePage, size)));
        if (data_ == nullptr) throw std::bad_alloc();
        prefer_huge_pages(data_.get(), size);
    }
    char* data() const { return data_.get(); }

private:
    std::unique_ptr<char, FreeAligned> data_;
};

// Memory in one part per thread, each initialised to ones by (most likely) the thread that will use it.
struct Parts {
    size_t n_threads = static_cast<size_t>(num_threads());
    size_t part_bytes;
    Memory memory;

    explicit Parts(size_t n_bytes)
        : part_bytes((n_bytes + n_threads * kProbeStep - 1) / (n_threads * kProbeStep) * kProbeStep),
          memory(n_threads * part_bytes) {
        run_together(n_threads, [&](size_t i) { std::fill_n(floats(i), part_bytes / sizeof(float), 1.0f); });
    }
    float* floats(size_t i) const { return reinterpret_cast<float*>(memory.data() + i * part_bytes); }
    double size() const { return static_cast<double>(n_threads * part_bytes); }
};

void read(const Parts& parts, size_t i, size_t repeats) {
    // The sink prevents the compiler from removing the unused loads.
    static std::atomic<uint64_t> sink;
    sink.store(kernels().probe_read(parts.floats(i), parts.part_bytes, repeats), std::memory_order_relaxed);
}

double read_rate(size_t n_bytes, double seconds) {
    const ReleasedGil released;
    const Parts parts(n_bytes);
    return parts.size() * best_rate(seconds, [&](size_t repeats) {
               return run_together(parts.n_threads, [&](size_t i) { read(parts, i, repeats); });
           });
}

double copy_rate(size_t n_bytes, double seconds) {
    const ReleasedGil released;
    const Parts from((n_bytes + 1) / 2), to((n_bytes + 1) / 2);
    const size_t n = from.part_bytes / sizeof(float);
    double best = 0.0;
    for (const bool streaming : {false, true}) {
        best = std::max(best, best_rate(seconds / 2, [&](size_t repeats) {
                            return run_together(from.n_threads, [&](size_t i) {
                                kernels().probe_copy(to.floats(i), from.floats(i), n, streaming, repeats);
                            });
                        }));
    }
    return 2.0 * from.size() * best;
}

double scale_rate(size_t n_bytes, double seconds) {
    const ReleasedGil released;
    const Parts parts(n_bytes);
    const size_t n = parts.part_bytes / sizeof(float);
    return 2.0 * parts.size() * best_rate(seconds, [&](size_t repeats) {
               return run_together(parts.n_threads,
                                   [&](size_t i) { kernels().probe_scale(parts.floats(i), n, 1.0f, repeats); });
           });
}

// Operations per second of a kernel with `flops` operations per step.
template <class A, class B, class Sum>
double fma_rate(size_t (*kernel)(const A*, const B*, Sum*, size_t), double flops, double seconds) {
    constexpr size_t kIterations = 1000;
    struct alignas(64) Operands {
        A a[64 / sizeof(A)] = {};
        B b[64 / sizeof(B)] = {};
        Sum sums[kProbeChains * 64 / sizeof(Sum)] = {};
        size_t steps = 0;
    };
    const ReleasedGil released;
    const auto n_threads = static_cast<size_t>(num_threads());
    std::vector<Operands> operands(n_threads);
    const double batches = best_rate(seconds, [&](size_t repeats) {
        return run_together(n_threads, [&](size_t i) {
            Operands& o = operands[i];
            o.steps = 0;
            for (size_t r = 0; r < repeats; ++r) o.steps = kernel(o.a, o.b, o.sums, kIterations);
        });
    });
    return batches * flops * static_cast<double>(operands[0].steps * n_threads);
}

double fma_rate_of(const std::string& dtype, double seconds) {
    const Kernels& k = kernels();
    if (dtype == "float32") return fma_rate(k.probe_fma_f32, 32.0, seconds);
    if (dtype == "float64") return fma_rate(k.probe_fma_f64, 16.0, seconds);
    if (dtype == "bfloat16") {  // widening them once is faster where no instruction multiplies them
        return std::max(fma_rate(k.probe_fma_bf16, 64.0, seconds / 2), fma_rate(k.probe_fma_f32, 32.0, seconds / 2));
    }
    return fma_rate(k.probe_fma_int8, 128.0, seconds);
}

// The memory is reused by the next call. The GIL, which is held, serialises calls.
void evict(size_t n_bytes) {
    static std::unique_ptr<Parts> parts;
    if (parts == nullptr || parts->size() < static_cast<double>(n_bytes) ||
        parts->n_threads != static_cast<size_t>(num_threads())) {
        parts.reset();
        parts = std::make_unique<Parts>(n_bytes);
    }
    run_together(parts->n_threads, [&](size_t i) { read(*parts, i, 1); });
}

// ---------------------------------------------------------------- pages and other memory

// A KV cache of a few pages, like an engine's.
class KvPages {
public:
    KvPages(size_t n_layers, size_t n_kv_heads, size_t head_dim, KvType type)
        : KvPages(make_config(n_layers, n_kv_heads, head_dim), type) {}

    // Allocates a zeroed page and frees it, like a sequence of one page.
    size_t take_and_release() {
        const int32_t page = index_.allocate();
        const PageWrite write{page, PageIndex::kNone};
        memory_.apply({&write, 1});
        index_.unref(page);
        return memory_.page_bytes();
    }

private:
    static ModelConfig make_config(size_t n_layers, size_t n_kv_heads, size_t head_dim) {
        ModelConfig config;
        config.n_layers = n_layers, config.n_kv_heads = n_kv_heads, config.head_dim = head_dim;
        return config;
    }

    static constexpr size_t kPages = 8;

    KvPages(const ModelConfig& config, KvType type)
        : memory_(config, type, kPages * KvMemory::page_bytes(config, type)) {}

    KvMemory memory_;
    PageIndex index_{kPages};
};

// malloc and free of the C library; zeroes the memory if `zeroed`.
size_t malloc_and_free(size_t n_bytes, bool zeroed) {
    void* memory = std::malloc(n_bytes);
    if (memory == nullptr) throw std::bad_alloc();
    __asm__ __volatile__("" : "+r"(memory) : : "memory");  // prevents fusion into calloc and dead-code elimination
    if (zeroed) std::memset(memory, 0, n_bytes);
    __asm__ __volatile__("" : : "r"(memory) : "memory");
    std::free(memory);
    return n_bytes;
}

}  // namespace

void bind_probe(nb::module_& m) {
    nb::class_<KvPages>(m, "KvPages")
        .def(nb::init<size_t, size_t, size_t, KvType>())
        .def("take_and_release", &KvPages::take_and_release);
    m.def("malloc_and_free", &malloc_and_free);
    m.def("read_rate", &read_rate);
    m.def("copy_rate", &copy_rate);
    m.def("scale_rate", &scale_rate);
    m.def("fma_rate", &fma_rate_of);
    m.def("evict", &evict);
    m.def("begin_job_trace", &begin_job_trace);
    m.def("end_job_trace", [] {
        const JobTrace trace = end_job_trace();
        return nb::make_tuple(trace.jobs, trace.clock_s);
    });
}

}  // namespace whet
