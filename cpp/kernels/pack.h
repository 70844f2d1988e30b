// Numbers of any source into one panel of 16 outputs, as linear.h reads it: float32, or pairs of bfloat16.
//
// A weight lies row by row (Linear), and then 16 rows of 16 words are transposed in registers; or column by column
// (Conv1D), and then a step of the panel is 16 neighbours. Rounding to bfloat16 is that of convert.h.

namespace pack {

// 16 numbers as float32.
WHET_INLINE f32x16 read(const float* x) { return load(x); }
struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
WHET_INLINE f32x16 read(const BFloat16* x) { return load_bf16(reinterpret_cast<const uint16_t*>(x)); }
WHET_INLINE f32x16 read(const Float16* x) { return load_f16(reinterpret_cast<const uint16_t*>(x)); }

// The words that 16 lanes hold: floats, or pairs of bfloat16 of the numbers from `first` and from `second`.
struct ToFloat32 {
    static constexpr size_t kPerWord = 1;
    template <class T>
    static WHET_INLINE f32x16 along(const T* x) {
        return read(x);
    }
    template <class T>
    static WHET_INLINE f32x16 across(const T* first, const T*) {
        return read(first);
    }
};
struct ToBFloat16 {
    static constexpr size_t kPerWord = 2;
    template <class T>
    static WHET_INLINE f32x16 along(const T* x) {
        uint16_t words[32];
        store_bf16(words, read(x));
        store_bf16(words + 16, read(x + 16));
        return bit_cast<f32x16>(load(words));
    }
    template <class T>
    static WHET_INLINE f32x16 across(const T* first, const T* second) {
        return bit_cast<f32x16>(zip_bf16(read(first), read(second)));
    }
};

template <class To, class T>
WHET_INLINE void from_rows(const T* x, ptrdiff_t row_stride, size_t k, float* panel) {
    constexpr size_t kStep = 16 * To::kPerWord;  // inputs of 16 words
    for (size_t at = 0; at < k; at += kStep) {
        f32x16 words[16];
        const size_t left = k - at < kStep ? k - at : kStep;
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
            const T* from = x + j * row_stride + at;
            T last[32] = {};
            if (left < kStep) {
                __builtin_memcpy(last, from, left * sizeof(T));
                from = last;
            }
            words[j] = To::along(from);
        }
        transpose(words);
        const size_t n = (left + To::kPerWord - 1) / To::kPerWord;
        for (size_t i = 0; i < n; ++i) store(panel + 16 * (at / To::kPerWord + i), words[i]);
    }
}

template <class To, class T>
WHET_INLINE void from_columns(const T* x, ptrdiff_t column_stride, size_t k, float* panel) {
    static constexpr T kZeros[16] = {};
    for (size_t at = 0; at < k; at += To::kPerWord, panel += 16) {
        const T* first = x + static_cast<ptrdiff_t>(at) * column_stride;
        store(panel, To::across(first, at + 1 < k ? first + column_stride : kZeros));
    }
}

template <class To, class T>
WHET_INLINE void panel_of(const void* x, ptrdiff_t row_stride, ptrdiff_t column_stride, size_t k, void* panel) {
    const T* from = static_cast<const T*>(x);
    if (column_stride == 1) {
        from_rows<To>(from, row_stride, k, static_cast<float*>(panel));
    } else {
        from_columns<To>(from, column_stride, k, static_cast<float*>(panel));
    }
}

}  // namespace pack

// One of the strides is 1.
#define WHET_PACK(suffix, To, T)                                                                                    \
    void pack_panel_##suffix(const void* x, ptrdiff_t row_stride, ptrdiff_t column_stride, size_t k, void* panel) { \
        pack::panel_of<pack::To, T>(x, row_stride, column_stride, k, panel);                                        \
    }
WHET_PACK(f32_f32, ToFloat32, float)
WHET_PACK(f32_bf16, ToFloat32, pack::BFloat16)
WHET_PACK(f32_f16, ToFloat32, pack::Float16)
WHET_PACK(bf16_f32, ToBFloat16, float)
WHET_PACK(bf16_bf16, ToBFloat16, pack::BFloat16)
WHET_PACK(bf16_f16, ToBFloat16, pack::Float16)
#undef WHET_PACK
