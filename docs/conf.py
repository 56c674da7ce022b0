"""How the site is built: `make docs`."""

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

import factormax  # noqa: E402

os.environ["TQDM_DISABLE"] = "1"  # a bar would fill the page of the script that shows it

project = "factormax"
author = "The factormax developers"
copyright = author
version = release = factormax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_gallery.gen_gallery",
    "matplotlib.sphinxext.plot_directive",
    "docstrings",
    "equations",
    "public",
]
exclude_patterns = ["_ext", "plots", "**/sg_execution_times.rst", "sg_execution_times.rst"]
default_role = "code"  # of the gallery's scripts; see docstrings for the others
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(numpy|torch|jax)\..*|Array")]  # no other site is asked
suppress_warnings = [
    "sphinx_gallery.duplicate_filename",  # the cookbook is a folder of the examples
]

# ---- Markdown ------------------------------------------------------------------------------------

myst_enable_extensions = ["dollarmath", "deflist", "fieldlist", "colon_fence"]
myst_heading_anchors = 3

# The number of a formula that is too wide, and scrolls, must be seen without scrolling.
mathjax3_config = {
    "tex": {"tagSide": "left"},
    "chtml": {"matchFontHeight": False},
}

# ---- The reference: docstrings -------------------------------------------------------------------

autodoc_typehints = "none"  # the text says what is taken, and shapes
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_custom_sections = ["Shapes"]
add_module_names = False
toc_object_entries_show_parents = "hide"

# ---- The gallery: every script of examples/ is run, its figures are captured ---------------------

TITLE = re.compile(r'"""\n?.+\n(===|---|###)')
untitled = [p.name for p in DOCS.parent.glob("examples/**/*.py") if not TITLE.match(p.read_text())]

sphinx_gallery_conf = {
    "examples_dirs": ["../examples", "../examples/cookbook"],
    "gallery_dirs": ["tutorials", "cookbook"],
    "copyfile_regex": r"index\.rst",  # the cookbook brings its own, or it would be taken twice
    "filename_pattern": "",
    "ignore_pattern": r"(^|/)(" + "|".join(["__init__.py", *untitled]) + ")$",  # no pages
    "within_subsection_order": "FileNameSortKey",
    "backreferences_dir": "generated/backreferences",
    "doc_module": ("factormax",),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "remove_config_comments": True,
    "image_srcset": ["2x"],
}

# ---- Pictures drawn at building: docs/plots ------------------------------------------------------

plot_formats = ["svg"]
plot_html_show_formats = False
plot_html_show_source_link = False
plot_include_source = False

# ---- Pages ---------------------------------------------------------------------------------------

html_theme = "furo"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = f"factormax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]
