"""What the processes of test_optimistic.py do."""

from __future__ import annotations

from django.db import OperationalError

from tests.app.versioned_models import Account
from tests.processes import hear, say


def add(pk: int, times: int, **options: object) -> int:
    """Add 1 to the balance, `times` times; return how often the change was applied."""
    applied = 0

    def change(account: Account) -> None:
        nonlocal applied
        account.balance += 1
        applied += 1

    for _ in range(times):
        Account.objects.retrying(pk, change, **options)
    return applied


def add_in_transactions(pk: int, times: int, **options: object) -> int:
    """Do the same inside transactions that have read the row before."""
    from django.db import transaction

    from distlock_app.guards.retrying import was_sacrificed

    begun = done = 0
    while done < times:
        begun += 1
        try:
            with transaction.atomic():
                Account.objects.get(pk=pk)
                add(pk, 1, **options)
            done += 1
        except OperationalError as error:
            if not was_sacrificed(error):
                raise
    return begun


def save_once_told(pk: int) -> int:
    """Save the row when told, from a connection of its own; return the version."""
    say("ready to save")
    hear()
    return int(Account.objects.retrying(pk, lambda account: None).version)
