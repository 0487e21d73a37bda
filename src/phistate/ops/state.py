"""The history of a linear mixer, folded: a value that can be carried, forked, reordered, saved."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

_FORMAT = "phistate.State/1"
_TENSORS = ("s", "z", "log_scale", "tokens")


@dataclass(frozen=True, eq=False)
class State:
    """Everything a linear mixer keeps of the past.

    s_t = Σ_j (decayed) k_j v_jᵀ and z_t = Σ_j (decayed) k_j. Where ``log_scale`` C is present (maps streamed in
    log space) the sums are of features divided by exp(C), one C per feature.

    A step in place (:func:`phistate.linear_attention_step_`) overwrites these tensors, so every method that gives a
    State copies: what it gives shares no memory with this one.

    Args:
        s: ``[B,Hs,K,V]``, float32 (float64 for float64 inputs).
        z: ``[B,Hs,K]``, the normaliser; None for mixers that do not normalise.
        log_scale: ``[B,Hs,K]``, the running maximum of log φ(k), −inf before the first token; None when unused.
        tokens: ``[B]`` int64, how many tokens each sequence has seen.
        fingerprint: print of the feature map the state was made with; None when q and k came as features.

    Raises:
        ValueError: shapes that do not fit one another, or tokens of another dtype or device.
        TypeError: a z or log_scale of another dtype or device than s.

    >>> import torch
    >>> state = State(s=torch.zeros(2, 4, 8, 16), tokens=torch.zeros(2, dtype=torch.int64))
    >>> state.nbytes, state.reorder(torch.tensor([1, 1])).s.shape
    (4112, torch.Size([2, 4, 8, 16]))
    """

    s: Tensor
    tokens: Tensor
    z: Tensor | None = None
    log_scale: Tensor | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if self.s.ndim != 4:
            raise ValueError(f"s: got shape {tuple(self.s.shape)}; takes [B,Hs,K,V]")
        for name, tensor in (("z", self.z), ("log_scale", self.log_scale)):
            if tensor is None:
                continue
            if tensor.shape != self.s.shape[:3]:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; takes [B,Hs,K] = {tuple(self.s.shape[:3])}")
            if tensor.dtype != self.s.dtype or tensor.device != self.s.device:
                raise TypeError(
                    f"{name}: got {tensor.dtype} on {tensor.device}; takes {self.s.dtype} on {self.s.device}, as s has"
                )
        if self.tokens.shape != self.s.shape[:1] or self.tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens: got {self.tokens.dtype} of shape {tuple(self.tokens.shape)}; "
                f"takes int64 [B] = {tuple(self.s.shape[:1])}"
            )
        if self.tokens.device != self.s.device:
            raise ValueError(f"tokens: got device {self.tokens.device}; takes {self.s.device}, where s is")

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors of the state."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def reorder(self, index: Tensor) -> State:
        """The state whose row i is row ``index[i]`` of this one (beam search); rows may repeat or be left out."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def fork(self) -> State:
        """A copy, still in the autograd graph."""
        return self._map(Tensor.clone)

    def detach(self) -> State:
        """A copy cut from the autograd graph."""
        return self._map(lambda tensor: tensor.detach().clone())

    def to(self, device: torch.device | str) -> State:
        """A copy on another device, or on the same."""
        return self._map(lambda tensor: tensor.to(device, copy=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a safetensors file; the file appears whole or not at all."""
        path = Path(path)
        metadata = {"format": _FORMAT}
        if self.fingerprint is not None:
            metadata["fingerprint"] = self.fingerprint
        # Tensors that share memory are no file of theirs, and a step may overwrite them meanwhile.
        tensors = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in self._tensors().items()
        }
        # Written as any new file is, for permissions of its own; in a directory of this call's, for a name.
        with tempfile.TemporaryDirectory(prefix=".phistate-", dir=path.parent) as directory:
            whole = Path(directory) / "state"
            whole.write_bytes(save(tensors, metadata))
            whole.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "cpu") -> State:
        """Read a state that :meth:`save` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        with safe_open(path, framework="pt", device=device) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"path: got {os.fspath(path)!r}, which is no {_FORMAT} file")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(**tensors, fingerprint=metadata.get("fingerprint"))

    def _tensors(self) -> dict[str, Tensor]:
        held = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def _map(self, change: Callable[[Tensor], Tensor]) -> State:
        changed = {name: change(tensor) for name, tensor in self._tensors().items()}
        return State(**changed, fingerprint=self.fingerprint)
