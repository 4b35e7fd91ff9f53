"""Runs as jobs of a remote Ray cluster: its job server, what is packed for it, following a job, ending one."""
