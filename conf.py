"""Sphinx configuration of the guide; run from the repository root.

    sphinx-build -c . docs docs/_build/html -W -n

Sphinx takes some relative paths from docs/ and some from this folder, so most are absolute here.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

_ROOT = Path(__file__).parent
_EXTENSIONS = str(_ROOT / "docs" / "_ext")
sys.path.insert(0, str(_ROOT))
sys.path.insert(0, _EXTENSIONS)
_EXAMPLES = str(_ROOT / "examples")  # pages and chapters import from its _lib
sys.path.insert(0, _EXAMPLES)
# Notebook pages run in a separate process that needs the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys(
        [str(_ROOT), _EXTENSIONS, _EXAMPLES, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    )
)
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["NSIGHTKIT_MODE"] = "replay"  # a build shows recordings and runs no workload

import nsightkit  # noqa: E402

site_url = os.environ.get("NSIGHTKIT_SITE_URL", "")
repo_url = os.environ.get("NSIGHTKIT_REPO_URL", "").rstrip("/")

# -- Project

project = "nsightkit"
author = "The nsightkit developers"
copyright = author
version = release = nsightkit.__version__

# -- What is built

extensions = [
    "myst_nb",  # also enables myst_parser: never list both
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "changes",
    "cli_reference",
    "gallery_index",
    "judgement",
    "measured",
    "page_form",
    "schematic",
    "site_downloads",
    "widgets",
    "notfound.extension",
    "sphinx_llms_txt",
]
root_doc = "index"
exclude_patterns = [
    "_build",
    "jupyter_execute",
    "_templates",
    "cases",
    "recordings",
    "gallery/**.ipynb",
    "**/.ipynb_checkpoints",
    "README.md",
]
templates_path = [str(_ROOT / "docs" / "_templates")]
nitpicky = True
default_role = "code"

# -- Pages in Markdown, some of them executed

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # never a cached output: it can be older than the code beside it
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# -- Gallery

sphinx_gallery_conf = {
    "examples_dirs": [str(_ROOT / "examples")],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r".*",  # every script is executed
    "ignore_pattern": r"(^|[/\\])_",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("site_figures.scrape", "gallery_hooks.scrape"),
    "reset_modules": ("gallery_hooks.reset",),
    "reset_modules_order": "before",
    "capture_repr": ("_repr_html_",),
    "abort_on_example_error": True,
    "notebook_extensions": set(),  # myst-nb would claim the notebooks
    "write_computation_times": False,  # that page loads scripts from three CDNs
    "min_reported_time": 1_000_000,  # replays are quick; the provenance block has the workload's time
    "show_signature": False,
    "thumbnail_size": (280, 196),  # all of them are on one page
    "download_all_examples": False,  # they run in the repository, beside what they import
    "remove_config_comments": True,
    "backreferences_dir": None,
    "inspect_global_variables": False,  # else every variable links to its type, such as dict
    "copyfile_regex": "",
    "parallel": True,
}

# -- API reference

autosummary_generate = True
autosummary_generate_overwrite = True
autodoc_typehints = "none"  # numpydoc states the types, with shapes and units
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
# Inventories are kept here, so that a build needs no network; the links lead to the projects' own sites.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "_inventories/python.inv"),
    "pandas": ("https://pandas.pydata.org/docs", "_inventories/pandas.inv"),
}
# Projects without an inventory here.
nitpick_ignore_regex = [("py:.*", r"(matplotlib|mpl|np|numpy|torch|pyarrow)\..*")]

# -- HTML

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = [str(_ROOT / "docs" / "_static")]
html_favicon = str(_ROOT / "docs" / "_static" / "nsightkit.svg")
html_css_files = ["nsightkit.css", "widgets.css"]
html_js_files = ["nsightkit.js", "widgets.js"]
html_show_sphinx = False
html_show_copyright = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": project},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "navbar_persistent": ["search-button"],
    "show_prev_next": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": {
        "**": ["page-toc", "gallery-download", "sourcelink"],
        "index": [],
    },
    "footer_start": ["footer"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# Pages of one level need no side bar.
_ALONE = ("index", "start", "case_files", "cli", "404")
html_sidebars = {page: [] for page in _ALONE}
notfound_urls_prefix = f"/{urlsplit(site_url).path.strip('/')}/".replace("//", "/")
llms_txt_full_file = False  # the pages' sources are linked one by one
llms_txt_summary = "A guide to GPU profiling whose pages are executed investigations, and the package that they use."
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# One page in seconds for its author: the rest of the site is not built, and links to it lead nowhere.
if only := os.environ.get("NSIGHTKIT_ONLY", ""):
    root_doc = "gallery/index"
    exclude_patterns += ["*.md", "guide", "reference"]
    sphinx_gallery_conf |= {"ignore_pattern": rf"^(?!(?:.*[/\\])?{re.escape(only)}\.py$)"}
    autosummary_generate = False
    nitpicky = False
    suppress_warnings = ["ref.doc", "ref.ref", "myst.xref_missing"]

# What needs to know where the site or the repository lives is off until that is known.
if site_url:
    html_baseurl = site_url
    ogp_site_url = site_url
    mark = str(_ROOT / "docs" / "_static" / "nsightkit.png")  # nsightkit.svg, which matplotlib does not read
    ogp_social_cards = {"enable": True, "line_color": "#2563a6", "image_mini": mark}
    ogp_description_length = 200
    sitemap_url_scheme = "{link}"
    extensions += ["sphinxext.opengraph", "sphinx_sitemap"]
if repo_url:
    html_context["edit_page_url_template"] = (
        f"{repo_url}/edit/main/"
        "{% if file_name.startswith('gallery/') %}examples/{{ file_name[8:-4] }}.py"
        "{% elif file_name.startswith('reference/generated/') %}docs/reference/index.md"
        "{% else %}docs/{{ file_name }}{% endif %}"
    )
    html_context["edit_page_provider_name"] = "the repository"
    html_theme_options["use_edit_page_button"] = True
    html_theme_options["secondary_sidebar_items"]["**"].insert(1, "edit-this-page")
    html_theme_options["icon_links"] = [{"name": "Source", "url": repo_url, "icon": "fa-solid fa-code-branch"}]
