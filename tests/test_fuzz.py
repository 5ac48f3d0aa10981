"""Whatever is given as a name, a time, a setting or a template: it works, or the error says why."""

from __future__ import annotations

import math
import re

import hypothesis.strategies as st
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from hypothesis import assume, example, given

from distlock_app import Lock, bucket, locked, named
from distlock_app.core.limits import MAX_TTL, MIN_TTL
from distlock_app.core.registry import registry
from distlock_app.decorators.naming import NameTemplate
from distlock_app.primitives.names import SHOWN_LENGTH, key_of, shown
from distlock_app.testing import NASTY_NAMES
from tests.examples import examples

# Hypothesis takes what engines' threads do for a strategy's: they use `random` for their jitter.
# And it warns of long values, which are asked for.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

# Every code point, lone surrogates too.
TEXTS = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=300),
    st.sampled_from(NASTY_NAMES),
)
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.decimals(), TEXTS)
# What people write into settings.
VALUES = st.recursive(
    st.one_of(NUMBERS, st.binary(max_size=5), st.just("default"), st.just("locmem")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.fixture(autouse=True)
def in_memory(settings):
    settings.DISTLOCK = {"default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}}


@examples(150)
@given(TEXTS)
def test_any_text_is_a_name(name):
    assume(name)
    lock = Lock(name)

    with lock as hold:
        assert hold.name == name
        [holding] = lock.holders()
        assert holding.name == shown(name)
    assert re.fullmatch("[0-9a-f]{40}", key_of(name))
    assert len(shown(name)) <= SHOWN_LENGTH
    assert shown(name).isprintable()
    assert name in repr(lock) or repr(name) in repr(lock)


@examples(60)
@given(st.lists(TEXTS, unique=True, min_size=2, max_size=20))
def test_different_texts_have_different_keys(names):
    assert len({key_of(name) for name in names}) == len(names)


@examples(60)
@given(st.one_of(st.none(), st.integers(), st.binary(), st.lists(st.text()), st.just("")))
def test_what_is_no_name_is_refused(name):
    with pytest.raises((TypeError, ValueError), match="a lock name must"):
        Lock(name)


@pytest.mark.filterwarnings("ignore:ttl=.* is in seconds")
@examples(100)
@given(NUMBERS)
@example(math.nan)
@example(MIN_TTL)
@example(MAX_TTL)
def test_any_ttl_is_taken_or_refused_by_name(ttl):
    try:
        lock = Lock("a", ttl=ttl)
    except (TypeError, ValueError) as error:
        assert "ttl must be" in str(error)
        assert repr(ttl) in str(error)
    else:
        assert MIN_TTL <= ttl <= MAX_TTL
        if ttl >= 1:  # one of less may be lost before it is left
            with lock as hold:
                assert 0 <= hold.expires_in <= ttl


@examples(100)
@given(NUMBERS)
@example(math.inf)
@example(10**400)
@example(5e-324)
def test_any_wait_is_taken_or_refused_by_name(wait):
    try:
        lock = Lock("a", wait=wait)
    except (TypeError, ValueError) as error:
        assert "wait must be" in str(error)
        assert repr(wait) in str(error)
    else:
        assert wait is None or wait >= 0
        with lock:
            pass


@examples(120)
@given(st.sampled_from(["max_hold", "limit", "owner", "release", "atomic", "using"]), VALUES)
def test_any_option_of_a_lock_is_taken_or_refused_by_name(option, value):
    try:
        lock = Lock("a", **{option: value})
    except (TypeError, ValueError, ImproperlyConfigured) as error:
        assert option in str(error) or (option == "using" and "DISTLOCK" in str(error))
    else:
        with lock._acquire():
            pass


ENTRIES = st.fixed_dictionaries(
    {
        "BACKEND": st.one_of(
            st.sampled_from(
                [
                    f"distlock_app.backends.{path}"
                    for path in (
                        *("database.DatabaseBackend", "redis.RedisBackend", "etcd.EtcdBackend"),
                        *("redlock.RedlockBackend", "zookeeper.ZooKeeperBackend"),
                        *("mysql.NamedLockBackend", "postgresql.AdvisoryLockBackend"),
                        *("locmem.LocMemBackend", "dummy.DummyBackend", "nowhere.Backend"),
                    )
                ]
            ),
            VALUES,
        )
    },
    optional={
        "LOCATION": VALUES,
        "TTL": VALUES,
        "WAIT": VALUES,
        "OPTIONS": st.one_of(
            VALUES,
            st.dictionaries(
                st.sampled_from(
                    [
                        *("PREFIX", "QUEUE", "CLUSTER", "REPLICAS", "REPLICAS_TIMEOUT", "USER"),
                        *("TIMEOUT", "SESSION", "TLS", "CA", "CERT", "KEY", "PASSWORD", "QUEU"),
                    ]
                ),
                VALUES,
                max_size=3,
            ),
        ),
        "LOCATIONS": VALUES,
    },
)


@examples(200)
@given(st.one_of(st.dictionaries(st.sampled_from(["default", "b"]), ENTRIES, max_size=2), VALUES))
def test_any_setting_is_taken_or_refused_by_its_alias(setting):
    with override_settings(DISTLOCK=setting):
        try:
            entry = registry["default"]
        except ImproperlyConfigured as error:
            assert "DISTLOCK" in str(error)
        else:
            assert MIN_TTL <= entry.ttl <= MAX_TTL


FIELDS = st.sampled_from(["{a}", "{b}", "{a.real}", "{b[0]}", "{a!r}", "{}", "{0}", "{_a}", "{c}"])
TEMPLATES = st.lists(st.one_of(FIELDS, st.text("a:{}[]!.%-é\x00", max_size=4)), max_size=6).map(
    "".join
)


@examples(150)
@given(TEMPLATES, TEXTS, st.one_of(st.integers(), st.dates(), TEXTS))
def test_any_template_is_taken_or_refused_with_its_text(template, a, b):
    try:

        @locked(template, wait=0)
        def work(a, b):
            return Lock(NameTemplate(template).fill({"a": a, "b": b})).locked()

        assert work(a, b)
    except ValueError as error:
        said = str(error)
        assert repr(template) in said or "must not be empty" in said or "format" in said


@examples(100)
@given(st.tuples(TEXTS, TEXTS), st.tuples(TEXTS, TEXTS), st.sampled_from([":", "-", "/x/"]))
def test_different_values_never_make_the_same_name(one, other, between):
    template = "job:{a}" + between + "{b}"
    names = [named(template, a=a, b=b) for a, b in (one, other)]

    assert (names[0] == names[1]) == (one == other)


@examples(100)
@given(TEXTS, VALUES, st.integers(1, 100))
def test_any_value_falls_into_a_bucket(name, value, buckets):
    assume(name)
    first = bucket(name, value, buckets=buckets)

    assert first == bucket(name, value, buckets=buckets)
    assert first.startswith(f"{name}:") and int(first.rpartition(":")[2]) < buckets


@examples(60)
@given(st.one_of(TEXTS, st.binary().map(lambda raw: raw.hex())))
def test_what_is_no_dumped_hold_is_refused(text):
    with pytest.raises(ValueError, match=r"not a valid text of Hold\.dump"):
        Lock.resume(text)
