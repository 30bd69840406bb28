"""Connectors: each lets one engine use the cache. No other package imports an engine; import the module you need.

`identity` names weights and settings for those that load checkpoints. `prefill_stopwatch`, which all of them use,
measures how fast the model computes prompts: loading must be faster. `extra_options` reads what an engine hands to its
connector.
"""

from __future__ import annotations
