"""The `rlhf-ray` command: one module a group of commands; `main` puts them together."""
