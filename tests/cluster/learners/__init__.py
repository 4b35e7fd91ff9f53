"""Tests of learners on real ranks, which they share (see conftest.py)."""
