"""Evaluation of a model on tasks made of a text, under sparse attention methods."""
