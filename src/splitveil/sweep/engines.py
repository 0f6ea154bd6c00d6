"""Where trials run: processes of this machine, or a Ray cluster. A trial's crash is an answer.

Jobs and answers are JSON. A worker ends with the process that started it, so that a sweep that is
killed leaves nobody behind who writes into its folders.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from splitveil.errors import ConfigError, RunError

Json = dict[str, Any]
Work = Callable[[Json], Json]
REACH_S = 5.0  # for the other end to answer; Ray itself would try for minutes
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@runtime_checkable
class Engine(Protocol):
    """Runs jobs side by side; an answer is what the work returned, or its `error`."""

    @property
    def slots(self) -> int:
        """How many jobs may run at once."""
        ...

    def submit(self, key: str, job: Json) -> None:
        """Start a job; at most `slots` at a time."""
        ...

    def wait(self) -> tuple[str, Json]:
        """The next answer and its key."""
        ...

    def close(self) -> None:
        """End everything that still runs."""
        ...


def attempted(work: Work, job: Json) -> Json:
    """What the work returned, or its error in words.

    >>> attempted(lambda job: 1 / 0, {})
    {'error': 'ZeroDivisionError: division by zero'}
    """
    try:
        return work(job)
    except Exception as err:  # a trial may fail in any way; the sweep goes on
        return {"error": f"{type(err).__name__}: {err}"}


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    key: str | None = None


class LocalEngine:
    """Worker processes of this machine, one thread each; what they print goes to `log`.

    With several GPUs, given by their ids, worker i has the i-th of them, in turns.
    """

    def __init__(self, work: Work, jobs: int, log: Path, gpus: tuple[str, ...] = ()) -> None:
        self._work, self._jobs, self._log, self._gpus = work, jobs, log, gpus
        self._workers: list[_Worker | None] = [None] * jobs

    @property
    def slots(self) -> int:
        """The number of workers."""
        return self._jobs

    def submit(self, key: str, job: Json) -> None:
        """Hand a job to a free worker; one is started where there is none."""
        place = next(i for i, w in enumerate(self._workers) if w is None or w.key is None)
        worker = self._workers[place]
        if worker is None or not worker.process.is_alive():
            worker = self._workers[place] = self._start(place)
        worker.key = key
        with suppress(OSError):  # should it die just now, `wait` reads the same from its pipe
            worker.pipe.send_bytes(json.dumps(job).encode())

    def wait(self) -> tuple[str, Json]:
        """The next answer; a worker that died answers with how it ended."""
        busy = {w.pipe: i for i, w in enumerate(self._workers) if w is not None and w.key}
        place = busy[wait(list(busy))[0]]  # type: ignore[index]
        worker = self._workers[place]
        if worker is None or worker.key is None:
            raise RunError("no trial is running, so there is nothing to wait for")
        key, worker.key = worker.key, None
        try:
            answer: Json = json.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join()
            self._workers[place] = None
            answer = {"error": f"its process {ended(worker.process.exitcode)}; see {self._log}"}
        return key, answer

    def close(self) -> None:
        """End the workers, whatever they do."""
        for worker in self._workers:
            if worker is not None:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()
        self._workers = [None] * self._jobs

    def _start(self, place: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, self._work, str(self._log)), daemon=True
        )
        gpu = {"CUDA_VISIBLE_DEVICES": self._gpus[place % len(self._gpus)]} if self._gpus else {}
        with _environment(ONE_THREAD | gpu):
            process.start()
        theirs.close()
        return _Worker(process, ours)


def ended(code: int | None) -> str:
    """How a process ended.

    >>> ended(-9), ended(3)
    ('was killed by SIGKILL', 'ended with code 3')
    """
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """The variables a new process inherits; ours are as before afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, work: Work, log: str) -> None:
    """A worker's life: jobs in, answers out, until nobody listens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Path(log).open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(json.dumps(attempted(work, job)).encode())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # at once: whoever resumes the sweep may open the same files


class RayEngine:
    """Tasks of a Ray cluster: the one at `address`, or a new one on this machine of `jobs` cores.

    The machines of a cluster need the same package and see the same folders. Without `jobs` every
    core takes a trial, or with `gpus` for each trial every GPU.
    """

    def __init__(
        self, work: Work, *, jobs: int | None, address: str | None = None, gpus: int = 0
    ) -> None:
        ray = need_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address:
            reach(address)
        started = {} if address else {"num_cpus": jobs, "include_dashboard": False}
        try:
            with _environment(ONE_THREAD):  # Ray gives a task of one core one thread by itself
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level="ERROR",
                    **started,
                )
        except (ConnectionError, RuntimeError, ValueError) as err:
            raise ConfigError(
                f"cannot reach Ray at '{address or 'local'}': {err}; check --address, and "
                "the token where the cluster wants one (RAY_AUTH_TOKEN)"
            ) from err
        there = int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1))
        self._ray, self._jobs, home = ray, jobs or max(there, 1), str(Path.cwd())
        self._running: dict[Any, str] = {}

        def answer(text: str) -> str:
            if Path(home).is_dir():
                os.chdir(home)  # relative paths of datasets mean what they mean here
            return json.dumps(attempted(work, json.loads(text)))

        self._call = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(answer)

    @property
    def slots(self) -> int:
        """How many tasks are handed to Ray at once."""
        return self._jobs

    def submit(self, key: str, job: Json) -> None:
        """Hand a task to the cluster."""
        self._running[self._call.remote(json.dumps(job))] = key

    def wait(self) -> tuple[str, Json]:
        """The next answer; a task whose worker died answers with Ray's words."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1)
        key = self._running.pop(ready[0])
        try:
            answer: Json = json.loads(self._ray.get(ready[0]))
        except self._ray.exceptions.RayError as err:
            answer = {"error": f"{type(err).__name__}: {str(err).splitlines()[0]}"}
        return key, answer

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()


def reach(address: str) -> None:
    """Refuse the address of a machine where nobody listens; only Ray understands other ones."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as err:
        raise ConfigError(
            f"nobody answers at '{address}': {err}; check --address and that the cluster runs "
            "(`ray status` there), or leave --address out for a new one on this machine"
        ) from err


def need_ray() -> Any:  # noqa: ANN401 - the module
    """Ray, or what to install."""
    try:
        import ray
    except ImportError as err:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed; "
            "pip install 'splitveil[sweep]', or use --engine local"
        ) from err
    return ray
