"""`tree-attn` and `python -m tree_attn`: the program, which Ctrl-C ends in a line from its first import on."""

import os
import signal
import sys


def main() -> int:
    """Runs `tree_attn.cli.main` on the program's arguments; returns the exit status."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)  # until `tree_attn.commands.interrupts` takes its place
    from tree_attn import cli

    return cli.main()


def _end(*_) -> None:
    command = " ".join(["tree-attn", *[word for word in sys.argv[1:2] if not word.startswith("-")]])
    os.write(2, f"{command}: interrupted; it had not begun\n".encode(errors="replace"))
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
