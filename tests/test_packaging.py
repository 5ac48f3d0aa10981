"""What users install: the package's files, its layers, its migrations."""

from __future__ import annotations

import ast
import configparser
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import django
import pytest
from django.core.management import call_command

import distlock_app
from tests.launching import free_port, launch, mortal

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "distlock_app"
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(PACKAGE.rglob("*.lua"))


def run(command, *, cwd=ROOT, deadline=120, env=None):
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=deadline, env=env
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_version_is_a_semantic_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", distlock_app.__version__)


def test_importing_the_package_needs_no_settings():
    run([sys.executable, "-W", "error", "-c", "import distlock_app; distlock_app.__version__"])


def test_every_public_name_can_be_imported():
    assert [name for name in distlock_app.__all__ if not hasattr(distlock_app, name)] == []


# What projects write in their settings and their code; where else a name is defined may change.
SHORT_PATHS = {
    "admin": "LiveLockAdminMixin",
    "backends.base": "BaseLockBackend",
    "backends.database": "DatabaseBackend",
    "backends.dummy": "DummyBackend",
    "backends.etcd": "EtcdBackend",
    "backends.locmem": "LocMemBackend",
    "backends.mysql": "NamedLockBackend",
    "backends.postgresql": "AdvisoryLockBackend",
    "backends.redis": "RedisBackend",
    "backends.redlock": "RedlockBackend",
    "backends.zookeeper": "ZooKeeperBackend",
    "claims": "Busy Claim Grant Holding",
    "errors": "LockError",
    "etags": "PreconditionFailed PreconditionRequired etag_of guarded_view require_match with_etag",
    "fencing": "FencedManager FencedModel FencedQuerySet FencedVersionedModel",
    "forms": "Change Conflict VersionedModelForm",
    "health": "health",
    "metrics": "use_opentelemetry use_prometheus",
    "models": "DistLock LiveLock",
    "optimistic": "TimestampVersionField VersionField VersionedManager VersionedModel",
    "pessimistic": "LockingManager LockingQuerySet for_update next_unlocked retry_on_deadlock",
    "signals": "lock_acquired lock_busy lock_cleared lock_lost lock_released version_conflict",
    "testing": "LockBackendContract held_elsewhere lose override_locks",
    "versioned_admin": "VersionedAdmin VersionedAdminMixin VersionedInlineMixin",
}


@pytest.mark.parametrize("module, names", SHORT_PATHS.items(), ids=list(SHORT_PATHS))
def test_what_projects_import_keeps_its_short_path(module, names):
    try:
        found = import_module(f"distlock_app.{module}")
    except ModuleNotFoundError as error:
        if error.name.startswith("distlock_app"):
            raise
        pytest.skip(f"{error.name} is not installed")

    assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    tree = ast.parse(path.read_text())

    assert not tree.body or "migrations" in path.parts or ast.get_docstring(tree)


def test_the_package_imports_nothing_that_lies_beside_it():
    beside = re.compile(r"^\s*(?:from|import) (?:tests|demo_project|benchmarks)\b", re.MULTILINE)

    assert [path for path in MODULES if beside.search(path.read_text())] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_lua_script_says_what_it_does_and_its_keys_arguments_and_answer(path):
    first, *head = path.read_text().partition("\n\n")[0].splitlines()

    assert re.match(r"-- [A-Z].+", first)
    if path.parent.name != "shared":
        starts = [line.split()[1] for line in head if line[3:4].strip()]
        assert starts[:3] == ["KEYS", "ARGV", "->"]


@pytest.mark.skipif(not find_spec("importlinter"), reason="import-linter is not installed")
def test_imports_go_down_only():
    run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as c; c()",
            "--no-cache",
        ]
    )


@pytest.mark.django_db
def test_the_models_have_their_migrations():
    call_command("makemigrations", "distlock_app", check=True, dry_run=True, verbosity=0)


TESTS_OF_A_PROJECT = """
from distlock_app import Lock
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.core.registry import registry


def test_a_lock_that_another_owner_holds(held_elsewhere):
    assert type(registry["default"].backend) is LocMemBackend
    held_elsewhere("pay:1")
    held_elsewhere("pay:2", using="redis")
    assert Lock("pay:1").try_acquire() is None
    assert Lock("pay:2", using="redis").try_acquire() is None


def test_a_lock_that_was_held_in_the_test_before():
    with Lock("pay:1", wait=0), Lock("pay:2", using="redis", wait=0):
        pass
"""
SETTINGS_OF_A_PROJECT = """
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DISTLOCK = {
    "default": {"BACKEND": "distlock_app.backends.database.DatabaseBackend"},
    "redis": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
}
"""


def test_pytest_finds_the_fixtures(tmp_path, monkeypatch):
    configured = configparser.ConfigParser()
    configured.read(ROOT / "setup.cfg")
    plugin = configured["options.entry_points"]["pytest11"].split()[-1]
    installed = any(point.value == plugin for point in entry_points(group="pytest11"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nusefixtures = locks_in_memory\n")
    (tmp_path / "project_settings.py").write_text(SETTINGS_OF_A_PROJECT)
    (tmp_path / "test_project.py").write_text(TESTS_OF_A_PROJECT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    command = [sys.executable, "-W", "error", "-m", "pytest", "--ds", "project_settings"]
    run([*command, *([] if installed else ["-p", plugin])], cwd=tmp_path)


# What is beside the package in a work tree, and belongs to no release.
LITTER = (
    "__pycache__ *.pyc .git .venv* var build dist site *.egg-info *.sqlite3* .coverage* .*_cache"
)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The work tree, and the directory with its source archive and the wheel built from that."""
    pytest.importorskip("build")
    directory = tmp_path_factory.mktemp("archives")
    source = directory / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LITTER.split()))
    there = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    run([sys.executable, "-m", "build", "--outdir", str(directory)], cwd=source, deadline=400)
    return there, directory


@pytest.fixture(scope="module")
def wheel(archives):
    """The wheel of the package as it is in the work tree."""
    [wheel] = archives[1].glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked(archives, tmp_path_factory):
    """The source archive, unpacked elsewhere."""
    [archive] = archives[1].glob("*.tar.gz")
    directory = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    [project] = directory.iterdir()
    return project


@pytest.mark.slow
def test_the_source_archive_carries_the_whole_work_tree(archives, unpacked):
    carried = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*")}

    # What only the repository needs.
    missing = {name for name in archives[0] - carried if not name.startswith(".git")}
    assert missing <= {".pre-commit-config.yaml"}


@pytest.mark.slow
def test_the_tests_of_the_source_archive_pass_where_it_is_unpacked(unpacked):
    # All are imported: none may need a server for that.
    needs_no_server = "test_core_holds or test_core_settings"
    environment = {k: v for k, v in os.environ.items() if not re.match(r"DISTLOCK_|PYTEST_", k)}

    # To rewrite the assertions of all files would take longer than all else.
    run(
        [sys.executable, "-m", "pytest", "-q", "--assert=plain", "-k", needs_no_server],
        cwd=unpacked,
        deadline=300,
        env=environment,
    )


@pytest.mark.slow
def test_the_linter_of_the_source_archive_leaves_out_what_the_tests_install(unpacked):
    pytest.importorskip("ruff")
    installed = unpacked / ".venv-tests/mysql/printers.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("import gdb")

    run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=unpacked)


@pytest.mark.slow
def test_what_pypi_shows_has_the_address_of_the_repository_and_no_relative_link(unpacked):
    run([sys.executable, ".ci/address", "https://example.com/shop/locks", "v1.0.0"], cwd=unpacked)

    metadata = configparser.ConfigParser()
    metadata.read(unpacked / "setup.cfg")
    assert "Source = https://example.com/shop/locks\n" in metadata["metadata"]["project_urls"]
    readme = (unpacked / "README.md").read_text()
    assert "](https://example.com/shop/locks/blob/v1.0.0/docs/quickstart.md)" in readme
    assert re.findall(r"\]\((?!https?:|#).*?\)", readme) == []


@pytest.mark.slow
def test_the_wheel_carries_every_file_of_the_package(wheel):
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert carried == there


@pytest.mark.slow
def test_the_quickstart_works_as_written_with_nothing_but_django_and_the_wheel(wheel, tmp_path):
    python = tmp_path / "venv/bin/python"
    venv.create(tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile"]
    run([*pip, str(wheel), f"Django=={django.__version__}"], deadline=300)

    said = follow(ROOT / "docs/quickstart.md", python=python, cwd=tmp_path)

    for words, times in {
        "order 1 is paid": 1,
        "order 2 is paid": 1,
        "Your request is already being processed.": 2,  # the second click, and the command's lock
        "HTTP/1.1 423 Locked": 2,
        "Retry-After: 10": 2,
        "invoice:42 is ours, with fencing token": 1,
        "settled": 1,
        "settle is already running: the lock 'command:shop.settle' is held by host": 1,
        "\n75\n": 1,
        "distlock run sleep": 1,  # in the list
        "1 cleared": 1,
        "shop.Account 1 has version 2, not 1": 1,
        "\n70\n": 1,
    }.items():
        assert said.count(words) == times, f"{words!r} is not said {times} times:\n{said}"
    assert "Traceback" not in said


def follow(page, *, python, cwd):
    """Do what a page says, in one shell; return what was printed."""
    port = str(free_port())
    script = "\n".join(steps(page)).replace(":8000", f":{port}")
    script = script.replace("runserver", f"runserver --noreload {port}")
    environment = {key: value for key, value in os.environ.items() if "DJANGO" not in key}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    with tempfile.TemporaryFile("w+") as output:
        shell = launch(
            mortal(["bash", "-c", script]),
            cwd=cwd,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait(30)
            output.seek(0)
            said = output.read()
    return said


def steps(page):
    """Yield the shell commands of a page; its other samples go where the page says."""
    for words, language, code in re.findall(
        r"([^\n]*)\n\n```(\w+)\n(.*?)^```$", page.read_text(), re.S | re.M
    ):
        file = re.fullmatch(r"(At the end of )?`([\w/.]+)`:", words)
        if language == "sh":
            yield re.sub(r"^pip install.*", "", code, flags=re.M)
        elif "manage.py shell" in words:
            yield f"python manage.py shell <<'END'\n{code}\nEND"
        else:
            redirect = ">>" if file[1] else ">"
            yield f"mkdir -p $(dirname {file[2]}); cat {redirect} {file[2]} <<'END'\n{code}END"
