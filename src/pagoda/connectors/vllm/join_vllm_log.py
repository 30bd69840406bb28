"""Sends PagodaKV's log lines to vLLM's log: vLLM configures only its own loggers, and other lines
are lost.
"""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Give the logger "pagoda" the handlers and the level of vLLM's logger, unless it is
    configured. Idempotent.

    It changes nothing if the logger "pagoda" has handlers or a level (also by `log_format =
    "json"`), if the root logger has handlers (the program around vLLM decides, and no line is shown
    twice), or if vLLM has no handlers (VLLM_CONFIGURE_LOGGING=0).
    """
    ours = logging.getLogger("pagoda")
    theirs = logging.getLogger("vllm")
    root = logging.root
    if (
        ours.handlers
        or ours.level != logging.NOTSET
        or root.handlers
        or not theirs.handlers
    ):
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
