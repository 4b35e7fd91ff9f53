"""Writing files durably without blocking a run: fsync, atomic writes, and the threads that write a run's files."""
