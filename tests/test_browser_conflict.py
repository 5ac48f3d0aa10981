"""Two windows, one object: the page that the second person gets, in a real browser."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.conf import settings as project
from django.contrib.auth.models import User
from django.test import Client
from selenium.webdriver.common.by import By

from tests.app.versioned_models import Extra, Offer, Tag
from tests.test_browser import chromium, shows, text, violations, wait_until, width  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

# Where pictures of the pages are kept, for people who want to look at them. What the docs show as
# docs/images/race.png is race-en-light.png of tests/test_race.py.
PICTURES = os.environ.get("DISTLOCK_TEST_PICTURES")


@pytest.fixture
def offer():
    offer = Offer.objects.create(
        name="Green tea",
        text="A mild tea from the hills of Boseong, picked in April and dried in the shade.",
        price=Decimal("10.50"),
    )
    offer.tags.add(Tag.objects.create(name="new"))
    Tag.objects.create(name="on sale")
    return offer


@pytest.fixture
def windows(chromium, settings, live_server):  # noqa: F811
    """Two people, each with a window of this browser and a session of their own."""
    settings.MIDDLEWARE = ["tests.test_browser.StrictPolicy", *settings.MIDDLEWARE]
    first = chromium.current_window_handle
    for number in range(2):
        chromium.get(f"{live_server}/admin/login/")  # a cookie is of the site that is shown
        if number == 0:
            chromium.switch_to.new_window("window")
    people = []
    for name, handle in (("ann", first), ("bob", chromium.current_window_handle)):
        client = Client()
        client.force_login(User.objects.create_superuser(name))
        cookie = client.cookies[project.SESSION_COOKIE_NAME].value
        people.append(SimpleNamespace(name=name, handle=handle, cookie=cookie))

    def use(person, path=None, language="en"):
        """Go on in the window of this person."""
        chromium.switch_to.window(person.handle)
        for key, value in (
            (project.SESSION_COOKIE_NAME, person.cookie),
            (project.LANGUAGE_COOKIE_NAME, language),
        ):
            chromium.add_cookie({"name": key, "value": value})
        if path is not None:
            chromium.get(f"{live_server}{path}")
        return chromium

    yield (use, *people)
    refused = violations(chromium)
    chromium.switch_to.window(people[1].handle)
    chromium.close()
    chromium.switch_to.window(first)
    chromium.delete_all_cookies()
    assert refused == []


def write(page, **values):
    for name, value in values.items():
        field = page.find_element(By.NAME, name)
        field.clear()
        field.send_keys(value)


def save(page):
    page.find_element(By.NAME, "_save").click()


def picture(page, name):
    if PICTURES:
        height = page.execute_script("return document.documentElement.scrollHeight")
        page.set_window_size(1400, max(1000, height + 200))
        page.save_screenshot(Path(PICTURES) / f"{name}.png")
        page.set_window_size(1400, 1000)


def change(obj, model="offer"):
    return f"/admin/testapp/{model}/{obj.pk}/change/"


WORDS = {
    "en": ("Another user saved this while you were working on it", "Last saved here by ann"),
    "ko": ("작업하시는 동안 다른 사람이 이 항목을 저장했습니다", "ann 님이"),
}


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_second_window_shows_the_conflict_and_merges_it(windows, offer, language):
    use, ann, bob = windows
    mine = "A mild tea from the hills of Boseong. Pour water of 70 degrees over it, wait a minute."
    use(ann, change(offer), language)
    use(bob, change(offer), language)
    page = use(ann, language=language)
    write(page, name="White tea", price="12.00", text="A mild tea, picked in April.")
    save(page)
    wait_until(page, lambda b: "/change/" not in b.current_url)

    page = use(bob, language=language)
    write(page, name="Black tea", text=mine)
    save(page)

    for words in WORDS[language]:
        shows(page, words)
    picture(page, f"conflict-{language}")
    assert page.find_element(By.NAME, "name").get_attribute("value") == "Black tea"
    assert page.find_element(By.NAME, "text").get_attribute("value") == mine
    assert page.find_element(By.NAME, "price").get_attribute("value") == "12.00"
    assert not page.find_elements(By.CSS_SELECTOR, ".errornote, .errorlist")
    assert page.title.startswith("Error:" if language == "en" else "오류:")
    theirs = page.find_element(By.CSS_SELECTOR, "[name=distlock_take_name][value=theirs]")
    heading = "Saved by another user" if language == "en" else "다른 사람이 저장한 값"
    assert theirs.accessible_name.startswith(f"Name {heading}")
    assert theirs.accessible_name.endswith("White tea")
    theirs.click()
    save(page)
    wait_until(page, lambda b: "/change/" not in b.current_url)
    offer.refresh_from_db()
    assert (offer.name, offer.price, offer.text) == ("White tea", Decimal("12"), mine)


def test_a_phone_shows_both_values_to_choose_from(windows, offer, width):  # noqa: F811
    use, ann, bob = windows
    page = use(bob, change(offer))
    width(390)
    Offer.objects.update(name="White tea of the hills of Boseong, first flush", text="A mild tea.")
    write(page, name="Black tea of the hills of Boseong, second flush", text="A strong tea.")
    save(page)
    shows(page, "Discard mine and reload")

    table = page.find_element(By.CSS_SELECTOR, ".dl-conflict .dl-scroll")
    assert table.get_property("scrollWidth") <= table.get_property("clientWidth")


def test_a_reload_discards_what_one_typed(windows, offer):
    use, ann, bob = windows
    page = use(bob, change(offer))
    Offer.objects.update(name="White tea")
    write(page, name="Black tea")
    save(page)
    shows(page, "Discard mine and reload")

    page.find_element(By.LINK_TEXT, "Discard mine and reload").click()

    wait_until(
        page, lambda b: b.find_element(By.NAME, "name").get_attribute("value") == "White tea"
    )
    save(page)
    wait_until(page, lambda b: "/change/" not in b.current_url)


@pytest.mark.parametrize("language", ["en", "ko"])
def test_a_deleted_object_and_a_stale_row_lose_nothing(windows, offer, language):
    use, ann, bob = windows
    Extra.objects.create(offer=offer, name="bag", price=1)
    page = use(bob, change(offer, "offerwithinlines"), language)
    Extra.objects.update(name="box")
    write(page, **{"extra_set-0-name": "sack"})
    save(page)
    shows(page, "“box”" if language == "en" else "‘box’")
    picture(page, f"row-{language}")
    assert page.find_element(By.NAME, "extra_set-0-name").get_attribute("value") == "sack"

    Offer.objects.all().delete()
    write(page, name="Black tea")
    save(page)

    shows(page, "deleted this" if language == "en" else "삭제했습니다")
    picture(page, f"deleted-{language}")
    assert "Black tea" in text(page)
