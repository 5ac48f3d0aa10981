"""Every text of the app and of its demo is there in Korean, and in the file that Django loads."""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.utils.translation import gettext as translated
from django.utils.translation import override
from django.utils.translation.template import templatize

import distlock_app

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [Path(distlock_app.__file__).parent, ROOT / "demo_project/shop"]
PO = "locale/ko/LC_MESSAGES/django.po"
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
FUNCTIONS = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy", "pgettext"}


def texts_of_code(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in FUNCTIONS:
            first = node.args[0]
            # A text that is put together is no text that can be translated.
            yield str(first.value) if isinstance(first, ast.Constant) else ast.unparse(first)


def texts_of_template(template: str) -> Iterator[str]:
    for call in re.findall(
        r"n?gettext\(u?(?:'.*?'|\"\"\".*?\"\"\"|\".*?\")", templatize(template), re.S
    ):
        yield ast.literal_eval(call.partition("(")[2].removeprefix("u"))


def used(package: Path) -> set[str]:
    found = {text for path in package.rglob("*.py") for text in texts_of_code(path.read_text())}
    for path in package.rglob("*.html"):
        found.update(texts_of_template(path.read_text()))
    return found


def in_po(package: Path) -> dict[str, str]:
    """Return the translations by text; the file has one line for each (`--no-wrap`)."""
    pairs = re.findall(
        r'^msgid (".+")\n(?:msgid_plural .+\n)?msgstr(?:\[0\])? (".*")$',
        (package / PO).read_text(),
        re.M,
    )
    return {ast.literal_eval(text): ast.literal_eval(korean) for text, korean in pairs}


def in_mo(package: Path) -> dict[str, str]:
    with (package / PO).with_suffix(".mo").open("rb") as file:
        catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    return {k[0] if isinstance(k, tuple) else k: v for k, v in catalog.items() if k}


@each_package
def test_every_text_is_translated_and_no_other(package: Path) -> None:
    assert {text: ko for text, ko in in_po(package).items() if not ko} == {}
    assert set(in_po(package)) == used(package)


@each_package
def test_the_file_that_django_loads_is_made_from_the_other(package: Path) -> None:
    assert "fuzzy" not in (package / PO).read_text()
    assert in_mo(package) == in_po(package)


@pytest.mark.parametrize(
    ("text", "korean"), sorted(pair for package in PACKAGES for pair in in_po(package).items())
)
def test_a_translation_has_the_places_and_the_markup_of_its_text(text: str, korean: str) -> None:
    places = re.compile(r"%\(\w+\)\w|</?\w+>")

    # A Korean plural always names the number.
    assert set(places.findall(text)) - {"%(count)s", "%(count)d"} == (
        set(places.findall(korean)) - {"%(count)s", "%(count)d"}
    )
    assert re.search("[가-힣]", korean) or not re.search(r"\w", places.sub("", text))


def test_django_speaks_korean_of_this_app() -> None:
    with override("ko"):
        assert translated("Discard mine and reload") == "내 변경을 버리고 새로 고침"
