"""Generates tokens: the compiled programs, the stream of tokens, sampling, shared prefixes, and memory."""
