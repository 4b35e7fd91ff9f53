"""A witness apart from the system: which samples a run trained on, from journals that the system does not write.

The reward service and the learners of a run write journals outside its directory (`journals`, `learners`). When the
run is over, what survived of them (`history`) is joined with an enumeration of the data (`data_order`), and the
generators' log-probabilities are computed again under the weights of the versions that they name (`versions`).
`testimony` is the result. Only `learners` imports the package under test: it runs inside its processes.
"""
