"""`VersionedModelForm`: if another user saved meanwhile, refuses and shows what they changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django import forms
from django.core import signing
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.core.files.base import File
from django.db.models.fields.files import FieldFile
from django.utils.crypto import salted_hmac
from django.utils.functional import cached_property
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .form_values import DIGEST, UPLOAD, differ, key_of, shown, withheld

# The hidden field with the version, and the radio buttons of a conflict.
VERSION = "distlock_version"
TAKE = "distlock_take_{}"
# The code of the error of a form that was refused.
CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Change:
    """A field that another user changed while the form was open; values are readable texts."""

    name: str
    label: str
    # None: no longer known.
    old: str | None
    theirs: str
    # None: not changed.
    yours: str | None
    # The name of the radio buttons "theirs" and "yours", if the user has to choose.
    choice: str | None
    take: str = "yours"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why the form was refused: another user has saved the object since the form was shown."""

    changes: list[Change] = field(default_factory=list)
    # Whether the state that the form showed is known.
    known: bool = True


class Token(forms.CharField):
    """Carries a version, which does not count as a change by the user."""

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class VersionedModelForm(forms.ModelForm):  # type: ignore[type-arg]
    """A form of a VersionedModel that detects saves while it was open.

    It carries what it shows, signed for this object and `user`. If another user has saved since,
    it is invalid, and `form.conflict` describes their changes. Shown again, it is a form of the
    new state that keeps the user's input. Fields that only the other user changed show the new
    values; where both did, the user's input remains unless `distlock_take_<name>` is "theirs".

    `save()` raises StaleObjectError if another request saves between `is_valid()` and `save()`.
    """

    distlock_version = Token(required=False, widget=forms.HiddenInput, label="")

    conflict: Conflict | None = None
    # Also refuse if nothing that this form shows was changed: for forms that save other rows too.
    strict = False
    # Always refuse: the submission could not be saved, and part of it (files) is gone.
    spent = False
    # The user that got the form; no other user may submit it.
    user: Any = None

    error_stale = _("Another user saved this while you were working on it.")
    error_unknown = _(
        "It is not known which version you were working on. Compare, then save again."
    )

    def __init__(self, *args: Any, user: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self.instance, "_version_field"):
            name = type(self.instance).__name__
            raise ImproperlyConfigured(
                f"{name} is not a VersionedModel: its forms have no version."
            )
        if user is not None:
            self.user = user
        self._taken: set[str] = set()
        if self.instance._state.adding:
            return
        # The current state of the database, before the submission is applied to the instance.
        self._values = forms.model_to_dict(self.instance, fields=[*self.fields])
        self._current_version = self.instance._version_field.text_of(self.instance)
        self.fields[VERSION].initial = self._token

    @property
    def changed_data(self) -> list[str]:
        """The fields that this user changed, without those taken from the other user."""
        return [name for name in super().changed_data if name not in self._taken]

    @cached_property
    def _current(self) -> dict[str, Any]:
        """What the fields show of the row; a subclass may change fields after `__init__()`."""
        names = [name for name, form_field in self.fields.items() if not form_field.disabled]
        return {name: self._key(name, self._values[name]) for name in names if name in self._values}

    def _key(self, name: str, value: Any) -> Any:
        """Return the value as JSON data, the same for equal meanings; of a secret, a digest."""
        key = key_of(value, self.fields[name])
        if key == "" or not withheld(self.fields[name]):
            return key
        salt = f"distlock_app.forms/{self.instance.pk}/{name}"  # so that equal secrets differ
        return {DIGEST: salted_hmac(salt, json.dumps(key), algorithm="sha256").hexdigest()}

    # The token: a version, and the values that the form showed.

    def _salt(self) -> str:
        who = getattr(self.user, "pk", self.user)
        return f"distlock_app.forms/{self.instance._meta.label_lower}/{self.instance.pk}/{who}"

    def _token(self) -> str:
        state = {"version": self._current_version, "state": self._current}
        return signing.dumps(state, salt=self._salt(), compress=True)

    def _seen(self) -> Any:
        """Return what the form showed, or None if the token is invalid."""
        try:
            return signing.loads(self[VERSION].data or "", salt=self._salt())
        except signing.BadSignature:
            return None

    # Validation.

    def _clean_fields(self) -> None:
        super()._clean_fields()  # type: ignore[misc]
        self.cleaned_data.pop(VERSION, None)
        if self.instance._state.adding:
            return
        seen = self._seen()
        if seen is None:
            self._refuse(Conflict(self._changes({}, self._current), known=False))
        else:
            self._compare(seen["version"], seen["state"])

    def _compare(self, version: str, old: dict[str, Any]) -> None:
        """Compare what the form showed with the current state of the row."""
        for name in self._current:
            if self._take(name) == "theirs":
                self._take_theirs(name)
        moved = version != self._current_version or self.spent
        # Of what a form shows, relations to many rows alone change without the version.
        changes = self._changes(old, [n for n in self._current if moved or self._is_relation(n)])
        if not (moved or changes):
            return
        mine = any(differ(self._yours(name), old.get(name)) for name in self._current)
        refuse = self.strict or self.spent or (changes and mine)
        for change in changes:
            # Not refused: this user changed nothing, so there is nothing to overwrite.
            if not refuse or change.yours is None:
                self._take_theirs(change.name)
        if refuse:
            self._refuse(Conflict(changes))

    def _changes(self, old: dict[str, Any], names: Iterable[str]) -> list[Change]:
        return [change for name in names if (change := self._change(name, old))]

    def _change(self, name: str, old: dict[str, Any]) -> Change | None:
        """Describe the change if another user changed the field."""
        theirs, yours = self._current.get(name), self._yours(name)
        before = old.get(name)
        if not (differ(theirs, before) and differ(theirs, yours)):
            return None
        touched = name not in old or differ(yours, before)
        return Change(
            name=name,
            label=str(self[name].label),
            old=shown(self, name, before) if name in old else None,
            theirs=shown(self, name, theirs),
            yours=shown(self, name, yours) if touched else None,
            choice=self.add_prefix(TAKE.format(name)) if touched else None,
            take=self._take(name),
        )

    def _yours(self, name: str) -> Any:
        """Return the user's input as JSON data; the raw text if it is invalid."""
        if name in self.cleaned_data:
            value = self.cleaned_data[name]
            if isinstance(self.fields[name], forms.FileField) and not value:
                return self._current.get(name) if value is None else ""
            if isinstance(value, File) and not isinstance(value, FieldFile):
                return {UPLOAD: value.name}  # never the stored one, whatever its name
            return self._key(name, value)
        return self[name].data

    def _is_relation(self, name: str) -> bool:
        return isinstance(self.fields[name], forms.ModelMultipleChoiceField)

    def _take(self, name: str) -> str:
        return str(self.data.get(self.add_prefix(TAKE.format(name)), "yours"))

    def _take_theirs(self, name: str) -> None:
        """Keep and show the row's value of the field."""
        self._taken.add(name)
        model_field = self.instance._meta.get_field(name)
        value = getattr(self.instance, name)
        self.cleaned_data[name] = value.all() if model_field.many_to_many else value
        self._errors.pop(name, None)  # type: ignore[attr-defined]
        self.fields[name].bound_data = lambda data, initial: initial  # type: ignore[method-assign]

    def _refuse(self, conflict: Conflict) -> None:
        self.conflict = conflict
        text = self.error_stale if conflict.known else self.error_unknown
        message = " ".join([str(text), *map(_line, conflict.changes)])
        self.add_error(None, ValidationError(message, code=CONFLICT))
        # Shown again, this is a form of the state that the user sees now.
        data: Any = self.data.copy()  # type: ignore[attr-defined]
        data[self.add_prefix(VERSION)] = self._token()
        self.data = data


def _line(change: Change) -> str:
    facts = {"label": change.label, "old": change.old, "theirs": change.theirs}
    if change.old is None:
        return gettext("%(label)s is now “%(theirs)s”.") % facts
    return gettext("%(label)s: “%(old)s” became “%(theirs)s”.") % facts
