"""`pagoda demo`: three processes answer one prompt: computed, from host memory and from disk.

- `demo_command`: the command, and what it prints
- `demo_run`: runs the three processes one after the other, and compares their answers
- `demo_child`: one of these processes
- `demo_prompts`: the text of the prompt
"""
