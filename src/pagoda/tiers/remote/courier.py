"""Requests of obstore, run to a deadline, and what their answers mean."""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import Context
from typing import TypeVar

from pagoda.metrics import Reason
from pagoda.threads import Pool
from pagoda.tiers.remote.store_client import Refused

__all__ = ["NO_BUCKET", "Courier", "Unsupported", "all_of", "code_in", "slices"]

_T = TypeVar("_T")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_SYSTEM = re.compile(r'message: "([A-Za-z ,]{1,60})"')
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "AccountNotFound")
_BUSY = (408, 425, 429)  # the 4xx that mean "later"
_REASONS = {413: Reason.TOO_LARGE, 507: Reason.FULL}

_used_by: int | None = None  # the process whose threads obstore's requests run in, once there was one


class Unsupported(Refused):
    """The store does not know what was asked of it."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.IO_ERROR, message)


class _Loop(asyncio.SelectorEventLoop):
    """Once it is closed, whoever still has an answer for it is not heard, and prints no trouble."""

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio."""
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


async def all_of(work: Iterable[Awaitable[_T]]) -> list[_T]:
    """All answers; raises the first trouble when none is under way any more, so that none is left unheard."""
    ends = await asyncio.gather(*work, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ends if not isinstance(end, BaseException)]


class Courier:
    """An event loop that runs within calls only. What is out of time is cancelled, which ends its connection.

    For one thread at a time, but for `abort` and `close`. obstore's own threads do not survive a fork: in a child, once
    there was a request in the parent, every call is an OSError at once.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # not epoll: a forked child's close would take the pipe out of the parent's too
        self._loop = _Loop(selectors.PollSelector())
        self._process = os.getpid()
        self._closing = threading.Lock()
        self._task: asyncio.Task[object] | None = None
        self.ended = False

    @property
    def running(self) -> bool:
        """Whether a call runs now."""
        return self._loop.is_running()

    def abort(self) -> None:
        """Let the call that runs fail now with an OSError, and all later ones. From any thread."""
        self.ended = True
        task = self._task
        try:
            if task is not None:
                self._loop.call_soon_threadsafe(task.cancel)
        except RuntimeError:
            pass  # the loop was closed in between: nobody waits

    def close(self) -> None:
        """End the loop, or have the call that runs end it. Idempotent."""
        self.abort()
        with self._closing:
            if not self._loop.is_running():
                self._loop.close()

    def run(self, work: Coroutine[None, None, _T], until: float) -> _T:
        """Run `work` until it ends or is out of time.

        In a thread of its own if this one is within somebody else's event loop, where no other may run.
        """
        try:
            self.check()
            if not _within_loop():
                return self._complete(work, until)
            try:
                with Pool(1, "pagoda-courier") as thread:
                    asked = thread.submit(self._complete, work, until)
            except RuntimeError as trouble:
                raise OSError(f"{self._address}: {trouble}") from None
            return asked.result()
        finally:
            work.close()

    def _complete(self, work: Coroutine[None, None, _T], until: float) -> _T:
        async def bounded() -> _T:
            async with asyncio.timeout_at(until):
                return await work

        task = self._loop.create_task(bounded())
        self._task = task
        try:
            if self.ended:  # by an abort that came before there was a task
                task.cancel()
            return self._loop.run_until_complete(task)
        except TimeoutError:
            raise TimeoutError(f"{self._address}: out of time") from None
        except asyncio.CancelledError:
            raise OSError(f"{self._address}: aborted") from None
        finally:
            self._task = None
            if not task.done():  # interrupted by a signal
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            if self.ended:
                self.close()

    def check(self) -> None:
        """OSError if nothing can be asked in this process, or any more."""
        global _used_by
        process = os.getpid()
        if _used_by is None:
            _used_by = process
        if process != _used_by or process != self._process:
            raise OSError(
                f"{self._address}: obstore was in use before this process was forked and cannot be used in the "
                "child; start the child with spawn, or open the tier after the fork"
            )
        if self.ended:
            raise OSError(f"{self._address}: the link was closed")

    async def ask(self, request: Awaitable[_T]) -> _T:
        """Await an answer of obstore.

        FileNotFoundError, FileExistsError and the end of a stream are answers too; all else is Refused or OSError. All
        in words of our own: obstore's carry the URL and what the server sent.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            return await request
        except FileNotFoundError as error:
            if any(code in str(error) for code in NO_BUCKET):
                raise Refused(Reason.IO_ERROR, f"{self._address}: there is no such bucket") from None
            raise FileNotFoundError(f"{self._address}: not there") from None
        except AlreadyExistsError:
            raise FileExistsError(f"{self._address}: already there") from None
        except NotImplementedError:
            raise Unsupported(f"{self._address}: this kind of store cannot do that") from None
        except (BaseError, OSError, RuntimeError, ValueError) as error:
            raise self._trouble(error) from None

    def _trouble(self, error: Exception) -> Exception:
        text = str(error)
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        if status:
            return self.no(status, code_in(text))
        return OSError(f"{self._address}: {_plain(text, type(error).__name__)}")

    def no(self, status: int, code: str) -> Exception:
        """What an answer means that is neither what was asked for nor its absence."""
        if code in NO_BUCKET:
            return Refused(Reason.IO_ERROR, f"{self._address}: there is no such bucket")
        said = f"{self._address}: the answer was {status} {code}".rstrip()
        if status == 501:
            return Unsupported(said)
        if (300 <= status < 500 and status not in _BUSY) or status in _REASONS:
            return Refused(_REASONS.get(status, Reason.IO_ERROR), said)
        return OSError(said)


def slices(items: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    """`items` in their order, at most so many at a time."""
    return (items[at : at + most] for at in range(0, len(items), most))


def code_in(text: str) -> str:
    """The code of an error as S3 and Azure put it; empty: none, or nothing that looks like one."""
    found = _CODE.search(text)
    return found[1] if found else ""


def _plain(text: str, kind: str) -> str:
    """What went wrong, from the words of obstore's error that no server has a say in."""
    if "169.254.169.254" in text:
        return "no credentials: none were given, and the machine has none of its own"
    if "BadScheme" in text:
        return "plain http is not allowed: write https, or allow_http=true"
    if "dns error" in text:
        return "the host is not known (DNS)"
    found = _SYSTEM.search(text)
    return found[1] if found else f"the request failed ({kind})"


def _within_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
