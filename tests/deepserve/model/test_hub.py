"""Model names. The hub's client is replaced by a local function: the network is the boundary, and tests do not cross it."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects

from deepserve.model.hub import SHIPPED_FOLDER, resolve_model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Records what the hub was asked for; `error` in it is raised."""
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        if "error" in asked:
            raise asked["error"]
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_folder_is_itself(hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")  # before the hub's model of that name
    assert hub == {}


def test_the_shipped_model(hub: dict[str, Any]):
    assert resolve_model("deepserve-tiny") == SHIPPED_FOLDER
    assert (SHIPPED_FOLDER / "config.json").exists()
    assert hub == {}


def test_a_hub_model_without_files_nobody_reads(hub: dict[str, Any], tmp_path: Path):
    assert resolve_model("deepseek-ai/DeepSeek-V3", "main") == tmp_path
    assert (hub["repo_id"], hub["revision"]) == ("deepseek-ai/DeepSeek-V3", "main")
    kept = list(
        filter_repo_objects(
            [
                "config.json",
                "model-00001-of-00163.safetensors",
                "chat_template.jinja",
                "README.md",
                "modeling_deepseek.py",
                "original/a.safetensors",
            ],
            allow_patterns=hub["allow_patterns"],
            ignore_patterns=hub["ignore_patterns"],
        )
    )
    assert kept == ["config.json", "model-00001-of-00163.safetensors", "chat_template.jinja"]


def test_dummy_weights_need_no_download_of_weights(hub: dict[str, Any]):
    resolve_model("deepseek-ai/DeepSeek-V3", with_weights=False)
    assert "*.safetensors" not in hub["allow_patterns"]


@pytest.mark.parametrize(
    "error",
    [
        OfflineModeIsEnabled("hub is off"),
        HFValidationError("hub is off"),
        TimeoutError("hub is off"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_is_a_sentence_with_the_name(error: Exception, hub: dict[str, Any]):
    hub["error"] = error
    with pytest.raises(
        ValueError, match=r"model 'no/such' is neither a folder .* nor the shipped 'deepserve-tiny'.*at revision 'v1'.*hub is off"
    ):
        resolve_model("no/such", "v1")


@pytest.mark.parametrize("name", ["/no/such", "./no/such", "../no/such", "~/no/such", ""])
def test_a_path_is_never_looked_for_on_the_hub(name: str, hub: dict[str, Any]):
    with pytest.raises(ValueError, match=f"model '{name}' is not a folder"):
        resolve_model(name)
    assert hub == {}


def test_a_file_is_not_a_folder(hub: dict[str, Any], tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["deepserve-tiny", "."])
def test_a_revision_of_a_folder_is_refused(name: str, hub: dict[str, Any]):
    with pytest.raises(ValueError, match="revision 'v1' is for models of the hub"):
        resolve_model(name, "v1")
