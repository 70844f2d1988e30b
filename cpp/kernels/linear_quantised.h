// The linear layer on quantised weights, in the panels of linear.h: integer products within blocks of 32 inputs.
//
// A row of inputs is quantised as it comes: in each block of 32, x = scale q with q in [-127, 127] (round to nearest
// even, scale = max|x| / 127), and the block's sum of q beside it. Weights are stored as unsigned integers u = w +
// offset, so that a block's dot product is exact in int32:
//
//   sum_k w q = sum_k u q - offset sum_k q
//
// and the blocks are added in float32, in order. The formats differ in how u is stored and in what scales it:
//
//   int8     u = q + 128, one float32 scale per output
//   q8_0     u = q + 128, one float16 scale per output and block of 32
//   q4_0     u = q + 8 in 4 bits, one float16 scale per output and block of 32
//   q4_k     u in 4 bits, w = (d s) u - (dmin m) with 6-bit s, m per block of 32 and float16 d, dmin per 256
//
// Within a panel: first all blocks' integers, 4 inputs x 16 outputs to a vector (8 vectors a block, or 4 where a byte
// holds the inputs of vector v in its low and of vector v + 4 in its high half), then all blocks' scales.
// Source of q8_0, q4_0 and q4_k: the GGUF format's block types of these names; panels hold the same numbers.

struct QuantisedRows {
    const int8_t* q;      // rows x 32 blocks
    const float* scales;  // rows x blocks
    const int32_t* sums;  // rows x blocks
    size_t rows, blocks;
};

WHET_INLINE u8x64 low_halves(u8x64 x) { return x & u8x64(15); }
// Each byte by n bits; what comes in from the byte above is cut off by the caller's mask.
template <int n>
WHET_INLINE u8x64 shifted_right(u8x64 x) {
    auto words = bit_cast<Vec<uint32_t>>(x);
    WHET_EACH_PART(p) words.part[p] = words.part[p] >> n;
    return bit_cast<u8x64>(words);
}
WHET_INLINE u8x64 high_halves(u8x64 x) { return shifted_right<4>(x) & u8x64(15); }

WHET_INLINE i32x16 sixteenth(i32x16 x) {
    WHET_EACH_PART(p) x.part[p] = x.part[p] >> 4;
    return x;
}

// Panels begin on cache lines.
constexpr size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

// --- the formats: `vector` gives the unsigned weights of 4 inputs, those of high halves times 16; Scales, moved to a
// block, what its sums are scaled by

struct Int8Panel {
    static constexpr int kOffset = 128;
    static constexpr size_t kBlockBytes = 512;
    static constexpr bool kBlockScales = false, kLowest = false, kHalves = false;
    static constexpr size_t bytes(size_t blocks) { return blocks * kBlockBytes + 64; }
    static WHET_INLINE u8x64 vector(const uint8_t* block, int v) { return load(block + 64 * v); }
    struct Scales {
        WHET_INLINE void move_to(const uint8_t*, size_t) {}
    };
};

struct HalfScales {  // a float16 per output and block
    f32x16 scale;
    WHET_INLINE void move_to(const uint8_t* scales, size_t block) {
        scale = load_f16(reinterpret_cast<const uint16_t*>(scales) + 16 * block);
    }
};

struct Q8Panel : Int8Panel {
    static constexpr bool kBlockScales = true;
    static constexpr size_t bytes(size_t blocks) { return whole_lines(blocks * (kBlockBytes + 32)); }
    using Scales = HalfScales;
};

struct Q4Panel {
    static constexpr int kOffset = 8;
    static constexpr size_t kBlockBytes = 256;
    static constexpr bool kBlockScales = true, kLowest = false, kHalves = true;
    static constexpr size_t bytes(size_t blocks) { return whole_lines(blocks * (kBlockBytes + 32)); }
    static WHET_INLINE u8x64 vector(const uint8_t* block, int v) {
        return v < 4 ? low_halves(load(block + 64 * v)) : load(block + 64 * (v - 4)) & u8x64(0xf0);
    }
    using Scales = HalfScales;
};

// The scales of 256 inputs: 12 x 16 bytes (the format's 12 bytes, 16 outputs side by side), d, then dmin. With bytes
// 0-3, 4-7 and 8-11 as a, b, c, the factors of the first four blocks are the low 6 bits of a and b, and those of the
// others have their low 4 bits in the halves of c and their high 2 in the top of a and b.
struct Q4KPanel : Q4Panel {
    static constexpr int kOffset = 0;
    static constexpr bool kLowest = true;
    static constexpr size_t kScaleBytes = 12 * 16 + 2 * 32;
    static constexpr size_t bytes(size_t blocks) { return blocks * kBlockBytes + blocks / 8 * kScaleBytes; }
    struct Scales {
        f32x16 scale, lowest, d, dmin;
        uint8_t factors[2][8 * 16];

        WHET_INLINE void move_to(const uint8_t* scales, size_t block) {
            if (block % 8 == 0) open(scales + block / 8 * kScaleBytes);
            scale = d * to_f32(load_u8(factors[0] + block % 8 * 16));
            lowest = dmin * to_f32(load_u8(factors[1] + block % 8 * 16));
        }
        WHET_INLINE void open(const uint8_t* bytes) {
            const u8x64 a = load(bytes), b = load(bytes + 64), c = load(bytes + 128), six_bits(63), top_bits(0x30);
            store(factors[0], a & six_bits);
            store(factors[1], b & six_bits);
            store(factors[0] + 64, low_halves(c) | (shifted_right<2>(a) & top_bits));
            store(factors[1] + 64, high_halves(c) | (shifted_right<2>(b) & top_bits));
            d = load_f16(reinterpret_cast<const uint16_t*>(bytes + 192));
            dmin = load_f16(reinterpret_cast<const uint16_t*>(bytes + 224));
        }
    };
};

#if defined(__AVX512F__)
constexpr int kQuantisedRows = 4, kQuantisedPanels = 3;  // each with an integer sum and a float one
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kQuantisedRows = 2, kQuantisedPanels = 1;
#else
constexpr int kQuantisedRows = 1, kQuantisedPanels = 1;
#endif

template <class Panel, int n_rows, int n_panels>
__attribute__((noinline)) void quantised_tile(const QuantisedRows& in, size_t row, const uint8_t* panels, size_t panel,
                                              const Outputs& out) {
    const size_t blocks = in.blocks, panel_bytes = Panel::bytes(blocks);
    const uint8_t* first = panels + panel * panel_bytes;
    f32x16 sum[n_rows][n_panels];
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) sum[r][p] = f32x16(0.0f);
    }
    typename Panel::Scales scales[n_panels];
    for (size_t b = 0; b < blocks; ++b) {
        const size_t at = row * blocks + b;
        i32x16 dot[n_rows][n_panels];
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; ++r) {
            const i32x16 start(Panel::kHalves ? 0 : -Panel::kOffset * in.sums[at + r * blocks]);
#pragma GCC unroll 4
            for (int p = 0; p < n_panels; ++p) dot[r][p] = start;
        }
        const int8_t* q = in.q + 32 * at;
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const int v = Panel::kHalves ? i ^ 4 : i;  // high halves first: their sum is divided by 16, once
            u8x64 weights[n_panels];
#pragma GCC unroll 4
            for (int p = 0; p < n_panels; ++p) {
                weights[p] = Panel::vector(first + p * panel_bytes + b * Panel::kBlockBytes, v);
            }
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; ++r) {
                int32_t four;
                __builtin_memcpy(&four, q + r * 32 * blocks + 4 * v, sizeof four);
                const i8x64 x = bit_cast<i8x64>(i32x16(four));
#pragma GCC unroll 4
                for (int p = 0; p < n_panels; ++p) dot[r][p] = dot_int8(dot[r][p], weights[p], x);
            }
            if (!Panel::kHalves || v != 7) continue;
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; ++r) {
                const i32x16 offset(-Panel::kOffset * in.sums[at + r * blocks]);
#pragma GCC unroll 4
                for (int p = 0; p < n_panels; ++p) dot[r][p] = sixteenth(dot[r][p]) + offset;
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) {
            scales[p].move_to(first + p * panel_bytes + blocks * Panel::kBlockBytes, b);
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; ++r) {
                const float x_scale = in.scales[at + r * blocks];
                f32x16 per_unit(x_scale);
                if constexpr (Panel::kBlockScales) per_unit = scales[p].scale * per_unit;
                sum[r][p] = fma(to_f32(dot[r][p]), per_unit, sum[r][p]);
                if constexpr (Panel::kLowest) {
                    const float x_sum = x_scale * static_cast<float>(in.sums[at + r * blocks]);
                    sum[r][p] = fma(scales[p].lowest, f32x16(-x_sum), sum[r][p]);
                }
            }
        }
    }
    if constexpr (!Panel::kBlockScales) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) {
            const uint8_t* per_output = first + p * panel_bytes + blocks * Panel::kBlockBytes;
            const f32x16 scale = load(reinterpret_cast<const float*>(per_output));
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; ++r) sum[r][p] = sum[r][p] * scale;
        }
    }
    store_tile(sum, out, row, panel);
}

template <class Panel, int n_panels>
WHET_INLINE void quantised_panels(const QuantisedRows& in, const uint8_t* panels, size_t panel, const Outputs& out) {
    size_t row = 0;
    for (; row + kQuantisedRows <= in.rows; row += kQuantisedRows) {
        quantised_tile<Panel, kQuantisedRows, n_panels>(in, row, panels, panel, out);
    }
    if (kQuantisedRows > 2 && row + 2 <= in.rows) {
        quantised_tile<Panel, 2, n_panels>(in, row, panels, panel, out);
        row += 2;
    }
    for (; row < in.rows; ++row) quantised_tile<Panel, 1, n_panels>(in, row, panels, panel, out);
}

template <class Panel>
WHET_INLINE void linear_quantised(const QuantisedRows& in, const void* panels, const Outputs& out) {
    const auto* bytes = static_cast<const uint8_t*>(panels);
    const size_t n_panels = (out.n + 15) / 16;
    size_t panel = 0;
    for (; panel + kQuantisedPanels <= n_panels; panel += kQuantisedPanels) {
        quantised_panels<Panel, kQuantisedPanels>(in, bytes, panel, out);
    }
    for (; panel < n_panels; ++panel) quantised_panels<Panel, 1>(in, bytes, panel, out);
}

#define WHET_LINEAR(name, Panel)                                                                              \
    void linear_##name(const int8_t* q, const float* scales, const int32_t* sums, size_t rows, size_t blocks, \
                       const void* panels, size_t n, const float* bias, float* y, size_t ldy) {               \
        linear_quantised<Panel>({q, scales, sums, rows, blocks}, panels, {y, ldy, n, bias});                  \
    }
WHET_LINEAR(int8, Int8Panel)
WHET_LINEAR(q8_0, Q8Panel)
WHET_LINEAR(q4_0, Q4Panel)
WHET_LINEAR(q4_k, Q4KPanel)
#undef WHET_LINEAR

// A row in blocks of 32, zeros after its n inputs. A block with a NaN or an infinity gets a NaN scale: so do its sums.
void quantize_row_f32(const float* x, size_t n, int8_t* q, float* scales, int32_t* sums) {
    for (size_t begin = 0; begin < n; begin += 32, q += 32) {
        float block[32];
        const size_t length = n - begin < 32 ? n - begin : 32;
        for (size_t i = 0; i < 32; ++i) block[i] = i < length ? x[begin + i] : 0.0f;
        const f32x16 low = load(block), high = load(block + 16);
        const f32x16 zero(0.0f);
        const float top = max_lane(max(max(low, zero - low), max(high, zero - high)));
        // x - x is 0 for a number and NaN else; the lanes of a NaN sum are NaN.
        const f32x16 odd = (low - low) + (high - high);
        float check = 0.0f;
        for (int i = 0; i < 16; ++i) check += odd[i];
        const float scale = top / 127.0f + check, inverse = top > 0.0f ? 127.0f / top : 0.0f;
        const bool finite = check == 0.0f && inverse < __builtin_inff();
        int32_t sum = 0;
        const Rounded<float> rounded[2] = {{low, f32x16(finite ? inverse : 0.0f)},
                                           {high, f32x16(finite ? inverse : 0.0f)}};
        for (int i = 0; i < 32; ++i) {
            const int value = finite ? static_cast<int>(rounded[i / 16].value()[i % 16]) : 0;
            q[i] = static_cast<int8_t>(value);
            sum += value;
        }
        *scales++ = scale;
        *sums++ = sum;
    }
}
