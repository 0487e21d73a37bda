"""Builds the documentation: sphinx-build -W docs site."""

import phistate

project = "phistate"
author = "the phistate authors"
release = phistate.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "phistate"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
