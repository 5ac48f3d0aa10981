"""Lock names from templates: "invoice:{invoice_id}", filled with a call's arguments."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import inspect
import re
import string
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MethodType
from typing import Any

from django.db import models

from ..primitives.names import Made, checked

# An argument, with attributes and items of it.
_FIELD = re.compile(r"[^\W\d]\w*(\.(?P<private>_\w*)|\.\w+|\[[^\[\]{}]+\])*")
_FORMATTER = string.Formatter()

# Types whose text is complete and the same in every process.
_PLAIN = (str, int, float, decimal.Decimal, uuid.UUID, datetime.date, datetime.time)

# May return a text for a field that is None, empty or missing.
Absent = Callable[[str], str | None]


class NameTemplate:
    """A template whose fields are names, attributes and items: `{request.user.pk}`, `{items[0]}`.

    Two calls with different values never get the same name: "%", ":" and the characters between
    fields are written as %XX inside values; "%" alone therefore separates nothing. Raise
    ValueError for a template that cannot guarantee this, and TypeError if it is not a str.
    """

    def __init__(self, template: str) -> None:
        self.template = checked(template)
        self._parts = _parts(template)
        self.fields = any(field for _, field in self._parts)
        self._quoted = {"%", ":"}
        for literal, field in self._parts[1:]:
            if not field:
                continue
            separators = {c for c in literal if not c.isalnum() and c != "%"}
            if not separators:
                raise ValueError(
                    f"{template!r} needs a separator, such as ':', before {{{field}}}: otherwise "
                    "different values give the same name"
                )
            self._quoted |= separators

    def check(self, known: Collection[str] | None, what: str) -> None:
        """Raise ValueError for a field that is not of `known` (None: any is), which are `what`."""
        for _, field in self._parts:
            if field and known is not None and re.split(r"[.\[]", field)[0] not in known:
                raise ValueError(
                    f"{{{field}}} in the lock name {self.template!r} is not one of the {what}: "
                    f"{', '.join(sorted(known)) or 'there are none'}"
                )

    def fill(self, values: Mapping[str, Any], *, absent: Absent = lambda field: None) -> Made:
        """Return the name for `values`; raise ValueError for a value that cannot name a lock."""
        name = []
        for literal, field in self._parts:
            name.append(literal)
            if field:
                name.append(quoted(self._text(field, values, absent), self._quoted))
        return Made("".join(name), self.template)

    def _text(self, field: str, values: Mapping[str, Any], absent: Absent) -> str:
        try:
            value, _ = _FORMATTER.get_field(field, (), values)
        except (AttributeError, LookupError, TypeError) as error:
            if (text := absent(field)) is not None:
                return text
            raise ValueError(
                f"{{{field}}} in the lock name {self.template!r}: {type(error).__name__}: {error}"
            ) from error
        if getattr(value, "is_anonymous", False):
            value = None  # all who are not logged in would share one lock
        if value in (None, "") and (text := absent(field)) is not None:
            return text
        try:
            return text_of(value)
        except ValueError as error:
            raise ValueError(f"{{{field}}} in the lock name {self.template!r} {error}") from None


# What names the locks of a decorator; None: what it decorates.
Named = NameTemplate | Callable[..., str] | None
# The name of the lock of one call, from its arguments.
NameOf = Callable[[tuple[Any, ...], dict[str, Any]], str]


def name_of_calls(name: Named, path: str, signature: inspect.Signature | None) -> NameOf:
    """Return what names the locks of the calls of a function; `path` is its name, or dotted path.

    Raise ValueError for a template with a field that is not in `signature`.
    """
    if callable(name):
        return lambda args, kwargs: name(*args, **kwargs)
    if name is not None:
        name.check(parameters_of(signature), f"arguments of {path}()")
        if name.fields:
            return lambda args, kwargs: name.fill(arguments(signature, args, kwargs))
    always = Made(path, path) if name is None else name.fill({})
    return lambda args, kwargs: always


def named(template: str, /, **values: Any) -> str:
    """Return the name of a lock: `named("invoice:{pk}", pk=42)` is "invoice:42".

    As in the decorators, different values never give the same name, a model instance stands for its
    primary key, and metrics are labelled by the template. Raise ValueError for a value that
    cannot name a lock.
    """
    parsed = NameTemplate(template)
    parsed.check(values, "values")
    return parsed.fill(values)


def text_of(value: Any) -> str:
    """Return the text of `value` in a lock name; a model instance is its primary key.

    Raise ValueError with a message that continues after the field's name.
    """
    if isinstance(value, models.Model):
        if value.pk is None:
            raise ValueError("is not saved yet, so it has no primary key to lock by")
        return text_of(value.pk)
    if value is None:
        # Otherwise all anonymous visitors, or all unsaved objects, would share one lock.
        raise ValueError("is None, which cannot name a lock")
    if isinstance(value, enum.Enum):
        return text_of(value.value)
    if isinstance(value, tuple):  # a composite primary key
        return ",".join(quoted(text_of(item), {"%", ","}) for item in value)
    if isinstance(value, _PLAIN) or _has_own_text(value):
        return str(value)
    raise ValueError(
        f"is of type {type(value).__name__}, which has no __str__ of its own: use an attribute, an "
        "item, or name= with a function"
    )


def quoted(text: str, characters: Collection[str]) -> str:
    """Return `text` with each of `characters` as %XX, as in a URL."""
    return "".join(_percent(c) if c in characters else c for c in text)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of `function` beneath its decorators; None: it has none.

    `method_decorator` presents a method as a `partial` that wraps the function with `self`:
    there the partial's own signature counts. That of a bound method has no `self`.
    """
    beneath = inspect.unwrap(function, stop=lambda f: isinstance(f, (partial, MethodType)))
    try:
        return inspect.signature(beneath, follow_wrapped=isinstance(beneath, MethodType))
    except (TypeError, ValueError):
        return None


def parameters_of(signature: inspect.Signature | None) -> set[str] | None:
    """Return the argument names of every call; None: the function accepts any."""
    if signature is None:
        return None
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


def arguments(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    if signature is None:
        return dict(kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            values = values.pop(parameter.name) | values  # that of a positional-only one counts
    return values


def _parts(template: str) -> list[tuple[str, str | None]]:
    """Return pairs of the text before a field and the field; the last may have none."""
    parts: list[tuple[str, str | None]] = []
    before = ""
    try:
        parsed = list(_FORMATTER.parse(template))
    except ValueError as error:
        raise ValueError(f"the lock name {template!r}: {error}") from None
    for literal, field, spec, conversion in parsed:
        before += literal  # "{{" ends a literal without a field
        if field is not None:
            _check_field(template, field, bool(spec or conversion))
            parts.append((before, field))
            before = ""
    return [*parts, (before, None)]


def _check_field(template: str, field: str, formatted: bool) -> None:
    where = f"{{{field}}} in the lock name {template!r}"
    match = _FIELD.fullmatch(field)
    if match is None:
        raise ValueError(f"{where}: an argument must be named")
    if formatted:
        raise ValueError(
            f"{where}: formats and conversions are not supported; use name= with a function"
        )
    if match["private"]:
        raise ValueError(f"{where}: the attribute is private")


def _has_own_text(value: Any) -> bool:
    """Whether the class defines its own text; `repr` often shows an address."""
    cls: Any = type(value)
    return cls.__str__ is not object.__str__ and not isinstance(value, bytes | BaseException | type)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def is_known(request: Any) -> bool:
    """Whether the user is logged in."""
    return bool(getattr(getattr(request, "user", None), "is_authenticated", False))


def visitor(request: Any) -> str:
    """Return the sender of a request, as text for a lock name: user, else session or address."""
    if is_known(request):
        return f"user={text_of(request.user)}"
    session = getattr(getattr(request, "session", None), "session_key", None)
    if session:
        # Names are shown to people, and this key would let them in.
        return f"session={hashlib.sha256(session.encode()).hexdigest()[:32]}"
    return f"address={request.META.get('REMOTE_ADDR', '')}"
