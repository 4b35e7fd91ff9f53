"""Checkpoints that are complete or absent: store, manifest, saved state, random states; model export; upload."""
