"""The math of RLHF as pure functions on tensors: no cluster, no models, no configuration objects.

Tensors are `[B, T]` float, masks `[B, T]` bool with True on response tokens, unless a docstring says otherwise.
`docs/algorithms.md` lists every formula with its source and the conventions where public systems differ.
"""
