"""A reward model as an HTTP service: `rlhf-ray serve-reward`."""
