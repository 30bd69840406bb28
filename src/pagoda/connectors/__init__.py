"""Connectors: each lets one engine use the cache. No other package imports an engine; import the module you need.

`identity` names weights and settings for those that load checkpoints. `prefill_stopwatch`, which all of them use,
measures how fast the model computes prompts: loading must be faster. `unused_options` names what an engine cannot use.
"""

from __future__ import annotations
