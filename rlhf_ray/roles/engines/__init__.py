"""The two ways a generator runs vLLM, behind one interface: inside its own thread, or in vLLM's own processes."""
