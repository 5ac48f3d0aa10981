"""Values of form fields as text, for the page of a conflict."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils import formats, timezone
from django.utils.choices import flatten_choices
from django.utils.translation import gettext


def withheld(field: Any) -> bool:
    """Return whether pages withhold the value of a form field, as of a password."""
    return isinstance(field.widget, forms.PasswordInput) and not field.widget.render_value


def shown(form: Any, name: str, key: Any) -> str:
    """Return a value, given as JSON data, as readable text."""
    field = form.fields[name]
    if withheld(field) and key not in ("", None):
        return "••••••••"
    if isinstance(key, dict) and set(key) == {"sha256"}:
        return gettext("(a long text)")
    if isinstance(key, dict) and set(key) == {"upload"}:
        return str(key["upload"])
    if isinstance(field, forms.ModelChoiceField):
        return _rows(field, key if isinstance(key, list) else [key])
    if isinstance(field, forms.ChoiceField):
        choices: Any = field.choices
        flat: Iterable[tuple[Any, Any]] = flatten_choices(choices)
        labels = {str(value): str(label) for value, label in flat}
        keys = key if isinstance(key, list) else [key]
        return ", ".join(labels.get(str(one), str(one)) for one in keys)
    if isinstance(key, bool):
        return gettext("yes") if key else gettext("no")
    return _plain(form, name, key)


def _plain(form: Any, name: str, key: Any) -> str:
    if key in ("", None):
        return ""
    field = form.instance._meta.get_field(name)
    try:
        value = field.to_python(key)
    except (ValidationError, TypeError, ValueError):
        return str(key)
    if isinstance(value, Decimal) and getattr(field, "decimal_places", None) is not None:
        value = round(value, field.decimal_places)
    if isinstance(value, datetime) and timezone.is_aware(value):
        value = timezone.localtime(value)
    return str(formats.localize(value))


def _rows(field: Any, keys: list[Any]) -> str:
    """Return the labels of these rows; the key of a row that no longer exists."""
    name = field.to_field_name or "pk"
    keys = [key for key in keys if key not in ("", None)]
    try:
        rows = {
            str(getattr(row, name)): field.label_from_instance(row)
            for row in field.queryset.filter(**{f"{name}__in": keys})
        }
    except (TypeError, ValueError, ValidationError):
        rows = {}
    return ", ".join(sorted(str(rows.get(str(key), key)) for key in keys))
