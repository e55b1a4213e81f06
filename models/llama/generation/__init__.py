"""Generation of tokens: layout, compiled programs, the stream of steps, sampling, shared prefixes, and memory."""
