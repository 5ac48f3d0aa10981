"""The time of the last change as the version of a row."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import IntegrityError, connection, migrations, models
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.utils.timezone import now

from distlock_app import StaleObjectError, TimestampVersionField
from tests.app.versioned_models import Page, Sheet

pytestmark = pytest.mark.django_db(transaction=True)

MODELS = pytest.mark.parametrize("model", [Page, Sheet])


@pytest.fixture
def stopped_clock(monkeypatch: Any) -> datetime:
    """The clock as a quick processor sees it: the same for every save."""
    now = datetime(2026, 5, 4, 3, 2, 1, 654321, tzinfo=timezone.utc)
    monkeypatch.setattr("django.utils.timezone.now", lambda: now)
    return now


@MODELS
def test_a_stale_save_is_refused_though_the_clock_stands_still(
    model: Any, stopped_clock: datetime
) -> None:
    mine = model.objects.create(text="a")
    theirs = model.objects.get()
    theirs.text = "b"
    theirs.save()

    mine.text = "c"
    with pytest.raises(StaleObjectError):
        mine.save()

    assert model.objects.get().text == "b"


@MODELS
def test_many_saves_in_one_moment_get_many_versions(model: Any, stopped_clock: datetime) -> None:
    page = model.objects.create()
    seen = {page.updated_at}

    for _ in range(3):
        page.save()
        page.refresh_from_db()
        seen.add(page.updated_at)
    model.objects.update(text="b")
    seen.add(model.objects.get().updated_at)

    assert len(seen) == 5
    assert all(time.microsecond == 0 for time in seen) == (model is Sheet)


def test_a_save_is_one_update_to_the_time_of_now(django_assert_num_queries: Any) -> None:
    page = Page.objects.create()
    Page.objects.update(updated_at=datetime(2020, 1, 1, tzinfo=timezone.utc))
    page.refresh_from_db()

    before = datetime.now(timezone.utc)
    with django_assert_num_queries(1):
        page.save()

    assert before <= page.updated_at == Page.objects.get().updated_at


def test_a_clock_that_was_set_back_does_not_bring_an_old_version_back() -> None:
    page = Page.objects.create()
    ahead = datetime.now(timezone.utc) + timedelta(days=1)
    Page.objects.update(updated_at=ahead)
    page.refresh_from_db()

    page.save()
    Page.objects.update(text="b")

    assert Page.objects.get().updated_at == ahead + timedelta(microseconds=2)


@MODELS
def test_stale_deletes_and_bulk_updates_are_refused(model: Any, stopped_clock: datetime) -> None:
    page, other = model.objects.create(), model.objects.create()
    model.objects.filter(pk=page.pk).update(text="b")

    with pytest.raises(StaleObjectError):
        page.delete()
    page.text = other.text = "c"
    with pytest.raises(StaleObjectError):
        model.objects.bulk_update([page, other], ["text"])

    assert sorted(model.objects.values_list("text", flat=True)) == ["", "b"]


@MODELS
def test_what_was_written_in_bulk_can_be_saved(model: Any) -> None:
    pages = model.objects.bulk_create([model(), model()])
    for page in pages:
        page.save()

    model.objects.bulk_update(pages, ["text"])
    for page in pages:
        page.save()


def test_an_object_that_was_never_read_overwrites_the_row() -> None:
    page = Page.objects.create()

    Page(pk=page.pk, text="b").save()

    with pytest.raises(StaleObjectError):
        page.save()


def test_a_migration_says_the_resolution_only_if_it_is_not_the_usual_one() -> None:
    text, _ = MigrationWriter.serialize(TimestampVersionField())
    rough, _ = MigrationWriter.serialize(TimestampVersionField(resolution=timedelta(seconds=1)))

    assert text == "distlock_app.optimistic.TimestampVersionField()"
    assert rough == (
        "distlock_app.optimistic.TimestampVersionField(resolution=datetime.timedelta(seconds=1))"
    )


def test_an_existing_column_is_guarded_without_any_sql() -> None:
    before = ProjectState()
    fields: Any = [
        ("id", models.BigAutoField(primary_key=True)),
        ("updated_at", models.DateTimeField(auto_now=True)),
    ]
    before.add_model(ModelState("testapp", "Diary", fields))
    alter = migrations.AlterField("Diary", "updated_at", TimestampVersionField())
    after = before.clone()
    alter.state_forwards("testapp", after)

    with connection.schema_editor(collect_sql=True) as editor:
        alter.database_forwards("testapp", editor, before, after)

    # SQLite makes the table anew for any change of a field.
    assert editor.collected_sql == [] or connection.vendor == "sqlite"


def test_a_column_that_may_be_null_is_filled_and_then_guarded() -> None:
    """The way of docs/how-to/optimistic.md."""
    before = ProjectState()
    fields: Any = [
        ("id", models.BigAutoField(primary_key=True)),
        ("updated_at", models.DateTimeField(null=True)),
    ]
    before.add_model(ModelState("testapp", "Diary", fields))
    alter = migrations.AlterField("Diary", "updated_at", TimestampVersionField())
    after = before.clone()
    alter.state_forwards("testapp", after)
    old, new = (state.apps.get_model("testapp", "Diary") for state in (before, after))
    with connection.schema_editor() as editor:
        editor.create_model(old)
    try:
        row = old.objects.create()
        old.objects.filter(updated_at=None).update(updated_at=now())
        with connection.schema_editor() as editor:
            alter.database_forwards("testapp", editor, before, after)

        filled = new.objects.get()
        filled.save()

        assert filled.pk == row.pk
        with pytest.raises(IntegrityError):
            new.objects.update(updated_at=None)
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(new)
