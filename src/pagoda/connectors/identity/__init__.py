"""Names of weights and settings, for the namespaces of all engines that load checkpoints from
files.

checkpoint_files  the files of a checkpoint that an engine loads
gguf_header       where the tensors of a GGUF file are
weight_digests    digests of these files
lora_adapters     digests of an adapter's files
plain_values      settings as values with the same text everywhere
"""

from __future__ import annotations
