"""The race lab: who may use it, within which limits, and that it counts right."""

from __future__ import annotations

from io import StringIO
from typing import Any
from unittest import mock
from xml.etree import ElementTree

from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.template.loader import render_to_string
from django.test import Client, SimpleTestCase, TestCase, TransactionTestCase

from distlock_app import Lock

from . import race as lab
from .race_buyers import Report
from .race_models import Race, RaceItem
from .race_plot import plot_of
from .race_results import Result, counted, percentile, split, stock_up, timed
from .race_strategies import strategies
from .race_terms import TERMS, Terms
from .race_views import findings

FORM = {"buyers": 2, "purchases": 4, "stock": 2, "think": 0, "hot": 1, "buckets": 1, "seconds": 1}


class Pages(TransactionTestCase):
    databases = "__all__"

    def setUp(self) -> None:
        self.boss = User.objects.create_superuser("boss")
        self.clerk = User.objects.create_user("clerk", is_staff=True)
        self.clerk.user_permissions.add(self.permission("view_race"))
        patch = mock.patch.object(lab.subprocess, "Popen")
        self.popen = patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(lab.LOCK.clear)

    def permission(self, codename: str) -> Permission:
        return Permission.objects.get(codename=codename)

    def login(self, user: User) -> Client:
        client = Client()
        client.force_login(user)
        return client

    def post(self, client: Client, **changed: Any) -> Any:
        return client.post("/race/", FORM | {"strategies": ["none", "f"]} | changed)

    def race(self, **values: Any) -> Race:
        terms = Terms(buyers=2, purchases=4, stock=2)
        race = lab.announce(terms, ["none", "f"], by="<i>ann</i>")
        Race.objects.filter(pk=race.pk).update(**values)
        return race

    def nothing_started(self) -> bool:
        return not (self.popen.called or Race.objects.exists() or lab.LOCK.locked())

    def test_only_staff_gets_in(self) -> None:
        visitor = User.objects.create_user("visitor")
        visitor.user_permissions.set([self.permission("view_race"), self.permission("add_race")])

        for client in (Client(), self.login(visitor)):
            for address in ("/race/", "/race/1/", "/race/1/cancel/"):
                self.assertIn("/admin/login/", client.get(address).url)
                self.assertIn("/admin/login/", client.post(address, FORM).url)
        self.assertTrue(self.nothing_started())

    def test_who_may_only_look_starts_and_stops_nothing(self) -> None:
        client = self.login(self.clerk)

        page = client.get("/race/")
        self.assertContains(page, "but not start them")
        self.assertNotContains(page, "Start the race")
        self.assertEqual(self.post(client).status_code, 403)
        self.assertTrue(self.nothing_started())
        race = self.race()
        with lab.LOCK.acquire():
            self.assertNotContains(client.get(race.get_absolute_url()), "Stop the race")
            self.assertEqual(client.post(f"/race/{race.pk}/cancel/").status_code, 403)
        self.assertEqual(Race.objects.get().state, Race.State.RUNNING)

    def test_nothing_beyond_the_limits_is_started(self) -> None:
        client = self.login(self.boss)

        for name, limits in TERMS.items():
            for value in (limits.low - 1, limits.high + 1, "nan", "inf", "1e9", "x", ""):
                answer = self.post(client, **{name: value})
                self.assertContains(answer, "errorlist", msg_prefix=f"{name}={value}")
        self.assertContains(self.post(client, strategies=["none", "rm -rf"]), "errorlist")
        self.assertContains(self.post(client, strategies=[]), "errorlist")
        self.assertTrue(self.nothing_started())

    def test_only_a_form_of_ours_starts_and_stops(self) -> None:
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(self.boss)

        self.assertEqual(self.post(strict).status_code, 403)
        self.assertTrue(self.nothing_started())
        self.assertEqual(strict.post(f"/race/{self.race().pk}/cancel/").status_code, 403)
        self.assertEqual(strict.get(f"/race/{Race.objects.get().pk}/cancel/").status_code, 405)

    def test_one_process_is_started_under_the_lock_and_a_second_race_is_not(self) -> None:
        client = self.login(self.boss)

        self.assertEqual(self.post(client, strategies=["f"] * 50 + ["none"]).status_code, 302)
        refused = client.post("/race/", FORM | {"strategies": ["f"]}, follow=True)

        race = Race.objects.get()
        self.assertEqual((race.strategies, race.started_by), (["f", "none"], "boss"))
        self.assertEqual(self.popen.call_count, 1)
        self.assertIn(f"--conduct={race.pk}", self.popen.call_args[0][0])
        self.assertContains(refused, "A race is already running")
        (handed_over,) = self.popen.return_value.communicate.call_args[0]
        Lock.resume(handed_over).release()
        self.assertFalse(lab.LOCK.locked())

    def test_without_scripts_a_running_race_reloads_itself(self) -> None:
        client, race = self.login(self.boss), self.race()

        with lab.LOCK.acquire():
            running = client.get(race.get_absolute_url())
            client.post(f"/race/{race.pk}/cancel/")
            self.assertEqual(Race.objects.get().state, Race.State.STOPPING)

        self.assertContains(running, '<noscript><meta http-equiv="refresh" content="2">')
        self.assertContains(running, "data-running")

    def test_a_race_whose_process_is_gone_is_called_failed(self) -> None:
        race = self.race()

        page = self.login(self.boss).get(race.get_absolute_url())

        self.assertContains(page, "the process that conducted it is gone")
        self.assertNotContains(page, "data-running")

    def test_what_an_engine_says_is_only_text(self) -> None:
        script = "<script>alert(1)</script>"
        result: dict[str, Any] = {"strategy": script, "title": script, "note": script, "stock": 1}
        result["per_buyer"] = [0]
        race = self.race(state=Race.State.DONE, trouble=script, results=[result])

        page = self.login(self.boss).get(race.get_absolute_url())

        self.assertContains(page, "&lt;script&gt;alert(1)", count=5)
        self.assertNotContains(page, script)
        self.assertEqual(page["Content-Security-Policy"], "default-src 'self'")

    def test_old_races_are_forgotten(self) -> None:
        first = self.race()
        stock_up(first, "f", Terms())
        for _ in range(lab.KEPT):
            last = self.race()

        self.assertEqual(Race.objects.count(), lab.KEPT)
        self.assertFalse(RaceItem.objects.exists())
        self.assertEqual(Race.objects.first(), last)

    def test_the_guide_can_be_read(self) -> None:
        titles = {"en": "# Which guard for what", "ko": "# 동시성 제어 방식 고르기"}

        for language, title in titles.items():
            page = Client(headers={"accept-language": language}).get("/race/guide/")
            self.assertIn(title, b"".join(page.streaming_content).decode())


class Books(TestCase):
    databases = "__all__"

    def test_what_was_sold_is_counted_from_the_orders(self) -> None:
        terms = Terms(stock=4, hot=0.5, buckets=2, buyers=3)
        race = lab.announce(terms, ["f"], by="ann")
        rows = stock_up(race, "f", terms)
        other = lab.announce(terms, ["f"], by="ann")
        RaceItem.objects.get(pk=stock_up(other, "f", terms)["hot:0"]).orders.create(buyer=0)
        for name, buyer in (("hot:0", 0), ("hot:0", 2), ("hot:0", 2), ("cold:7", 0)):
            RaceItem.objects.get(pk=rows[name]).orders.create(buyer=buyer)
        RaceItem.objects.filter(pk=rows["hot:0"]).update(stock=0)

        found = counted(race, "f", terms)

        # Three of "hot:0", where one was, and one of "cold:7", where none was.
        expected = {"stock": 4, "sold": 4, "oversold": 3, "left": 3, "lost": 3}
        self.assertEqual(found, expected | {"per_buyer": [2, 0, 2]})
        result = Result(strategy="f", title="F", **found)
        self.assertTrue(result.broke_promise)
        self.assertIsNone(result.fairness)

    def test_stock_is_spread_over_rows_named_as_buckets_are(self) -> None:
        self.assertEqual(split("hot", 5, 3), {"hot:0": 2, "hot:1": 2, "hot:2": 1})

    def test_a_guard_that_broke_its_promise_is_the_exit_code(self) -> None:
        bad = Result(strategy="f", title="F()", stock=1, sold=2, oversold=1, seconds=1)
        naive = Result(strategy="none", title="No guard", promises=False, sold=2, oversold=1)

        def conduct(race: Race, *_: Any) -> list[Result]:
            race.state = Race.State.DONE
            return [naive] if "none" in race.strategies else [naive, bad]

        with mock.patch.object(lab, "conduct", conduct), mock.patch("signal.signal"):
            call_command("race", "--only", "none", stdout=StringIO())
            with self.assertRaisesMessage(CommandError, "Sold what was not there: F()"):
                call_command("race", "--only", "f", stdout=StringIO())
            with self.assertRaisesMessage(CommandError, "no paper here"):
                call_command("race", "--only", "paper")
            with self.assertRaisesMessage(CommandError, "buyers must be 1 to 16"):
                call_command("race", "--buyers", "17")


class Numbers(SimpleTestCase):
    def test_terms_out_of_their_limits_are_refused(self) -> None:
        for name, limits in TERMS.items():
            for value in (limits.low - 1, limits.high + 1, float("nan"), float("inf")):
                with self.assertRaises(ValueError, msg=f"{name}={value}"):
                    Terms(**{name: value})

    def test_percentiles_are_of_the_nearest_rank(self) -> None:
        waits = [float(number) for number in range(1, 201)]

        self.assertEqual((percentile(waits, 50), percentile(waits, 99)), (100.0, 198.0))
        self.assertEqual((percentile([7.0], 50), percentile([7.0], 99)), (7.0, 7.0))
        self.assertIsNone(percentile([], 50))

    def test_retries_are_attempts_beyond_the_first_of_each_purchase(self) -> None:
        reports = [
            Report(waits=[0.2], attempts=5, purchases=3, conflicts=2, began=10, ended=12),
            Report(waits=[0.1], gave_up=1, note="late", began=11, ended=15),
        ]

        found = timed(reports)

        self.assertEqual((found["retries"], found["conflicts"], found["gave_up"]), (2, 2, 1))
        self.assertEqual((found["seconds"], found["note"]), (5, "late"))
        self.assertEqual((found["wait_p50"], found["wait_p99"]), (0.1, 0.2))

    def test_the_fastest_is_as_fast_as_in_the_table(self) -> None:
        result = Result(strategy="f", title="F", sold=1449, seconds=10)

        self.assertEqual(
            findings([result], {}), ["Fastest without a mistake: F, 145 units per second."]
        )

    def test_the_plot_is_sound_whatever_is_drawn(self) -> None:
        titles = {key: strategy.title for key, strategy in strategies().items()}
        nothing = Result(strategy="f", title="F", stock=1, per_buyer=[0, 0])
        much = Result(
            strategy="none",
            title="<none> & more",
            stock=2000,
            sold=4000,
            oversold=2000,
            per_buyer=[4000],
            wait_p50=0.0,
            wait_p99=90.0,
            seconds=0.001,
        )
        for results in ([nothing], [much], [nothing, much]):
            plot = plot_of(results, titles)
            svg = ElementTree.fromstring(render_to_string("shop/race_plot.html", {"plot": plot}))
            for shape in svg:
                ends = [float(shape.get(name, 0)) for name in ("x", "x1", "x2", "cx")]
                ends.append(float(shape.get("x", 0)) + float(shape.get("width", 0)))
                self.assertTrue(all(0 <= end <= plot.width for end in ends), shape.attrib)
