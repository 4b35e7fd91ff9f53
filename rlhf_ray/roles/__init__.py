"""What works on the data: generator, scorers, learners, assembler. Ordinary classes; none of them knows Ray."""
