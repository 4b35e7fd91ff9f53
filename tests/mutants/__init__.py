"""Mutation testing: `make mutants` changes the code in 300 places, one at a time, and counts what the tests notice."""
