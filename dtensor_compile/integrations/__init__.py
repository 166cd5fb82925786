"""How third-party packages reach the backend where they do not take its name, one module for each package.

Nothing here is imported unless a program imports it, and no package named here is a dependency: a module imports its
package when it is imported itself, and says so where the package is missing. `docs/integrations.md` shows every way in,
most of which need no module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Sequence
from types import ModuleType


def third_party(package: str, tested: Sequence[str]) -> ModuleType:
    """Imports a third-party package for the module of this folder that fits it.

    Args:
        package: the name to import, which is the name of its distribution too.
        tested: versions that the tests ran with. Another one gives a warning, and is used.

    Raises:
        ImportError: the package is not installed.
    """
    versions = ", ".join(tested)
    try:
        module = importlib.import_module(package)
        installed = importlib.metadata.version(package)
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in (package, None):
            raise  # the package is there, and lacks one of its own dependencies
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
