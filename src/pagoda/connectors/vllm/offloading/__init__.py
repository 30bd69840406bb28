"""The storage behind PagodaHybridConnector, for models with several KV cache groups (decision 0026).

hybrid_connector    the connector: vLLM's OffloadingConnector with our spec
spec                PagodaOffloadingSpec: makes the manager and the workers
offloading_manager  the scheduler's half: which chunks are hits, which slots new ones get
lookup_table        what the scheduler asked for, and what is known of it
chunk_finder        finds those chunks on threads: held in host slots, or brought there
offloading_worker   a worker's half: copies between blocks and slots
messages            what the halves tell each other
"""

from __future__ import annotations
