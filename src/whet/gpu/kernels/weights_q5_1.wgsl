const MORE_BITS = 1u;
