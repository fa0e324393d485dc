"""Send a model folder to the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

from greedy_gnorm.errors import GnormError


def check(name: str) -> None:
    """Refuse before the run starts what could not be pushed after it: a bad name, no network, no login."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise GnormError(f"Can't push to {name}: HF_HUB_OFFLINE is set. Unset it, or omit --push-to-hub.")
    try:
        validate_repo_id(name)
        huggingface_hub.HfApi().whoami()
    except (HFValidationError, LocalTokenNotFoundError, HfHubHTTPError, OSError) as error:
        raise GnormError(f"Can't push to {name}: {_first_line(error)} (log in with `hf auth login`)") from error


def push(folder: Path, name: str) -> str:
    """Upload the folder as a model and return the address of its page."""
    try:
        api = huggingface_hub.HfApi()
        page = api.create_repo(name, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name, commit_message="Pruned by greedy-gnorm")
    except (HfHubHTTPError, OSError) as error:
        raise GnormError(
            f"The model is in {folder}, but pushing it to {name} failed: {_first_line(error)} "
            f"Try again with `hf upload {name} {folder}`."
        ) from error
    return str(page)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
