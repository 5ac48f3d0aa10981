"""The test project in the theme of django-unfold, with a database of its own."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["DISTLOCK_TEST_UNFOLD_FILE"],
    }
}
DISTLOCK = {
    "default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
    "broken": {"BACKEND": "tests.failing_engines.DownBackend"},
}
DISTLOCK_HISTORY = 50
INSTALLED_APPS = ["unfold", *INSTALLED_APPS]
ROOT_URLCONF = "tests.unfold_site"
