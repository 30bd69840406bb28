"""Runs the server inside `xllamacpp` until it is killed: `llama_in_process.py '{"n_ctx": 512}'`."""

import json
import signal
import sys

import xllamacpp


def main() -> None:
    parameters = xllamacpp.CommonParams()
    for name, value in json.loads(sys.argv[1]).items():
        *owners, last = name.split(".")
        target = parameters
        for owner in owners:
            target = getattr(target, owner)
        setattr(target, last, _converted(last, value))
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    signal.pause()


def _converted(name: str, value: object) -> object:
    if name.startswith("cache_type_"):
        return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{str(value).upper()}")
    if name == "flash_attn_type":
        return xllamacpp.llama_flash_attn_type(value)
    if name == "lora_adapters" and isinstance(value, list):
        return [_adapter(path, scale) for path, scale in value]
    return value


def _adapter(path: str, scale: float) -> xllamacpp.CommonAdapterLoraInfo:
    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path = path
    adapter.scale = scale
    return adapter


if __name__ == "__main__":
    main()
