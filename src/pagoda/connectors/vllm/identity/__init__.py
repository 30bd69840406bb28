"""Everything except the tokens that vLLM's KV depends on: the namespace and the layout's fingerprint.

engine_namespace  the namespace, from all modules below
engine_settings   settings of the engine that change what it computes
checkpoint_files  the files of a checkpoint that vLLM loads
weight_digests    digests of these files
lora_adapters     digests of an adapter's files
device_facts      everything that decides the bytes inside a page
"""

from __future__ import annotations
