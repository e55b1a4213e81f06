"""`python -m tree_attn`: the program `tree-attn`."""

import sys

from tree_attn.cli import main

if __name__ == "__main__":
    sys.exit(main())
