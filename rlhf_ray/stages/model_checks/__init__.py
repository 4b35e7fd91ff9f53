"""The parts of `rlhf-ray check-model`; `stages.check_model` runs them."""
