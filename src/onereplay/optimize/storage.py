"""Weights in larger tensors, for kernels that want them side by side or padded, without a second copy.

A joined tensor replaces the storage of the module's own parameters, which become views of it: no memory is held twice,
and a change of the weights in place reaches both. Several encoders of one model share what they join alike; the last
one that releases it gives the parameters dense storage of their own again. Values never change.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Place = tuple[slice, ...]


@dataclass
class _Joined:
    """A tensor that parameters are views of, and how many users read it."""

    tensor: Tensor
    parameters: tuple[Tensor, ...]
    users: int = 0

    def holds(self, parameters: Sequence[Tensor], places: Sequence[Place], shape: tuple[int, ...]) -> bool:
        """Whether these parameters lie in it, at these places, still."""
        return tuple(self.tensor.shape) == shape and all(
            parameter.data_ptr() == self.tensor[place].data_ptr() and parameter.shape == self.tensor[place].shape
            for parameter, place in zip(parameters, places, strict=True)
        )


_joined = WeakIdKeyDictionary()
"""By the first parameter: encoders of one model share its weights, and what they are joined to."""
_lock = threading.Lock()


class Storage:
    """What one set of rewrites has joined."""

    def __init__(self) -> None:
        self._taken: list[_Joined] = []
        self._marks: list[tuple[nn.Module, str]] = []

    def join(self, parameters: Sequence[Tensor], places: Sequence[Place], shape: tuple[int, ...]) -> Tensor:
        """One tensor of `shape` with each parameter at its place and zeros elsewhere.

        Args:
            parameters: of one dtype and device; they become views of the result.
            places: one a parameter, of its shape, without overlap.
            shape: of the result.
        """
        first = parameters[0]
        with _lock, torch.inference_mode(False), torch.no_grad():
            while _left:
                _left.popleft()._give_back()
            known: _Joined | None = _joined.get(first)
            if known is None or not known.holds(parameters, places, shape):
                tensor = torch.zeros(shape, dtype=first.dtype, device=first.device)
                for parameter, place in zip(parameters, places, strict=True):
                    tensor[place].copy_(parameter)
                    parameter.data = tensor[place]
                known = _joined[first] = _Joined(tensor, tuple(parameters))
            known.users += 1
            self._taken.append(known)
            return known.tensor

    def stack(self, parameters: Sequence[Tensor], rows: int | None = None) -> Tensor:
        """The parameters one below the other, each filled up with zeros to `rows` along the first dimension."""
        height = rows or len(parameters[0])
        trailing = parameters[0].shape[1:]
        places = [
            (slice(place * height, place * height + len(parameter)), *map(slice, trailing))
            for place, parameter in enumerate(parameters)
        ]
        return self.join(parameters, places, (len(parameters) * height, *trailing))

    def pad(self, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The parameter with zeros behind it in each dimension up to `shape`."""
        return self.join([parameter], [tuple(map(slice, parameter.shape))], shape)

    def mark(self, module: nn.Module, name: str, value: object) -> None:
        """Give a module an attribute until the release."""
        module.__dict__[name] = value
        self._marks.append((module, name))

    def release(self) -> None:
        """Give all of it back."""
        with _lock:
            self._give_back()

    def release_if_free(self) -> None:
        """The same from a finalizer, which may run in the middle of what holds the lock: then the next one does it."""
        if _lock.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                _lock.release()
        else:
            _left.append(self)

    def _give_back(self) -> None:
        for module, name in self._marks:
            module.__dict__.pop(name, None)
        with torch.inference_mode(False), torch.no_grad():
            for known in self._taken:
                known.users -= 1
                # Another encoder may have joined the parameters otherwise since: what is its own stays as it is.
                if not known.users and _joined.get(known.parameters[0]) is known:
                    del _joined[known.parameters[0]]
                    for parameter in known.parameters:
                        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self._taken, self._marks = [], []


_left: deque[Storage] = deque()
"""What finalizers could not give back at once."""
