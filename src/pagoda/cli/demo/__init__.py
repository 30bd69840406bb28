"""`pagoda demo`: one prompt answered by three processes, computed, from host memory and from disk.

- `demo_command`: the command, and what it prints
- `demo_run`: the three processes, one after the other, and what they prove together
- `demo_child`: what one of them does
- `demo_prompts`: the text that is asked about
"""
