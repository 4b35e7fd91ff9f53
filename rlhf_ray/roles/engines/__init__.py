"""The two ways to run vLLM in a generator, behind one interface: on a thread of its process, or in vLLM's processes."""
