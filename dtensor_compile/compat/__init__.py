"""Every private torch name that the package uses, and every difference between torch releases.

The rest of the package imports functions and classes from here under names of its own, so that a new torch release is
met in one place:

- ``release``: which releases are supported.
- ``hooks``: what of torch's private names is there, and which feature does not work where one is not.
- ``mesh``: what a ``DeviceMesh`` is made of, process groups by name and by ranks.
- ``dtensor``: specs, placements without a public name, the function through which every redistribution goes.
- ``dynamo``: the scope in which Dynamo traces for our backend, and the tables in which it looks up trackers.
- ``inductor``: compiling a graph with Inductor and our passes.
"""

from dtensor_compile.compat.release import check_release

check_release()
