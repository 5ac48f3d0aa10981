"""`RLock`: that of threading, which an interrupt leaves free on Python 3.14 as well."""

from __future__ import annotations

import sys
import threading
from typing import Any


class SafeRLock(type(threading.RLock())):  # type: ignore[misc]  # noqa: TID251
    """Python 3.14 runs signal handlers between `__enter__` and the body of a `with`.

    What one raises there (Ctrl-C, a soft time limit) would leave the lock taken for good. 3.15
    has mended that: https://github.com/python/cpython/issues/148874
    """

    def __enter__(self) -> bool:
        taken: list[bool] = []
        try:
            taken.extend(map(self.acquire, (True,)))  # one call, so both happen or neither
        except BaseException:
            if taken:
                self.release()
            raise
        return True


# Elsewhere without the call that it takes.
RLock: Any = SafeRLock if sys.version_info[:2] == (3, 14) else threading.RLock  # noqa: TID251
