"""Values of form fields: as JSON data, to compare them, and as text, for the page of a conflict."""

from __future__ import annotations

import datetime as times
import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from decimal import MAX_PREC, Context, Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.core.files.base import File
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils import formats, timezone
from django.utils.choices import flatten_choices
from django.utils.translation import gettext

# Of a longer text only a digest is kept: it can be compared, but not shown.
LONGEST = 20_000
# The keys of what stands for a value: nobody's JSON data has them.
DIGEST, UPLOAD = "distlock_sha256", "distlock_upload"
# The usual context rounds to 28 digits; a column may have more.
EXACT = Context(prec=MAX_PREC)


class Encoder(DjangoJSONEncoder):
    """Writes what is no JSON, such as a range or a geometry, as its text."""

    def default(self, o: Any) -> Any:
        try:
            return super().default(o)
        except TypeError:
            return str(o)


def key_of(value: Any, field: Any) -> Any:
    """Return the value of a form field as JSON data, the same for equal meanings."""
    exact = isinstance(field, forms.JSONField)  # in whose data blanks and null mean something
    if isinstance(value, str) and not exact:  # as browsers send it, and forms clean it
        value = value.replace("\r\n", "\n").replace("\r", "\n")
        value = value.strip() if getattr(field, "strip", False) else value
    if isinstance(value, datetime | times.time):
        return _time_key(value, field)
    if isinstance(value, File):
        return value.name or ""
    if isinstance(value, Decimal):  # written out, 1E-999999999 takes a gigabyte
        short = abs(value.adjusted()) < LONGEST
        return format(value.normalize(EXACT), "f") if short else str(value)
    many = isinstance(value, models.QuerySet | list | tuple | set)
    if many and isinstance(field, forms.ModelMultipleChoiceField):
        return sorted(str(field.prepare_value(one)) for one in value)
    if isinstance(value, models.Model):
        prepared = field.prepare_value(value)
        value = value.pk if prepared is value else prepared  # the parent of an inline
    if value in field.empty_values and not exact:
        return ""
    text = _text(_by_parts(value, field))
    if len(text) > LONGEST:
        return {DIGEST: hashlib.sha256(text.encode()).hexdigest()}
    return json.loads(text)


def differ(one: Any, other: Any) -> bool:
    """Return whether two such values differ; as Python compares them, JSON's `true` equals 1."""
    return _text(one) != _text(other)


def _text(value: Any) -> str:
    return json.dumps(value, cls=Encoder, sort_keys=True)


def _time_key(value: datetime | times.time, field: Any) -> str:
    if not getattr(field.widget, "supports_microseconds", True):
        value = value.replace(microsecond=0)
    if isinstance(value, datetime) and value.tzinfo:
        return value.astimezone(times.timezone.utc).isoformat()
    return str(value)


def _by_parts(value: Any, field: Any) -> Any:
    """Return an array or a range with keys for its parts: they may be times."""
    if isinstance(value, list | tuple) and hasattr(field, "base_field"):
        return [key_of(one, field.base_field) for one in value]
    if not (isinstance(field, forms.MultiValueField) and hasattr(value, "lower_inc")):
        return value
    if value.isempty:
        return str(value)
    lower, upper = (key_of(end, field.fields[0]) for end in (value.lower, value.upper))
    return f"{'[' if value.lower_inc else '('}{lower}, {upper}{']' if value.upper_inc else ')'}"


def withheld(field: Any) -> bool:
    """Return whether pages withhold the value of a form field, as of a password."""
    return isinstance(field.widget, forms.PasswordInput) and not field.widget.render_value


def shown(form: Any, name: str, key: Any) -> str:
    """Return a value, given as JSON data, as readable text."""
    field = form.fields[name]
    if withheld(field) and key not in ("", None):
        return "••••••••"
    if isinstance(key, dict) and DIGEST in key:
        return gettext("(a long text)")
    if isinstance(key, dict) and UPLOAD in key:
        return str(key[UPLOAD])
    if isinstance(field, forms.JSONField) and isinstance(key, dict | list):
        return str(field.prepare_value(key))
    keys = key if isinstance(key, list) else [key]
    if isinstance(field, forms.ModelChoiceField):
        return _rows(field, keys)
    if isinstance(field, forms.ChoiceField):
        return _choices(field, keys)
    if isinstance(key, bool):
        return gettext("yes") if key else gettext("no")
    return _plain(form, name, key)


def typed(form: Any, name: str) -> Any:
    """Return what was typed into a field, valid or not, as people read it."""
    field, value = form.fields[name], form[name].value()
    if isinstance(value, bool) or (value and isinstance(field, forms.ChoiceField)):
        return shown(form, name, value)
    # Of several inputs, such as a date and a time.
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _plain(form: Any, name: str, key: Any) -> str:
    if key in ("", None):
        return ""
    field = form.instance._meta.get_field(name)
    try:
        value = field.to_python(key)
        if isinstance(value, Decimal) and getattr(field, "decimal_places", None) is not None:
            value = round(value, field.decimal_places)
    except (ValidationError, TypeError, ValueError, ArithmeticError):  # of more than 28 digits
        return str(key)
    if isinstance(value, datetime) and timezone.is_aware(value):
        value = timezone.localtime(value)
    return str(formats.localize(value))


def _choices(field: Any, keys: list[Any]) -> str:
    """Return the labels of these choices; the key of one that no longer exists."""
    flat: Iterable[tuple[Any, Any]] = flatten_choices(field.choices)
    labels = {str(value): str(label) for value, label in flat}
    return ", ".join(labels.get(str(key), str(key)) for key in keys)


def _rows(field: Any, keys: list[Any]) -> str:
    """Return the labels of these rows; the key of a row that no longer exists."""
    name = field.to_field_name or "pk"
    keys = [key for key in keys if key not in ("", None)]
    try:
        rows = {
            str(getattr(row, name)): field.label_from_instance(row)
            for row in field.queryset.filter(**{f"{name}__in": keys})
        }
    except (TypeError, ValueError, ValidationError, OverflowError):  # the last on SQLite
        rows = {}
    return ", ".join(sorted(str(rows.get(str(key), key)) for key in keys))
