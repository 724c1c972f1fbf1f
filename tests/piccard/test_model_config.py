"""Configurations: one structure in two forms, and the shipped repository is that structure."""

from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from piccard.model_config import config_json, config_text, config_with_versions, model_configs
from piccard.shipped import write_shipped
from piccard_contract.home import Service
from piccard_contract.tensors import GENERATE_INPUTS, GENERATE_OUTPUTS
from tritonclient.grpc import model_config_pb2

ROOT = Path(__file__).parents[2]
SERVICE = Service(Path("home"))


@pytest.mark.parametrize("model", SERVICE.models)
def test_text_and_json_are_the_same_configuration(model: str) -> None:
    config = model_configs(SERVICE)[model]
    from_text = text_format.Parse(config_text(config), model_config_pb2.ModelConfig())
    from_json = json_format.Parse(config_json(config), model_config_pb2.ModelConfig())
    assert from_text == from_json
    assert from_text.name == model


def test_ensembles_take_and_give_what_the_contract_says() -> None:
    for model in (SERVICE.ensemble, SERVICE.unary, SERVICE.llm):
        config = model_configs(SERVICE)[model]
        assert [tensor["name"] for tensor in config["input"]] == [spec.name for spec in GENERATE_INPUTS]
        assert all(tensor["optional"] for tensor in config["input"])
        assert [tensor["name"] for tensor in config["output"]] == [spec.name for spec in GENERATE_OUTPUTS]


def test_no_output_of_an_ensemble_has_an_input_s_name() -> None:
    assert not {spec.name for spec in GENERATE_INPUTS} & {spec.name for spec in GENERATE_OUTPUTS}


def test_override_differs_from_the_file_in_the_versions_alone() -> None:
    for model in (SERVICE.llm, SERVICE.admission, SERVICE.router, SERVICE.router_unary):
        on_disk, override = model_configs(SERVICE)[model], config_with_versions(SERVICE, model, [7, 2])
        assert override.pop("version_policy") == {"specific": {"versions": [2, 7]}}
        assert on_disk.pop("version_policy") == {"specific": {"versions": [1]}}
        assert override == on_disk


def test_only_streams_are_decoupled() -> None:
    configs = model_configs(SERVICE)
    decoupled = {name for name, c in configs.items() if c.get("model_transaction_policy", {}).get("decoupled")}
    assert decoupled == {SERVICE.llm, SERVICE.router}


def test_shipped_repository_is_what_is_rendered(tmp_path: Path) -> None:
    write_shipped(tmp_path / "model_repository")
    assert _tree(tmp_path / "model_repository") == _tree(ROOT / "model_repository"), (
        "run: python -m piccard.shipped model_repository"
    )


def _tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    }
