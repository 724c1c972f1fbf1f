"""What serves the operators of a model in a runner, from dispatch, the runner's graphs and the model's config."""

from typing import TYPE_CHECKING, Any

import torch
from piccard_contract.operators import ONNX_RUNTIME, FusionUse, OperatorUse

from deepseek_engine.gpu.fusions import (
    NOT_IN_USE,
    Obstacle,
    capability_of,
    fused_operators,
    fusions,
    kernel_obstacle,
    step_operators,
)
from deepseek_engine.kernels.dispatch import DISPATCH, Dispatch
from deepseek_engine.models import ModelConfig
from deepseek_engine.operator_watch import OperatorFigures, OperatorWatch

if TYPE_CHECKING:
    # It reads graphs, which takes a package that runner torch does without.
    from deepseek_engine.runners.onnx_operators import ExportedOperators


def watch_operators(
    config: ModelConfig,
    runner: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    exported: "ExportedOperators | None" = None,
    dispatch: Dispatch = DISPATCH,
) -> OperatorWatch:
    """The watch of a version that is warm.

    Args:
        runner: the model runner; one that has `graphs` (`gpu.step_graphs.StepGraphs`) runs the device kernels.
        device, dtype: of weights and activations.
        exported: of a model that is an export; then dispatch knows what is outside of it.
    """
    graphs = getattr(runner, "graphs", None)
    obstacle = _obstacle(config, device, dtype, on_kernels=graphs is not None)
    found = fusions(
        config,
        obstacle,
        graphs=_graph_obstacle(runner, graphs),
        exported=None if exported is None else exported.fused,
    )
    return OperatorWatch(
        figures=lambda: _figures(dispatch, graphs, _compilations(graphs is not None)),
        operators=lambda: [*_exported_uses(exported), *_uses(dispatch)],
        fusions=[
            FusionUse(
                name=fusion.name,
                operators=fusion.operators,
                applies=fusion.obstacle is None,
                cause=fusion.obstacle.cause if fusion.obstacle else "",
                reason=fusion.obstacle.reason if fusion.obstacle else fusion.limits,
            )
            for fusion in found
        ],
        step_operators=sum(step_operators(config).values()),
        fused_operators=fused_operators(found),
        revision=lambda: dispatch.revision,
        precision=str(dtype).removeprefix("torch."),
        graphs=graphs is not None and graphs.captures > 0,
    )


def _obstacle(config: ModelConfig, device: torch.device, dtype: torch.dtype, *, on_kernels: bool) -> Obstacle | None:
    if on_kernels:
        return None
    found = kernel_obstacle(config, device, dtype, capability_of(device))
    return found or NOT_IN_USE


def _graph_obstacle(runner: Any, graphs: Any) -> Obstacle | None:
    if graphs is not None and graphs.captures == 0:
        return Obstacle("device", "no graph was captured: steps are launched kernel by kernel")
    if graphs is not None and runner.eager:
        return Obstacle("runner", "steps are launched kernel by kernel, as was asked for")
    return None


def _compilations(on_kernels: bool) -> int:
    if not on_kernels:
        return 0
    from deepseek_engine.kernels.launcher import compilations

    return compilations()


def _figures(dispatch: Dispatch, graphs: Any, compilations: int) -> OperatorFigures:
    # Copies are taken at once: the engine's thread goes on counting.
    served = list(dispatch.served.items())
    return OperatorFigures(
        fallbacks=dict(dispatch.fallbacks.copy()),
        fallback_seconds={
            operator: use.seconds for (operator, _), use in served if use.fallback and use.seconds is not None
        },
        replays=0 if graphs is None else graphs.replays,
        captures=0 if graphs is None else graphs.captures,
        compilations=compilations,
        ungraphed={} if graphs is None else dict(graphs.ungraphed.copy()),
    )


def _exported_uses(exported: "ExportedOperators | None") -> list[OperatorUse]:
    if exported is None:
        return []
    return [
        OperatorUse(
            operator=name,
            implementation=ONNX_RUNTIME,
            reason=f"{count} of the export's nodes, on {exported.provider}",
        )
        for name, count in sorted(exported.nodes.items())
    ]


def _uses(dispatch: Dispatch) -> list[OperatorUse]:
    return [
        OperatorUse(
            operator=operator,
            implementation=use.implementation,
            reason=use.reason,
            choices=use.choices,
            fallback=use.fallback,
            microseconds=None if use.seconds is None else round(use.seconds * 1e6, 1),
        )
        for (operator, _), use in sorted(dispatch.served.items())
    ]
