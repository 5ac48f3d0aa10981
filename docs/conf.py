"""Build these pages: `sphinx-build -W docs OUT`. They can be read as they are, too."""

import re

project = "distlock_app"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme_options = {
    "description": "Locks and write guards for Django",
    "page_width": "1160px",
    "sidebar_width": "260px",
}


def setup(app):
    """Take the menus from the links of the two indexes."""
    app.connect("source-read", add_menu)


def add_menu(app, page, source):
    if page in ("index", "ko/index"):
        pages = re.findall(r"\]\(([\w/-]+)\.md\)", source[0])
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *pages, "```\n"])
