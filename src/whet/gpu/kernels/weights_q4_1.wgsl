const MORE_BITS = 0u;
