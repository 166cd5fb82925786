"""Every private torch name that the package uses, and every difference between torch releases.

The rest of the package imports functions and classes from here under names of its own, so that support for a new torch
release is added in one place:

- ``release``: the supported releases.
- ``missing_names``: stand-ins for names that torch no longer has.
- ``patches``: the table of torch functions that are replaced or called, and the feature that depends on each.
- ``apply_patches``: applies rows of the table; nothing else assigns to torch.
- ``dynamo/``: trackers, and the scope in which Dynamo traces for our backend.
- ``aot/``: joint graphs, wrappers of compiled graphs, symbolic sizes.
- ``inductor/``: compiling a graph with our passes; kernels, caches and generated code.
- ``dtensor/``: specs, rules, the function through which every redistribution goes.
- ``distributed/``: meshes, process groups, data-parallel wrappers, ranks as threads.
- ``emulation/``: an emulated GPU.
"""

import importlib

from dtensor_compile.compat.missing_names import tolerate_missing_names
from dtensor_compile.compat.release import check_release

check_release()
# The first of torch's private modules: those of AOTAutograd cannot be imported before it on 2.15.
importlib.import_module("torch._dynamo")
tolerate_missing_names()
