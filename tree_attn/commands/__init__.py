"""The commands of `tree-attn`, one module each, with `HELP`, `add_arguments(parser)` and `run(args) -> exit status`."""
