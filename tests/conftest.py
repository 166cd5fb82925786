"""Settings of the test process."""

import gc

# Graphs are cyclic and live for a test: traces make the collector look at millions of objects that stay. As in ranks
# (`dtensor_compile/testing/ranks.py`), it runs less often.
gc.set_threshold(50_000, 20, 50)
