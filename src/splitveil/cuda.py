"""Steps replayed from a CUDA graph, and work that runs beside other work on a GPU."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Generator, Tensor, nn

Step = Callable[[], None]
WARM_UP = 3  # eager calls before the capture: cuDNN picks its kernels, optimisers their buffers


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Lets float32 matrix products on a GPU round their factors to TF32 (10 bits)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def captured(step: Step, device: torch.device, generators: Sequence[Generator] = ()) -> Step:
    """The same step, replayed from a graph after a few eager calls; on a CPU the step itself.

    `step` takes and returns nothing: it reads tensors that stay where they are, writes results
    into others, clears gradients to None at its start, and never asks the device for a value.
    `generators` are the streams it draws from beside torch's own; they advance with every replay.
    Numbers that change between steps (a learning rate, a weight) must be tensors.
    """
    return _Graph(step, device, generators) if device.type == "cuda" else step


def compiled(net: nn.Module, backend: str = "inductor") -> nn.Module:
    """The same network on the same parameters; its kernels are fused at the first use.

    Networks of one structure share what was compiled, and torch keeps it on disk.
    """
    return cast(nn.Module, torch.compile(net, dynamic=False, backend=backend))


def compile_methods(owner: object, *names: str, backend: str = "inductor") -> None:
    """Has one object's methods compiled, in place, at their first use."""
    for name in names:
        method = getattr(owner, name)
        setattr(owner, name, torch.compile(method, dynamic=False, backend=backend))


def to_device(net: nn.Module, device: torch.device) -> None:
    """Moves a network there, in place; on a GPU with the channels last."""
    net.to(device)
    if device.type == "cuda":
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """A new learning rate, written into the tensor that a replayed step reads, where it is one."""
    set_rates(optimiser, [rate] * len(optimiser.param_groups))


def set_rates(optimiser: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """A new learning rate for each of the groups."""
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class _Graph:
    """Eager calls on a side stream, then one capture, then replays."""

    def __init__(self, step: Step, device: torch.device, generators: Sequence[Generator]) -> None:
        self._step, self._generators = step, generators
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        self._calls += 1
        if self._calls > WARM_UP:
            self._graph = self._capture()
            self._graph.replay()
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._step()
        torch.cuda.current_stream().wait_stream(self._side)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with no_collection(), torch.cuda.graph(graph, stream=self._side):
            self._step()
        return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector away: an old graph that it frees would break a capture."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class SideStream:
    """Runs small work on a GPU on a stream of its own, beside what the caller does next.

    Many small kernels leave a GPU almost idle; beside large ones they cost next to nothing. The
    backward pass of the work runs on that stream too. `join` before its results are used.
    """

    def __init__(self, device: torch.device) -> None:
        # First in line: a small kernel behind a large one would wait longer than it works.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self, x: Tensor) -> Iterator[Tensor]:
        """Work inside runs on that stream, on a copy of x: both streams own what they free."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield x.clone()

    def join(self) -> None:
        """What follows waits for the work."""
        torch.cuda.current_stream().wait_stream(self._stream)
