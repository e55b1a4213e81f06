"""Predicts what a decoding step costs: the paper's equations, times, hardware limits, measured machines."""
