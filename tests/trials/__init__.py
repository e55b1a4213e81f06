"""Trials: random cases, each held against what is known to be right."""
