"""KV in the memory of a GPU. The modules, in the order in which KV passes through them:

device_pages_kv  the view of planes of pages on a GPU, and snapshots of them
copy_engine      chooses how to copy, and copies: by kernels, a staging ring or one copy per run
autotune         measures which way is fastest
staging_ring     the ring of device memory, and the bounce buffer of pinned memory
kernels          Triton kernels that gather and scatter runs
device           streams, events, memory and asynchronous copies: CUDA's, and CPU memory's
layer_events     when each layer of a load can be used
"""
