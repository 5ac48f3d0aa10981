"""Settle one shop, and not again within two seconds."""

from django.core.management.base import BaseCommand

from distlock_app import locked_command


@locked_command("settle:{shop}", at_least=2, ttl=1, busy_exit=0)
class Command(BaseCommand):
    requires_system_checks = []

    def add_arguments(self, parser):
        parser.add_argument("shop")
        parser.add_argument("--fail", action="store_true")

    def handle(self, *args, **options):
        if options["fail"]:
            raise RuntimeError("fails")
        return f"settled {options['shop']}"
