"""The workload, the model and the tiers of the command."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from contextlib import ExitStack, closing
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from pagoda import Cache, Config, KVLayout, Namespace
from pagoda.base import recorded_tiers
from pagoda.connectors.transformers import layout_of, namespace_of
from pagoda_tools.cli.demo.demo_prompts import ByteTokenizer

from .engine import Engine, Sequence

TIERS = ("device", "host", "disk")
FIELDS = {
    "id": str,
    "tokens": list,
    "salt": str,
    "after": str,
    "max_new_tokens": int,
    "arrival_seconds": Real,
    "documents": list,
    "question": list,
    "recompute": Real,
    "policy": str,
}


def made_up(vocabulary: int) -> list[Sequence]:
    """Return 8 conversations of 3 turns about two documents."""
    dice = random.Random(0)
    made = []
    documents = [
        [dice.randrange(vocabulary) for _ in range(192)] for _ in range(2)
    ]
    for turn in range(3):
        for talk in range(8):
            said = [dice.randrange(vocabulary) for _ in range(40)]
            tokens, after = (
                (said, f"{talk}.{turn - 1}")
                if turn
                else (documents[talk % 2] + said, None)
            )
            made.append(
                Sequence(
                    f"{talk}.{turn}",
                    tokens,
                    32,
                    arrival_seconds=turn + talk / 16,
                    after=after,
                )
            )
    return made


def encoded(
    piece: object, tokenizer: ByteTokenizer, first: bool = True
) -> object:
    """Return the ids of a text, and what is no text as it is. The first piece of a prompt gets
    special tokens.
    """
    if not isinstance(piece, str):
        return piece
    plain = (
        {}
        if first or isinstance(tokenizer, ByteTokenizer)
        else {"add_special_tokens": False}
    )
    return tokenizer.encode(piece, **plain)


def read(
    path: str, tokenizer: ByteTokenizer, vocabulary: int, unchecked: bool = False
) -> list[Sequence]:
    """Read requests. Raises ValueError that names the line."""
    found: dict[str, Sequence] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            if "prompt" in fields:
                fields["tokens"] = encoded(fields.pop("prompt"), tokenizer)
            if "documents" in fields:
                pieces = [*fields["documents"], fields.get("question")]
                pieces = [
                    encoded(piece, tokenizer, not number)
                    for number, piece in enumerate(pieces)
                ]
                fields |= {"documents": pieces[:-1], "question": pieces[-1]}
            wrong = [
                name
                for name, value in fields.items()
                if not isinstance(value, FIELDS.get(name, ()))
            ]
            if wrong:
                raise ValueError(
                    f"{wrong[0]!r} is no field, or of the wrong type"
                )
            if ("tokens" in fields) == ("documents" in fields) or {
                "documents",
                "after",
            } <= fields.keys():
                raise ValueError(
                    "give a prompt, tokens, or documents that follow no other request"
                )
            seq = Sequence(**fields, unchecked=unchecked)
            pieces = [seq.tokens, *(seq.documents or ()), seq.question or ()]
            if not all(
                type(token) is int and 0 <= token < vocabulary
                for piece in pieces
                for token in piece
            ):
                raise ValueError(f"tokens are numbers from 0 to {vocabulary - 1}")
            if seq.id in found or seq.after not in (None, *found):
                raise ValueError(
                    "its id was there before, or 'after' names no request above it"
                )
            found[seq.id] = seq
        except (ValueError, TypeError, AttributeError) as trouble:
            raise ValueError(f"{path}, line {number}: {trouble}") from None
    return list(found.values())


def model_of(
    name: str | None, device: str
) -> tuple[PreTrainedModel, ByteTokenizer]:
    """The model asked for, or a small one of random weights: its text is noise, but depends on all
    of the prompt.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as trouble:
        raise ValueError(
            f"--device {device}: {str(trouble).splitlines()[0]}"
        ) from None
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(name)
    # the model is so small that a second thread would only wait
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "vocab_size": 256,
    }
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**size, **heads, **ends, initializer_range=0.08)
    return LlamaForCausalLM(config).to(device).eval(), ByteTokenizer()


def tiers(
    args: argparse.Namespace,
    space: Namespace,
    layout: KVLayout,
    opened: ExitStack,
) -> Cache | None:
    """Return the host tier and the disk, in temporary directories unless they are given."""
    if args.no_prefix_cache or args.host == "0":
        return None
    own = [
        opened.enter_context(TemporaryDirectory("", "paged-", at))
        for at in ("/dev/shm", None)
    ]
    for place in own:
        opened.callback(recorded_tiers.remove, os.path.realpath(place))
    host = {"host_size": args.host, "host_path": args.host_path or own[0]}
    disk = (
        {"disk_size": args.disk, "disk_path": args.disk_path or own[1]}
        if args.disk != "0"
        else {}
    )
    # worth_it: show every hit, even where a small model computes faster than a disk reads
    config = Config(
        chunk_tokens=layout.chunk_tokens, worth_it=False, **host, **disk
    )
    return opened.enter_context(Cache(config, namespace=space, layout=layout))


def replay(engine: Engine, requests: list[Sequence]) -> list[Sequence]:
    """Send each request at its time and step until all have finished."""
    began = time.monotonic()
    pending = list(requests)
    done = dict[str, Sequence]()
    while pending or engine.busy:
        now = time.monotonic() - began
        for seq in [
            seq
            for seq in pending
            if seq.arrival_seconds <= now and seq.after in (None, *done)
        ]:
            if seq.after is not None:
                seq.tokens = done[seq.after].tokens + seq.tokens
            pending.remove(seq)
            engine.add(seq)
        done |= {seq.id: seq for seq in engine.step()}
    return list(done.values())


def row_of(seq: Sequence, model: PreTrainedModel | None) -> dict:
    """Return the numbers of a request and, if a model is given, whether plain `generate` gives the
    same text.
    """
    row = {
        "id": seq.id,
        "prompt_tokens": seq.prompt_tokens,
        "first_token_seconds": seq.first_token_seconds,
    }
    row |= {tier: seq.hits.get(tier, 0) for tier in TIERS}
    row |= {
        "preemptions": seq.preemptions,
        "identical": None,
        "output": seq.output,
    }
    if seq.blended is not None:
        of = seq.blended
        row |= {
            "exact": of.exact_tokens,
            "recomputed": of.recomputed_tokens,
            "reused": of.reused_tokens,
        }
    if model is not None and not row.get("reused"):
        prompt = torch.tensor(
            [seq.tokens[: seq.prompt_tokens]], device=model.device
        )
        plain = model.generate(
            prompt,
            max_new_tokens=seq.max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,
        )
        row["identical"] = plain[0, seq.prompt_tokens :].tolist() == seq.output
    return row


def run(args: argparse.Namespace) -> int:
    """Open everything, replay, and return the result."""
    model, tokenizer = model_of(args.model, args.device)
    vocabulary = model.config.get_text_config().vocab_size
    requests = (
        made_up(vocabulary)
        if args.requests is None
        else read(args.requests, tokenizer, vocabulary, args.unchecked)
    )
    layout = layout_of(model, args.block_tokens)
    with ExitStack() as opened:
        cache = tiers(args, namespace_of(model, layout), layout, opened)
        how = {
            "cache": cache,
            "prefix_caching": not args.no_prefix_cache,
            "step_tokens": args.chunk,
        }
        engine = opened.enter_context(
            closing(Engine(model, layout, blocks=args.blocks, **how))
        )
        began = time.monotonic()
        done = replay(engine, requests)
        seconds = time.monotonic() - began
    rows = [row_of(seq, model if args.verify else None) for seq in done]
    summary = {
        name: sum(row[name] for row in rows)
        for name in ("prompt_tokens", *TIERS, "preemptions")
    }
    summary |= {
        "prompt_tokens_computed": engine.prompt_tokens_computed,
        "requests": len(rows),
    }
    summary["mean_first_token_seconds"] = sum(
        seq.first_token_seconds for seq in done
    ) / max(1, len(rows))
    summary |= {
        "seconds": seconds,
        "different": sum(row["identical"] is False for row in rows),
    }
    if args.json:
        print(json.dumps({"requests": rows, "summary": summary}))
    else:
        print(
            f"{'id':>8} {'prompt':>7} {'first token':>12}  "
            + " ".join(f"{tier:>6}" for tier in TIERS)
        )
        for row in rows:
            said = {None: "", True: "identical", False: "DIFFERENT"}[
                row["identical"]
            ]
            said += ", ".join(
                f" {row[name]} {name}"
                for name in ("exact", "recomputed", "reused")
                if name in row
            )
            hits = " ".join(
                f"{row[tier]:>6}" for tier in TIERS
            ) + "  preempted" * bool(row["preemptions"])
            print(
                f"{row['id']:>8} {row['prompt_tokens']:>7} {row['first_token_seconds']:>10.3f} s "
                f" {hits}  {said}"
            )
        print(
            "\n".join(f"{name}: {value:.4g}" for name, value in summary.items())
        )
    return 1 if summary["different"] else 0
