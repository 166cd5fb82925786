"""Settings of the test process."""

import gc
import os

# Before torch is imported, here and in ranks: it collects after each compilation, of which most tests make several.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

from dtensor_compile.garbage_collection import RARE  # noqa: E402

# As while a program is compiled, and in ranks (`dtensor_compile/testing/ranks.py`).
gc.set_threshold(*RARE)
