// Bindings of the engine: a model and an engine as one object, on shared weights. whet.engine validates arguments
// and explains errors; the checks here ensure memory safety. Methods are atomic: a mutex serialises threads, and
// interrupts are handled between methods.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "gpu.h"
#include "engine/engine.h"
#include "runtime/errors.h"
#include "runtime/fair_mutex.h"

namespace nb = nanobind;

namespace whet {
namespace {

std::vector<int32_t> tokens_of(nb::handle object) {
    Array a;
    if (!view_vector(object, DType::kInt32, a)) throw std::invalid_argument("not an int32 array");
    return {a.as<int32_t>(), a.as<int32_t>() + a.size()};
}

nb::object array_of(std::span<const float> values) { return array_of(DType::kFloat32, values); }
nb::object array_of(std::span<const int32_t> values) { return array_of(DType::kInt32, values); }
nb::object array_of(std::span<const int64_t> values) { return array_of(DType::kInt64, values); }

[[noreturn]] void throw_forked() {
    throw ForkedError(
        "Engine: another thread was using it when this process was forked. Make a new engine, or fork while no call is "
        "under way.");
}

// Guard of the engine's mutex. Locks without the GIL, so that the owner of the mutex may wait for the GIL.
class EngineGuard {
public:
    explicit EngineGuard(FairMutex& lock) : lock_(lock) {
        bool is_whole;
        {
            const ReleasedGil released;
            is_whole = lock_.lock();
        }
        if (!is_whole) throw_forked();
    }
    EngineGuard(const EngineGuard&) = delete;
    ~EngineGuard() { lock_.unlock(); }

private:
    FairMutex& lock_;
};

class EngineObject {
public:
    EngineObject(const Shared<Weights>& weights, size_t kv_bytes, size_t max_batch, size_t chunk, KvType kv_type,
                 size_t expert_bytes, bool speculation, const Shared<Weights>* draft, nb::object device)
        : weights_(weights),
          expert_bytes_(expert_bytes),
          model_(weights.value, max_batch + chunk, kv_type),
          draft_transformer_(draft ? std::make_unique<Transformer>(draft->value, max_batch + chunk, kv_type) : nullptr),
          draft_(draft ? std::make_unique<DraftModel>(*draft_transformer_,
                                                      kv_bytes / KvMemory::page_bytes(model_.config(), kv_type),
                                                      max_batch, model_.config().vocab_size)
                       : nullptr),
          device_(make_device(std::move(device), model_.weights())),
          engine_(model_, {kv_bytes, max_batch, chunk, speculation, device_ ? gpu::kLookahead : 1}, draft_.get(),
                  device_.get()) {}

    Shared<Weights> weights() const { return weights_; }

    // Opens the session of a call. An exclusive session changes the model, has no requests and excludes all others.
    // Returns 0, or the number of open sessions if it cannot be opened.
    size_t begin_session(uint64_t session, bool exclusive) {
        const EngineGuard guard(lock_);
        if (!sessions_.empty() && is_exclusive_ && forks_ != FairMutex::n_forks()) throw_forked();
        if (!sessions_.empty() && (exclusive || is_exclusive_)) return sessions_.size();
        if (exclusive) engine_.evict_retained();
        sessions_.push_back(session);
        is_exclusive_ = exclusive;
        forks_ = FairMutex::n_forks();
        return 0;
    }

    // Cancels the session's remaining requests. Idempotent.
    void end_session(uint64_t session) {
        const EngineGuard guard(lock_);
        engine_.end_session(session);
        std::erase(sessions_, session);
    }

    uint64_t add_prompt(uint64_t session, nb::handle tokens, size_t n, size_t min_new_tokens, size_t max_new_tokens,
                        nb::handle stop_tokens, const Shared<const StopStrings>* stop_strings, uint64_t seed,
                        uint64_t prompt_index, uint64_t first_sample, uint64_t adapter, const nb::dict& sampling,
                        bool keep, bool constrained, bool records_kept, bool records_experts, int scored_alternatives) {
        const EngineGuard guard(lock_);
        Request request = request_of(session, tokens, adapter);
        if (n == 0) throw std::invalid_argument("no token to sample");
        request.n = n;
        request.min_new_tokens = min_new_tokens;
        request.keep = keep;
        request.constrained = constrained;
        request.records_kept = records_kept;
        request.records_experts = records_experts;
        if (scored_alternatives >= 0) {
            request.score_from = 1;
            request.scoring.top_logprobs = static_cast<size_t>(scored_alternatives);
        }
        request.max_new_tokens = max_new_tokens;
        request.stop_tokens = tokens_of(stop_tokens);
        request.seed = seed, request.prompt_index = prompt_index, request.first_sample = first_sample;
        request.sampling = sampling_of(sampling);
        if (stop_strings != nullptr) request.stop_strings = stop_strings->value;
        return engine_.add(std::move(request), session);
    }

    uint64_t add_score(uint64_t session, nb::handle tokens, size_t score_from, float temperature, bool entropy,
                       bool logits, bool hidden, size_t top_logprobs, uint64_t adapter, bool keep) {
        const EngineGuard guard(lock_);
        Request request = request_of(session, tokens, adapter);
        request.score_from = score_from;
        request.keep = keep;
        request.entropy = entropy;
        request.logits = logits;
        request.hidden = hidden;
        request.scoring.temperature = temperature;
        request.scoring.top_logprobs = top_logprobs;
        return engine_.add(std::move(request), session);
    }

    // tokens: (ceil(vocab_size / 32),) int32, the words of a bitmap.
    void allow(uint64_t id, size_t sample, nb::handle tokens) {
        const EngineGuard guard(lock_);
        const std::vector<int32_t> words = tokens_of(tokens);
        if (words.size() != (model_.config().vocab_size + 31) / 32) {
            throw std::invalid_argument("not a bitmap of the vocabulary");
        }
        engine_.allow(id, sample, {words.begin(), words.end()});
    }

    // Returns true if the request is done, else runs a step.
    bool step(uint64_t id) {
        const EngineGuard guard(lock_);
        if (engine_.job(id).done) return true;
        const ReleasedGil released;
        {
            const auto lock = model_.weights().reading();
            engine_.step();
        }
        if (expert_bytes_ > 0) weights_.value->drop_deferred(expert_bytes_);
        return false;
    }

    // Returns, of tokens [from, n): ids, log-probs, withheld bytes, ids and log-probs of alternatives; and the finish
    // reason.
    nb::tuple sample(uint64_t id, size_t i, size_t from) const {
        const EngineGuard guard(lock_);
        const Job& job = engine_.job(id);
        const Sample& s = job.samples.at(i);
        from = std::min(from, s.tokens.size());
        const size_t n = s.tokens.size() - from, n_top = job.request.sampling.top_logprobs;
        const auto [top_ids, top_logprobs] = arrays_of(std::span(s.alternatives).subspan(from * n_top, n * n_top));
        static const char* const kFinish[] = {"running", "stop", "length", "cancelled"};
        return nb::make_tuple(array_of(std::span(s.tokens).subspan(from)),
                              array_of(std::span(s.logprobs).subspan(from)),
                              array_of(std::span(s.n_withheld).subspan(std::min(from, s.n_withheld.size()))), top_ids,
                              top_logprobs, kFinish[static_cast<int>(s.finish)]);
    }

    // Returns offsets and words of the TokenSets of a sample's tokens.
    nb::tuple kept_tokens(uint64_t id, size_t i) const {
        const EngineGuard guard(lock_);
        const Sample& s = engine_.job(id).samples.at(i);
        return nb::make_tuple(array_of(s.kept_offsets), array_of(s.kept_words));
    }

    // Returns the experts of the prompt's and of the sample's computed tokens: (tokens, mixture layers, experts of a
    // token), flat.
    nb::object experts(uint64_t id, size_t i) const {
        const EngineGuard guard(lock_);
        const std::vector<uint16_t>& experts = engine_.job(id).samples.at(i).experts;
        return array_of(std::vector<int32_t>(experts.begin(), experts.end()));
    }

    bool is_done(uint64_t id) const {
        const EngineGuard guard(lock_);
        return engine_.job(id).done;
    }

    // Number of prompt tokens found in the cache on admission.
    size_t reused(uint64_t id) const {
        const EngineGuard guard(lock_);
        return engine_.job(id).reused;
    }

    // Returns log-probs, entropies, logits, ids and log-probs of alternatives, and hidden states.
    nb::tuple scores(uint64_t id) const {
        const EngineGuard guard(lock_);
        const Job& job = engine_.job(id);
        const auto [top_ids, top_logprobs] = arrays_of(std::span(job.alternatives));
        return nb::make_tuple(array_of(job.logprobs), array_of(job.entropies), array_of(job.logits), top_ids,
                              top_logprobs, array_of(job.hiddens));
    }

    // parts: (layer, target, first row, A (rank, k), B (n, rank), magnitudes (n,) or None) with contiguous float32
    // arrays, the scaling folded into B; norms: (slot, contiguous float32 values).
    void add_adapter(uint64_t id, const nb::iterable& parts, const nb::iterable& norms) {
        const EngineGuard guard(lock_);
        auto adapter = std::make_unique<Adapter>(model_.config().n_layers);
        for (nb::handle part : parts) {
            const auto entry = nb::cast<nb::tuple>(part);
            Array a, b, magnitude;
            if (!view_matrix(entry[3], a) || !view_matrix(entry[4], b) || a.shape[0] != b.shape[1]) {
                throw std::invalid_argument("not float32 factors (rank, k) and (n, rank)");
            }
            const bool is_scaled = !entry[5].is_none();
            if (is_scaled && (!view_vector(entry[5], magnitude) || magnitude.shape[0] != b.shape[0])) {
                throw std::invalid_argument("not a float32 magnitude of each row");
            }
            adapter->add(model_.weights(), nb::cast<size_t>(entry[0]), nb::cast<Target>(entry[1]),
                         nb::cast<size_t>(entry[2]), a.as<float>(), b.as<float>(), static_cast<size_t>(a.shape[0]),
                         static_cast<size_t>(a.shape[1]), static_cast<size_t>(b.shape[0]),
                         is_scaled ? magnitude.as<float>() : nullptr);
        }
        for (nb::handle norm : norms) {
            const auto entry = nb::cast<nb::tuple>(norm);
            Array values;
            if (!view_vector(entry[1], values)) throw std::invalid_argument("not float32 values of a norm");
            adapter->set_norm(model_.weights(), nb::cast<std::string>(entry[0]),
                              {values.as<float>(), static_cast<size_t>(values.shape[0])});
        }
        if (device_) device_->add_adapter(id, *adapter);
        engine_.add_adapter(id, std::move(adapter));
    }

    // A no-op for an unknown id. No later request may use it.
    void remove_adapter(uint64_t id) {
        const EngineGuard guard(lock_);
        engine_.remove_adapter(id);
    }

    std::string error(uint64_t id) const {
        const EngineGuard guard(lock_);
        return engine_.job(id).error;
    }

    // Returns an upper bound of the bytes released.
    size_t release_memory() {
        const EngineGuard guard(lock_);
        const ReleasedGil released;
        return engine_.release_memory();
    }

    // Returns the numbers of drafted and of accepted tokens.
    nb::tuple drafts() const {
        const EngineGuard guard(lock_);
        return nb::make_tuple(engine_.n_drafted(), engine_.n_accepted());
    }

    nb::dict memory() const {
        const EngineGuard guard(lock_);
        nb::dict out;
        const PageIndex& pages = engine_.pages();
        const size_t page_bytes = engine_.kv_memory().page_bytes();
        out["weights_bytes"] = model_.weights().size_bytes();
        out["experts_resident_bytes"] = model_.weights().deferred_bytes();
        out["kv_bytes"] = pages.n_pages() * page_bytes;
        out["kv_page_bytes"] = page_bytes;
        out["kv_state_bytes"] = pages.n_state_pages() * page_bytes;
        out["kv_used_bytes"] = (pages.n_pages() - pages.n_free()) * page_bytes;
        out["kv_kept_bytes"] = pages.n_evictable() * page_bytes;
        out["kv_committed_bytes"] = engine_.kv_memory().n_committed() * page_bytes;
        out["workspace_bytes"] = engine_.runner().workspace_bytes();
        out["workspace_committed_bytes"] = engine_.runner().committed_workspace_bytes();
        out["adapters_bytes"] = engine_.adapters_bytes();
        out["draft_bytes"] = draft_ ? draft_->committed_bytes() : 0;
        return out;
    }

private:
    mutable FairMutex lock_;
    const Shared<Weights> weights_;
    const size_t expert_bytes_;  // limit of deferred weights after a step; 0: none
    Transformer model_;
    const std::unique_ptr<Transformer> draft_transformer_;  // null: no draft model
    const std::unique_ptr<DraftModel> draft_;               // the engine's samples refer to it
    const std::unique_ptr<HostDevice> device_;              // null: the CPU
    Engine engine_;
    std::vector<uint64_t> sessions_;  // open sessions
    bool is_exclusive_ = false;
    uint64_t forks_ = 0;  // FairMutex::n_forks() when the last session was opened

    Request request_of(uint64_t session, nb::handle tokens, uint64_t adapter) const {
        if (is_exclusive_ || std::find(sessions_.begin(), sessions_.end(), session) == sessions_.end()) {
            throw std::out_of_range("the call has ended");
        }
        Request request;
        request.tokens = tokens_of(tokens);
        request.adapter = adapter;
        return request;
    }

    static std::unique_ptr<HostDevice> make_device(nb::object program, const Weights& weights) {
        if (program.is_none()) return nullptr;
        const gpu::Plan& plan = nb::cast<const gpu::Plan&>(program.attr("plan"));
        return std::make_unique<HostDevice>(std::move(program), plan, weights);
    }

    static bool view_matrix(nb::handle object, Array& a) {
        return view(object.ptr(), a) && a.dtype == DType::kFloat32 && a.ndim == 2;
    }

    static bool view_vector(nb::handle object, Array& x) {
        return view(object.ptr(), x) && x.dtype == DType::kFloat32 && x.ndim == 1;
    }
};

}  // namespace

void bind_engine(nb::module_& m) {
    using nb::arg;
    nb::enum_<Target>(m, "Target")
        .value("QKV", Target::kQkv)
        .value("O", Target::kO)
        .value("UP", Target::kUp)
        .value("DOWN", Target::kDown)
        .value("INPUT_GATE", Target::kInputGate)
        .value("INPUT_OUT", Target::kInputOut)
        .value("LAYER_INPUTS", Target::kLayerInputs)
        .value("EXPERTS_UP", Target::kExpertsUp)
        .value("EXPERTS_DOWN", Target::kExpertsDown);
    nb::enum_<KvType>(m, "KvType")
        .value("float32", KvType::kFloat32)
        .value("bfloat16", KvType::kBFloat16)
        .value("q8", KvType::kInt8);
    nb::class_<EngineObject>(m, "Engine")
        .def(nb::init<const Shared<Weights>&, size_t, size_t, size_t, KvType, size_t, bool, const Shared<Weights>*,
                      nb::object>(),
             arg("weights"), nb::kw_only(), arg("kv_bytes"), arg("max_batch"), arg("chunk"), arg("kv_type"),
             arg("expert_bytes") = 0, arg("speculation") = false, arg("draft").none() = nb::none(),
             arg("device") = nb::none())
        .def_prop_ro("weights", &EngineObject::weights)
        .def("add_prompt", &EngineObject::add_prompt, arg("session"), nb::kw_only(), arg("tokens"), arg("n"),
             arg("min_new_tokens"), arg("max_new_tokens"), arg("stop_tokens"), arg("stop_strings").none(), arg("seed"),
             arg("prompt_index"), arg("first_sample"), arg("adapter"), arg("sampling"), arg("keep"), arg("constrained"),
             arg("records_kept"), arg("records_experts"), arg("scored_alternatives"))
        .def("allow", &EngineObject::allow, arg("job"), arg("sample"), arg("tokens"))
        .def("add_score", &EngineObject::add_score, arg("session"), nb::kw_only(), arg("tokens"), arg("score_from"),
             arg("temperature"), arg("entropy"), arg("logits"), arg("hidden"), arg("top_logprobs"), arg("adapter"),
             arg("keep"))
        .def("add_adapter", &EngineObject::add_adapter)
        .def("remove_adapter", &EngineObject::remove_adapter)
        .def("step", &EngineObject::step)
        .def("is_done", &EngineObject::is_done)
        .def("sample", &EngineObject::sample)
        .def("kept_tokens", &EngineObject::kept_tokens)
        .def("experts", &EngineObject::experts)
        .def("reused", &EngineObject::reused)
        .def("scores", &EngineObject::scores)
        .def("begin_session", &EngineObject::begin_session)
        .def("end_session", &EngineObject::end_session)
        .def("error", &EngineObject::error)
        .def("drafts", &EngineObject::drafts)
        .def("memory", &EngineObject::memory)
        .def("release_memory", &EngineObject::release_memory);
}

}  // namespace whet
