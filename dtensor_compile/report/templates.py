"""Templates of pages."""

from __future__ import annotations

import jinja2


def template(package: str, name: str) -> jinja2.Template:
    """A template among the assets of a package: values are escaped, and an unknown one is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name)
