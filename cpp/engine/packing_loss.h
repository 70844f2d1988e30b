// Measures, before packing, what weights would lose to the range of a format.
#pragma once
#include "engine/stored_rows.h"

namespace whet {

struct PackingLoss {
    WeightFormat format;
    double largest = 0.0;       // largest |weight|; infinity if a weight is NaN or infinite
    double limit = 0.0;         // largest |weight| that the format can represent
    double squared_norm = 0.0;  // sum of w^2, or a lower bound
    // Sum of (w - packed w)^2, or an upper bound of the part in blocks without a usable scale.
    double squared_lost = 0.0;
};

// Reads the weights once. Only if the norm is so small that blocks with a scale of 0 could matter, also packs the
// weights into temporary memory, in chunks, and compares. Blocks that keep their bytes lose nothing: only their scales
// are read.
PackingLoss measure_packing_loss(const StoredRows& rows, WeightFormat format);

}  // namespace whet
