"""Decode steps on one GPU, and their times: in chains of dependent steps, by this library and its peers."""
