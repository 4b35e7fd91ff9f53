"""How many cases are tried: a fixed few in the default suite, others and many more by `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("FUZZ_CASES", 0))


def cases(usual: int) -> settings:
    """Settings of a fuzz test that tries `usual` cases by default, always the same ones."""
    return settings(
        max_examples=CASES or usual,
        derandomize=not CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
