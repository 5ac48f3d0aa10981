"""One measurement in a process of its own: `python -m benchmarks.job FUNCTION [ARGUMENT...]`.

The arguments are JSON. What the function returns is printed as JSON on the last line.
"""

from __future__ import annotations

import json
import sys
import warnings
from importlib import import_module


def main() -> None:
    module, _, name = sys.argv[1].rpartition(".")
    arguments = [json.loads(argument) for argument in sys.argv[2:]]
    warnings.simplefilter("ignore")  # those of the peers
    import django

    django.setup()
    make_lock_tables()
    found = getattr(import_module(f"benchmarks.{module}"), name)(*arguments)
    print(json.dumps(found), flush=True)


def make_lock_tables() -> None:
    """Make the tables of the lock engine; leave no connection that a fork would share."""
    from django.db import connections

    from distlock_app.models import DistLock

    for connection in connections.all():
        if DistLock._meta.db_table not in connection.introspection.table_names():
            with connection.schema_editor() as editor:
                editor.create_model(DistLock)
        connection.close()


if __name__ == "__main__":
    main()
