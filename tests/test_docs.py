"""The documentation: its code runs, its links lead somewhere, and what is public is in it.

A Korean page has the code, the names and the links of the English page of its file's name.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from django.core.management import load_command_class
from django.dispatch import Signal
from django.test.utils import isolate_apps

import distlock_app
from distlock_app import claims, signals
from distlock_app.backends import base
from distlock_app.operations import doctor, reading
from distlock_app.testing import LOCMEM, override_locks
from tests.app.models import Account, Job

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/reference"
KOREAN = [ROOT / "README.ko.md", *sorted((ROOT / "docs/ko").glob("*.md"))]
ENGLISH = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page not in KOREAN),
]
PAGES = [*ENGLISH, *KOREAN]
AROUND = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
INDEXES = [ROOT / "docs/index.md", ROOT / "docs/ko/index.md"]
# Samples that rely on what only their page's text tells; those of the backend run in
# test_docs_backend.py.
ONLY_COMPILED = {
    *("docs/how-to/optimistic.md", "docs/how-to/fencing.md", "docs/how-to/write-a-backend.md"),
}

BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.S | re.M)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def title(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return [code for lang, code in BLOCK.findall(page.read_text()) if lang == language]


def compiled(code, where):
    return compile(code, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def signature(function):
    return [name for name in inspect.signature(function).parameters if name != "lock_options"]


def of(page):
    return (REFERENCE / page).read_text()


@pytest.fixture
def shop(monkeypatch):
    """The project that the samples are in: what they find there before their first line."""
    account = Account.objects.create(balance=100)
    product = MagicMock()
    product.objects.get.return_value = SimpleNamespace(stock=5, save=lambda: None)
    product.objects.filter.return_value.update.return_value = 2
    models = {
        "Account": Account,
        "Job": Job,
        "Order": MagicMock(),
        "Product": product,
        "pk": account.pk,
    }
    modules = {"shop": {}, "shop.models": models, "shop.views": {"pay": repr}}
    modules["shop.jobs"] = {"send_newsletter": repr}
    modules["shop.billing"] = {"charge_card": repr, "send_invoice": repr}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return models


PAGES_THAT_RUN = [
    page for page in ENGLISH if blocks(page, "python") and title(page) not in ONLY_COMPILED
]


@pytest.mark.django_db(databases=["default"])
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=title)
def test_the_samples_of_a_page_run(page, shop, settings):
    names = {"INSTALLED_APPS": [], "DATABASES": {}, "BASE_DIR": ROOT}
    namespace = {"__name__": "tests.app.documented", **names, **shop}
    settings.DISTLOCK = dict.fromkeys([*settings.DISTLOCK, "redis"], {"BACKEND": LOCMEM})
    settings.LOCKS = ("default", "redis")

    with override_locks(), isolate_apps("tests.app"):
        for code in blocks(page, "python"):
            if "django.tasks" in code and not find_spec("django.tasks"):
                continue  # Django 5.2
            exec(compiled(code, title(page)), namespace)
            namespace |= shop  # a model that a sample defined has no table

    for receiver in filter(callable, list(namespace.values())):
        signals.lock_busy.disconnect(receiver)


def test_the_scheduler_of_a_leader_has_its_job_in_each_turn(monkeypatch):
    jobs, begun = [], []

    class Scheduler:  # as that of APScheduler, which forgets its jobs
        add_job = staticmethod(lambda job, *_, **__: jobs.append(job))
        start = staticmethod(lambda: begun.extend(jobs))
        shutdown = staticmethod(jobs.clear)

    stand_in = SimpleNamespace(BackgroundScheduler=Scheduler)
    monkeypatch.setitem(sys.modules, "apscheduler.schedulers.background", stand_in)
    monkeypatch.setitem(sys.modules, "shop.jobs", SimpleNamespace(send_newsletter=repr))
    page = ROOT / "docs/how-to/leader.md"
    (sample,) = [code for code in blocks(page, "python") if "def schedule(" in code]
    namespace = {}
    exec(compiled(sample, title(page)), namespace)

    namespace["schedule"](MagicMock())
    namespace["schedule"](MagicMock())

    assert begun == [repr, repr]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_the_samples_of_a_page_compile(page):
    for code in blocks(page, "python"):
        compiled(code, title(page))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_the_commands_of_a_page_exist(page):
    text = "\n".join(blocks(page, "sh"))

    for name, line in re.findall(r"^python manage\.py (distlock|migrate_locked) (.+)$", text, re.M):
        parser = load_command_class("distlock_app", name).create_parser("manage.py", name)
        words = takewhile(lambda word: word not in ("&", "&&"), shlex.split(line, comments=True))
        parser.parse_args(list(words))


@pytest.mark.parametrize("page", [*PAGES, *AROUND], ids=title)
def test_the_links_of_a_page_lead_somewhere(page):
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_a_page_names_nothing_of_one_machine(page):
    assert re.findall(r"(?<![\w.])/(?:root|work|home|tmp)/\S*", page.read_text()) == []


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("furo"), reason="furo is not installed")
def test_the_site_is_built_without_a_warning_and_its_menu_has_the_sections_of_the_index(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", ROOT / "docs", tmp_path]

    done = subprocess.run(build, capture_output=True, text=True, timeout=200)

    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "how-to/tasks.html").read_text()
    captions = re.findall(r'class="caption-text">(.+?)<', page)
    assert captions == re.findall(r"^## (.+)$", INDEXES[0].read_text(), re.M)
    assert f"distlock_app {distlock_app.__version__}" in page
    assert ' lang="ko"' in (tmp_path / "ko/quickstart.html").read_text()


def test_the_index_leads_to_every_page():
    linked = {target for index in INDEXES for target in targets(index)}
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]

    assert INDEXES[1] in targets(INDEXES[0])
    assert [title(page) for page in pages if page not in {*linked, *INDEXES}] == []


TRANSLATED = [page for page in KOREAN if page not in INDEXES]
# What a page's benchmark has written into it is in English only.
MEASURED = re.compile(r"^<!-- \w+: written by.*?^<!-- end -->$", re.S | re.M)


def english(page):
    """Return the page that a Korean page is the translation of."""
    name = page.name.replace(".ko.", ".")
    return next(p for p in ENGLISH if p.name == name) if page in KOREAN else page


def prose(page):
    return MEASURED.sub("", BLOCK.sub("", page.read_text()))


def targets(page):
    links = [link for link in LINK.findall(prose(page)) if ":" not in link]
    return [(page.parent / link.partition("#")[0]).resolve() for link in links if link[0] != "#"]


def without_comments(language, code):
    if language == "python":
        return ast.dump(ast.parse(code), indent=1)
    if language == "sh":
        lines = [shlex.split(line, comments=True) for line in code.splitlines()]
        return [line for line in lines if line]
    return code


@pytest.mark.parametrize("page", TRANSLATED, ids=title)
def test_a_korean_page_has_the_code_of_the_english_page(page):
    ours, theirs = (
        [without_comments(*block) for block in BLOCK.findall(p.read_text())]
        for p in (page, english(page))
    )

    assert ours == theirs


@pytest.mark.parametrize("page", TRANSLATED, ids=title)
def test_a_korean_page_has_the_names_and_the_headings_of_the_english_page(page):
    def names(page):
        found = re.findall(r"`[^`]+`|\b[EW]\d{3}\b", prose(page))
        return sorted({" ".join(name.split()) for name in found})

    def levels(page):
        return re.findall(r"^#+(?= )", prose(page), re.M)

    assert names(page) == names(english(page))
    assert levels(page) == levels(english(page))


@pytest.mark.parametrize("page", KOREAN, ids=title)
def test_bold_korean_ends_where_markdown_sees_the_end(page):
    # After punctuation it sees none if a letter follows, as a particle does.
    bold = re.findall(r"\*\*([^*]+)\*\*(\w?)", prose(page))

    assert [words for words, particle in bold if particle and not words[-1].isalnum()] == []


@pytest.mark.parametrize("page", TRANSLATED, ids=title)
def test_a_korean_page_leads_where_the_english_page_does(page):
    led = {english(target) for target in targets(page)}

    assert [title(p) for p in targets(english(page)) if english(p) not in led] == []


def test_the_code_map_has_every_room_and_only_files_that_exist():
    text = (ROOT / "docs/explanation/code-map.md").read_text()
    package = Path(distlock_app.__file__).parent
    paths = set(re.findall(r"`([\w/]+(?:/|\.py|\.lua))`", text)) - {"distlock_app/"}
    rooms = {f"{p.parent.relative_to(package).as_posix()}/" for p in package.rglob("*.py")}

    assert [path for path in sorted(paths) if not (package / path).exists()] == []
    assert rooms - paths == {"./", "migrations/", "management/commands/"}


# What is imported from its own module, and what of it is nobody's business.
MODULES = "admin etags fencing forms health metrics pessimistic testing versioned_admin".split()
INNER = {"DistLockAdmin", "LiveLockAdmin"}


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    public = set(distlock_app.__all__)
    for name in MODULES:
        module = import_module(f"distlock_app.{name}")
        listed = getattr(module, "__all__", None)
        listed = listed or [n for n, x in vars(module).items() if is_of(module, x) and n[0] != "_"]
        public |= {*listed}

    assert [n for n in sorted(public - INNER) if not re.search(rf"\b{n}\b", text)] == []


def is_of(module, thing):
    return getattr(thing, "__module__", "") == module.__name__


def test_the_reference_has_every_check_and_no_other():
    pattern = re.compile(r"distlock_app\.[EIW]\d+")
    code = "".join(p.read_text() for p in (ROOT / "distlock_app").rglob("*.py"))

    assert set(pattern.findall(of("checks.md"))) == set(pattern.findall(code))


def test_the_reference_has_every_option_of_a_lock_and_every_part_of_a_hold():
    options = [field.name for field in fields(distlock_app.Lock)]
    inner = {"leave", "aleave", "end_block", "abandon", "log_fields"}
    inner |= {"enter", "entry", "taken_at"}
    parts = [
        name
        for name in {*vars(distlock_app.Lock), *vars(distlock_app.Hold)}
        if not name.startswith("_") and name not in inner
    ]

    assert [name for name in [*options, *parts] if f"`{name}" not in of("lock.md")] == []


@pytest.mark.parametrize("decorator", ["locked", "locked_view", "locked_command", "unique_task"])
def test_the_reference_has_every_option_of_a_decorator(decorator):
    options = signature(getattr(distlock_app, decorator))

    assert [name for name in options if name not in of("decorators.md")] == []


def test_the_reference_has_every_key_of_the_json():
    backends = reading.Health(alias="default"), doctor.Finding(alias="default")
    section = of("command.md").partition("## JSON")[2]

    missing = {key for found in backends for key in found.facts() if f"`{key}`" not in section}
    assert not missing


def test_the_reference_has_every_signal():
    found = [name for name, value in vars(signals).items() if isinstance(value, Signal)]

    assert found
    assert [name for name in found if f"`{name}`" not in of("errors-and-signals.md")] == []


def rows(text):
    """Return name and default of each row of the tables that have a default."""
    found = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", text, re.M)
    return [(name, default or None) for name, default in found]


@pytest.mark.parametrize("kind", [claims.Claim, claims.Grant, claims.Busy, claims.Holding])
def test_the_reference_has_every_field_of_what_backends_get_and_give(kind):
    section = of("backend-contract.md").partition(f"### {kind.__name__}\n")[2].partition("\n#")[0]

    assert rows(section) == [(field.name, default_of(field)) for field in fields(kind)]


def default_of(field):
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    return None if field.default is MISSING else repr(field.default)


def test_the_reference_has_every_flag_and_every_verb_of_a_backend():
    text = of("backend-contract.md")
    public = {n: v for n, v in vars(base.BaseLockBackend).items() if n[0] != "_"}
    flags = {name: repr(value) for name, value in public.items() if not callable(value)}
    few = (base.InTransaction, base.GuardedWrites, base.Purgeable)
    verbs = [n for kind in (base.BaseLockBackend, *few) for n in vars(kind) if n[0] != "_"]

    assert dict(rows(text.partition("## What goes in")[0])) == flags
    assert [n for n in verbs if n not in flags and f"`{n}(" not in text] == []
    assert [kind.__name__ for kind in few if f"`{kind.__name__}`" not in text] == []


def messages():
    """Return each text in the code, and each part that it may be quoted up to; \0 is any text."""
    found = set()
    for path in (ROOT / "distlock_app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [getattr(part, "value", "") for part in parts]
            text = "".join(text if isinstance(text, str) else "\0" for text in texts)
            text = re.sub(r"%[.\d]*[a-z]", "\0", text)
            found |= {text[: end.start()] for end in re.finditer(r"[.:,](?= )|[.:]?$", text)}
    return [text for text in found if len(text) > 15]


def test_every_message_that_troubleshooting_explains_is_one_of_the_code():
    table = (ROOT / "docs/how-to/troubleshooting.md").read_text()
    cells = re.findall(r"^\| (`.+?`) \|", table, re.M)
    quoted = [quote.rstrip(".") for cell in cells for quote in re.findall(r"`(.+?)`", cell)]
    # Those that can be meant, for a pattern of all takes seconds to compile.
    meant = [
        re.escape(text).replace("\0", ".+")
        for text in messages()
        if any(all(part in quote for part in text.split("\0")) for quote in quoted)
    ]
    # The label and the key of an object may stand before it, or an alias of the settings.
    said = re.compile(rf"(.{{0,15}}|DISTLOCK\['\w+'\]: )({'|'.join(meant)})")

    assert len(quoted) > 30
    assert [quote for quote in quoted if not said.fullmatch(quote)] == []


def test_the_readme_names_every_option_of_the_two_scripts():
    demo = (ROOT / "demo_project/run.sh").read_text().partition("\nset -u")[0]
    suite = (ROOT / "tests/running.py").read_text()
    options = [
        *re.findall(r"^#   (--\w+|[A-Z_]+)", demo, re.M),
        *re.findall(r'add_argument\("(--\w+)"', suite),
        *re.findall(r"^  (DISTLOCK_\w+)=", suite, re.M),
    ]

    assert len(options) == 16
    for readme in ("README.md", "README.ko.md"):
        text = (ROOT / readme).read_text()
        assert [option for option in options if option not in text] == []
