"""A stand-in for the Hugging Face hub: repositories in memory, behind the three calls that are made of its client."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from huggingface_hub import HfApi, RepoUrl, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id


class Hub:
    """What the stub was asked, and what it holds."""

    url, token = "https://hub.invalid", "hf_of_the_tests"

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        """Of each repository, by name."""
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.refuse_with: int | None = None
        """Answer everything with this status."""


@contextmanager
def hub_stub() -> Iterator[Hub]:
    hub = Hub()

    def create_repo(api: HfApi, repo_id: str, *, private: bool | None, exist_ok: bool) -> RepoUrl:
        validate_repo_id(repo_id)
        status = hub.refuse_with or (None if (api.token or get_token()) == hub.token else 401)
        if status is not None:
            response = SimpleNamespace(headers={}, request=None, status_code=status)
            raise HfHubHTTPError(f"{status} Client Error.\n\nMore lines.", response=response)
        hub.private[repo_id] = bool(private)
        return RepoUrl(f"{hub.url}/{repo_id}", endpoint=hub.url)

    def upload_folder(_: HfApi, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        hub.messages.append(commit_message)
        hub.files[repo_id] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], cache_dir: Path | None = None) -> str:
        assert allow_patterns == ["config.json", "model.safetensors", "classes.json"], "no other file is asked for"
        folder = Path(cache_dir or constants.HF_HUB_CACHE) / repo_id
        folder.mkdir(parents=True)
        for name in hub.files[repo_id].keys() & allow_patterns:
            (folder / name).write_bytes(hub.files[repo_id][name])
        return str(folder)

    client = patch.multiple(HfApi, create_repo=create_repo, upload_folder=upload_folder)
    with client, patch("huggingface_hub.snapshot_download", snapshot_download):
        yield hub
