"""Third-party packages that do not accept the name of the backend; one module for each package.

A program imports these modules explicitly, and no package named here is a dependency: a module imports its package when
it is imported, and raises if the package is missing. `docs/integrations.md` lists all integrations, most of which need
no module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Sequence
from types import ModuleType


def third_party(package: str, tested: Sequence[str]) -> ModuleType:
    """Imports a third-party package for the module of this folder that supports it.

    Args:
        package: the name to import, which is also the name of its distribution.
        tested: versions that the tests ran with. Other versions are used with a warning.

    Raises:
        ImportError: the package is not installed.
    """
    versions = ", ".join(tested)
    try:
        module = importlib.import_module(package)
        installed = importlib.metadata.version(package)
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in (package, None):
            raise  # the package is installed, and lacks one of its own dependencies
        raise ImportError(
            f"dtensor_compile.integrations.{package} needs {package}, which is not installed; "
            f"tested versions: {versions}"
        ) from error
    if installed not in tested:
        warnings.warn(
            f"dtensor_compile.integrations.{package} is tested with {package} {versions}; {installed} is installed",
            stacklevel=3,
        )
    return module
