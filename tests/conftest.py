"""Settings of all tests."""

from hypothesis import settings

# How long one example takes says more about the machine's other work than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
