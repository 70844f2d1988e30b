// The range of weights against the range of the format that they are to be packed in, measured before packing.
#pragma once
#include "engine/stored_rows.h"

namespace whet {

// Norms are those of the weights as a vector. `lost` is the norm of the difference between the weights and what is
// packed, as far as the format's range causes it: an upper bound of it if that is small, else the whole difference.
struct PackingLoss {
    WeightFormat format;   // of the rows with the largest weight or loss, where there are several
    double largest = 0.0;  // |weight|; infinity if one is NaN or infinite
    double limit = 0.0;    // the largest |weight| that the format can hold
    double squared_norm = 0.0, squared_lost = 0.0;
};

// Reads the weights once. Packs them into temporary memory, some rows at a time, only if their norm is so small that
// blocks with a scale of 0 could matter. Blocks that are packed as they are lose nothing: only their scales are read.
PackingLoss measure_packing_loss(StoredRows rows, WeightFormat format);

}  // namespace whet
