"""Code of users in processes of its own that can be killed: loading it, talking to it, and ending it."""
