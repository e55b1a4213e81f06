"""Compiles the programs of all cases of `tree-attn bench` before the first is timed."""

import concurrent.futures
import os
from collections.abc import Callable, Sequence

import jax

from tree_attn.commands import session
from tree_attn.models.llama import Generator

MAX_COMPILERS = 8  # cases at once; each may take some GB of the host's memory


def compile_all(
    generators: Sequence[Generator], lower: Callable[[Generator, int], Callable[[], object]]
) -> list[Exception | None]:
    """Compiles the programs of the cases; each generator keeps its own. None is traced after one that failed.

    Where one process runs, several are compiled at once, while Python traces the next. Several processes compile
    theirs in order, with nothing beside: XLA exchanges what they measure.

    Args:
      generators: of each case.
      lower: `(generator, number) -> call`: traces the programs of that case; the call compiles them.

    Returns:
      What went wrong with each case, None where nothing did. An exception must leave the list before it is raised: it
      holds its caller's frame, and would hold the model by that frame's list.
    """
    alone = jax.process_count() > 1
    outcomes: list[concurrent.futures.Future[Exception | None]] = []
    threads = concurrent.futures.ThreadPoolExecutor(min(MAX_COMPILERS, os.cpu_count() or 1))
    with session.phase("compiling", len(generators)) as compiling:
        try:
            for number, generator in enumerate(generators):
                if any(one.done() and one.result() is not None for one in outcomes):
                    break
                try:
                    outcomes.append(threads.submit(_error_of, lower(generator, number)))
                except Exception as error:
                    outcomes.append(concurrent.futures.Future())
                    outcomes[-1].set_result(error)
                outcomes[-1].add_done_callback(lambda _: compiling.advance())
                if alone:
                    outcomes[-1].result()
            return [one.result() for one in outcomes]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an interruption nothing more begins
            outcomes.clear()


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
