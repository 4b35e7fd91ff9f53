"""Transformers models as this project runs them: packed rows without padding, token log-probabilities, scalar heads."""
