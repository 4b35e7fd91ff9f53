"""The stages and how they are wired: workers, their arguments, and the files written at the end."""
