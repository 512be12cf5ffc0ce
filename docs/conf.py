"""Settings of the documentation: `make docs`."""

project = "bnjax"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
autodoc_typehints = "none"  # the shapes of jaxtyping read better in the signature
autodoc_member_order = "bysource"
myst_enable_extensions = ["dollarmath"]
