"""What users install: the package's files, its floors, its migrations."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.core.management import call_command

import distlock_app

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "distlock_app"
MODULES = sorted(PACKAGE.rglob("*.py"))


def run(command, *, cwd=ROOT, deadline=120):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=deadline)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_version_is_a_semantic_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", distlock_app.__version__)


def test_importing_the_package_needs_no_settings():
    run([sys.executable, "-W", "error", "-c", "import distlock_app; distlock_app.__version__"])


def test_every_public_name_can_be_imported():
    assert [name for name in distlock_app.__all__ if not hasattr(distlock_app, name)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    tree = ast.parse(path.read_text())

    assert not tree.body or "migrations" in path.parts or ast.get_docstring(tree)


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


@pytest.mark.slow
def test_the_wheel_carries_every_file_of_the_package(tmp_path):
    pytest.importorskip("build")
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(PACKAGE, source / "distlock_app", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path)],
        cwd=source,
        deadline=300,
    )

    [wheel] = tmp_path.glob("*.whl")
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(source).as_posix()
        for path in (source / "distlock_app").rglob("*")
        if path.is_file()
    }
    assert carried == there
