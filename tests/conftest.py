"""Settings of the test process."""

import gc

from dtensor_compile.garbage_collection import RARE

# As while a program is compiled, and in ranks (`dtensor_compile/testing/ranks.py`).
gc.set_threshold(*RARE)
