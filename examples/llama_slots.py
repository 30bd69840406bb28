"""Ask a llama-server one question, and keep what it computed: the smallest proxy with `SlotStates`.

    mkdir -m 700 /dev/shm/slots
    llama-server -m MODEL.gguf --slot-save-path /dev/shm/slots --cache-ram 0 &
    python -m examples.llama_slots http://127.0.0.1:8080 /dev/shm/slots --disk-path ~/kv 'Why?'

Ask again after a restart of the server: the prompt is not computed again. What is stored stays in
`--disk-path`.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request

from pagoda.connectors.llamacpp import SlotStates

SLOT = 0


def main() -> None:
    """Load the prompt's KV into a slot, ask with this slot, store the slot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server_url")
    parser.add_argument("directory", help="the server's --slot-save-path")
    parser.add_argument("prompt")
    parser.add_argument("--disk-path", required=True)
    parser.add_argument("--disk-size", default="10GiB")
    parser.add_argument("--tokens", type=int, default=32, help="of the answer")
    args = parser.parse_args()

    def post(path: str, body: dict[str, object]) -> dict:
        request = urllib.request.Request(
            args.server_url + path, json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    with SlotStates(
        args.server_url,
        args.directory,
        host_size=0,
        disk_path=args.disk_path,
        disk_size=args.disk_size,
    ) as states:
        prompt = {"content": args.prompt, "add_special": True}
        tokens = post("/tokenize", prompt)["tokens"]
        began = time.perf_counter()
        loaded = states.load(tokens, SLOT)
        body = {
            "prompt": tokens,
            "id_slot": SLOT,
            "n_predict": args.tokens,
            "temperature": 0,
        }
        answer = post("/completion", body)
        seconds = time.perf_counter() - began
        stored = states.store(tokens, SLOT, more_tokens=args.tokens)
    reused = answer["timings"]["cache_n"]
    print(answer["content"])
    why = f" ({loaded.reason}: {loaded.detail})" if loaded.reason else ""
    print(f"{reused} of {len(tokens)} tokens reused, {seconds:.2f} s{why}")
    print(
        f"{stored.num_tokens} tokens can be loaded now, {stored.new_tokens} are new"
    )


if __name__ == "__main__":
    main()
