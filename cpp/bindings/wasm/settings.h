// Named fields as JavaScript sends them: an array of doubles, in the order of fields.def. In an anonymous namespace, so
// that each file inlines its own copy: 50 bytes less in each build.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "engine/engine.h"

namespace whet {
namespace {

// Sequential reader of settings.
class Settings {
public:
    Settings(const double* at, size_t n) : at_(at), end_(at + n) {}
    void read(bool& value) { value = number() != 0; }
    void read(uint64_t& value) {  // high and low 32 bits
        value = static_cast<uint64_t>(number()) << 32;
        value |= static_cast<uint64_t>(number());
    }
    template <class Number>
    void read(Number& value) {
        value = static_cast<Number>(number());
    }
    void read(TokenBias& value) {
        if (size() != 2) throw std::invalid_argument("a bias is not a pair");
        read(value.token), read(value.bias);
    }
    template <class Element>
    void read(std::vector<Element>& values) {
        for (size_t i = size(); i > 0; --i) {
            Element value;
            read(value);
            values.push_back(value);
        }
    }
    void finish() const {
        if (at_ != end_) throw std::invalid_argument("too many settings");
    }

private:
    double number() {
        if (at_ == end_) throw std::invalid_argument("too few settings");
        return *at_++;
    }
    size_t size() { return static_cast<size_t>(number()); }

    const double *at_, *end_;
};

}  // namespace
}  // namespace whet
