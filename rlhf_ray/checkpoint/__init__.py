"""Checkpoints that are whole or absent: manifests, atomic directories, small state, random states, model export."""
