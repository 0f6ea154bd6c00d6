"""Memory layout and precision of networks; CUDA graphs, compilation, side streams on a GPU."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Generator, Tensor, nn

Step = Callable[[], None]
Precision = Literal["float32", "bf16"]
WARM_UP = 3  # eager calls first: cuDNN chooses its kernels, optimisers create their buffers


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let float32 matrix products on a GPU round their factors to TF32 (10 bits of mantissa)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def captured(step: Step, device: torch.device, generators: Sequence[Generator] = ()) -> Step:
    """The same step, replayed from a CUDA graph after a few eager calls; on a CPU the step itself.

    Args:
        step: Takes and returns nothing. It reads tensors that stay where they are, writes results
            into others, sets gradients to None at its start, and never asks the device for a value.
            Numbers that change between steps, such as a learning rate, must be tensors.
        device: Where the step runs.
        generators: The streams it draws from, besides torch's own; every replay advances them.

    Returns:
        A function to call in place of `step`.
    """
    return _Graph(step, device, generators) if device.type == "cuda" else step


def compiled(net: nn.Module, backend: str = "inductor") -> nn.Module:
    """The same network with the same parameters, compiled at its first use.

    Networks of one structure share the compiled code, and torch caches it on disk.
    """
    return cast(nn.Module, torch.compile(net, dynamic=False, backend=backend))


def compile_methods(owner: object, *names: str, backend: str = "inductor") -> None:
    """Have methods of one object compiled at their first use, in place."""
    for name in names:
        method = getattr(owner, name)
        setattr(owner, name, torch.compile(method, dynamic=False, backend=backend))


def to_device(net: nn.Module, device: torch.device) -> None:
    """Move a network to a device, in place, its convolutions with their channels last in memory."""
    net.to(device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def channels_last(x: Tensor) -> Tensor:
    """The same numbers; images and maps (n, c, h, w) with their channels last in memory.

    Convolutions are faster so, on a CPU as on a GPU. The order in which `flatten` reads a map does
    not change.

    >>> x = torch.arange(4.0).view(1, 2, 1, 2)
    >>> channels_last(x).stride(), channels_last(x).flatten().tolist()
    ((4, 1, 4, 2), [0.0, 1.0, 2.0, 3.0])
    """
    is_map = x.ndim == 4  # noqa: PLR2004 - (n, c, h, w)
    return x.contiguous(memory_format=torch.channels_last) if is_map else x


def usual_precision(device: torch.device) -> Precision:
    """What a device computes in if nobody has chosen: bf16 on a GPU, float32 on a CPU."""
    return "bf16" if device.type == "cuda" else "float32"


def mixed(device: torch.device, precision: Precision) -> torch.autocast:
    """Inside, convolutions and matrix products round their factors to bfloat16 for "bf16"."""
    # Cached casts of the weights would be out of date in a replayed step.
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set one learning rate for all groups of an optimiser."""
    set_rates(optimiser, [rate] * len(optimiser.param_groups))


def set_rates(optimiser: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each group; a rate that is a tensor is written in place."""
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):  # a captured step reads this very tensor
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
    """Switch the garbage collector off: if it freed an old graph, the capture would break."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class SideStream:
    """Runs small work on a GPU stream of its own, in parallel with what the caller does next.

    Many small kernels leave a GPU almost idle; next to large ones they cost almost nothing. The
    backward pass of the work runs on that stream too. Call `join` before using its results.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority: a small kernel queued behind a large one would wait longer than it runs.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self, x: Tensor) -> Iterator[Tensor]:
        """Run the block on that stream, on a copy of x: each stream frees only its own memory."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield x.clone()

    def join(self) -> None:
        """Make the current stream wait for the work."""
        torch.cuda.current_stream().wait_stream(self._stream)
