"""obstore's clients of object stores: made from a URL and options, and called with a deadline."""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import threading
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import Context
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import SplitResult

from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Pool
from pagoda.tiers.remote.socket_keepalive import IDLE_SECONDS
from pagoda.tiers.remote.store_client import RefusedError, ServerError
from pagoda.tiers.remote.store_urls import (
    authorization_header,
    endpoint_of,
    host_of,
    is_loopback,
    without_vendor,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_T = TypeVar("_T")

# obstore's own limit for a request (30 s by default); ours end at `until`
_LONGEST = "1h"
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_SYSTEM = re.compile(r'message: "([A-Za-z ,]{1,60})"')
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "AccountNotFound")
_RETRY_STATUSES = (408, 425, 429)  # the 4xx that mean "later"
_REASONS_OF_STATUS = {413: Reason.TOO_LARGE, 507: Reason.FULL}

# the process in which obstore has started its threads
_used_by: int | None = None


def open_store(parts: SplitResult, options: Mapping[str, str]) -> ObjectStore:
    """Return a new client with a separate connection pool; sends no request. ValueError: an invalid
    setting.
    """
    try:
        from obstore import store
        from obstore.exceptions import BaseError, UnknownConfigurationKeyError
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "object stores need obstore: pip install 'pagodakv[objects]'"
        ) from None
    settings = _client_settings(parts, options)
    never: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}
    try:
        buckets = {
            "s3": store.S3Store,
            "gs": store.GCSStore,
            "az": store.AzureStore,
        }
        if (bucket := buckets.get(parts.scheme)) is not None:
            found: ObjectStore = bucket(
                parts.hostname, config=settings, retry_config=never
            )
            return found
        client: ClientConfig = {**settings}  # type: ignore[typeddict-item, unused-ignore]
        if parts.username is not None:
            client["default_headers"] = authorization_header(parts)
        url = f"{parts.scheme}://{host_of(parts)}/"
        return store.HTTPStore(url, client_options=client, retry_config=never)
    except (BaseError, ValueError) as error:
        unknown = isinstance(
            error, UnknownConfigurationKeyError
        ) or "Invalid key" in str(error)
        named = [
            name
            for name in options
            if unknown and name.lower() in str(error).lower()
        ]
        if named:
            raise ValueError(
                f"{named[0]}: no such option of {parts.scheme}:// (see docs/how-to/objects.md)"
            ) from None
        given = f"; options given: {', '.join(options)}" if options else ""
        raise ValueError(
            f"{parts.scheme}://: {_safe_complaint(str(error))}{given}"
        ) from None


def _client_settings(
    parts: SplitResult, options: Mapping[str, str]
) -> dict[str, str]:
    """Return the options, with our defaults for those that are not given."""
    endpoint = endpoint_of(parts, options)
    settings = {"timeout": _LONGEST, "pool_idle_timeout": f"{IDLE_SECONDS}s"}
    is_plain = endpoint is not None and endpoint.scheme == "http"
    if is_plain and is_loopback(endpoint and endpoint.hostname):
        settings["allow_http"] = "true"
    elif is_plain and options.get("allow_http", "").lower() != "true":
        raise ValueError(
            "plain http can be read and changed on the way: write https, or say allow_http=true"
        )
    if parts.scheme == "s3" and (
        not is_plain or is_loopback(endpoint and endpoint.hostname)
    ):
        # TLS guards the bytes; hashing them costs 6x the CPU
        settings["unsigned_payload"] = "true"
    given = {without_vendor(name) for name in options}
    return {
        name: value for name, value in settings.items() if name not in given
    } | dict(options)


def _safe_complaint(text: str) -> str:
    """Return the kind of obstore's error about settings, without its text, which may contain their
    values.
    """
    for found in (
        r"Missing \w+",
        r"\w+ must be specified",
        r"failed to parse",
        r"Duplicate key \w+",
    ):
        if match := re.search(found, text):
            return match[0]
    return "obstore cannot use these settings"


class UnsupportedError(RefusedError):
    """The store does not support the operation."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.IO_ERROR, message)


class _QuietLoop(asyncio.SelectorEventLoop):
    """Ignores results that arrive after it is closed, so that no error is printed."""

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """See asyncio."""
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


async def gather_all(work: Iterable[Awaitable[_T]]) -> list[_T]:
    """Return all results. If some fail, raise the first error after all have ended, so that none is
    left running.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class ObstoreRunner:
    """Runs obstore's requests in an event loop that runs only during calls.

    A request that is out of time is cancelled, which closes its connection. For one thread at a
    time, except `abort` and `close`. obstore's own threads do not survive a fork: once the parent
    has sent a request, every call in a child is an OSError at once.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # not epoll: the close in a forked child would remove the pipe from the parent's epoll too
        self._loop = _QuietLoop(selectors.PollSelector())
        self._process = os.getpid()
        self._closing = threading.Lock()
        self._task: asyncio.Task[object] | None = None
        self.ended = False

    @property
    def running(self) -> bool:
        """Whether a call is running."""
        return self._loop.is_running()

    def abort(self) -> None:
        """Make the running call fail now with an OSError, and all later calls. From any thread."""
        self.ended = True
        task = self._task
        try:
            if task is not None:
                self._loop.call_soon_threadsafe(task.cancel)
        except RuntimeError:
            pass  # the loop was closed in between: no call is running

    def close(self) -> None:
        """Close the loop, or let the running call close it. Idempotent."""
        self.abort()
        with self._closing:
            if not self._loop.is_running():
                self._loop.close()

    def run(self, work: Coroutine[None, None, _T], until: float) -> _T:
        """Run `work` until it ends or is out of time.

        Uses another thread if this thread is already running an event loop, because a thread can
        run only one.
        """
        try:
            self.check_usable()
            if not _is_in_loop():
                return self._complete(work, until)
            try:
                with Pool(1, "pagoda-obstore") as thread:
                    future = thread.submit(self._complete, work, until)
            except RuntimeError as error:
                raise OSError(f"{self._address}: {error}") from None
            return future.result()
        finally:
            work.close()

    def _complete(self, work: Coroutine[None, None, _T], until: float) -> _T:
        async def bounded() -> _T:
            async with asyncio.timeout_at(until):
                return await work

        task = self._loop.create_task(bounded())
        self._task = task
        try:
            if self.ended:  # by an abort before the task was made
                task.cancel()
            return self._loop.run_until_complete(task)
        except TimeoutError:
            raise TimeoutError(f"{self._address}: out of time") from None
        except asyncio.CancelledError:
            raise OSError(f"{self._address}: aborted") from None
        finally:
            self._task = None
            if not task.done():  # not done: a signal handler raised an exception
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            if self.ended:
                self.close()

    def check_usable(self) -> None:
        """Raise OSError if no request can be sent in this process, or after an abort."""
        global _used_by
        process = os.getpid()
        if _used_by is None:
            _used_by = process
        if process != _used_by or process != self._process:
            raise OSError(
                f"{self._address}: obstore was in use before this process was forked and cannot "
                "be used in the "
                "child; start the child with spawn, or open the tier after the fork"
            )
        self.check_open()

    def check_open(self) -> None:
        """Raise OSError after an abort."""
        if self.ended:
            raise OSError(f"{self._address}: the connection was closed")

    async def result_of(self, request: Awaitable[_T]) -> _T:
        """Await a result of obstore.

        FileNotFoundError, FileExistsError and the end of a stream are results too; all other errors
        become RefusedError or OSError. The messages are ours: obstore's messages contain the URL
        and what the server sent.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            return await request
        except FileNotFoundError as error:
            if any(code in str(error) for code in NO_BUCKET):
                raise RefusedError(
                    Reason.IO_ERROR, f"{self._address}: there is no such bucket"
                ) from None
            raise FileNotFoundError(f"{self._address}: not there") from None
        except AlreadyExistsError:
            raise FileExistsError(f"{self._address}: already there") from None
        except NotImplementedError:
            raise UnsupportedError(
                f"{self._address}: this kind of store cannot do that"
            ) from None
        except (BaseError, OSError, RuntimeError, ValueError) as error:
            raise self._translated(error) from None

    def _translated(self, error: Exception) -> Exception:
        text = str(error)
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        if status:
            return self.status_error(status, error_code(text))
        return OSError(
            f"{self._address}: {_safe_message(text, type(error).__name__)}"
        )

    def status_error(self, status: int, code: str) -> Exception:
        """Return the exception for a response that means neither success nor absence."""
        if code in NO_BUCKET:
            return RefusedError(
                Reason.IO_ERROR, f"{self._address}: there is no such bucket"
            )
        said = f"{self._address}: the answer was {status} {code}".rstrip()
        if status == 501:
            return UnsupportedError(said)
        if (
            300 <= status < 500 and status not in _RETRY_STATUSES
        ) or status in _REASONS_OF_STATUS:
            return RefusedError(
                _REASONS_OF_STATUS.get(status, Reason.IO_ERROR), said
            )
        return ServerError(said)


def batches(items: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    """Return `items` in their order, at most `most` at a time."""
    return (items[at : at + most] for at in range(0, len(items), most))


def error_code(text: str) -> str:
    """Return the code of an error in the form of S3 and Azure; empty if there is none."""
    found = _CODE.search(text)
    return found[1] if found else ""


def _safe_message(text: str, kind: str) -> str:
    """Return what went wrong, from the parts of obstore's error that a server cannot influence."""
    if "169.254.169.254" in text:
        return "no credentials: none were given, and the machine provides none"
    if "BadScheme" in text:
        return "plain http is not allowed: write https, or allow_http=true"
    if "dns error" in text:
        return "the host is not known (DNS)"
    found = _SYSTEM.search(text)
    return found[1] if found else f"the request failed ({kind})"


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
