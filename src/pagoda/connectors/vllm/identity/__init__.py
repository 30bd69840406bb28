"""What vLLM's KV depends on besides the tokens: the namespace and the layout's fingerprint.

engine_namespace  the namespace, from all of the below
engine_settings   settings of the engine that change what it computes
checkpoint_files  which files of a checkpoint vLLM loads
weight_digests    names for what is in them
lora_adapters     names for what is in an adapter's files
device_facts      what decides the bytes inside a page
"""

from __future__ import annotations
