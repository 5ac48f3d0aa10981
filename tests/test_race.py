"""The race lab of the demo: real processes, and books that tell what became of the stock."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.by import By

from tests.conftest import missing
from tests.engines import until
from tests.launching import free_port
from tests.test_browser import chromium, log_in, shows, text, violations, wait_until  # noqa: F401
from tests.test_browser_conflict import PICTURES, picture
from tests.test_demo import Shop, open_up, somebody_listens

pytestmark = pytest.mark.slow

BUYERS = 3
# One unit, which each buyer wants once: without a guard all have read "1 left" before anybody
# writes, however slow this machine is. A guard that did not guard would let them think together.
LAST_ONE = [f"--buyers={BUYERS}", f"--purchases={BUYERS}", "--stock=1", "--think=0.2"]


HELD = "SELECT holder FROM distlock_app_distlock WHERE name = 'race-lab' AND owner <> ''"
# Goes on until it is stopped.
LONG = ["--only", "none", "f", "--purchases=2000", "--stock=2000", "--think=0.5", "--seconds=20"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop that is open, for all tests of this file."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    try:
        open_up(shop)
        yield shop
    finally:
        shop.close()


def server_of(kind: str) -> str:
    url = os.environ.get(f"DISTLOCK_TEST_{kind.upper()}_URL", "")
    if not url:
        missing(kind, f"DISTLOCK_TEST_{kind.upper()}_URL is not set")
    return url


@contextmanager
def database_on(kind: str) -> Iterator[str]:
    """A database of its own on one of the suite's servers; its URL."""
    parts = urlsplit(server_of(kind))
    name = "test_demo" + os.environ.get("DISTLOCK_TEST_SUFFIX", "")
    if kind == "mysql":
        import MySQLdb

        connection: Any = MySQLdb.connect(
            host=parts.hostname, port=parts.port, user=parts.username, passwd=parts.password or ""
        )
    else:
        import psycopg

        connection = psycopg.connect(parts.geturl(), autocommit=True)
    try:
        cursor = connection.cursor()
        cursor.execute(f"DROP DATABASE IF EXISTS {name}")
        cursor.execute(f"CREATE DATABASE {name}")
        yield parts._replace(path=f"/{name}").geturl()
        cursor.execute(f"DROP DATABASE {name}")
    finally:
        connection.close()


def raced(shop: Shop, *arguments: str) -> dict[str, dict[str, Any]]:
    said = shop.run("race", "--json", *arguments)
    return {result["strategy"]: result for result in json.loads(said)}


def check_the_last_one(results: dict[str, dict[str, Any]]) -> None:
    """Without a guard everybody got it; with any guard one did, and the books say so."""
    naive = results.pop("none")
    assert (naive["sold"], naive["oversold"], naive["lost"]) == (BUYERS, BUYERS - 1, BUYERS - 1)
    assert results["optimistic"]["conflicts"] >= BUYERS - 1
    for key, result in results.items():
        books = [result[name] for name in ("sold", "left", "oversold", "lost", "skipped")]
        assert (key, books) == (key, [1, 0, 0, 0, ""])
        assert result["wait_p50"] is not None and sum(result["per_buyer"]) == 1


def test_the_last_one_is_sold_once_by_every_guard_on_sqlite(shop):
    results = raced(shop, *LAST_ONE)

    assert list(results) == ["none", "f", "optimistic", "pessimistic", "table"]
    check_the_last_one(results)
    assert shop.ask("SELECT COUNT(*) FROM shop_order") == [(5,)], "the shop's own books"


def test_a_second_race_is_refused_and_the_end_of_the_first_ends_its_buyers(shop):
    before = shop.ask("SELECT MAX(id) FROM shop_raceorder")
    first = shop.start("race", *LONG)
    until(lambda: shop.ask("SELECT MAX(id) FROM shop_raceorder") != before)

    second = shop.start("race", *LAST_ONE)
    said, _ = second.communicate(timeout=120)
    assert shop.ask(HELD, "locks")
    first.terminate()
    first.communicate(timeout=60)

    assert (second.returncode, first.returncode) == (75, 143)
    assert "a race is already running" in said
    until(lambda: not alive(first.pid))
    assert shop.ask("SELECT state FROM shop_race ORDER BY id DESC LIMIT 1") == [("cancelled",)]
    assert not shop.ask(HELD, "locks")


def alive(group: int) -> bool:
    """Whether any process of this group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_the_last_one_is_sold_once_by_every_engine_that_settings_name(kind, tmp_path):
    redis = urlsplit(server_of("redis"))
    if number := os.environ.get("DISTLOCK_TEST_REDIS_DB"):
        redis = redis._replace(path=f"/{number}")
    urls = {"DEMO_REDIS_URL": redis.geturl()}
    for engine in ("REDLOCK", "ETCD", "ZOOKEEPER") if kind == "postgresql" else ():
        if url := os.environ.get(f"DISTLOCK_TEST_{engine}_URL"):
            urls[f"DEMO_{engine}_URL"] = url
    with database_on(kind) as url:
        shop = Shop(tmp_path, DEMO_DATABASE_URL=url, **urls)
        try:
            shop.run("migrate", "--verbosity=0", "--skip-checks")
            results = raced(shop, *LAST_ONE)
        finally:
            shop.close()

    assert {"mysql": "named", "postgresql": "advisory"}[kind] in results
    assert "transaction" in results
    assert len(results) == 7 + len(urls)
    check_the_last_one(results)


@pytest.fixture(scope="module")
def site(shop):
    """The shop, served."""
    port = free_port()
    server = shop.start("runserver", "--noreload", "--skip-checks", f"127.0.0.1:{port}")
    until(lambda: somebody_listens(port) or server.poll() is not None)
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def page(chromium, site):  # noqa: F811
    """A browser in which the shop's admin is logged in, at the race lab."""
    log_in(chromium, f"{site}/race/", "admin", "locked-shop", "Race lab")
    yield chromium
    assert violations(chromium) == []


def first_bar(page):
    return page.find_element(By.TAG_NAME, "progress").get_attribute("outerHTML")


def choose(page, **values):
    for name, value in values.items():
        field = page.find_element(By.CSS_SELECTOR, f".terms [name={name}]")
        field.clear()
        field.send_keys(str(value))
    page.find_element(By.CSS_SELECTOR, "main form button.primary").click()


def pictures(page, name):
    """Keep pictures of the page in both languages, light and dark, if somebody wants them."""
    if not PICTURES:
        return
    for language in ("en", "ko"):
        page.add_cookie({"name": "django_language", "value": language})
        page.refresh()
        for scheme in ("light", "dark"):
            wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            page.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
            picture(page, f"{name}-{language}-{scheme}")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.delete_cookie("django_language")
    page.refresh()


def test_from_the_click_to_the_plot(page):
    pictures(page, "race-lab")
    choose(page, buyers=4, purchases=30, stock=20)
    wait_until(page, lambda b: re.search(r"/race/\d+/$", b.current_url))
    page.execute_script("window.unloaded = false")

    wait_until(page, lambda b: b.find_elements(By.CSS_SELECTOR, ".findings"))

    assert page.execute_script("return window.unloaded") is False, "polled, not reloaded"
    shows(page, "finished")
    plot = page.find_element(By.CSS_SELECTOR, "svg.plot")
    assert plot.size["width"] > 500 and plot.size["height"] > 150
    assert plot.text.count("✓") == 4 and plot.text.count("✗") == 1
    cells = page.find_elements(By.CSS_SELECTOR, ".results .wrong td")
    assert int(cells[2].text) + int(cells[3].text) > 0, "oversold or lost"
    pictures(page, "race")
    page.find_element(By.PARTIAL_LINK_TEXT, "Which guard for what").click()
    shows(page, "# Which guard for what")


def test_a_race_is_watched_and_stopped(page, site, shop):
    choose(page, purchases=200, stock=200, think=0.5, seconds=20)
    wait_until(page, lambda b: 'value="0"' not in first_bar(b))
    pictures(page, "race-running")
    there = page.current_url
    page.get(f"{site}/race/")
    choose(page)
    shows(page, "A race is already running")

    page.get(there)
    # In one step, for the page replaces the button each time it asks how the race goes.
    page.execute_script("document.querySelector('main button.danger').click()")

    wait_until(page, lambda b: "cancelled" in text(b))
    wait_until(page, lambda b: not shop.ask(HELD, "locks"))
