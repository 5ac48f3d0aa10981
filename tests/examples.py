"""How many examples Hypothesis tries: always the same ones, unless somebody looks for others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, configuration
from hypothesis import settings as hypothesis_settings

# It keeps tables of Unicode in files.
configuration.set_hypothesis_home_dir(Path(__file__).parent / "var" / "hypothesis")

# DISTLOCK_TEST_EXAMPLES=1000: so many others each time.
MORE = int(os.environ.get("DISTLOCK_TEST_EXAMPLES", 0))


def examples(number: int, **options: Any) -> hypothesis_settings:
    """Return settings for `number` examples, however long each of them takes."""
    return hypothesis_settings(
        max_examples=MORE or number,
        derandomize=not MORE,
        database=None,
        deadline=None,
        print_blob=bool(MORE),
        report_multiple_bugs=False,
        # To find a smaller example takes minutes: ask for it.
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if MORE else [])],
        suppress_health_check=list(HealthCheck),
        **options,
    )
