"""The version field in migrations, in forms and in the system checks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from django.db import connection, migrations, models
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.forms import modelform_factory
from django.test.utils import isolate_apps

from distlock_app.fencing import (
    FencedManager,
    FencedQuerySet,
    FencedVersionedManager,
    FencedVersionedQuerySet,
)
from distlock_app.optimistic import (
    StaleObjectError,
    TimestampVersionField,
    VersionedManager,
    VersionedModel,
    VersionedQuerySet,
    VersionField,
)
from distlock_app.pessimistic import LockingManager, LockingQuerySet
from tests.app.versioned_models import Account, Article, ProxyAccount, SavingsAccount, Seat


def ids(model: Any) -> set[str]:
    return {message.id for message in model.check() if message.id.startswith("distlock_app")}


def test_the_models_of_the_tests_pass_the_checks() -> None:
    for model in (Account, Article, SavingsAccount, Seat):
        assert model.check(databases=["default"]) == []


@isolate_apps("tests.app")
def test_a_version_field_without_the_model_that_guards_it_is_an_error() -> None:
    class Unguarded(models.Model):
        version = VersionField()

        class Meta:
            app_label = "testapp"

    assert ids(Unguarded) == {"distlock_app.E021"}


@isolate_apps("tests.app")
def test_a_second_version_field_is_an_error() -> None:
    class Twice(VersionedModel):
        revision = VersionField()

        class Meta:
            app_label = "testapp"

    class Renamed(VersionedModel):
        version = None
        revision = VersionField()

        class Meta:
            app_label = "testapp"

    assert ids(Twice) == {"distlock_app.E022"}
    assert ids(Renamed) == set()


@isolate_apps("tests.app")
def test_a_plain_field_in_the_place_of_the_version_is_an_error() -> None:
    class Counted(VersionedModel):
        version = models.IntegerField(default=0)

        class Meta:
            app_label = "testapp"

    class Bare(VersionedModel):
        version = None

        class Meta:
            app_label = "testapp"

    assert ids(Counted) == ids(Bare) == {"distlock_app.E025"}


@isolate_apps("tests.app")
def test_a_version_that_may_be_null_is_an_error() -> None:
    class Old(VersionedModel):
        version = None
        updated_at = TimestampVersionField(null=True)

        class Meta:
            app_label = "testapp"

    class Numbered(VersionedModel):
        version = VersionField(null=True)

        class Meta:
            app_label = "testapp"

    assert ids(Old) == ids(Numbered) == {"distlock_app.E024"}


@isolate_apps("tests.app")
def test_a_manager_that_leaves_the_version_is_a_warning() -> None:
    class Unversioned(VersionedModel):
        objects = models.Manager()  # type: ignore[assignment]

        class Meta:
            app_label = "testapp"

    class Derived(VersionedModel):
        objects = type("Own", (VersionedManager,), {})()

        class Meta:
            app_label = "testapp"

    assert ids(Unversioned) == {"distlock_app.W023"}
    assert ids(Derived) == set()


@pytest.mark.parametrize(
    "kind",
    [
        *(VersionedQuerySet, LockingQuerySet, FencedQuerySet, FencedVersionedQuerySet),
        *(VersionedManager, LockingManager, FencedManager, FencedVersionedManager),
    ],
)
def test_a_queryset_or_manager_takes_its_model_as_a_type(kind: Any) -> None:
    own = type("Own", (kind[Account],), {})

    assert issubclass(own, kind)


def test_a_migration_writes_the_field_without_its_fixed_options() -> None:
    text, imports = MigrationWriter.serialize(VersionField(verbose_name="edition"))

    assert text == "distlock_app.optimistic.VersionField(verbose_name='edition')"
    assert imports == {"import distlock_app.optimistic"}


def test_forms_leave_the_version_out_and_validation_does_not_ask_for_it() -> None:
    assert "version" not in modelform_factory(Account, fields="__all__").base_fields

    Account(owner="Ann").full_clean(exclude=["seen", "parent"])


@pytest.mark.django_db(transaction=True)
def test_the_column_can_be_added_while_code_that_does_not_know_it_inserts() -> None:
    before = ProjectState()
    before.add_model(
        ModelState("testapp", "Ledger", [("id", models.BigAutoField(primary_key=True))])
    )
    add = migrations.AddField("Ledger", "version", VersionField())
    after = before.clone()
    add.state_forwards("testapp", after)
    old, new = (state.apps.get_model("testapp", "Ledger") for state in (before, after))
    with connection.schema_editor() as editor:
        editor.create_model(old)
    try:
        old.objects.create()
        with connection.schema_editor() as editor:
            add.database_forwards("testapp", editor, before, after)
        row = old.objects.create()
        row.save()  # does not move a version that it does not know
        new.objects.get(pk=row.pk).delete()
        old.objects.create()

        # A model of a migration guards nothing, but moves the version on.
        row = new.objects.create()
        row.save()
        row.save()

        assert list(new.objects.order_by("pk").values_list("version", flat=True)) == [1, 1, 3]
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(new)


@pytest.mark.parametrize("model", [Account, ProxyAccount, SavingsAccount, Article])
def test_migrations_say_nothing_of_managers(model: Any) -> None:
    state = ModelState.from_model(model)

    assert state.managers == []
    assert "base_manager_name" not in state.options


def test_a_model_that_is_added_later_does_not_take_the_base_manager_away() -> None:
    Account._meta._expire_cache()  # type: ignore[attr-defined]

    assert isinstance(Account._base_manager.get_queryset(), VersionedQuerySet)


@isolate_apps("tests.app")
def test_a_base_manager_that_leaves_the_version_is_a_warning() -> None:
    class Plain(VersionedModel):
        every = models.Manager()

        class Meta:
            app_label = "testapp"
            base_manager_name = "every"

    assert ids(Plain) == {"distlock_app.W023"}


@pytest.mark.once
@pytest.mark.parametrize(
    "line",
    [
        "from distlock_app import StaleObjectError, RetriesExhausted, retry_on_conflict",
        "import distlock_app; distlock_app.__all__; dir(distlock_app)",
    ],
)
def test_what_needs_no_models_can_be_imported_before_the_apps_are_ready(line: str) -> None:
    run = subprocess.run([sys.executable, "-W", "error", "-c", line], timeout=60)

    assert run.returncode == 0


@pytest.mark.once
def test_a_model_asked_for_too_early_is_there_later() -> None:
    code = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
from django.core.exceptions import AppRegistryNotReady
try:
    from distlock_app import VersionedModel
except AppRegistryNotReady:
    import django
    django.setup()
    from distlock_app import VersionedModel
    from tests.app.models import Account
    assert issubclass(Account, VersionedModel)
    raise SystemExit(0)
raise SystemExit("it was no error")
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60)

    assert run.returncode == 0


@pytest.mark.django_db(transaction=True)
def test_an_existing_table_is_guarded_step_by_step_while_the_old_release_writes() -> None:
    """The steps of docs/how-to/optimistic.md."""

    def release(**fields: Any) -> Any:
        """Return the model as this release of the code has it."""
        with isolate_apps("tests.app"):
            base: Any = VersionedModel if "version" in fields else models.Model
            meta = type("Meta", (), {"app_label": "testapp", "db_table": "testapp_diary"})
            body = {"__module__": __name__, "Meta": meta, "text": models.TextField(default="")}
            return type(base)(
                "Diary", (base,), {**body, "id": models.BigAutoField(primary_key=True)}
            )

    old, new = release(), release(version=True)
    with connection.schema_editor() as editor:
        editor.create_model(old)
    try:
        before = old.objects.create(text="before")
        with connection.schema_editor() as editor:
            editor.add_field(old, new._meta.get_field("version"))

        # Both releases run, on old rows and on new ones.
        during = old.objects.create(text="during")
        for row in new.objects.order_by("pk"):
            row.text += ", new"
            row.save()
        before.text = "old again"
        before.save()
        assert list(new.objects.order_by("pk").values_list("version", flat=True)) == [2, 2]

        # The last process of the old release has ended.
        mine, theirs = (new.objects.get(pk=during.pk) for _ in range(2))
        theirs.save()
        with pytest.raises(StaleObjectError):
            mine.save()
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(new)
