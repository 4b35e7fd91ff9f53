"""Shared by the tests of observability."""

import time

import pytest


@pytest.fixture
def wait_for():
    """Ask again until the answer is not None; fails when the time is over."""

    def wait(question, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (answer := question()) is not None:
                return answer
            time.sleep(0.5)
        raise AssertionError(f"{question.__name__} had no answer within {seconds} s")

    return wait
