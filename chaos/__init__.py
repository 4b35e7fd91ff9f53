"""Faults on purpose: real runs whose processes are killed and stopped, whose driver dies, whose checkpoints are
damaged, and what must hold of them afterwards. Run by `make chaos`; docs/chaos.md explains.
"""
