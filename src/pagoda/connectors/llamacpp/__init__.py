"""llama.cpp: `SlotStates`, the slots of a running server stored and loaded as chunks.

In the order in which data reaches them:
    slot_states       SlotStates: load, store
    server_probe      what a server computes, for the namespace; whether its states can be used
    server_requests   requests to the server, each with a deadline
    state_directory   the directory through which states go
    state_file        reads a state file: where its rows are; refuses what it does not know
    state_rows        chunks and endings out of a state file; composes one of them

Endings (`pagoda.connectors.endings`) are for models with windows and recurrent layers.
"""

from __future__ import annotations

from pagoda.connectors.llamacpp.slot_states import (
    LoadedState,
    SlotStates,
    StoredState,
)
from pagoda.connectors.llamacpp.state_directory import make_state_directory

__all__ = ["LoadedState", "SlotStates", "StoredState", "make_state_directory"]
