"""The site: ``make docs``. The reference of calls is generated from the protos, that of the client from docstrings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "client"), str(ROOT / "proto" / "gen")]

from cachesvc import __version__  # noqa: E402

project = "cachesvc"
author = "The cachesvc authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"cachesvc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
autodoc_default_options = {"members": True, "inherited-members": "Exception,tuple"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The repository's own files are included from above this folder; their links to files are for readers of the source.
suppress_warnings = ["myst.xref_missing"]
nitpicky = False


def setup(app: Sphinx) -> None:
    """Write what is generated before Sphinx looks for documents."""
    from tools.protodocs import read_protos, reference

    text = reference(read_protos())
    target = Path(app.srcdir) / "reference" / "rpc.md"
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
