"""The workers' classes: generator, scorers, learners, assembler, data readers. Ordinary classes without Ray."""
