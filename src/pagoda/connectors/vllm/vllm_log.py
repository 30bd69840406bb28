"""PagodaKV's log lines in vLLM's log: vLLM configures its own loggers only, so others' lines would be lost."""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Give the logger "pagoda" the handlers and the level of vLLM's logger, unless somebody configured it. Idempotent.

    Left alone: a logger "pagoda" with handlers or a level of its own (`log_format = "json"` too), a root logger
    with handlers (the program around vLLM decides, and no line is shown twice), and a vLLM without handlers
    (VLLM_CONFIGURE_LOGGING=0).
    """
    ours, theirs, root = logging.getLogger("pagoda"), logging.getLogger("vllm"), logging.root
    if ours.handlers or ours.level != logging.NOTSET or root.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
