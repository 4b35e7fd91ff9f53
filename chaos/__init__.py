"""Fault injection: real runs whose processes are killed and stopped, whose driver dies, whose checkpoints are damaged,
and the invariants that must hold afterwards. `make chaos` runs it; docs/chaos.md describes it.
"""
