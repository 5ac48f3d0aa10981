"""`VersionedAdmin`: the conflict page, inlines, lists and deletions of versioned models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import flatten_fieldsets
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from ...errors import StaleObjectError
from .form_values import typed, withheld
from .forms import CONFLICT, VERSION, VersionedModelForm
from .saving import row_of

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Any]
    _Base = admin.options.BaseModelAdmin[Any]
    _Inline = admin.options.InlineModelAdmin[Any, Any]
else:
    _Admin = _Base = _Inline = object

# Another request may save between this one's read and write; then the form is compared anew, and
# the row is locked meanwhile, or a row that is saved all the time could not be saved here.
TRIES = 5
# What the buttons of a form are called that save it.
SAVING = {"_save", "_saveasnew", "_addanother", "_continue"}


def _compared_again(
    view: Callable[..., HttpResponse], request: Any, *args: Any, **kwargs: Any
) -> HttpResponse:
    stale: list[Any] = []
    while True:
        try:
            with _locked([obj for obj in stale if obj is not None]):
                return view(request, *args, **kwargs)
        except StaleObjectError as error:
            stale.append(error.obj)
            if len(stale) == TRIES:
                raise
            if request.FILES:  # storing them may have moved them away
                request.close()
                request.FILES.clear()
                request.distlock_spent = True


@contextmanager
def _locked(objects: list[Any]) -> Iterator[None]:
    """Lock the rows of these objects, all in one order, where the database can."""
    using = router.db_for_write(type(objects[0])) if objects else ""
    if not using or not connections[using].features.has_select_for_update:
        yield
        return
    with transaction.atomic(using):
        for obj in sorted(objects, key=lambda obj: (obj._meta.label, str(obj.pk))):
            row_of(obj, obj._version_field, using).select_for_update().first()
        yield


def _for_request(request: Any, form: Any) -> Any:
    """Tell a form class who submits it, and whether part of the submission is already gone."""
    form.user = request.user
    form.spent = getattr(request, "distlock_spent", False)
    return form


def _shown_fields(formset: Any) -> Iterator[str]:
    """Yield the names of what a user sees and types in the rows of an inline."""
    parent = getattr(formset, "fk", None)  # not of generic ones, whose keys are no fields
    for name, field in formset.form.base_fields.items():
        if not (field.widget.is_hidden or withheld(field) or (parent and parent.name == name)):
            yield name


class _Unseen(Exception):
    """The object to delete has this version, not that of the page."""


class BesideKey(forms.HiddenInput):
    """Renders a row's key and version: the admin's list renders no other hidden field."""

    def __init__(self, form: VersionedModelForm) -> None:
        super().__init__()
        self.form = form

    def render(self, *args: Any, **kwargs: Any) -> SafeString:
        return format_html("{}{}", super().render(*args, **kwargs), self.form[VERSION])


class VersionedListFormSet(forms.BaseModelFormSet):  # type: ignore[type-arg]
    """The rows of a list with `list_editable`."""

    def add_fields(self, form: Any, index: int | None) -> None:
        super().add_fields(form, index)
        form.fields[form.instance._meta.pk.name].widget = BesideKey(form)


class VersionedFieldsets(_Base):
    """Puts the hidden version into the page; without it every save would be refused."""

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fieldsets = super().get_fieldsets(request, obj)
        shown = flatten_fieldsets(fieldsets)
        # The page for a new object needs none, and may have another form.
        if obj is None or VERSION in shown or not self.has_change_permission(request, obj):
            return [*fieldsets]
        *others, (name, options) = fieldsets
        return [*others, (name, {**options, "fields": [*options["fields"], VERSION]})]


class VersionedInlineMixin(VersionedFieldsets, _Inline):
    """An inline whose rows are guarded one by one; put it before TabularInline or StackedInline."""

    form = VersionedModelForm

    def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        formset: Any = super().get_formset(request, obj, **kwargs)
        formset.form.user = request.user
        return formset


class VersionedAdminMixin(VersionedFieldsets, _Admin):
    """All of VersionedAdmin; put it before the ModelAdmin of your theme."""

    form = VersionedModelForm
    change_form_template = "admin/distlock_app/versioned/change_form.html"

    class Media:
        css = {"all": ["distlock_app/conflict.css"]}

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form = _for_request(request, super().get_form(request, obj, change=change, **kwargs))
        # Inline rows have no version of their own, or are saved with this object: a save of any
        # of them incremented its version.
        form.strict = bool(self.get_inline_instances(request, obj))
        return form

    def get_changelist_form(self, request: Any, **kwargs: Any) -> Any:
        options = {"form": VersionedModelForm, **kwargs}
        return _for_request(request, super().get_changelist_form(request, **options))

    def get_changelist_formset(self, request: Any, **kwargs: Any) -> Any:
        options = {"formset": VersionedListFormSet, **kwargs}
        formset: Any = super().get_changelist_formset(request, **options)
        if VERSION not in formset.form.base_fields:
            raise ImproperlyConfigured(
                f"The form of the list of {type(self).__name__} must derive from "
                "VersionedModelForm: its rows have no version."
            )
        return formset

    def changeform_view(
        self, request: Any, object_id: str | None = None, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        view, sent = super().changeform_view, request.POST
        adds = object_id is None or "_saveasnew" in sent
        acts = ACTION_CHECKBOX_NAME in sent and SAVING.isdisjoint(sent)  # since Django 6.1
        if acts or adds and request.FILES:
            return view(request, object_id, *args, **kwargs)
        return _compared_again(view, request, object_id, *args, **kwargs)

    def changelist_view(self, request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        view = super().changelist_view
        if "_save" not in request.POST:  # perhaps an action, which nothing undoes
            return view(request, *args, **kwargs)
        return _compared_again(view, request, *args, **kwargs)

    def delete_view(
        self, request: Any, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Delete the object as the confirmation page showed it: its address has the version."""
        request.distlock_deletes = True
        try:
            return _compared_again(super().delete_view, request, object_id, extra_context)
        except _Unseen as unseen:
            (version,) = unseen.args
        query = request.GET.copy()
        query.pop(VERSION, None)
        if request.method != "POST":
            query[VERSION] = version
            return HttpResponseRedirect(f"?{query.urlencode()}")
        text = gettext("Another user changed this meanwhile. Look at it before you delete it.")
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(f"../change/?{query.urlencode()}".rstrip("?"))

    def get_object(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise _Unseen for an object to delete that has another version than the page showed.

        Here, because `delete()` is guarded by the version of this very object.
        """
        obj = super().get_object(request, *args, **kwargs)
        deletes = hasattr(request, "distlock_deletes")
        if deletes and obj is not None and self.has_delete_permission(request, obj):
            version, seen = obj._version_field.text_of(obj), request.GET.get(VERSION)
            by_program = seen is None and request.method == "POST"  # which was shown no page
            if seen != version and not by_program:
                raise _Unseen(version)
        return obj

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Add the other user; a conflict page is not a success (409)."""
        form = context["adminform"].form
        if (conflict := getattr(form, "conflict", None)) is None:
            return super().render_change_form(request, context, *args, **kwargs)
        # The page says it better than the error of the form.
        said, errors = form.non_field_errors(), context["errors"]
        said.data[:] = [error for error in said.data if error.code != CONFLICT]
        errors[:] = [found for found in errors if found]
        context |= {"conflict": conflict, "last": self._last_change(context["original"])}
        response = super().render_change_form(request, context, *args, **kwargs)
        response.status_code = 409
        return response

    def _last_change(self, obj: Any) -> LogEntry | None:
        entries = LogEntry.objects.filter(
            content_type=get_content_type_for_model(obj), object_id=obj.pk, action_flag=CHANGE
        )
        return entries.select_related("user").order_by("-action_time").first()

    def _get_obj_does_not_exist_redirect(
        self, request: Any, opts: Any, object_id: str
    ) -> HttpResponse:
        """Show what the user typed if the object was deleted meanwhile: nothing else is left."""
        if request.method != "POST" or hasattr(request, "distlock_deletes"):
            gone: HttpResponse = super()._get_obj_does_not_exist_redirect(  # type: ignore[misc]
                request, opts, object_id
            )
            return gone
        context = {
            **self.admin_site.each_context(request),
            "title": gettext("Deleted meanwhile"),
            "opts": opts,
            "media": self.media,
            "typed": self._typed(request),
        }
        request.current_app = self.admin_site.name
        template = "admin/distlock_app/versioned/deleted.html"
        return TemplateResponse(request, template, context, status=410)

    def _typed(self, request: Any) -> list[tuple[Any, Any]]:
        """Return the labels and values of the submitted form, then the names of inline fields."""
        form = self.get_form(request)(request.POST, request.FILES)
        values = [
            (form[name].label, typed(form, name))
            for name, field in form.fields.items()
            if name != VERSION and not withheld(field)
        ]
        formsets = [inline.get_formset(request) for inline in self.get_inline_instances(request)]
        of_inlines = {name for formset in formsets for name in _shown_fields(formset)}
        # As in "extra_set-0-price", or "extra_set-0-sold_at_1", of a field with several inputs.
        inlines = [
            (name, value)
            for name, value in request.POST.items()
            if value and (field := re.search(r"-\d+-((\w+?)(_\d+)?)$", name))
            if not of_inlines.isdisjoint(field.groups())
        ]
        return values + inlines


class VersionedAdmin(VersionedAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """A ModelAdmin in which no user overwrites what another saved meanwhile."""
