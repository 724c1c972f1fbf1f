"""Muon for matrices, AdamW for the rest.

Muon orthogonalises the momentum of a matrix by five Newton-Schulz steps (coefficients of Jordan's Muon); the update is
scaled by 0.2 * sqrt(max(rows, columns)), which gives it the size of an AdamW update (Liu et al., "Muon is scalable for
LLM training"), so one learning rate serves both. Learning rate and step live on the device: a captured graph may hold
the whole step.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of ``matrices`` [n, rows, columns] near one."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Muon with Nesterov momentum over matrices, and stacks of matrices, of equal shape at once."""

    def __init__(self, parameters: list[nn.Parameter], decay: float, momentum: float = 0.95) -> None:
        self.decay, self.momentum = decay, momentum
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[(parameter.shape[-2], parameter.shape[-1])].append(parameter)
        self.buffers = {shape: torch.zeros_like(self.gather(group)) for shape, group in self.groups.items()}

    @staticmethod
    def gather(tensors: list[nn.Parameter] | list[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().reshape(-1, *tensor.shape[-2:]) for tensor in tensors])

    def reset(self) -> None:
        for buffer in self.buffers.values():
            buffer.zero_()

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        for shape, group in self.groups.items():
            gradient = self.gather([parameter.grad for parameter in group if parameter.grad is not None])
            buffer = self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum)) * (0.2 * max(shape) ** 0.5)
            counts = [parameter.numel() // (shape[0] * shape[1]) for parameter in group]
            for parameter, part in zip(group, update.split(counts), strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(part.view_as(parameter) * rate)


class AdamW:
    """AdamW over every parameter at once; vectors are not decayed."""

    def __init__(self, parameters: list[nn.Parameter], decay: float, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.parameters, self.betas = parameters, betas
        self.decays = [decay if parameter.dim() > 1 else 0.0 for parameter in parameters]
        self.first = [torch.zeros_like(parameter) for parameter in parameters]
        self.second = [torch.zeros_like(parameter) for parameter in parameters]
        self.steps = torch.zeros((), device=parameters[0].device)

    def reset(self) -> None:
        torch._foreach_zero_([*self.first, *self.second, self.steps])

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        self.steps += 1
        corrections = [1 - beta**self.steps for beta in self.betas]
        for parameter, decay, first, second in zip(self.parameters, self.decays, self.first, self.second, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            first.lerp_(gradient, 1 - self.betas[0])
            second.lerp_(gradient.square(), 1 - self.betas[1])
            update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + 1e-8)
            parameter.mul_(1 - rate * decay).sub_(update * rate)
