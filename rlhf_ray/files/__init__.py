"""Writing that lasts and cannot hold up a run: every flush, and the threads in which a run's files are written."""
