// Arguments and sums of the divergence of two rows of logits; see divergence.h.
#pragma once

namespace whet {

struct DivergenceRow {
    double temperature;
    float beta;
    float lse_p, lse_q;  // log sum_v exp(z_v / temperature) of both rows
};

struct DivergenceSums {
    double divergence = 0.0;
    double mean_log_ratio = 0.0;  // of the gradient
};

}  // namespace whet
