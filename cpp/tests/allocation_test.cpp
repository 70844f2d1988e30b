// Out-of-memory safety, and no allocation per token. Each allocation of an operation fails in turn, first only it and
// then all from it on: the operation must throw, other calls must continue, the next call must give the bits of an
// undisturbed one, and nothing may leak. A decoded token must not allocate on any thread.
//
// operator new is replaced, and malloc and similar functions are wrapped by the linker (CMakeLists.txt), which covers
// the allocations of the core's objects only.
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <latch>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "engine/gemm.h"
#include "runtime/packing.h"
#include "runtime/thread_pool.h"
#include "small_model.h"
#include "tests/checks.h"

namespace {

enum class Mode { kCount, kOnce, kFromThen };

std::atomic<Mode> mode{Mode::kCount};
std::atomic<long> seen{0}, fails_at{0}, live{0}, failures_made{0};
thread_local bool is_registering = false;  // in __cxa_thread_atexit

// Counts an allocation and returns whether it is to fail. In a static program this includes the C library's: glibc
// terminates the process if it cannot register a destructor.
bool fail_allocation() {
    if (is_registering) return false;
    const long n = ++seen;
    const Mode m = mode.load();
    const bool fails = (m == Mode::kOnce && n == fails_at) || (m == Mode::kFromThen && n >= fails_at);
    failures_made += fails;
    return fails;
}

void* counted(void* p) {
    live += p != nullptr;
    return p;
}

}  // namespace

extern "C" {
void* __real_malloc(size_t);
void* __real_calloc(size_t, size_t);
int __real_posix_memalign(void**, size_t, size_t);
void __real_free(void*);
void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);
int __real___cxa_thread_atexit(void (*)(void*), void*, void*);

void* __wrap_malloc(size_t n) { return fail_allocation() ? nullptr : counted(__real_malloc(n)); }
void* __wrap_calloc(size_t n, size_t size) { return fail_allocation() ? nullptr : counted(__real_calloc(n, size)); }
int __wrap_posix_memalign(void** p, size_t alignment, size_t n) {
    if (fail_allocation()) return ENOMEM;
    const int error = __real_posix_memalign(p, alignment, n);
    live += error == 0;
    return error;
}
void __wrap_free(void* p) {
    live -= p != nullptr;
    __real_free(p);
}
void* __wrap_mmap(void* at, size_t n, int protection, int flags, int file, off_t offset) {
    if (fail_allocation()) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return counted(__real_mmap(at, n, protection, flags, file, offset));
}
int __wrap_munmap(void* p, size_t n) {
    --live;
    return __real_munmap(p, n);
}
int __wrap___cxa_thread_atexit(void (*destroy)(void*), void* object, void* library) {
    is_registering = true;
    const int result = __real___cxa_thread_atexit(destroy, object, library);
    is_registering = false;
    return result;
}
}

void* operator new(size_t n) {
    if (void* p = fail_allocation() ? nullptr : counted(__real_malloc(n == 0 ? 1 : n))) return p;
    throw std::bad_alloc();
}
void* operator new(size_t n, std::align_val_t alignment) {
    const auto unit = static_cast<size_t>(alignment);
    if (void* p = fail_allocation() ? nullptr : counted(std::aligned_alloc(unit, (n + unit - 1) / unit * unit)))
        return p;
    throw std::bad_alloc();
}
void operator delete(void* p) noexcept { __wrap_free(p); }
void operator delete(void* p, size_t) noexcept { __wrap_free(p); }
void operator delete(void* p, std::align_val_t) noexcept { __wrap_free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { __wrap_free(p); }

using namespace whet;

namespace {

constexpr int kThreads = 3;
constexpr WeightFormat kFormats[] = {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kInt8,
                                     WeightFormat::kQ8_0};

// ---------------------------------------------------------------- every allocation fails

// One attempt at an operation, in which an allocation fails.
class Attempt {
public:
    Attempt(Mode mode, long n) : mode_(mode), n_(n) {}

    // Returns whether `body` ends without an exception. After an out-of-memory exception runs `undo`, with allocations
    // still failing.
    bool operator()(const std::function<void()>& body, const std::function<void()>& undo = [] {}) {
        bool whole = false;
        seen = 0, fails_at = n_, failures_made = 0, mode = mode_;
        try {
            body();
            whole = true;
        } catch (const std::bad_alloc&) {
            undo();
        } catch (const std::system_error&) {  // a thread could not be started
            undo();
        }
        mode = Mode::kCount;
        reached = failures_made > 0;
        return whole;
    }

    bool reached = false;  // the failing allocation was reached

private:
    Mode mode_;
    long n_;
};

// Calls work(attempt) with the first allocation failing, then the second, and so on, until there are no more. Each time
// on a new thread, with a new pool.
template <class Work>
void fail_each(const std::string& name, const Work& work) {
    // Warm-up: in a static program libraries allocate some memory once, such as for the first exception.
    std::thread([&] {
        Attempt first(Mode::kOnce, 1);
        work(first);
    }).join();
    for (const Mode each : {Mode::kOnce, Mode::kFromThen}) {
        bool reached = true;
        long n = 0;
        while (reached) {
            const int before = failures;
            set_num_threads(1);
            num_threads();
            const long held = live;
            std::thread([&] {
                Attempt attempt(each, ++n);
                work(attempt);
                reached = attempt.reached;
            }).join();
            set_num_threads(1);
            num_threads();
            const long leaked = live - held;
            expect(leaked == 0, "%ld allocations are leaked", leaked);
            if (failures > before) {
                std::printf("  where allocation %ld%s fails in %s\n", n, each == Mode::kOnce ? "" : " and all after it",
                            name.c_str());
                if (failures > 20) std::exit(1);
            }
        }
        std::printf("%s: %ld allocations\n", name.c_str(), n - 1);
    }
}

// Stop strings that every token begins and no token completes.
std::shared_ptr<const StopStrings> never_found() {
    auto texts = std::make_shared<TokenTexts>();
    for (int32_t i = 0; i < 97; ++i) {
        texts->bytes += i % 2 == 0 ? "ab" : "a";
        texts->ends.push_back(static_cast<int32_t>(texts->bytes.size()));
    }
    return std::make_shared<const StopStrings>(texts, std::vector<std::string>{"abx", "aax"});
}

// A prompt with every setting for which samples allocate memory.
Request rich_prompt(size_t length, size_t n, size_t max_new, uint64_t index) {
    Request r = prompt(length, n, max_new, index);
    r.sampling = {.temperature = 0.8f,
                  .top_p = 0.9f,
                  .min_p = 0.01f,
                  .repetition_penalty = 1.2f,
                  .presence_penalty = 0.5f,
                  .frequency_penalty = 0.1f,
                  .top_k = 20,
                  .top_logprobs = 3,
                  .logit_bias = {{5, 1.0f}}};
    r.stop_strings = never_found();
    r.records_kept = true;
    r.score_from = 1, r.scoring.top_logprobs = 1;
    return r;
}

Request score(size_t length, size_t from) {
    Request r;
    r.tokens = tokens(length, 1);
    r.score_from = from, r.entropy = true, r.logits = true;
    return r;
}

Request hidden_states(size_t length) {
    Request r;
    r.tokens = tokens(length, 2);
    r.score_from = 1, r.hidden = true;
    return r;
}

// Each format has another model.
int kind_of(WeightFormat format) {
    return format == WeightFormat::kBFloat16 ? kOther
           : format == WeightFormat::kInt8   ? kDelta
           : format == WeightFormat::kQ8_0   ? kMixture
                                             : kLlama;
}

size_t some_pages(const Model& model) { return model.kv_bytes(60); }

void test_making_an_engine() {
    Model known(false, WeightFormat::kInt8, 8 + 32);
    Engine right(known.transformer, {some_pages(known), 8, 32});
    const uint64_t expected = right.add(prompt(70, 2, 10, 0));
    run(right);
    fail_each("making an engine", [&](Attempt& attempt) {
        const auto make = [&] {
            set_num_threads(kThreads, kOversubscribe);
            Model model(false, WeightFormat::kInt8, 8 + 32);
            Engine s(model.transformer, {some_pages(model), 8, 32});
            const uint64_t id = s.add(prompt(70, 2, 10, 0));
            run(s);
            expect(outputs_of(s, id) == outputs_of(right, expected), "a new engine gives the same tokens");
        };
        if (!attempt(make)) make();
    });
}

// A call on an engine during the completion of another call.
void test_calls(const std::string& name, WeightFormat format, const std::vector<Request>& requests) {
    Model model(kind_of(format), format, 8 + 32);
    const Limits limits{some_pages(model), 8, 32};
    Engine right(model.transformer, limits);
    const auto results = [&](Engine& s, const std::vector<uint64_t>& ids) {
        std::vector<Outputs> out;
        for (const uint64_t id : ids) {
            const Job& job = s.job(id);
            expect(job.done && job.error.empty(), "a call finishes");
            out.push_back(outputs_of(s, id));
            out.push_back({{{}, job.logprobs}, {{}, job.entropies}, {{}, job.logits}});
        }
        return out;
    };
    const auto add_all = [&](Engine& s, std::vector<uint64_t>& ids) {
        ids.reserve(requests.size());
        for (const Request& request : requests) ids.push_back(s.add(request));
    };
    std::vector<uint64_t> expected_ids;
    const std::vector<uint64_t> other_expected{right.add(prompt(100, 2, 40, 9))};
    add_all(right, expected_ids);
    run(right);
    const std::vector<Outputs> expected = results(right, expected_ids), others = results(right, other_expected);

    fail_each(name, [&](Attempt& attempt) {
        set_num_threads(kThreads, kOversubscribe);
        Engine s(model.transformer, limits);
        const std::vector<uint64_t> other{s.add(prompt(100, 2, 40, 9))};
        for (int i = 0; i < 6; ++i) s.step();
        std::vector<uint64_t> ids;
        ids.reserve(requests.size());
        const auto call = [&] {
            add_all(s, ids);
            for (const uint64_t id : ids) {
                while (!s.job(id).done) s.step();
            }
        };
        const auto forget = [&] {
            for (const uint64_t id : ids) s.remove(id);
            ids.clear();
        };
        if (attempt(call, forget)) {
            expect(results(s, ids) == expected, "calls without a failed allocation are correct");
        } else {
            call();
            expect(results(s, ids) == expected, "the next call is correct");
        }
        run(s);
        expect(results(s, other) == others, "running calls of others continue");
        expect(s.pages().n_free() == s.pages().n_pages(), "all pages are free");
    });
}

void test_adapters() {
    Model model(false, WeightFormat::kFloat32, 8 + 32);
    const Limits limits{some_pages(model), 8, 32};
    const auto with = [&](Engine& s) {
        Request r = prompt(70, 2, 10, 0);
        r.adapter = 1;
        s.add_adapter(r.adapter, adapter_of(*model.weights));
        const uint64_t id = s.add(r);
        run(s);
        const Outputs out = outputs_of(s, id);
        s.remove(id);
        s.remove_adapter(r.adapter);
        return out;
    };
    Engine right(model.transformer, limits);
    const Outputs expected = with(right);
    fail_each("adapters", [&](Attempt& attempt) {
        Model own(false, WeightFormat::kFloat32, 8 + 32);
        Engine s(own.transformer, limits);
        uint64_t number = 0;
        const auto add = [&] {
            number = 1;
            s.add_adapter(number, adapter_of(*own.weights));
            s.remove_adapter(number);
        };
        attempt(add);
        expect(!s.has_adapter(number), "the adapter is removed");
        expect(with(s) == expected, "the next adapter is correct");
    });
}

void test_loading(WeightFormat format) {
    const size_t n = 200, k = 256;
    std::vector<float> x(n * k);
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
    const auto rows = [&](PackedWeight& w) {
        w.pack_rows(0, n, x.data(), RowType::kFloat32, static_cast<ptrdiff_t>(k), 1);
        std::vector<float> out(n * k);
        for (size_t i = 0; i < n; ++i) w.row(i, out.data() + i * k);
        return out;
    };
    PackedWeight right(format, n, k);
    const std::vector<float> expected = rows(right);
    fail_each("loading", [&](Attempt& attempt) {
        set_num_threads(kThreads, kOversubscribe);
        std::vector<float> out;
        attempt([&] {
            PackedWeight w(format, n, k);
            out = rows(w);
        });
        PackedWeight w(format, n, k);
        expect(rows(w) == expected, "the next load is correct");
    });
}

void test_products(bool bf16) {
    const size_t m = 70, n = 90, k = 101;
    std::vector<float> a(m * k, 0.5f), b(k * n, 0.25f), x(k, 0.5f);
    const auto product = [&] {
        std::vector<float> c(m * n, 1.0f), y(m, 1.0f);
        const auto row = [](size_t i) { return static_cast<ptrdiff_t>(i); };
        gemm(bf16, m, n, k, 2.0f, a.data(), 1, row(m), b.data(), row(n), 1, 0.5f, c.data(), row(n));
        gemv(bf16, m, k, 2.0f, a.data(), row(k), 1, x.data(), 0.5f, y.data());
        c.insert(c.end(), y.begin(), y.end());
        return c;
    };
    const std::vector<float> expected = product();
    fail_each("products", [&](Attempt& attempt) {
        set_num_threads(kThreads, kOversubscribe);
        attempt([&] { product(); });
        expect(product() == expected, "the next product is correct");
    });
}

void test_packing() {
    const std::vector<int64_t> lengths{5, 3, 8, 1, 7, 2};
    const auto packed = [&] { return pack_sequences(lengths.data(), static_cast<int64_t>(lengths.size()), 9).indices; };
    const std::vector<int64_t> expected = packed();
    fail_each("packing", [&](Attempt& attempt) {
        attempt([&] { packed(); });
        expect(packed() == expected, "the next packing is correct");
    });
}

// ---------------------------------------------------------------- no allocation

// Allocates the scratch memory of every thread of the pool: which threads take part in a step is random.
void warm_threads(Model& model, size_t rows) {
    const Weights& w = model.transformer.weights();
    std::latch all(kThreads);
    auto task = [&](size_t) {
        all.arrive_and_wait();
        const auto product = [&](const Matrix& matrix, size_t n_rows) {
            if (matrix.parts.empty()) return;
            const std::vector<float> x(n_rows * matrix.k());
            std::vector<float> y(n_rows * matrix.n());
            linear(matrix.parts, x.data(), false, matrix.k(), n_rows, nullptr, y.data(), matrix.n());
            matrix.parts[0].row(0, std::vector<float>(matrix.k()).data());
        };
        for (const LayerWeights& layer : w.layers) {
            for (const Matrix* matrix : {&layer.qkv, &layer.o, &layer.up, &layer.down, &layer.router}) {
                product(*matrix, rows);
            }
            for (const Matrix* matrix : {&layer.experts_up, &layer.experts_down}) {
                product(*matrix, Choice::most_rows(w.config(), rows));
            }
        }
        product(w.embedding, rows);
    };
    parallel_for(kThreads, task);
}

void test_decoding(const std::string& name, WeightFormat format, const Sampling& sampling, bool with_adapter) {
    set_num_threads(kThreads, kOversubscribe);
    Model model(kind_of(format), format, 8 + 32);
    Engine s(model.transformer, {some_pages(model), 8, 32});
    Request r = prompt(20, 5, 300, 0);
    r.sampling = sampling;
    if (sampling.counts_tokens()) r.stop_strings = never_found(), r.min_new_tokens = 300, r.stop_tokens = {3};
    if (with_adapter) {
        r.adapter = 1;
        s.add_adapter(r.adapter, adapter_of(*model.weights));
    }
    const uint64_t id = s.add(r);
    warm_threads(model, 8);
    for (int i = 0; i < 5; ++i) s.step();
    const long before = seen;
    for (int i = 0; i < 200; ++i) s.step();  // crosses several page boundaries
    const long during = seen - before;
    expect(s.job(id).samples[4].tokens.size() > 200, "tokens are decoded");
    expect(during == 0, "%s: 200 steps of decoding make %ld allocations, expected 0", name.c_str(), during);
}

}  // namespace

int main() {
    return run_tests([] {
        for (const WeightFormat format : kFormats) {
            const std::string number = " in format " + std::to_string(static_cast<int>(format));
            test_decoding("greedy" + number, format, {.temperature = 0}, false);
            test_decoding("sampled" + number, format, {}, false);
            test_decoding("filtered, with penalties" + number, format, rich_prompt(1, 1, 1, 0).sampling, false);
            test_decoding("top-k" + number, format, {.top_k = 7, .model_logprobs = true}, false);
            test_decoding("top-p" + number, format, {.top_p = 0.7f, .model_logprobs = true}, true);
            Request kept = prompt(64, 1, 70, 1);
            kept.keep = true;
            test_calls("calls" + number, format,
                       {rich_prompt(150, 3, 20, 0), kept, score(140, 70), hidden_states(130)});
            test_loading(format);
        }
        test_making_an_engine();
        test_adapters();
        for (const bool bf16 : {false, true}) test_products(bf16);
        test_packing();
    });
}
