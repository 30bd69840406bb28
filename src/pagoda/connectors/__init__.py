"""Connectors: each lets one engine use the cache. Only this package imports engines; import the
module you need.

`identity` names weights and settings, for connectors whose engines load checkpoints.
`prefill_stopwatch`, which all connectors use, measures how fast the model computes prompts: loading
must be faster. `extra_options` reads the options that an engine passes to its connector.
`hint_parameters` reads what clients say of their requests, `tool_call_marks` how answers ended.
`endings` stores what an engine keeps of a prefix beside the rows of its tokens.
"""

from __future__ import annotations
