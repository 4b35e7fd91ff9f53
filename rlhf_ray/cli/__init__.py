"""The `rlhf-ray` command: one module per group of commands; `main` combines them."""
