"""Sleep under a lock."""

import os
import time

from django.core.management.base import BaseCommand

from distlock_app import locked_command


@locked_command
class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--seconds", type=float, default=0.0)
        parser.add_argument("--until", help="a file that ends the sleep")

    def handle(self, *, seconds, until, **options):
        assert not {"lock_wait", "lock_ttl", "no_lock"} & set(options)
        self.stdout.write("running")
        self.stdout.flush()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not (until and os.path.exists(until)):
            # In short naps: a signal just before a sleep is heard after it. (Python's own race.)
            time.sleep(min(left, 0.05))
        return "done"
