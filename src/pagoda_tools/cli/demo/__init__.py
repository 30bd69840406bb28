"""`pagoda demo`: one prompt answered in several processes: computed, and from what was stored.

With Transformers, three processes: computed, from host memory and from disk.
- `demo_run`: runs the three processes one after the other, and compares their answers
- `demo_child`: one of these processes

With llama.cpp, two starts of its server: computed, and from disk.
- `llama_run`: starts and asks the servers, and compares their answers
- `demo_server`, `llama_child`: a server in a process of its own
- `random_gguf`: writes a random model for it

Both:
- `demo_command`: the command, and what it prints
- `demo_prompts`: the text of the prompt
- `own_directories`: directories that are removed however the demo ends
"""
