"""Many visitors who click at the same moment, on the running site, over HTTP."""

from __future__ import annotations

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPCookieProcessor, HTTPRedirectHandler, ProxyHandler, build_opener

TIMEOUT = 60.0


class _Stay(HTTPRedirectHandler):
    """Where a click leads to is the answer."""

    def redirect_request(self, *args: Any) -> None:
        return None


class Visitor:
    """A browser: cookies of its own, and the hidden fields of the page that it looks at."""

    def __init__(self, site: str) -> None:
        self.site = site.rstrip("/")
        self.fields: dict[str, str] = {}
        self._open = build_opener(ProxyHandler({}), HTTPCookieProcessor(CookieJar()), _Stay()).open

    def look(self, path: str) -> None:
        """Load a page."""
        with self._open(self.site + path, timeout=TIMEOUT) as page:
            text = page.read().decode()
        self.fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="(\w+)">', text))

    def click(self, path: str, **fields: Any) -> str:
        """Press a button of the page; return the path that it leads to, or the status."""
        data = urlencode(self.fields | fields).encode()
        try:
            with self._open(self.site + path, data, timeout=TIMEOUT) as answer:
                return str(answer.status)
        except HTTPError as answer:
            with answer:
                return urlsplit(answer.headers.get("Location") or str(answer.code)).path


def all_at_once(clicks: list[tuple[Visitor, str]]) -> list[str]:
    """Make every click in a thread of its own, at the same moment; return where they lead to."""
    start = threading.Barrier(len(clicks))

    def make(click: tuple[Visitor, str]) -> str:
        visitor, path = click
        start.wait(TIMEOUT)
        return visitor.click(path)

    with ThreadPoolExecutor(len(clicks)) as threads:
        return list(threads.map(make, clicks))


def visitors(site: str, count: int, *, think: float) -> list[Visitor]:
    """Let so many people come in, for whom the shop works so slowly."""
    found = [Visitor(site) for _ in range(count)]
    for visitor in found:
        visitor.look("/")
        visitor.click("/pace/", seconds=think)
    return found


def more_than_once(keys: list[Any]) -> int:
    """Count those that are there more than once."""
    return sum(number > 1 for number in Counter(keys).values())
