// Running sums over a row of logits that is read in parts; see token_logprobs.h.
#pragma once

namespace whet {

struct TokenSums {
    float top = -0x1.fffffep+127f;  // the greatest logit so far
    float token_logit = 0.0f;       // the token's, which is in none of the sums
    double weights = 0.0;           // sum of 2^u, u = (logit - top) log2(e) / temperature
    double weighted_u = 0.0;        // sum of 2^u u
};

}  // namespace whet
