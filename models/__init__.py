"""Models that decode with the attention of this library; one package per family."""
