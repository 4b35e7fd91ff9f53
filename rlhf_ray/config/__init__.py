"""Typed configuration: one file a section, `stages` for what a run reads as a whole, `load` to resolve it."""
