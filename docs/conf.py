"""Build these pages: `sphinx-build -W docs OUT`. They can be read as they are, too."""

import re
from pathlib import Path

project = "distlock_app"
package = Path(__file__).parent.parent / "distlock_app/__init__.py"
release = re.search(r'^__version__ = "(.+)"', package.read_text(), re.M)[1]
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False


def setup(app):
    """Take the menus from the links of the two indexes."""
    app.connect("source-read", add_menu)
    app.connect("html-page-context", say_language)


def add_menu(app, page, source):
    """Add a menu for each section that has links to pages, with its heading as the caption."""
    if page in ("index", "ko/index"):
        _, *sections = re.split(r"^## (.+)\n", source[0], flags=re.M)
        for caption, section in zip(sections[::2], sections[1::2], strict=True):
            pages = re.findall(r"\]\(([\w/-]+)\.md\)", section)
            menu = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
            source[0] += "\n" + "\n".join(menu) + "\n"


def say_language(app, page, template, context, document):
    """Let browsers choose Korean letters and line breaks for Korean pages."""
    if page.startswith("ko/"):
        context["language"] = "ko"
