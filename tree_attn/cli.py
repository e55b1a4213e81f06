"""The program `tree-attn`: finds the command by its name, and imports only that one."""

import argparse
import importlib
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence

import tree_attn

# One line each, here and not in the commands' modules, so that `tree-attn --help` need not import them.
COMMANDS = {
    "demo": "a small Llama answers over 8 devices by tree, ring and single-device attention, with the same tokens",
    "generate": "generate text with a Llama of yours, its KV cache sharded over devices",
    "sample": "draw many samples of a prompt, whose keys and values are held once, and print the best",
    "eval": "score a model under SparQ and other sparse attentions, over compression ratios",
    "compare": "measure tree against ring attention: latency, memory, communication, beside what theory predicts",
    "bench": "time a Llama over long contexts: prefill, each new token, memory, beside its roofline",
    "plan": "predict time, traffic and memory of every strategy on a cluster, without one, and choose",
    "reproduce": "make a figure or table of the five papers, and print their numbers beside ours",
    "figures": "draw the paper's figures from measured rows, and what is predicted beyond them",
    "slurm": "copy the files that start jobs under SLURM, for these commands and for programs of your own",
    "doctor": "list devices, links, versions and what can run here, and for what cannot, why",
}

_EPILOG = """\
start here:
  tree-attn demo              no GPU needed
  tree-attn compare --devices 8 --keys 8192,65536 --out results/
  tree-attn COMMAND --help    every option, with examples

Without enough accelerators, devices are emulated on the CPU: right in every result, and no guide to speed.
"""

# Arguments of the library whose options have other names.
OPTIONS = {
    "n_devices": "devices",
    "num_keys": "keys",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "share_prefixes": "share_prefix",
}
COLUMNS = 80  # of help
INTERRUPTED_STATUS = 130  # as shells report SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0 done, 1 a check failed, 2 it was called wrongly, 130 interrupted.

    Errors a user can act on are one line on stderr; with TREE_ATTN_TRACEBACK=1 in the environment they are raised.
    Without `argv` it is the program `tree-attn` itself, which Ctrl-C ends at once (`tree_attn.commands.interrupts`).
    """
    args = argparse.Namespace(command_name=None)
    is_program = argv is None
    if is_program:
        from tree_attn.cluster import ending
        from tree_attn.commands import interrupts

        argv = sys.argv[1:]
        interrupts.watch(lambda: _end_interrupted(args, ending.say))
    parser = _parser(argv)
    parser.parse_args(argv, args)
    if args.command_name is None:
        parser.print_help()
        return 2
    if is_program and getattr(args, "json", False):
        _keep_stdout_for_python()
    args.command_line = shlex.join(["tree-attn", *argv])
    try:
        return _run(args, is_program)
    except KeyboardInterrupt:
        _end_interrupted(args)
        return INTERRUPTED_STATUS
    except Exception as error:
        if is_program and isinstance(error, BrokenPipeError) and not _rank_of_several(args):
            # The reader of stdout has gone, `head` for one. Python would flush it again and print an exception.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1  # as rich's console ends
        is_users = isinstance(error, ValueError | OSError | ImportError | NotImplementedError)
        is_brief = is_users and not os.environ.get("TREE_ATTN_TRACEBACK")
        line = f"tree-attn {args.command_name}: {_rank_of_several(args)}error: {_words(error, args)}"
        _end_all(line, "" if is_brief else traceback.format_exc())
        if not is_brief:
            raise
        print(line, file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, is_program: bool) -> int:
    """Runs the command that the arguments name, with its phases on stderr if it is the program; returns its status."""
    from tree_attn.commands import common, phases, processes

    common.show_choices(args.verbose)
    new_folder = common.keep_compiled(args)
    is_quiet = args.quiet or not is_program or not processes.is_first(args)
    remark = f"compiled programs are kept in {new_folder} for the next run; --no-compilation-cache: not"
    with phases.command(is_quiet=is_quiet, remark=None if new_folder is None else remark):
        status = _module(args.command_name).run(args)
        sys.stdout.flush()
    return status


def _keep_stdout_for_python() -> None:
    """Sends to stderr what libraries of C++ print on stdout, Gloo for one: a JSON document must be alone there."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)


def _end_interrupted(args: argparse.Namespace, say: Callable[[str], None] = _print_error) -> None:
    """Saves, and says in a line what is saved; ends all processes if this is one of several."""
    from tree_attn.commands import interrupts

    interrupts.save_all()
    interrupts.restore_terminal()
    line = "tree-attn: interrupted"
    if args.command_name is not None:
        line = f"tree-attn {args.command_name}: {_rank_of_several(args)}interrupted; {interrupts.resumption(args)}"
        _end_all(line, "", INTERRUPTED_STATUS)
    say(line)


def _end_all(line: str, details: str, status: int = 2) -> None:
    """Ends this process and the others, if this is one of several; otherwise each would wait for the rest in JAX."""
    join = sys.modules.get("tree_attn.cluster.join")
    fail = getattr(join, "fail", None)  # an interrupt may come while it is imported
    if fail is not None:
        fail(line, status, details)


def _words(error: Exception, args: argparse.Namespace) -> str:
    """Returns the message of an error, with the option that is to blame in the place of Python's number of it."""
    if not isinstance(error, OSError) or error.strerror is None:
        return _with_flags(str(error), args)
    name = error.filename
    if name is None:
        return error.strerror
    values = ((option, value) for option, entry in vars(args).items() for value in _listed(entry))
    is_in = lambda value: isinstance(value, str | os.PathLike) and f"{name}/".startswith(f"{os.fspath(value)}/")
    option = next((option for option, value in values if is_in(value)), None)
    flag = "" if option is None else "--" + option.replace("_", "-") + ": "
    return f"{flag}{error.strerror}: {str(name)!r}"


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def _with_flags(message: str, args: argparse.Namespace) -> str:
    """Returns the message of an error of the library, whose arguments are named as the command's options.

    A name of several words is replaced anywhere; one of a single word, which may be any word, as the subject or with a
    value.
    """
    options = vars(args).keys() - {"command_name", "command_line"}

    def flag(match: re.Match) -> str:
        name = match[0] if match[0] in options else OPTIONS.get(match[0])
        return match[0] if name not in options else "--" + name.replace("_", "-")

    message = re.sub(r"(?<![\w./'\"-])[a-z]+(_[a-z]+)+(?![\w./'\"])", flag, message)
    return re.sub(r"^[a-z]+(?= must )|(?<![\w./'\"-])[a-z]+(?==)", flag, message)


def _rank_of_several(args: argparse.Namespace) -> str:
    """Returns "rank 3 on n2: " in one of several processes, nothing in a single one."""
    from tree_attn.commands.processes import rank_name

    name = rank_name(args)
    return f"{name}: " if name else ""


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    description = "Exact attention over a KV cache that is sharded along the sequence."
    parser = _Parser(prog="tree-attn", description=description, epilog=_EPILOG, formatter_class=_Help)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND", title="commands")
    if "--version" in argv[:1]:
        print(f"tree-attn {tree_attn.__version__}")
        raise SystemExit(0)
    named = next((word for word in argv if not word.startswith("-")), None)
    parser.command = named if named in COMMANDS else None
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=_Help)
        if name == named:
            module = _module(name)
            command.description = module.HELP
            module.add_arguments(command)
            importlib.import_module("tree_attn.commands.common").add_arguments(command, name)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a line, without the usage, which is longer than the screen.

    Attributes:
      command: the command that the arguments name, whose unknown options only the parser of all commands meets.
    """

    command: str | None = None

    def error(self, message: str):
        """Ends with the line, and status 2."""
        program = self.prog if self.command is None else f"{self.prog} {self.command}"
        self.exit(2, f"{program}: error: {message}; see {program} --help\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps help to 80 columns or the terminal's fewer: paragraphs at words, indented examples before options."""

    def __init__(self, prog: str, **options):
        """Takes the options of argparse."""
        super().__init__(prog, **{"width": min(shutil.get_terminal_size().columns, COLUMNS) - 2} | options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.strip().split("\n\n"):
            if "\n  " in paragraph:  # with examples
                paragraphs.append("\n".join(self._example(line, width) for line in paragraph.split("\n")))
            else:
                paragraphs.append(textwrap.fill(paragraph, width, break_on_hyphens=False))
        return "\n\n".join(paragraphs) + "\n"

    def _example(self, line: str, width: int) -> str:
        entry = re.match(r" +(\S+  +|\d+\. )", line)
        if entry is not None or not line.startswith(" "):
            margin = " " * len(entry[0]) if entry else ""
            return textwrap.fill(line, width, subsequent_indent=margin, break_on_hyphens=False)
        if len(line) <= width:
            return line
        first, *parts = re.split(r" (?=--?\w|[>|] |&& )", line)
        lines = [first]
        for part in parts:
            is_short = len(lines[-1]) + len(part) + 1 <= width - 2  # " \\"
            lines[-1:] = [f"{lines[-1]} {part}"] if is_short else [lines[-1], f"      {part}"]
        return " \\\n".join(lines)


def _module(name: str):
    return importlib.import_module(f"tree_attn.commands.{name}")


if __name__ == "__main__":
    sys.exit(main())
