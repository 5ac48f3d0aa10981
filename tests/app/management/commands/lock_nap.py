"""Sleep under a lock."""

import time

from django.core.management.base import BaseCommand

from distlock_app import locked_command


@locked_command
class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--seconds", type=float, default=0.0)

    def handle(self, *, seconds, **options):
        assert not {"lock_wait", "lock_ttl", "no_lock"} & set(options)
        self.stdout.write("running")
        self.stdout.flush()
        time.sleep(seconds)
        return "done"
