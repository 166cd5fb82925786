"""Every private torch name that the package uses, and every difference between torch releases.

The rest of the package imports functions and classes from here under names of its own, so that a new torch release is
met in one place:

- ``release``: which releases are supported.
- ``missing_names``: a name that torch has no more costs what needs it, and not the import of a module.
- ``patches``: the table of what is replaced and called, and which feature does not work where something is not there.
- ``apply_patches``: how a row is applied; nothing else assigns to torch.
- ``dynamo/``: trackers, and the scope in which Dynamo traces for our backend.
- ``aot/``: joint graphs, what stands around compiled graphs, symbolic sizes.
- ``inductor/``: compiling a graph with our passes; its kernels, caches and written code.
- ``dtensor/``: specs, rules, the function through which every redistribution goes.
- ``distributed/``: meshes, process groups, data-parallel wrappers, ranks as threads.
- ``emulation/``: a GPU that is not there.
"""

import torch._dynamo  # noqa: F401 - the first of torch's private modules: those of AOTAutograd import it, and it them

from dtensor_compile.compat.missing_names import tolerate_missing_names
from dtensor_compile.compat.release import check_release

check_release()
tolerate_missing_names()
