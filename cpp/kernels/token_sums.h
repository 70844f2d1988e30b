// Running sums over a row of logits; see token_logprobs.h.
#pragma once

namespace whet {

struct TokenSums {
    float maximum = -0x1.fffffep+127f;  // of the logits so far
    float token_logit = 0.0f;           // of the token, which is excluded from the sums
    double weights = 0.0;               // sum of 2^u, u = (logit - maximum) log2(e) / temperature
    double weighted_u = 0.0;            // sum of 2^u u
};

}  // namespace whet
