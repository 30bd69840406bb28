"""KV in the memory of a GPU: the device, the copy engine that moves runs between it and slots, and its views."""
