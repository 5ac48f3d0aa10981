"""Views of Django REST framework: the user, whom DRF authenticates only inside the view."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def as_the_view_sees_it(request: Any, view: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the request with the user whom `view` will find; other views have it already.

    `view` is an instance, or what `as_view()` returned. A refused user is anonymous here:
    the view authenticates again, and answers that.
    """
    if hasattr(getattr(view, "cls", None), "initialize_request"):
        actions = getattr(view, "actions", {})
        view = view.cls(**view.initkwargs)
        view.action_map = actions
    if not hasattr(view, "initialize_request"):
        return request
    shown = view.initialize_request(request, *args, **kwargs)
    known = {name: vars(request)[name] for name in ("user", "auth") if name in vars(request)}
    with suppress(Exception):
        _ = shown.user
    # Authentication has set these on Django's request, where a session that failed the CSRF check
    # would look like an anonymous user: put back what was there.
    for name in ("user", "auth"):
        vars(request).pop(name, None)
    vars(request).update(known)
    return shown
