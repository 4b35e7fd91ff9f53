"""Wiring of one run: which workers there are, what they are given, what is written at the end."""
