// Running sums over a row of logits whose parts come one after another; see token_logprobs.h.
#pragma once

namespace whet {

struct TokenSums {
    float top = -0x1.fffffep+127f;  // the greatest logit so far
    float token_logit = 0.0f;       // the token's, which stands in no sum
    double weights = 0.0;           // sum of 2^u, u = (logit - top) log2(e) / temperature
    double weighted_u = 0.0;        // sum of 2^u u
};

}  // namespace whet
