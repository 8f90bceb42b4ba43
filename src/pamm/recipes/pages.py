"""HTML files that need no other."""

import jinja2


def template(name: str) -> jinja2.Template:
    """One of the recipes' pages, by its path from here; they share ``style.html``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pamm.recipes", package_path="."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["thousands"] = "{:,}".format
    return environment.get_template(name)
