"""Everything except the tokens that vLLM's KV depends on: the namespace and the layout's
fingerprint.

engine_namespace  the namespace, from the modules below and `connectors.identity`
engine_settings   settings of the engine that change what it computes
machine_facts     everything that decides the bytes inside a page
media_names       whether vLLM's hashes name media by their content
"""

from __future__ import annotations
