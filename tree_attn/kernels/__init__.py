"""All Mosaic GPU kernels. Imported inside functions only, when a kernel is made."""
