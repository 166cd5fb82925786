import pytest

from dtensor_compile.compat.dynamo.trackers.constant_objects import OPAQUE

needs_native = pytest.mark.skipif(not OPAQUE, reason="the C++ part needs what torch 2.13 has")
