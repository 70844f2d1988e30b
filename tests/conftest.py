"""One thread each for torch and BLAS: the suite runs one process per core, and idle threads spin."""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
