"""The configurations of a service's six models, as JSON for the load API and as text for config.pbtxt.

Both come from one structure and the contract's tensor tables. A configuration that differs from the one that a
version was loaded with, in anything but version_policy and instance_group, restarts the version, so the override
and the file on disk must never drift apart.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from piccard_contract.home import Service
from piccard_contract.tensors import ADMITTED, DATATYPES, GENERATE_INPUTS, GENERATE_OUTPUTS, TensorSpec

# The two numbers under which routers and admission keep the same code, so that they roll from one to the other.
ROLLING_VERSIONS = (1, 2)

ModelConfig = dict[str, Any]

# Fields whose text form is a bare enum name.
_ENUMS = frozenset({"data_type", "kind"})


def model_configs(service: Service, stable: int = 1) -> dict[str, ModelConfig]:
    """The six configurations of `service` by model name, in the load API's JSON form.

    Args:
        stable: the version that deepseek_llm's policy names.
    """
    return {
        service.llm: llm_config(service, [stable]),
        service.admission: rolling_config(service, service.admission, ROLLING_VERSIONS[:1]),
        service.router: rolling_config(service, service.router, ROLLING_VERSIONS[:1]),
        service.router_unary: rolling_config(service, service.router_unary, ROLLING_VERSIONS[:1]),
        service.ensemble: _ensemble(service.ensemble, service.admission, service.router),
        service.unary: _ensemble(service.unary, service.admission, service.router_unary),
    }


def llm_config(service: Service, versions: Iterable[int]) -> ModelConfig:
    """The model of versions, loading exactly `versions`."""
    return _python_model(service.llm, GENERATE_INPUTS, GENERATE_OUTPUTS, versions, decoupled=True)


def rolling_config(service: Service, model: str, versions: Iterable[int]) -> ModelConfig:
    """Admission or a router, loading exactly `versions` of its twin folders."""
    if model == service.admission:
        return _python_model(model, GENERATE_INPUTS, (ADMITTED,), versions, decoupled=False)
    if model in (service.router, service.router_unary):
        decoupled = model == service.router
        return _python_model(model, (ADMITTED,), GENERATE_OUTPUTS, versions, decoupled=decoupled)
    raise ValueError(f"{model} is neither admission nor a router of service {service.name}")


def config_with_versions(service: Service, model: str, versions: Iterable[int]) -> ModelConfig:
    """The configuration of a model that has versions, loading exactly `versions`."""
    if model == service.llm:
        return llm_config(service, versions)
    return rolling_config(service, model, versions)


def config_json(config: ModelConfig) -> str:
    """The form that the load API's override takes."""
    return json.dumps(config, separators=(",", ":"))


def config_text(config: ModelConfig) -> str:
    """The form of config.pbtxt (protobuf text)."""
    return "\n".join(_lines(config, 0)) + "\n"


def _python_model(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    versions: Iterable[int],
    *,
    decoupled: bool,
) -> ModelConfig:
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": decoupled},
        "version_policy": {"specific": {"versions": sorted(versions)}},
        "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
        "input": [_input(spec) for spec in inputs],
        "output": [_tensor(spec) for spec in outputs],
    }


def _ensemble(name: str, admission: str, router: str) -> ModelConfig:
    read = {spec.name: spec.name for spec in GENERATE_INPUTS}
    admitted = {ADMITTED.name: ADMITTED.name}
    written = {spec.name: spec.name for spec in GENERATE_OUTPUTS}
    return {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": 0,
        "input": [_input(spec) for spec in GENERATE_INPUTS],
        "output": [_tensor(spec) for spec in GENERATE_OUTPUTS],
        "ensemble_scheduling": {
            "step": [
                {"model_name": admission, "model_version": -1, "input_map": read, "output_map": admitted},
                {"model_name": router, "model_version": -1, "input_map": admitted, "output_map": written},
            ]
        },
    }


def _tensor(spec: TensorSpec) -> ModelConfig:
    return {"name": spec.name, "data_type": DATATYPES[spec.datatype][0], "dims": list(spec.dims)}


def _input(spec: TensorSpec) -> ModelConfig:
    tensor = _tensor(spec)
    # A router without the admitted request has nothing to do, so that input is always there.
    return tensor if spec is ADMITTED else {**tensor, "optional": spec.optional}


def _lines(message: ModelConfig, depth: int) -> list[str]:
    indent = "  " * depth
    lines = []
    for field, value in message.items():
        if field.endswith("_map"):
            for key, target in value.items():
                lines.append(f"{indent}{field} {{ key: {json.dumps(key)} value: {json.dumps(target)} }}")
        elif isinstance(value, dict):
            lines += [f"{indent}{field} {{", *_lines(value, depth + 1), f"{indent}}}"]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                lines += [f"{indent}{field} {{", *_lines(item, depth + 1), f"{indent}}}"]
        else:
            lines.append(f"{indent}{field}: {_scalar(field, value)}")
    return lines


def _scalar(field: str, value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(field, item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and field not in _ENUMS:
        return json.dumps(value)
    return str(value)
