"""Forms of versioned models: two people open one, the second to send it is told."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timezone
from decimal import Decimal
from typing import Any

import pytest
from django import forms
from django.core import signing
from django.core.exceptions import NON_FIELD_ERRORS, ImproperlyConfigured
from django.core.files.base import ContentFile
from django.core.files.storage import InMemoryStorage
from django.core.files.uploadedfile import SimpleUploadedFile
from django.forms import inlineformset_factory
from django.http import QueryDict
from django.utils.timezone import override

from distlock_app import StaleObjectError
from distlock_app.forms import VERSION, VersionedModelForm
from distlock_app.guards.optimistic.form_values import key_of, shown
from tests.app.versioned_models import Account, Chapter, Extra, Leaflet, Note, Offer, Page, Tag

pytestmark = pytest.mark.django_db


class OfferForm(VersionedModelForm):
    class Meta:
        model = Offer
        exclude = ["stock"]


@pytest.fixture
def offer() -> Offer:
    offer = Offer.objects.create(
        name="Green tea",
        price=Decimal("10.50"),
        starts=datetime(2026, 5, 4, 3, 2, 1, 654321, tzinfo=timezone.utc),
        ends=date(2026, 6, 1),
    )
    offer.tags.add(Tag.objects.create(name="new"))
    return offer


def sent(form: forms.BaseForm | Any, **changes: Any) -> QueryDict:
    """Return what a browser sends of this form after these changes."""
    data = QueryDict(mutable=True)
    for bound in form:
        name, value = bound.html_name, bound.value()
        if isinstance(bound.field.widget, forms.CheckboxInput):
            if value:
                data[name] = "on"
        elif isinstance(bound.field.widget, forms.SelectMultiple):
            data.setlist(name, [str(getattr(one, "pk", one)) for one in value or ()])
        else:
            shown = bound.field.widget.format_value(value)
            data[name] = str("".join(shown) if isinstance(shown, list) else shown or "")
    for name, value in changes.items():
        data.setlist(name, value) if isinstance(value, list) else data.update({name: value})
    return data


def opened(offer: Offer, **options: Any) -> OfferForm:
    return OfferForm(instance=Offer.objects.get(pk=offer.pk), **options)


def answered(offer: Offer, data: QueryDict, **options: Any) -> OfferForm:
    return opened(offer, data=data, **options)


def changed(offer: Offer, **values: Any) -> None:
    """Let somebody else save."""
    Offer.objects.filter(pk=offer.pk).update(**values)


def test_a_form_is_saved_if_nobody_else_saved(offer: Offer) -> None:
    form = answered(offer, sent(opened(offer), name="Black tea"))

    assert form.is_valid(), form.errors
    form.save()

    offer.refresh_from_db()
    assert (offer.name, offer.version) == ("Black tea", 2)


def test_an_untouched_form_has_not_changed(offer: Offer) -> None:
    assert not answered(offer, sent(opened(offer))).has_changed()


def test_what_browsers_and_forms_make_of_a_text_is_no_change(offer: Offer) -> None:
    changed(offer, name="Green tea ", text="one\ntwo\rthree\n")
    data = sent(opened(offer), price="11", text="one\r\ntwo\r\nthree\r\n")
    changed(offer, name="White tea", text="four", price=Decimal("12"))

    form = answered(offer, data)
    form.is_valid()

    assert form.conflict is not None
    yours = {change.name: change.yours for change in form.conflict.changes}
    assert yours == {"name": None, "text": None, "price": "11.00"}


def test_blanks_that_a_form_keeps_are_a_change() -> None:
    class Exact(VersionedModelForm):
        title = forms.CharField(strip=False)

        class Meta:
            model = Leaflet
            fields = ["title"]

    leaflet = Leaflet.objects.create(title="a")
    data = sent(Exact(instance=leaflet), title="a ")
    Leaflet.objects.update(title="b")

    assert not Exact(data, instance=Leaflet.objects.get()).is_valid()


def test_an_upload_is_a_change_whatever_its_name(monkeypatch: Any) -> None:
    class LeafletForm(VersionedModelForm):
        class Meta:
            model = Leaflet
            fields = ["picture"]

    picture = Leaflet._meta.get_field("picture")
    monkeypatch.setattr(picture, "upload_to", "")
    monkeypatch.setattr(picture, "storage", InMemoryStorage())
    leaflet = Leaflet.objects.create(picture=ContentFile(b"old", "a.png"))
    data = sent(LeafletForm(instance=leaflet))
    other = Leaflet.objects.get()
    other.picture = ContentFile(b"theirs", "b.png")
    other.save()

    upload = {"picture": SimpleUploadedFile("a.png", b"mine")}
    form = LeafletForm(data, upload, instance=Leaflet.objects.get())

    assert not form.is_valid()
    assert form.conflict is not None
    assert [(c.theirs, c.yours) for c in form.conflict.changes] == [("b.png", "a.png")]


def test_the_microseconds_of_a_time_are_no_change() -> None:
    class LeafletForm(VersionedModelForm):
        class Meta:
            model = Leaflet
            fields = ["title", "shown_at"]

    Leaflet.objects.create(title="a", shown_at=time(1, 2, 3, 456789))
    data = sent(LeafletForm(instance=Leaflet.objects.get()), title="mine")
    Leaflet.objects.update(title="theirs", shown_at=time(5))

    form = LeafletForm(data, instance=Leaflet.objects.get())
    form.is_valid()

    assert form.conflict is not None
    changes = {change.name: (change.theirs, change.yours) for change in form.conflict.changes}
    assert changes == {"title": ("theirs", "mine"), "shown_at": ("5 a.m.", None)}


def test_a_new_object_needs_no_version() -> None:
    form = OfferForm(data=sent(OfferForm(), name="Mug", price="1", kind="cup"))

    assert form.is_valid(), form.errors
    assert form.save().version == 1


def test_the_second_is_told_what_the_first_changed(offer: Offer) -> None:
    data = sent(opened(offer), name="Black tea")
    changed(offer, name="White tea", price=Decimal("12"), active=False)

    form = answered(offer, data)

    assert not form.is_valid()
    assert form.conflict is not None
    assert [(c.name, c.old, c.theirs, c.yours) for c in form.conflict.changes] == [
        ("name", "Green tea", "White tea", "Black tea"),
        ("price", "10.50", "12.00", None),
        ("active", "yes", "no", None),
    ]
    assert form.has_error(NON_FIELD_ERRORS, "conflict")
    assert "White tea" in form.non_field_errors()[0]
    offer.refresh_from_db()
    assert offer.name == "White tea"


def test_shown_again_it_keeps_what_was_typed_and_takes_what_was_not(offer: Offer) -> None:
    data = sent(opened(offer), name="Black tea")
    changed(offer, name="White tea", price=Decimal("12"))
    form = answered(offer, data)
    form.is_valid()

    again = sent(form)

    assert (again["name"], again["price"]) == ("Black tea", "12.00")
    final = answered(offer, again)
    assert final.is_valid(), final.errors
    final.save()
    offer.refresh_from_db()
    assert (offer.name, offer.price) == ("Black tea", Decimal("12"))


def test_theirs_may_be_chosen_field_by_field(offer: Offer) -> None:
    data = sent(opened(offer), name="Black tea", text="Fine.", ends="2026-07-01")
    changed(offer, name="White tea", text="Finest.", ends=date(2026, 8, 1))
    form = answered(offer, data)
    form.is_valid()
    assert form.conflict is not None
    choices = {change.name: str(change.choice) for change in form.conflict.changes}

    final = answered(offer, sent(form, **{choices["name"]: "theirs", choices["ends"]: "theirs"}))

    assert final.is_valid(), final.errors
    final.save()
    offer.refresh_from_db()
    assert (offer.name, offer.text, offer.ends) == ("White tea", "Fine.", date(2026, 8, 1))


def test_theirs_may_be_chosen_where_ones_own_makes_no_sense(offer: Offer) -> None:
    data = sent(opened(offer), price="many")
    changed(offer, price=Decimal("12"))
    form = answered(offer, data)
    form.is_valid()
    assert form.conflict is not None
    assert [(c.theirs, c.yours) for c in form.conflict.changes] == [("12.00", "many")]

    final = answered(offer, sent(form, **{str(form.conflict.changes[0].choice): "theirs"}))

    assert final.is_valid(), final.errors
    assert final.save().price == Decimal("12")


def test_a_third_who_saves_meanwhile_is_noticed_too(offer: Offer) -> None:
    data = sent(opened(offer), name="Black tea")
    changed(offer, name="White tea")
    form = answered(offer, data)
    form.is_valid()
    again = sent(form)
    changed(offer, name="Red tea")

    final = answered(offer, again)

    assert not final.is_valid()
    assert final.conflict is not None
    [change] = final.conflict.changes
    assert (change.old, change.theirs, change.yours) == ("White tea", "Red tea", "Black tea")


def test_a_change_of_what_the_form_does_not_show_is_no_conflict(offer: Offer) -> None:
    data = sent(opened(offer), name="Black tea")
    changed(offer, stock=7)

    form = answered(offer, data)

    assert form.is_valid(), form.errors
    form.save()
    offer.refresh_from_db()
    assert (offer.name, offer.stock) == ("Black tea", 7)


def test_who_changed_nothing_overwrites_nothing(offer: Offer) -> None:
    data = sent(opened(offer))
    changed(offer, name="White tea")

    form = answered(offer, data)

    assert form.is_valid(), form.errors
    assert form.save().name == "White tea"


def test_what_was_taken_over_from_others_has_not_changed(offer: Offer) -> None:
    data = sent(opened(offer))
    changed(offer, name="White tea")
    form = answered(offer, data)
    assert form.is_valid() and not form.has_changed()

    data["name"], data["price"] = "Black tea", "11"
    data.setlist("tags", [])
    form = answered(offer, data)
    form.is_valid()
    again = answered(offer, sent(form, distlock_take_name="theirs"))
    assert again.is_valid(), again.errors
    assert again.changed_data == ["price", "tags"]


def test_a_relation_changed_without_a_save_is_a_conflict_too(offer: Offer) -> None:
    data = sent(opened(offer), name="Black tea")
    untouched = sent(opened(offer))
    offer.tags.add(Tag.objects.create(name="sale"))

    form = answered(offer, data)

    assert not form.is_valid()
    assert form.conflict is not None
    (change,) = form.conflict.changes
    assert (change.old, change.theirs, change.yours) == ("new", "new, sale", None)
    for kept in (untouched, sent(form)):
        form = answered(offer, kept)
        assert form.is_valid(), form.errors
        form.save()
        assert offer.tags.count() == 2


def test_the_same_change_by_both_is_no_conflict(offer: Offer) -> None:
    data = sent(opened(offer), name="White tea")
    changed(offer, name="White tea")

    assert answered(offer, data).is_valid()


def test_every_kind_of_field_is_compared_and_shown_as_people_read_it(offer: Offer) -> None:
    ann, bob = Account.objects.create(owner="Ann"), Account.objects.create(owner="Bob")
    old, more = Tag.objects.get(), Tag.objects.create(name="sale")
    offer.account = ann
    offer.save()
    data = sent(
        opened(offer),
        kind="cup",
        active="",
        starts="2026-05-04 09:00:00",
        account=str(bob.pk),
        tags=[str(old.pk), str(more.pk)],
    )
    data.pop("active")
    changed(
        offer,
        name="White tea",
        starts=datetime(2026, 5, 4, 10, tzinfo=timezone.utc),
        account=None,
    )
    offer.tags.clear()

    form = answered(offer, data)
    form.is_valid()

    assert form.conflict is not None
    changes = {c.name: (c.old, c.theirs, c.yours) for c in form.conflict.changes}
    assert changes == {
        "name": ("Green tea", "White tea", None),
        "starts": ("May 4, 2026, 3:02 a.m.", "May 4, 2026, 10 a.m.", "May 4, 2026, 9 a.m."),
        "account": (str(ann), "", str(bob)),
        "tags": ("new", "", "new, sale"),
    }


@pytest.mark.parametrize("token", ["", "made up", None])
def test_a_form_without_its_version_is_refused(offer: Offer, token: str | None) -> None:
    data = sent(opened(offer), name="Black tea")
    if token is None:
        del data[VERSION]
    else:
        data[VERSION] = token

    form = answered(offer, data)

    assert not form.is_valid()
    assert form.conflict is not None and not form.conflict.known
    [change] = form.conflict.changes
    assert (change.old, change.theirs, change.yours) == (None, "Green tea", "Black tea")
    assert answered(offer, sent(form)).is_valid()


def test_the_version_of_another_object_or_user_is_refused(offer: Offer) -> None:
    other = Offer.objects.create(name="Mug")
    mine = sent(opened(offer, user=1), name="Black tea")

    assert not answered(other, mine, user=1).is_valid()
    assert not answered(offer, mine, user=2).is_valid()
    assert answered(offer, mine, user=1).is_valid()


def test_a_strict_form_refuses_whatever_moved_the_version(offer: Offer) -> None:
    data = sent(opened(offer), name="Black tea")
    changed(offer, stock=7)
    form = answered(offer, data)
    form.strict = True

    assert not form.is_valid()
    assert form.conflict is not None and form.conflict.changes == []


def test_a_save_between_the_check_and_the_save_is_refused(offer: Offer) -> None:
    form = answered(offer, sent(opened(offer), name="Black tea"))
    assert form.is_valid()
    changed(offer, name="White tea")

    with pytest.raises(StaleObjectError):
        form.save()


def test_a_long_text_is_compared_but_not_carried(offer: Offer) -> None:
    changed(offer, text="x" * 100_000)
    first = sent(opened(offer), name="Black tea")
    assert len(first[VERSION]) < 2000
    assert answered(offer, first).is_valid()
    changed(offer, text="short")

    form = answered(offer, first)

    assert not form.is_valid()
    assert form.conflict is not None
    assert [(c.old, c.theirs) for c in form.conflict.changes] == [("(a long text)", "short")]


def test_long_json_data_in_another_order_is_no_change() -> None:
    field, text = forms.JSONField(), "x" * 100_000
    key = key_of({"text": text, "number": 1}, field)

    assert key_of({"number": 1, "text": text}, field) == key
    assert key_of({"number": 2, "text": text}, field) != key
    assert text not in str(key)


def test_json_data_differs_where_python_values_are_equal(offer: Offer) -> None:
    class DataForm(OfferForm):
        text = forms.JSONField()

    def opened(**options: Any) -> DataForm:
        offer = Offer.objects.get()
        offer.text = json.loads(offer.text)  # as a JSONField does
        return DataForm(instance=offer, **options)

    changed(offer, text='{"vat": 1}')
    data = sent(opened(), name="Black tea")
    changed(offer, text='{"vat": true}')

    form = opened(data=data)

    assert not form.is_valid()
    assert form.conflict is not None
    assert [change.name for change in form.conflict.changes] == ["text"]
    assert form.cleaned_data["text"] == {"vat": True}


@pytest.mark.parametrize("other", ["a", "a\r\n", "", None, [], {}])
def test_json_texts_differ_by_their_blanks_and_from_nothing(other: Any) -> None:
    field = forms.JSONField()

    assert key_of("a\n", field) != key_of(other, field) == json.loads(json.dumps(other))


@pytest.mark.parametrize("empty", [[], {}])
def test_what_a_form_makes_of_null_is_no_change(empty: Any) -> None:
    assert key_of(empty, forms.Field()) == key_of(None, forms.Field())  # of arrays and hstores


@pytest.mark.parametrize("key", ["sha256", "upload"])
def test_json_data_is_shown_whatever_its_keys(offer: Offer, key: str) -> None:
    form = OfferForm(instance=offer)

    assert shown(form, "text", {key: "abc"}) == str({key: "abc"})


def test_json_data_is_shown_as_a_form_shows_it(offer: Offer) -> None:
    form = OfferForm(instance=offer)
    form.fields["text"] = forms.JSONField()

    assert shown(form, "text", {"vat": True, "이름": [None]}) == '{"vat": true, "이름": [null]}'
    assert shown(form, "text", [1, "a"]) == '[1, "a"]'
    assert shown(form, "text", "typed {") == "typed {"


def test_what_is_no_key_of_a_row_any_more_is_shown_as_it_is(offer: Offer) -> None:
    form = OfferForm(instance=offer)

    assert shown(form, "account", {"of": "an older form"}) == str({"of": "an older form"})
    assert shown(form, "tags", ["no number"]) == "no number"


def test_a_password_is_compared_but_neither_carried_nor_shown(offer: Offer) -> None:
    class SecretForm(VersionedModelForm):
        class Meta:
            model = Offer
            fields = ["name", "text"]
            widgets = {"text": forms.PasswordInput}

    changed(offer, text="first secret")
    form = SecretForm(instance=Offer.objects.get())
    carried = signing.loads(str(sent(form)[VERSION]), salt=form._salt())
    blank, typed = sent(form, text="", name="mine"), sent(form, text="my secret", name="mine")
    assert SecretForm(typed, instance=Offer.objects.get()).is_valid()
    changed(offer, text="their secret")

    told = []
    for data in blank, typed:
        form = SecretForm(data, instance=Offer.objects.get())
        form.is_valid()
        assert form.conflict is not None
        told += [(change.old, change.theirs, change.yours) for change in form.conflict.changes]

    dots = "••••••••"
    assert told == [(dots, dots, ""), (dots, dots, dots)]
    assert carried["state"]["name"] == "Green tea"
    assert "secret" not in f"{carried} {form.errors}"


def test_fields_that_a_subclass_changes_count_as_they_are_shown(offer: Offer) -> None:
    class ChangedForm(VersionedModelForm):
        class Meta:
            model = Offer
            fields = ["name", "text", "price"]

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.fields["name"].disabled = True
            self.fields["text"].widget = forms.PasswordInput(render_value=False)

    changed(offer, text="secret")
    form = ChangedForm(instance=Offer.objects.get())
    data = sent(form, text="secret")
    changed(offer, name="Black tea", price=Decimal("12"))

    again = ChangedForm(data, instance=Offer.objects.get())

    assert "secret" not in str(signing.loads(str(data[VERSION]), salt=form._salt()))
    assert again.is_valid(), again.errors
    assert again.save().price == Decimal("12")


def test_amounts_without_fixed_places_are_shown_as_they_are(offer: Offer, monkeypatch: Any) -> None:
    form = OfferForm(instance=offer)
    monkeypatch.setattr(Offer._meta.get_field("price"), "decimal_places", None)  # Django 6.1

    assert shown(form, "price", "1.505") == "1.505"


def test_amounts_of_more_than_28_digits_are_compared_to_the_last(offer: Offer) -> None:
    field = OfferForm(instance=offer).fields["price"]
    one, two = Decimal(f"1{35 * '0'}1.00"), Decimal(f"1{35 * '0'}2")

    assert key_of(one, field) == f"1{35 * '0'}1"
    assert key_of(two, field) == f"1{35 * '0'}2"


def test_a_key_that_no_column_can_hold_is_shown_as_it_was_typed(offer: Offer) -> None:
    assert shown(OfferForm(instance=offer), "account", "9" * 30) == "9" * 30


@pytest.mark.parametrize("amount", ["1E-99999999", "1E+99999999"])
def test_an_amount_with_a_huge_exponent_is_not_written_out(offer: Offer, amount: str) -> None:
    assert key_of(Decimal(amount), forms.DecimalField()) == amount


def test_an_amount_of_too_many_digits_is_shown_as_it_was_typed(offer: Offer) -> None:
    data = sent(opened(offer), price=f"1{35 * '0'}")
    changed(offer, price=12, version=9)

    form = answered(offer, data)

    assert not form.is_valid()
    assert form.conflict is not None
    assert [change.yours for change in form.conflict.changes] == [f"1{35 * '0'}"]


def test_what_was_typed_for_a_password_is_not_shown_even_if_it_is_wrong(offer: Offer) -> None:
    class PinForm(VersionedModelForm):
        class Meta:
            model = Offer
            fields = ["stock"]
            widgets = {"stock": forms.PasswordInput}

    data = sent(PinForm(instance=offer), stock="12E4")
    changed(offer, stock=5678)

    form = PinForm(data, instance=Offer.objects.get())
    form.is_valid()

    assert form.conflict is not None
    assert [change.yours for change in form.conflict.changes] == ["••••••••"]


def test_values_that_are_no_json_are_compared_as_text() -> None:
    class ChapterForm(VersionedModelForm):
        class Meta:
            model = Chapter
            fields = ["title", "pages"]

    Chapter.objects.create(title="Tea", pages="1-5")
    data = sent(ChapterForm(instance=Chapter.objects.get()), title="Green tea")
    assert ChapterForm(data, instance=Chapter.objects.get()).is_valid()
    Chapter.objects.update(title="Black tea", pages="1-9")

    form = ChapterForm(data, instance=Chapter.objects.get())
    form.is_valid()

    assert form.conflict is not None
    changes = {c.name: (c.old, c.theirs, c.yours) for c in form.conflict.changes}
    assert changes == {
        "title": ("Tea", "Black tea", "Green tea"),
        "pages": ("1-5", "1-9", None),
    }


def test_times_in_arrays_and_ranges_count_as_they_are_shown() -> None:
    pytest.importorskip("psycopg")
    from django.contrib.postgres.forms import DateTimeRangeField, SimpleArrayField
    from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

    start = datetime(2026, 5, 4, 3, 2, 1, 654321, tzinfo=timezone.utc)
    array, span = SimpleArrayField(forms.DateTimeField()), DateTimeRangeField()
    with override("Asia/Seoul"):
        times = array.clean(array.prepare_value([start, start]))
        ends = span.clean(["2026-05-04 12:02:01", ""])

    assert key_of(times, array) == key_of([start, start], array)
    assert key_of(ends, span) == key_of(DateTimeTZRange(start, None), span)
    assert key_of(ends, span) != key_of(DateTimeTZRange(None, start), span)
    empty, unlimited = DateTimeTZRange(empty=True), DateTimeTZRange(None, None, "()")
    assert key_of(empty, span) != key_of(unlimited, span)
    spans = [DateTimeTZRange(start, start, bounds) for bounds in ("[]", "[)", "(]", "()")]
    assert len({key_of(one, span) for one in spans}) == 4


def test_a_time_as_the_version_is_carried_to_its_microsecond() -> None:
    class PageForm(VersionedModelForm):
        class Meta:
            model = Page
            fields = ["text"]

    page = Page.objects.create(text="a")
    data = sent(PageForm(instance=Page.objects.get()), text="b")
    assert PageForm(data, instance=Page.objects.get()).is_valid()
    page.text = "c"
    page.save()

    assert not PageForm(data, instance=Page.objects.get()).is_valid()


def test_rows_of_a_formset_are_guarded_one_by_one(offer: Offer) -> None:
    Formset = inlineformset_factory(
        Offer, Extra, form=VersionedModelForm, fields=["name", "price"], extra=0
    )
    one, two = (Extra.objects.create(offer=offer, name=name) for name in ("bag", "box"))
    shown = Formset(instance=offer, queryset=Extra.objects.order_by("pk"))
    data = sent(shown.management_form)
    for form in shown.forms:
        for name, value in sent(form).items():
            data[name] = str(value)
    data["extra_set-0-name"] = "sack"
    Extra.objects.filter(pk=two.pk).update(price=5)

    formset = Formset(data, instance=offer, queryset=Extra.objects.order_by("pk"))
    assert formset.is_valid(), formset.errors  # the second row was not touched here
    formset.save()

    two.refresh_from_db()
    assert (Extra.objects.get(pk=one.pk).name, two.price) == ("sack", 5)
    stale = Formset(data, instance=offer, queryset=Extra.objects.order_by("pk"))
    data["extra_set-0-name"] = "tin"
    assert not stale.is_valid()
    assert stale.forms[0].conflict is not None


def test_a_model_without_a_version_is_refused() -> None:
    class NoteForm(VersionedModelForm):
        class Meta:
            model = Note
            fields = ["text"]

    with pytest.raises(ImproperlyConfigured, match="VersionedModel"):
        NoteForm()
