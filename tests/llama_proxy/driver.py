"""Random traffic through the proxy: no text is another one than that of a bare server that computes
every prompt from its first token, and every request gets an answer.

Servers and proxies are killed, clients go away, the disk is full, files of states are cut short,
adapters change, two proxies share one host tier. `test_driver.py` has the options that make it
longer.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from testbed.llama_client import LlamaClient, Reply
from tests.llama_proxy.state_watch import FullDisk, StateWatch
from tests.llama_proxy.traffic import Controls, Conversation, Question, words

CONTEXT = 2048  # of one slot
LONGEST = 800  # of a conversation, which then begins anew
PREDICT = (1, 4, 8, 16)
_STARTS = 5  # of a server that cut files end, before its trouble is a fault


class Target(Protocol):
    """A server that clients ask, maybe behind a proxy."""

    client: LlamaClient

    def kill_server(self) -> None:
        """Kill llama.cpp's server with SIGKILL."""

    def kill_proxy(self) -> None:
        """Kill the proxy with SIGKILL."""

    def stop(self) -> None:
        """Send SIGTERM and wait for the end."""

    def start(self) -> None:
        """Start what does not run; wait until it answers."""


class Asked(NamedTuple):
    """One request of a batch."""

    target: Target
    question: Question
    stream: bool
    abort_seconds: float | None = None
    conversation: Conversation | None = None


class Driver:
    """Random operations on some targets with the same model."""

    def __init__(
        self,
        rng: random.Random,
        targets: Sequence[Target],
        controls: Controls,
        *,
        watch: StateWatch | None = None,
        disk: FullDisk | None = None,
        scale: float | None = None,
        kills: int = 1,
        adapter_changes: int = 3,
    ) -> None:
        """Make a driver; nothing is asked yet.

        Arguments:
            rng: chooses everything
            targets: have the same model and settings
            controls: say what is right
            watch: of the files of states, which it may cut short; None: none are cut
            disk: may be filled; None: never
            scale: of the adapter of all servers, which changes; None: they have none
            kills: weight of each way to end a process; 0: never
            adapter_changes: weight of a change of the adapter; nothing is stored after one until
                the server is restarted with the scale that it has then
        """
        self._rng = rng
        self._targets = targets
        self._controls = controls
        self._watch = watch
        self._disk = disk
        self._scale = scale
        self._is_rough = False  # files are cut: a server may die of it
        systems = [words(rng, rng.randint(150, 300)) for _ in range(2)]
        self._systems = systems
        self._conversations = [
            self._new_conversation() for _ in range(rng.randint(2, 6))
        ]
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by step
        self.faults: list[str] = []
        self._reported = 0  # hundreds of requests
        self._told = 0  # faults
        self._steps: list[tuple[Callable[[], None], int]] = [
            (self._ask_one, 40),
            (self._ask_some, 15),
            (self._abort, 8),
            (self._predict_nothing, 4),
            (self._exceed_the_context, 3),
            (self._edit, 6),
        ]
        if kills:
            self._steps += [
                (self._kill_server, kills),
                (self._kill_proxy, kills),
                (self._stop, kills),
            ]
        if watch is not None:
            self._steps.append((self._cut_or_not, 3))
        if disk is not None:
            self._steps.append((self._fill_or_empty, 3))
        if scale is not None:
            self._steps.append((self._change_adapter, adapter_changes))
            self._steps.append((self._choose_adapters, 5))

    def run(self, steps: int, requests: int = 0) -> None:
        """Take so many steps, and more until there were so many requests; then everything runs and
        nothing is in the way.
        """
        for _ in range(steps):
            self._take_a_step()
        while self.counts["requests"] < requests:
            self._take_a_step()
        if self._watch is not None:
            self._watch.cuts = False
        if self._disk is not None:
            self._disk.empty()

    def _take_a_step(self) -> None:
        things = [thing for thing, _ in self._steps]
        weights = [weight for _, weight in self._steps]
        thing = self._rng.choices(things, weights)[0]
        name = thing.__name__.strip("_")
        began = time.monotonic()
        thing()
        self.counts[name] += 1
        self.seconds[name] += time.monotonic() - began
        self._report()

    def _report(self) -> None:
        """Print how far a long run is, now and then, and each fault at once."""
        hundreds = self.counts["requests"] // 100
        if hundreds == self._reported and len(self.faults) == self._told:
            return
        self._reported = hundreds
        for fault in self.faults[self._told :]:
            print(f"FAULT {fault}", flush=True)
        self._told = len(self.faults)
        print(f"{dict(self.counts)}", flush=True)

    # ---- requests

    def _new_conversation(self) -> Conversation:
        return Conversation(self._rng, self._rng.choice(self._systems))

    def _next(self, number: int | None = None, predict: int = 0) -> Asked:
        """Return a request of one conversation."""
        rng = self._rng
        if number is None:
            number = rng.randrange(len(self._conversations))
        if len(self._conversations[number]) > LONGEST:
            self._conversations[number] = self._new_conversation()
        conversation = self._conversations[number]
        question = conversation.question(predict or rng.choice(PREDICT))
        return Asked(
            rng.choice(self._targets),
            question,
            rng.random() < 0.5,
            conversation=conversation,
        )

    def _ask(self, asked: Sequence[Asked], trouble: bool = False) -> None:
        """Ask all at the same time, and check each answer.

        With `trouble` something is killed meanwhile: then an answer may end early.
        """

        def send(each: Asked) -> Reply:
            return each.target.client.ask(
                each.question.route,
                each.question.body,
                each.stream,
                each.abort_seconds,
            )

        with ThreadPoolExecutor(len(asked)) as pool:
            replies = list(pool.map(send, asked))
        for each, reply in zip(asked, replies, strict=True):
            self.counts["requests"] += 1
            self.counts["hit tokens"] += reply.hits
            loaded = re.search(r"loaded=(\d+)", reply.headers.get("X-Pagoda", ""))
            if loaded is not None:
                self.counts["loaded tokens"] += int(loaded[1])
                self.counts["loads"] += loaded[1] != "0"
            aborted = each.abort_seconds is not None
            is_cut = not reply.ended or reply.status >= 500 or bool(reply.error)
            if is_cut and (trouble or self._is_rough) and reply.status != 400:
                self.counts["requests ended by a kill"] += 1
                aborted = True
            fault = self._controls.fault_of(each.question, reply, aborted)
            if fault:
                self.faults.append(
                    f"request {self.counts['requests']} ({each.question.route}, "
                    f"stream {each.stream}, aborted {each.abort_seconds}, "
                    f"beside {len(asked)}, trouble {trouble}, "
                    f"hits {reply.hits} of {reply.hits + reply.computed}, "
                    f"{reply.headers.get('X-Pagoda')}): {fault}"
                )
            is_right = not aborted and reply.is_right and not fault
            if (
                is_right
                and each.conversation is not None
                and self._rng.random() < 0.7
            ):
                each.conversation.go_on(reply.text)
        if self._is_rough and not trouble:
            self._start_all()

    def _ask_one(self) -> None:
        self._ask([self._next()])

    def _ask_some(self) -> None:
        count = min(self._rng.randint(2, 4), len(self._conversations))
        numbers = self._rng.sample(range(len(self._conversations)), count)
        self._ask([self._next(number) for number in numbers])

    def _abort(self) -> None:
        """Some clients go away at any moment, others stay."""
        leaving = self._next(predict=self._rng.choice((8, 100)))
        seconds = self._rng.random() ** 2 * 0.3
        asked = [leaving._replace(abort_seconds=seconds)]
        if self._rng.random() < 0.5:
            asked.append(self._next())
        self._ask(asked)

    def _predict_nothing(self) -> None:
        each = self._next()
        name = "n_predict" if "n_predict" in each.question.body else "max_tokens"
        body = {**each.question.body, name: 0}
        question = each.question._replace(body=body)
        self._ask([each._replace(question=question, conversation=None)])

    def _exceed_the_context(self) -> None:
        long = Conversation(self._rng, words(self._rng, 2 * CONTEXT + 100))
        target = self._rng.choice(self._targets)
        question = long.question(8)
        self._ask([Asked(target, question, self._rng.random() < 0.5)])

    def _edit(self) -> None:
        self._rng.choice(self._conversations).edit()
        self._ask_one()

    # ---- trouble

    def _kill_server(self) -> None:
        target = self._rng.choice(self._targets)
        self._during_requests(target.kill_server)

    def _kill_proxy(self) -> None:
        target = self._rng.choice(self._targets)
        self._during_requests(target.kill_proxy)

    def _stop(self) -> None:
        target = self._rng.choice(self._targets)
        if self._rng.random() < 0.5:
            self._during_requests(target.stop)
        else:
            target.stop()
            self._start_all()

    def _during_requests(self, trouble: Callable[[], None]) -> None:
        asked = [self._next(predict=30) for _ in range(2)]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._ask, asked, True)
            # any moment of the requests, and some time after them
            running_seconds = self._rng.random() ** 2 * 0.3
            wait([running], running_seconds)
            trouble()
            running.result()
        self._start_all()

    def _start_all(self) -> None:
        for target in self._targets:
            target.start()
        if self._scale is not None:
            self._set_scale()  # a server that was started has its first one

    def _cut_or_not(self) -> None:
        assert self._watch is not None
        self._watch.cuts = not self._watch.cuts
        self._is_rough = self._watch.cuts

    def _fill_or_empty(self) -> None:
        assert self._disk is not None
        if self._rng.random() < 0.5:
            self._disk.fill()
        else:
            self._disk.empty()

    def _change_adapter(self) -> None:
        self.change_adapter(self._rng.choice((0.0, 0.5, 1.0)))

    def change_adapter(self, scale: float) -> None:
        """Change the scale at all servers, while nothing is asked."""
        self._scale = scale
        self._set_scale()

    def _choose_adapters(self) -> None:
        """Ask with adapters of the request's own, which nobody else gets."""
        chosen = [{"id": 0, "scale": self._rng.choice((0.0, 0.5, 1.0))}]
        each = self._next()
        question = each.question._replace(
            body={**each.question.body, "lora": chosen}
        )
        asked = [each._replace(question=question, conversation=None)]
        if self._rng.random() < 0.5:
            asked.append(self._next())
        self._ask(asked)

    def _set_scale(self) -> None:
        scales = [{"id": 0, "scale": self._scale}]
        for target in self._targets:
            for tries_left in reversed(range(_STARTS)):
                try:
                    target.client.post("/lora-adapters", scales)
                    break
                except (OSError, RuntimeError):
                    if not self._is_rough or not tries_left:
                        raise
                    # a cut file has just ended its server, which it may do again
                    target.start()
        self._controls.set_scales(scales)
