"""The workers of a run: spawned, called, scheduled, watched and replaced."""
