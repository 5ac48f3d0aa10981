"""The admin of versioned models, by requests; tests/test_browser.py looks at its pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django import forms
from django.contrib.admin import ModelAdmin, options
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import OperationalError, connection, transaction
from django.forms import modelform_factory
from django.test import Client

from distlock_app import StaleObjectError
from distlock_app.forms import VERSION, VersionedModelForm
from tests.app.admin import ArticleAdmin, ExtraInline, LeafletAdmin, NoteInline, OfferAdmin
from tests.app.versioned_models import Article, Extra, Leaflet, Note, Offer, Tag
from tests.engines import running

pytestmark = pytest.mark.django_db

# Where an action may be; only in lists before Django 6.1.
LOCATIONS = [*getattr(options, "ActionLocation", [])]


class Fields(HTMLParser):
    """What a browser sends of the first form that is posted, of each input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, Any] = {}
        self.select: str = ""
        self.text: str = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        at = {name: value or "" for name, value in attributes}
        name = at.get("name", "")
        if tag == "input" and name and at.get("type") not in ("submit", "file"):
            box = at.get("type") in ("checkbox", "radio")
            if not box or "checked" in at:
                self.data[name] = at.get("value", "on" if box else "")
        elif tag == "select":
            self.select = name
        elif tag == "option" and self.select and "selected" in at:
            self.data[self.select] = at["value"]
        elif tag == "textarea":
            self.text = name
            self.data[name] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self.text = ""

    def handle_data(self, data: str) -> None:
        if self.text:
            self.data[self.text] += data.removeprefix("\n")


def fields(response: Any) -> dict[str, Any]:
    parser = Fields()
    text = response.content.decode()
    parser.feed(text[text.index('id="content-main"') :])
    return {name: value for name, value in parser.data.items() if "__prefix__" not in name}


def url(obj: Any, model: str = "offer") -> str:
    return f"/admin/testapp/{model}/{obj.pk}/change/"


def person(name: str) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser(name))
    return client


@pytest.fixture
def ann() -> Client:
    return person("ann")


@pytest.fixture
def bob() -> Client:
    return person("bob")


@pytest.fixture
def offer() -> Offer:
    return Offer.objects.create(
        name="Green tea",
        price=Decimal("10.50"),
        starts=datetime(2026, 5, 4, 3, 2, 1, 654321, tzinfo=timezone.utc),
    )


def meets(patched: Any, admin: Any, method: str, save: Callable[[], Any]) -> None:
    """Let this method of the admin meet a save of somebody else, once; the next read sees it."""
    real, read = getattr(admin, method), admin.get_queryset
    left, found = [save], list[bool]()

    def stale(*args: Any, **kwargs: Any) -> Any:
        if found:
            return real(*args, **kwargs)
        found.append(True)
        raise StaleObjectError  # what the guard finds; the transaction is rolled back then

    def get_queryset(self: Any, request: Any) -> Any:
        if found and left:
            left.pop()()
        return read(self, request)

    patched.setattr(admin, method, stale)
    patched.setattr(admin, "get_queryset", get_queryset)


def test_one_person_saves_as_ever(ann: Client, offer: Offer) -> None:
    for name in ("Black tea", "White tea"):
        data = fields(ann.get(url(offer)))
        assert ann.post(url(offer), {**data, "name": name}).status_code == 302

    offer.refresh_from_db()
    assert (offer.name, offer.version) == ("White tea", 3)


def test_the_second_gets_a_page_that_says_what_the_first_did(
    ann: Client, bob: Client, offer: Offer
) -> None:
    of_ann, of_bob = fields(ann.get(url(offer))), fields(bob.get(url(offer)))
    ann.post(url(offer), {**of_ann, "name": "White tea", "price": "12"})

    response = bob.post(url(offer), {**of_bob, "name": "Black <b>tea</b>", "text": "My words"})

    page = response.content.decode()
    assert response.status_code == 409
    assert "Last saved here by <strong>ann</strong>" in page
    for text in ("Green tea", "White tea", "Black &lt;b&gt;tea&lt;/b&gt;", "10.50", "My words"):
        assert text in page
    assert "Please correct" not in page
    offer.refresh_from_db()
    assert offer.name == "White tea"


def test_beside_the_page_of_a_conflict_only_other_errors_are_shown(
    ann: Client, bob: Client, offer: Offer
) -> None:
    of_ann, of_bob = fields(ann.get(url(offer))), fields(bob.get(url(offer)))
    ann.post(url(offer), {**of_ann, "name": "White tea"})

    response = bob.post(url(offer), {**of_bob, "name": "Black tea", "price": "much"})

    page = response.content.decode()
    assert response.status_code == 409
    assert "Please correct the error below." in page and "Enter a number." in page
    assert "“Green tea” became “White tea”" not in page  # the panel says so


def test_the_page_of_a_conflict_names_a_user_whose_name_is_a_number(
    ann: Client, bob: Client, offer: Offer, monkeypatch: Any
) -> None:
    monkeypatch.setattr(User, "get_username", lambda self: 821012345678)  # as of a custom model
    of_ann, of_bob = fields(ann.get(url(offer))), fields(bob.get(url(offer)))
    ann.post(url(offer), {**of_ann, "name": "White tea"})

    response = bob.post(url(offer), {**of_bob, "name": "Black tea"})

    assert response.status_code == 409
    assert "Last saved here by <strong>821012345678</strong>" in response.content.decode()


def test_the_page_of_a_conflict_saves_the_merge(ann: Client, bob: Client, offer: Offer) -> None:
    of_ann, of_bob = fields(ann.get(url(offer))), fields(bob.get(url(offer)))
    ann.post(url(offer), {**of_ann, "name": "White tea", "price": "12"})
    conflict = bob.post(url(offer), {**of_bob, "name": "Black tea", "text": "My words"})

    merged = {**fields(conflict), "distlock_take_name": "theirs"}
    assert bob.post(url(offer), merged).status_code == 302

    offer.refresh_from_db()
    assert (offer.name, offer.price, offer.text) == ("White tea", Decimal("12"), "My words")


def test_a_save_in_the_middle_of_the_request_is_a_conflict_too(
    ann: Client, offer: Offer, monkeypatch: Any
) -> None:
    data = fields(ann.get(url(offer)))
    meets(monkeypatch, OfferAdmin, "save_model", lambda: Offer.objects.update(name="White tea"))

    response = ann.post(url(offer), {**data, "name": "Black tea"})

    assert response.status_code == 409
    assert "White tea" in response.content.decode()


@pytest.fixture
def uploads(settings: Any, tmp_path: Path) -> Path:
    """Uploads are files, which are moved when they are stored."""
    settings.MEDIA_ROOT = tmp_path
    settings.FILE_UPLOAD_HANDLERS = ["django.core.files.uploadhandler.TemporaryFileUploadHandler"]
    return tmp_path


@pytest.mark.parametrize("theirs", [{"title": "theirs"}, {"printed": 1}])
@pytest.mark.parametrize("page", ["form", "list"])
def test_an_upload_that_meets_a_save_is_asked_for_again(
    ann: Client, monkeypatch: Any, uploads: Path, page: str, theirs: Any
) -> None:
    leaflet = Leaflet.objects.create(title="old")
    address = url(leaflet, "leaflet") if page == "form" else "/admin/testapp/leaflet/"
    prefix = "" if page == "form" else "form-0-"
    data = {**fields(ann.get(address)), "_save": "Save", f"{prefix}title": "mine"}
    meets(monkeypatch, LeafletAdmin, "save_related", lambda: Leaflet.objects.update(**theirs))

    def sent(data: Any) -> Any:
        upload = SimpleUploadedFile("a.txt", b"all of it")
        return ann.post(address, {**data, f"{prefix}picture": upload})

    response = sent(data)

    assert response.status_code == (409 if page == "form" else 200)
    leaflet.refresh_from_db()
    assert leaflet.title == theirs.get("title", "old")
    again = {**fields(response), "_save": "Save"}
    assert again[f"{prefix}title"] == "mine"
    assert sent(again).status_code == 302
    leaflet.refresh_from_db()
    stored = uploads / str(leaflet.picture)
    assert (leaflet.title, stored.read_bytes()) == ("mine", b"all of it")


def test_a_new_object_is_not_saved_without_its_upload(
    ann: Client, monkeypatch: Any, uploads: Path
) -> None:
    meets(monkeypatch, LeafletAdmin, "save_related", Offer.objects.all)
    upload = SimpleUploadedFile("a.txt", b"all of it")

    with pytest.raises(StaleObjectError):
        ann.post("/admin/testapp/leaflet/add/", {"title": "new", "picture": upload})

    assert not Leaflet.objects.exists()


def test_a_post_without_the_version_saves_nothing(ann: Client, offer: Offer) -> None:
    data = fields(ann.get(url(offer)))
    del data[VERSION]

    response = ann.post(url(offer), {**data, "name": "Black tea"})

    assert response.status_code == 409
    assert "Compare with what is saved now" in response.content.decode()
    assert Offer.objects.get().name == "Green tea"


def test_the_version_of_somebody_else_is_refused(ann: Client, bob: Client, offer: Offer) -> None:
    data = fields(ann.get(url(offer)))

    assert bob.post(url(offer), {**data, "name": "Black tea"}).status_code == 409


def test_the_version_of_somebody_elses_inline_is_refused(
    ann: Client, bob: Client, offer: Offer
) -> None:
    Extra.objects.create(offer=offer, name="bag")
    address, version = url(offer, "offerwithinlines"), f"extra_set-0-{VERSION}"
    of_ann, of_bob = fields(ann.get(address)), fields(bob.get(address))
    of_bob["extra_set-0-name"] = "sack"

    assert bob.post(address, {**of_bob, version: of_ann[version]}).status_code == 200
    assert Extra.objects.get().name == "bag"
    assert bob.post(address, of_bob).status_code == 302


def test_what_was_typed_for_a_deleted_object_is_shown(
    ann: Client, offer: Offer, monkeypatch: Any
) -> None:
    class SecretForm(VersionedModelForm):
        class Meta:
            widgets = {"price": forms.PasswordInput}

    monkeypatch.setattr(ExtraInline, "form", SecretForm)
    Extra.objects.create(offer=offer, name="bag", price=1)
    address = url(offer, "offerwithinlines")
    data = fields(ann.get(address))
    offer.delete()

    typed = {"name": "A new <name>", "note_set-0-text": "A note", "extra_set-0-price": "1234"}
    response = ann.post(address, {**data, **typed})

    page = response.content.decode()
    assert response.status_code == 410
    assert "A new &lt;name&gt;" in page and "A note" in page
    found = re.findall(r"extra_set-\S+|note_set-\S+", page, re.I)
    assert [name.split("<")[0] for name in found] == ["Extra_set-0-name", "Note_set-0-text"]
    assert "1234" not in page
    assert ann.get(address).status_code == 302


def test_what_was_chosen_for_a_deleted_object_is_shown_by_its_name(
    ann: Client, offer: Offer
) -> None:
    tags = [Tag.objects.create(name=name) for name in ("green", "new")]
    data = fields(ann.get(url(offer)))
    offer.delete()

    response = ann.post(url(offer), {**data, "tags": [tag.pk for tag in tags]})

    assert response.status_code == 410
    assert "green, new" in response.content.decode()
    assert "[" not in response.content.decode().split("<table")[1]


def test_a_password_typed_for_a_deleted_object_is_not_shown(ann: Client, monkeypatch: Any) -> None:
    class SecretForm(VersionedModelForm):
        class Meta:
            widgets = {"title": forms.PasswordInput}

    monkeypatch.setattr(LeafletAdmin, "form", SecretForm)
    leaflet = Leaflet.objects.create(title="a")
    address = url(leaflet, "leaflet")
    leaflet.delete()

    response = ann.post(address, {"title": "secret", "shown_at": "12:34"})

    assert response.status_code == 410
    assert "12:34" in response.content.decode()
    assert "secret" not in response.content.decode()


def test_the_version_of_any_name_and_kind_is_in_the_page(ann: Client) -> None:
    article = Article.objects.create(text="a")
    address = url(article, "article")
    data = fields(ann.get(address))
    Article.objects.update(text="b")

    assert ann.post(address, {**data, "text": "c"}).status_code == 409
    assert ann.post("/admin/testapp/article/add/", {"text": "new"}).status_code == 302


def test_who_may_only_look_gets_no_version_also_not_to_delete(offer: Offer) -> None:
    user = User.objects.create_user("eve", is_staff=True)
    kind = ContentType.objects.get_for_model(Offer)
    user.user_permissions.add(Permission.objects.get(codename="view_offer", content_type=kind))
    client = Client()
    client.force_login(user)

    response = client.get(url(offer))

    assert response.status_code == 200
    assert VERSION not in response.content.decode()
    for method in client.get, client.post:
        assert method(f"/admin/testapp/offer/{offer.pk}/delete/?{VERSION}=0").status_code == 403


def test_inlines_are_guarded_row_by_row(ann: Client, bob: Client, offer: Offer) -> None:
    extra = Extra.objects.create(offer=offer, name="bag")
    address = url(offer, "offerwithinlines")
    of_bob = fields(bob.get(address))
    Extra.objects.update(name="box")

    response = bob.post(address, {**of_bob, "extra_set-0-name": "sack"})

    assert response.status_code == 200
    assert "“bag” became “box”" in response.content.decode()
    extra.refresh_from_db()
    assert extra.name == "box"
    again = fields(response)
    assert again["extra_set-0-name"] == "sack"
    assert bob.post(address, again).status_code == 302
    extra.refresh_from_db()
    assert extra.name == "sack"


def test_inlines_without_a_version_are_guarded_by_their_objects(
    ann: Client, bob: Client, offer: Offer
) -> None:
    note = Note.objects.create(offer=offer, text="old")
    address = url(offer, "offerwithinlines")
    of_ann, of_bob = fields(ann.get(address)), fields(bob.get(address))
    assert ann.post(address, {**of_ann, "note_set-0-text": "ann's"}).status_code == 302

    response = bob.post(address, {**of_bob, "note_set-0-text": "bob's"})

    assert response.status_code == 409
    assert "related data may have been" in response.content.decode()
    note.refresh_from_db()
    assert note.text == "ann's"


def test_inlines_that_an_admin_chooses_by_itself_are_guarded_by_their_objects(
    ann: Client, bob: Client, offer: Offer, monkeypatch: Any
) -> None:
    chosen = lambda admin, *args: [NoteInline(Offer, admin.admin_site)]  # noqa: E731
    monkeypatch.setattr(OfferAdmin, "get_inline_instances", chosen)
    Note.objects.create(offer=offer, text="old")
    of_ann, of_bob = fields(ann.get(url(offer))), fields(bob.get(url(offer)))
    assert ann.post(url(offer), {**of_ann, "note_set-0-text": "ann's"}).status_code == 302

    assert bob.post(url(offer), {**of_bob, "note_set-0-text": "bob's"}).status_code == 409


def test_the_page_for_a_new_object_may_have_another_form(ann: Client, monkeypatch: Any) -> None:
    class NameForm(forms.ModelForm):
        class Meta:
            model = Offer
            fields = ["name"]

    def get_form(admin: Any, request: Any, obj: Any = None, **options: Any) -> Any:
        return real(admin, request, obj, **options | ({} if obj else {"form": NameForm}))

    def get_fieldsets(admin: Any, request: Any, obj: Any = None) -> Any:
        return OfferAdmin.fieldsets if obj else [(None, {"fields": ["name"]})]

    real = ModelAdmin.get_form
    monkeypatch.setattr(ModelAdmin, "get_form", get_form)  # as the admin of users does
    monkeypatch.setattr(ModelAdmin, "get_fieldsets", get_fieldsets)
    address = "/admin/testapp/offer/add/"

    assert ann.post(address, {**fields(ann.get(address)), "name": "Tea"}).status_code == 302
    assert VERSION in fields(ann.get(url(Offer.objects.get())))


def test_the_pages_have_no_script_and_no_style_of_their_own(
    ann: Client, bob: Client, offer: Offer
) -> None:
    of_ann, of_bob = fields(ann.get(url(offer))), fields(bob.get(url(offer)))
    ann.post(url(offer), {**of_ann, "name": "White tea"})
    page = bob.post(url(offer), {**of_bob, "name": "Black tea"}).content.decode()
    panel = page[page.index('<section class="dl-conflict"') : page.index("</section>")]

    assert not re.search(r"<script|<style|style=|\son\w+=", panel)
    assert "conflict.css" in page


def test_without_a_csrf_token_nothing_is_saved(offer: Offer) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("ann"))
    data = fields(client.get(url(offer)))

    assert client.post(url(offer), data).status_code == 302
    del data["csrfmiddlewaretoken"]
    assert client.post(url(offer), data).status_code == 403


def test_a_list_is_guarded_row_by_row(ann: Client, bob: Client) -> None:
    first, second = (Article.objects.create(text=text) for text in ("a", "b"))
    address = "/admin/testapp/article/"
    of_bob = {**fields(bob.get(address)), "_save": "Save"}
    rows = {of_bob[f"form-{n}-id"]: f"form-{n}" for n in range(2)}
    Article.objects.filter(pk=first.pk).update(text="ann's")

    response = bob.post(address, {**of_bob, f"{rows[str(first.pk)]}-text": "bob's"})

    assert response.status_code == 200
    assert "“a” became “ann&#x27;s”" in response.content.decode()
    again = {**fields(response), "_save": "Save"}
    assert again[f"{rows[str(first.pk)]}-text"] == "bob's"
    assert bob.post(address, again).status_code == 302
    assert dict(Article.objects.values_list("pk", "text")) == {first.pk: "bob's", second.pk: "b"}


def test_a_list_asks_for_no_field_that_only_the_form_has(ann: Client, monkeypatch: Any) -> None:
    class ReasonForm(VersionedModelForm):
        reason = forms.CharField()

    monkeypatch.setattr(ArticleAdmin, "form", ReasonForm)
    Article.objects.create(text="a")
    address = "/admin/testapp/article/"
    data = {**fields(ann.get(address)), "form-0-text": "b", "_save": "Save"}

    assert ann.post(address, data).status_code == 302
    assert Article.objects.get().text == "b"


def test_a_list_without_versions_is_refused(ann: Client, monkeypatch: Any) -> None:
    plain = modelform_factory(Article, fields=["text", "hidden"])
    monkeypatch.setattr(ArticleAdmin, "get_changelist_form", lambda *args, **options: plain)

    with pytest.raises(ImproperlyConfigured, match="VersionedModelForm"):
        ann.get("/admin/testapp/article/")


def test_rows_of_a_list_that_were_not_touched_stay(ann: Client) -> None:
    article = Article.objects.create(text="a")
    address = "/admin/testapp/article/"
    data = {**fields(ann.get(address)), "_save": "Save"}
    Article.objects.update(text="b")

    assert ann.post(address, data).status_code == 302
    article.refresh_from_db()
    assert (article.text, article.revision) == ("b", 2)
    assert not LogEntry.objects.exists()


def test_the_log_names_who_changed_a_field(ann: Client, bob: Client, offer: Offer) -> None:
    of_ann, of_bob = fields(ann.get(url(offer))), fields(bob.get(url(offer)))
    of_ann["name"] = "White tea"
    ann.post(url(offer), of_ann)
    merge = {**fields(bob.post(url(offer), {**of_bob, "name": "Black tea", "price": "11"}))}
    assert bob.post(url(offer), {**merge, "distlock_take_name": "theirs"}).status_code == 302

    entries = LogEntry.objects.order_by("pk").values_list("user__username", "change_message")
    assert [*entries] == [
        ("ann", '[{"changed": {"fields": ["Name"]}}]'),
        ("bob", '[{"changed": {"fields": ["Price"]}}]'),
    ]


def test_an_action_runs_once(ann: Client, monkeypatch: Any) -> None:
    article = Article.objects.create(text="a")
    told = []

    def tell(admin: Any, request: Any, queryset: Any) -> None:
        for one in queryset:
            told.append(one.text)
            Article.objects.update(text="b")
            one.save()

    tell.locations = LOCATIONS  # type: ignore[attr-defined]
    monkeypatch.setattr(ArticleAdmin, "actions", [tell])
    chosen = {"_selected_action": article.pk}
    with pytest.raises(StaleObjectError):
        ann.post("/admin/testapp/article/", {**chosen, "action": "tell"})
    assert told == ["a"]
    if LOCATIONS:  # the page of one object has actions since Django 6.1
        name = f"{options.ActionLocation.CHANGE_FORM.value}-action"
        with pytest.raises(StaleObjectError):
            ann.post(url(article, "article"), {**chosen, name: "tell"})
        assert told == ["a", "b"]


def test_a_list_saved_in_the_middle_of_the_request_is_compared_again(
    ann: Client, monkeypatch: Any
) -> None:
    article = Article.objects.create(text="a")
    address = "/admin/testapp/article/"
    data = {**fields(ann.get(address)), "_save": "Save", "form-0-text": "mine"}
    meets(monkeypatch, ArticleAdmin, "save_model", lambda: Article.objects.update(text="theirs"))

    response = ann.post(address, data)

    assert "“a” became “theirs”" in response.content.decode()
    article.refresh_from_db()
    assert article.text == "theirs"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("of_list", [True, False])
def test_an_object_that_others_save_all_the_time_is_saved(
    ann: Client, monkeypatch: Any, of_list: bool
) -> None:
    if not connection.features.has_select_for_update_nowait:
        pytest.skip("the database locks no rows")
    article = Article.objects.create(text="a")
    address = "/admin/testapp/article/" if of_list else url(article, "article")
    text = "form-0-text" if of_list else "text"
    data = {**fields(ann.get(address)), "_save": "Save", text: "mine"}
    real, met = ArticleAdmin.save_model, list[bool]()

    def save_of_another() -> None:
        try:
            with transaction.atomic():
                Article.objects.select_for_update(nowait=True).get()
                Article.objects.update(text="a")
                met.append(True)
        except OperationalError:  # it would wait
            met.append(False)
        finally:
            connection.close()

    def meet_and_save(*args: Any, **options: Any) -> None:
        with running(save_of_another):
            pass
        real(*args, **options)

    monkeypatch.setattr(ArticleAdmin, "save_model", meet_and_save)

    response = ann.post(address, data)

    assert response.status_code == 302 and met == [True, False]
    article.refresh_from_db()
    assert article.text == "mine"


def test_a_delete_that_meets_a_save_deletes_nothing(
    ann: Client, offer: Offer, monkeypatch: Any
) -> None:
    address = f"/admin/testapp/offer/{offer.pk}/delete/"
    shown = ann.get(address, follow=True).redirect_chain[-1][0]
    meets(monkeypatch, OfferAdmin, "delete_model", lambda: Offer.objects.update(name="White tea"))

    response = ann.post(f"{address}{shown}&_popup=1", {"post": "yes"})

    assert response["Location"] == "../change/?_popup=1"
    assert Offer.objects.exists()


def test_what_changed_since_the_confirmation_is_not_deleted(ann: Client, offer: Offer) -> None:
    address = f"/admin/testapp/offer/{offer.pk}/delete/"
    confirmation = ann.get(address, follow=True)
    shown = confirmation.redirect_chain[-1][0]
    Offer.objects.update(name="White tea")

    response = ann.post(f"{address}{shown}", {"post": "yes"}, follow=True)

    assert response.redirect_chain == [("../change/", 302)]
    assert "Look at it before you delete it" in response.content.decode()
    again = ann.get(f"{address}{shown}", follow=True).redirect_chain[-1][0]
    assert ann.post(f"{address}{again}", {"post": "yes"}).status_code == 302
    assert not Offer.objects.exists()


def test_a_delete_of_what_is_gone_says_so_as_ever(ann: Client, offer: Offer) -> None:
    address = f"/admin/testapp/offer/{offer.pk}/delete/"
    offer.delete()

    for response in (ann.get(address), ann.post(address, {"post": "yes"})):
        assert (response.status_code, response["Location"]) == (302, "/admin/")


def test_a_delete_without_a_page_works_as_ever(ann: Client, offer: Offer) -> None:
    assert ann.post(f"/admin/testapp/offer/{offer.pk}/delete/", {"post": "yes"}).status_code == 302

    assert not Offer.objects.exists()
