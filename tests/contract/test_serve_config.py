"""The shipped Serve config is valid and builds the application that it names."""

from pathlib import Path

import pytest
import yaml

CONFIGS = sorted((Path(__file__).parents[2] / "deployments" / "config").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_is_valid_and_builds(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    from orthros_deployments.app import from_config

    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    (application,) = config.applications
    assert application.import_path == f"{from_config.__module__}:{from_config.__name__}"
    built = from_config(application.args)
    assert built._bound_deployment.name == "Gateway"
    named = {deployment.name for deployment in application.deployments}
    assert named == {"Gateway", "Coordinator", "Prefill", "Decode"}


def test_there_is_a_config() -> None:
    assert CONFIGS
