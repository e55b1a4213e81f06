"""All experiments, by name and by paper."""

import difflib

from tree_attn.commands.reproduce import bifurcated, hydragen, lean, sparq, tree
from tree_attn.commands.reproduce.experiment import Experiment

ALL = (*tree.EXPERIMENTS, *lean.EXPERIMENTS, *bifurcated.EXPERIMENTS, *hydragen.EXPERIMENTS, *sparq.EXPERIMENTS)
EXPERIMENTS = {experiment.name: experiment for experiment in ALL}


def by_name(name: str) -> Experiment:
    """Returns an experiment.

    Raises:
      ValueError: no such name; the message has names that are like it, or one of each paper.
    """
    if name not in EXPERIMENTS:
        like = difflib.get_close_matches(name, EXPERIMENTS, n=3) or list({one.paper: one.name for one in ALL}.values())
        raise ValueError(f"NAME must be one that --list prints, such as {', '.join(like)}, got {name!r}")
    return EXPERIMENTS[name]
