"""Options of every command: choices that are said once."""

import logging

from tree_attn.commands import common


def test_a_choice_is_said_once(capsys):
    logger = logging.getLogger("tree_attn")
    level = logger.level
    try:
        common.show_choices(1)
        for _ in range(2):
            logger.info("implementation=None picked %r", "xla")
            logger.debug("passed over")
    finally:
        common.show_choices(0)
        logger.setLevel(level)
    logger.warning("not on this handler any more")
    assert capsys.readouterr().err.count("tree_attn: ") == 1
