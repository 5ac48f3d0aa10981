"""The admin's pages in a real browser, under a strict Content-Security-Policy."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.http import HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from distlock_app import Lock, LockBusy, locked_view
from distlock_app.claims import Grant
from distlock_app.core.registry import registry
from distlock_app.models import LiveLock
from distlock_app.operations import history
from distlock_app.primitives import identity
from distlock_app.primitives.names import key_of
from distlock_app.testing import held_elsewhere
from distlock_app.testing.claims import a_claim
from tests.conftest import missing
from tests.urls import urlpatterns as test_urls

try:
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait
except ImportError:
    webdriver = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

LIST = "/admin/distlock_app/livelock/"
FLAGS = """
    --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync
    --window-size=1400,1000
"""
# Seconds; a race is processes on a machine that may have two cores.
WITHIN = 90


class StrictPolicy:
    """What a site with `Content-Security-Policy: default-src 'self'` sends."""

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        response = self.get_response(request)
        response["Content-Security-Policy"] = "default-src 'self'"
        return response


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """One browser for the module, with a profile of its own."""
    if webdriver is None:
        missing("chromium", "selenium is not installed")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        missing("chromium", "chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Only to this machine, whatever proxy the environment names.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1"
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


@pytest.fixture
def site(settings, live_server):
    """The test project with locks in memory, which the server's threads share with the test."""
    settings.DISTLOCK = {
        "default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
        "broken": {"BACKEND": "tests.failing_engines.DownBackend"},
    }
    settings.MIDDLEWARE = ["tests.test_browser.StrictPolicy", *settings.MIDDLEWARE]
    return live_server


@pytest.fixture
def browser(chromium, site):
    """Log somebody with these permissions in; return the browser."""

    def login(*codenames):
        user = User.objects.create_user("ann", password="x", is_staff=True)
        # Whatever other transactional tests have flushed.
        for codename in codenames:
            kind = ContentType.objects.get_for_model(LiveLock)
            permission, _ = Permission.objects.get_or_create(
                codename=codename, content_type=kind, defaults={"name": codename}
            )
            user.user_permissions.add(permission)
        log_in(chromium, f"{site}/admin/login/?next={LIST}")
        return chromium

    yield login
    chromium.execute_script("sessionStorage.clear()")  # else the next list refreshes, too
    assert violations(chromium) == []


def log_in(browser, url, user="ann", password="x", shown="Live locks"):
    """Log somebody in at the form to which `url` leads, and wait for the page behind it."""
    browser.delete_all_cookies()
    browser.get(url)
    browser.find_element(By.NAME, "username").send_keys(user)
    browser.find_element(By.NAME, "password").send_keys(password)
    browser.find_element(By.CSS_SELECTOR, "[type=submit]").click()
    shows(browser, shown)


def violations(browser):
    """Return what the browser refused because of the Content-Security-Policy."""
    return [e["message"] for e in browser.get_log("browser") if "Policy" in e["message"]]


def taken(name, ttl=600.0, who="bob /pay/7"):
    """Take the lock as another process would."""
    with identity.activity(who):
        wanted = replace(a_claim(name, ttl=ttl), holder=identity.holder_text())
    grant = registry["default"].backend.acquire(wanted, 0)
    assert isinstance(grant, Grant)
    return grant


def held(name):
    return bool(list(registry["default"].backend.holders(key_of(name))))


def text(browser):
    return browser.find_element(By.TAG_NAME, "body").text


def wait_until(browser, condition):
    # While a page is being left, the driver has a different error for each moment of it.
    leaving = [WebDriverException]
    return WebDriverWait(browser, WITHIN, ignored_exceptions=leaving).until(condition)


def shows(browser, wanted):
    """Wait until the page has `wanted` in it."""
    wait_until(browser, lambda b: wanted in text(b))


def seconds_left(browser):
    minutes, seconds = browser.find_element(By.CSS_SELECTOR, "[data-dl-left]").text.split(":")
    return int(minutes) * 60 + int(seconds)


def test_a_lock_counts_down_by_the_servers_clock(browser):
    taken("invoice:42", ttl=90)
    page = browser("view_livelock")

    first = seconds_left(page)
    wait_until(page, lambda b: seconds_left(b) < first)

    assert 60 < first <= 90
    assert "invoice:42" in text(page) and "bob /pay/7" in text(page)
    assert re.search(r"broken\s+down", text(page))


def test_a_time_that_is_up_is_not_called_free(browser):
    taken("invoice:42", ttl=600)
    page = browser("view_livelock")

    page.execute_script("document.querySelector('[data-dl-left]').dataset.dlLeft = '0.1'")

    shows(page, "renewed or over")


def test_a_lock_is_taken_away_with_the_permission(browser):
    taken("invoice:42")
    page = browser("view_livelock", "clear_lock")

    page.find_element(By.LINK_TEXT, "invoice:42").click()
    link = page.find_element(By.PARTIAL_LINK_TEXT, "Force release")
    assert link.aria_role == "link" and link.value_of_css_property("text-decoration-line") == "none"
    link.click()
    shows(page, "Take this lock away")
    assert "bob /pay/7" in text(page)
    assert held("invoice:42")
    page.find_element(By.NAME, "reason").send_keys("host is gone")
    page.find_element(By.CSS_SELECTOR, "button.dl-danger").click()

    shows(page, "“invoice:42” was released")
    assert not held("invoice:42")


def test_no_reason_no_release(browser):
    taken("invoice:42")
    page = browser("view_livelock", "clear_lock")

    page.find_element(By.LINK_TEXT, "invoice:42").click()
    page.find_element(By.PARTIAL_LINK_TEXT, "Force release").click()
    page.find_element(By.CSS_SELECTOR, "button.dl-danger").click()

    shows(page, "Take this lock away")
    assert held("invoice:42")


def test_several_locks_are_taken_away_at_once(browser):
    for name in ("a1", "a2", "a3"):
        taken(name)
    page = browser("view_livelock", "clear_lock")

    for box in page.find_elements(By.CSS_SELECTOR, "input.action-select")[:2]:
        box.click()
    page.find_element(By.CSS_SELECTOR, "select[name=action] option[value=force_release]").click()
    page.find_element(By.CSS_SELECTOR, "button[name=index]").click()
    shows(page, "Take these 2 locks away")
    page.find_element(By.NAME, "reason").send_keys("hosts are gone")
    page.find_element(By.CSS_SELECTOR, "button.dl-danger").click()

    shows(page, "“a2” was released")
    assert [held(name) for name in ("a1", "a2", "a3")] == [False, False, True]


def test_a_lock_that_changed_hands_meanwhile_is_left_alone(browser):
    grant = taken("invoice:42")
    page = browser("view_livelock", "clear_lock")
    page.find_element(By.LINK_TEXT, "invoice:42").click()
    page.find_element(By.PARTIAL_LINK_TEXT, "Force release").click()
    shows(page, "Take this lock away")

    registry["default"].backend.release(grant)
    taken("invoice:42", who="eve /next")
    page.find_element(By.NAME, "reason").send_keys("host is gone")
    page.find_element(By.CSS_SELECTOR, "button.dl-danger").click()

    shows(page, "changed hands meanwhile")
    assert "eve /next" in text(page)
    assert held("invoice:42")


def test_without_the_permission_there_is_no_way_to_release(browser, site):
    taken("invoice:42")
    page = browser("view_livelock")

    assert page.find_elements(By.CSS_SELECTOR, "select[name=action]") == []
    page.find_element(By.LINK_TEXT, "invoice:42").click()
    shows(page, "bob /pay/7")
    assert page.find_elements(By.PARTIAL_LINK_TEXT, "Force release") == []
    page.get(f"{site}{LIST}clear/?lock=default:{key_of('invoice:42')}")
    shows(page, "403")
    assert held("invoice:42")


def test_the_list_is_read_again_without_a_reload_while_the_button_is_pressed(browser):
    taken("a1")
    page = browser("view_livelock", "clear_lock")
    page.execute_script("window.notReloaded = true")

    page.find_element(By.CSS_SELECTOR, "button.dl-refresh").click()
    taken("a2", ttl=90)

    shows(page, "a2")
    assert page.execute_script("return window.notReloaded")
    # What was swapped works: the times go on, and Django's script knows the new boxes.
    page.find_element(By.CSS_SELECTOR, "button.dl-refresh").click()
    first = seconds_left(page)
    wait_until(page, lambda b: seconds_left(b) < first)
    page.find_element(By.ID, "action-toggle").click()
    shows(page, "2 of 2 selected")


def test_the_button_says_what_it_does_and_the_text_beside_it_what_happens(browser):
    taken("a1")
    page = browser("view_livelock")
    button = page.find_element(By.CSS_SELECTOR, "button.dl-refresh")
    assert button.text == "Auto-refresh"
    assert "Reload the page to ask" in text(page) and "asked again every" not in text(page)

    button.click()
    taken("a2")

    shows(page, "a2")  # also after the text was swapped
    assert button.text == "Stop refreshing" and button.get_attribute("aria-pressed") == "true"
    assert "Reload the page to ask" not in text(page) and "asked again every" in text(page)
    button.click()
    assert button.text == "Auto-refresh" and button.get_attribute("aria-pressed") == "false"
    assert "Reload the page to ask" in text(page)


# Answers wait in the page until `letGo()`; `timers` are those for the next reading.
HOLD_BACK = """
    const [later, cancel, real] = [window.setTimeout, window.clearTimeout, window.fetch];
    window.timers = new Set();
    window.rounds = 0;
    window.setTimeout = (what, after) => {
        const timer = later(() => { window.timers.delete(timer); what(); }, after);
        if (after === 3000) { window.timers.add(timer); window.rounds += 1; }
        return timer;
    };
    window.clearTimeout = (timer) => { window.timers.delete(timer); cancel(timer); };
    window.fetch = (where, options) => new Promise((resolve, reject) => {
        options.signal?.addEventListener("abort", () => reject(options.signal.reason));
        window.letGo = () => resolve(real(where, options));
    });
"""


def reading_again(browser, button):
    """Press the button of the list; return when an answer is on its way."""
    browser.execute_script(HOLD_BACK)
    button.click()
    wait_until(browser, lambda b: b.execute_script("return !!window.letGo"))


def test_a_row_that_is_chosen_while_the_list_is_read_stays_chosen(browser):
    taken("a1")
    page = browser("view_livelock", "clear_lock")
    reading_again(page, page.find_element(By.CSS_SELECTOR, "button.dl-refresh"))

    page.find_element(By.CSS_SELECTOR, "input.action-select").click()
    page.execute_script("window.letGo()")
    wait_until(page, lambda b: b.execute_script("return window.rounds") == 2)

    assert page.find_element(By.CSS_SELECTOR, "input.action-select").is_selected()
    assert "1 of 1 selected" in text(page)


def test_the_keyboard_stays_at_its_row_while_the_list_is_read(browser):
    taken("a1")
    page = browser("view_livelock", "clear_lock")
    button = page.find_element(By.CSS_SELECTOR, "button.dl-refresh")
    box = page.find_element(By.CSS_SELECTOR, "input.action-select")
    name = box.get_attribute("value")

    button.click()
    page.execute_script("arguments[0].focus()", box)
    taken("a2")
    shows(page, "a2")

    assert page.switch_to.active_element.get_attribute("value") == name


def test_pressed_twice_the_list_is_read_no_more_often(browser):
    taken("a1")
    page = browser("view_livelock")
    button = page.find_element(By.CSS_SELECTOR, "button.dl-refresh")
    reading_again(page, button)

    button.click()
    button.click()
    page.execute_script("window.letGo()")
    wait_until(page, lambda b: b.execute_script("return window.rounds") == 3)

    assert page.execute_script("return window.timers.size") == 1


def test_a_server_that_does_not_answer_is_said_to_be_silent(browser):
    taken("a1")
    page = browser("view_livelock")
    reading_again(page, page.find_element(By.CSS_SELECTOR, "button.dl-refresh"))

    shows(page, "not refreshed")


@pytest.fixture
def width(chromium):
    """Return a function that makes the page so wide, a phone's as well."""

    def set_width(pixels):
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": pixels < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        chromium.refresh()

    yield set_width
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def last_seen(browser):
    """Return which columns can be seen of the list without scrolling sideways."""
    return browser.execute_script("""
        const edge = document.querySelector("#changelist-form .results").getBoundingClientRect();
        return [...document.querySelectorAll("#result_list tbody tr:first-child > *")]
            .filter((cell) => cell.getBoundingClientRect().right <= edge.right + 1)
            .map((cell) => cell.className.split("-").pop())
    """)


def test_the_list_fits_its_page_and_a_phone_shows_what_is_urgent(browser, width):
    with identity.activity("manage.py import_everything --from=/var/spool/2026"):
        waiter = replace(a_claim("invoice:42"), holder=identity.holder_text())
    taken("a long name of a lock:composed:of:many:parts:0123456789", ttl=20_000)
    taken("invoice:42", who="alice@example.com /invoices/42/pay/with/some/more/of/it")
    registry["default"].backend.acquire(waiter, 5)
    page = browser("view_livelock", "clear_lock")
    width(1265)  # 1280 without the bar to scroll
    wide = last_seen(page)
    width(390)
    narrow = last_seen(page)

    assert len(wide) == 9
    assert narrow[1:5] == ["name", "state", "held_for", "waiters"]


def test_a_phone_shows_whose_lock_is_taken_away(browser, width):
    taken("invoice:42", who="manage.py import --from=/var/spool/of/some/very/long/path/file.csv")
    page = browser("view_livelock", "clear_lock")
    page.find_element(By.LINK_TEXT, "invoice:42").click()
    page.find_element(By.PARTIAL_LINK_TEXT, "Force release").click()
    shows(page, "Take this lock away")

    width(390)

    table = page.find_element(By.CSS_SELECTOR, ".dl-scroll")
    assert table.get_property("scrollWidth") <= table.get_property("clientWidth")


def test_filters_and_search_pick_locks(browser):
    taken("invoice:42")
    taken("nightly")
    page = browser("view_livelock")

    page.find_element(By.NAME, "q").send_keys("NIGHT", Keys.ENTER)
    shows(page, "1 live lock")
    assert "nightly" in text(page) and "invoice:42" not in text(page)
    page.find_element(By.LINK_TEXT, "expiring").click()
    shows(page, "0 live locks")


@pytest.fixture
def used(settings, monkeypatch):
    """A lock that is held, and has a history."""
    monkeypatch.setattr(history, "EVERY", 0.01)
    settings.DISTLOCK_HISTORY = 50
    for _ in range(3):
        with held_elsewhere("invoice:42"), contextlib.suppress(LockBusy):
            Lock("invoice:42", wait=0.05).acquire()
    history.writer.flush(30)
    taken("invoice:42")


def test_the_page_of_a_lock_has_its_history_and_a_chart(browser, used):
    page = browser("view_livelock")

    page.find_element(By.LINK_TEXT, "invoice:42").click()

    shows(page, "Recent events")
    bars = page.find_elements(By.CSS_SELECTOR, "svg.dl-waiting rect, svg.dl-holding rect")
    assert bars and all(bar.size["height"] > 0 for bar in bars)
    assert "gave up (busy)" in text(page)
    assert page.find_element(By.CSS_SELECTOR, ".dl-scroll").get_attribute("tabindex") == "0"


def test_a_page_from_right_to_left_has_a_chart_with_its_begin_at_the_left(browser, settings, used):
    page = browser("view_livelock")
    page.add_cookie({"name": settings.LANGUAGE_COOKIE_NAME, "value": "ar"})

    page.find_element(By.LINK_TEXT, "invoice:42").click()

    shows(page, "Recent events")
    assert page.find_element(By.TAG_NAME, "html").get_attribute("dir") == "rtl"
    begin, end = page.find_elements(By.CSS_SELECTOR, ".dl-axis span")
    assert begin.location["x"] < end.location["x"]
    cell = page.find_element(By.CSS_SELECTOR, ".dl-past td")
    assert cell.value_of_css_property("text-align") == "right"


# The edges of the first and the last letter of a text.
ENDS = """
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const ends = [];
for (let node; (node = walker.nextNode()); ) {
  const at = node.data.indexOf(arguments[0]);
  if (at < 0 || !node.parentElement.checkVisibility()) continue;
  const edge = (where) => {
    const range = document.createRange();
    range.setStart(node, where);
    range.setEnd(node, where + 1);
    return range.getBoundingClientRect().x;
  };
  ends.push([edge(at), edge(at + arguments[0].length - 1)]);
}
return ends;
"""


def test_a_page_from_right_to_left_shows_names_as_they_are(browser, settings):
    name, who = "order:1 (a)", "bob /pay/"
    taken(name, who=who)
    page = browser("view_livelock", "clear_lock")
    page.add_cookie({"name": settings.LANGUAGE_COOKIE_NAME, "value": "ar"})

    page.refresh()
    for link in (name, "Force release…", None):
        assert page.find_element(By.TAG_NAME, "html").get_attribute("dir") == "rtl"
        for shown in (name, who):
            ends = page.execute_script(ENDS, shown)
            assert ends and all(first < last for first, last in ends), (page.current_url, ends)
        if link:
            address = page.current_url
            page.find_element(By.LINK_TEXT, link).click()
            wait_until(page, lambda b, left=address: b.current_url != left)


def test_a_lock_is_extended(browser):
    taken("invoice:42", ttl=60)
    page = browser("view_livelock", "extend_lock")

    page.find_element(By.LINK_TEXT, "invoice:42").click()
    page.find_element(By.NAME, "seconds").clear()
    page.find_element(By.NAME, "seconds").send_keys("3000", Keys.ENTER)

    shows(page, "at least 3000 more seconds")
    assert seconds_left(page) > 2000


def test_buttons_have_room_for_their_text_under_a_theme_of_small_buttons(browser):
    taken("invoice:42")
    page = browser("view_livelock", "extend_lock")
    page.find_element(By.LINK_TEXT, "invoice:42").click()
    shows(page, "more seconds")

    # As django-grappelli has it.
    rule = "button { height: 25px; margin-left: -25px; overflow: hidden; width: 30px; }"
    page.execute_script("document.styleSheets[0].insertRule(arguments[0], 0)", rule)

    button = page.find_element(By.CSS_SELECTOR, "button[form=dl-extend]")
    assert button.get_property("scrollWidth") <= button.get_property("clientWidth")
    assert button.value_of_css_property("margin-left") == "0px"


def test_a_name_with_a_script_in_it_is_only_text(browser):
    name = "<img src=x onerror=\"document.title='owned'\">"
    taken(name)
    page = browser("view_livelock", "clear_lock")

    shows(page, "<img src=x")
    page.find_element(By.PARTIAL_LINK_TEXT, "<img").click()
    shows(page, "<img src=x")

    assert page.title != "owned"


@locked_view("pay:7")
def pay(request):
    raise AssertionError("not under the lock")


def order(request):
    """A page with a form that sends a POST, as of a shop."""
    form = '<form method="post" action="/pay/7/"><button>Pay</button></form>'
    return HttpResponse(f"<!doctype html><title>Order</title><h1>Order 7</h1>{form}")


RACE_JS = Path(__file__).parent.parent / "demo_project/shop/static/shop/race.js"


def race(request):
    """A page of the race lab that is renewed, with its button."""
    page = '<div id="race" data-running><button>Stop</button></div><script src="/race.js"></script>'
    return HttpResponse(f"<!doctype html><title>Race</title>{page}")


def race_js(request):
    return HttpResponse(RACE_JS.read_bytes(), content_type="text/javascript")


urlpatterns = [
    path("orders/7/", order),
    path("pay/7/", csrf_exempt(pay)),
    path("race/", race),
    path("race.js", race_js),
    *test_urls,
]


@pytest.mark.urls("tests.test_browser")
def test_the_keyboard_stays_at_the_button_of_a_race_that_is_renewed(chromium, site):
    chromium.get(f"{site}/race/")
    button = chromium.find_element(By.TAG_NAME, "button")
    chromium.execute_script("window.old = arguments[0]; old.focus()", button)

    wait_until(chromium, lambda b: b.execute_script("return !old.isConnected"))

    assert chromium.switch_to.active_element.tag_name == "button"


@pytest.mark.urls("tests.test_browser")
def test_the_page_of_a_busy_view_goes_back_and_sends_nothing_again(chromium, site):
    chromium.get(f"{site}/orders/7/")

    with held_elsewhere("pay:7"):
        chromium.find_element(By.TAG_NAME, "button").click()
        shows(chromium, "Your request is already being processed.")
        assert chromium.current_url == f"{site}/pay/7/"
        assert (
            chromium.find_element(By.TAG_NAME, "main").value_of_css_property("max-width") != "none"
        )
        wait_until(chromium, lambda b: b.current_url == f"{site}/orders/7/")

    shows(chromium, "Order 7")
    assert violations(chromium) == []


def test_the_pages_work_in_the_theme_of_unfold(chromium, processes, tmp_path):
    if find_spec("unfold") is None:
        missing("chromium", "django-unfold is not installed")
    worker = processes.start(
        "tests.unfold_site:serve",
        env={
            "DJANGO_SETTINGS_MODULE": "tests.unfold_settings",
            "DISTLOCK_TEST_UNFOLD_FILE": str(tmp_path / "unfold.sqlite3"),
        },
    )
    site = f"http://127.0.0.1:{worker.read(within=60)}"
    log_in(chromium, f"{site}/admin/login/?next={LIST}")

    shows(chromium, "invoice:42")
    assert re.search(r"broken\s+down", text(chromium))
    chromium.get(f"{site}{LIST}?q=night")
    shows(chromium, "1 live lock")
    assert "invoice:42" not in text(chromium)
    chromium.find_element(By.PARTIAL_LINK_TEXT, "nightly").click()
    shows(chromium, "Recent events")
    assert chromium.find_elements(By.CSS_SELECTOR, "svg.dl-holding rect")
    chromium.find_element(By.NAME, "seconds").clear()
    chromium.find_element(By.NAME, "seconds").send_keys("3000", Keys.ENTER)
    shows(chromium, "at least 3000 more seconds")
    chromium.find_element(By.PARTIAL_LINK_TEXT, "Force release").click()
    shows(chromium, "Take this lock away")
    chromium.find_element(By.NAME, "reason").send_keys("host is gone")
    chromium.find_element(By.CSS_SELECTOR, "button.dl-danger").click()
    shows(chromium, "was released")
    worker.tell("nightly")
    assert worker.read() is False
    worker.tell("invoice:42")
    assert worker.read() is True
    chromium.get_log("browser")  # the theme's own scripts need more than a strict policy allows
