"""Where a model comes from: a folder here, or a name on the Hugging Face Hub. Finding out needs no torch."""

from __future__ import annotations

import logging
from pathlib import Path

from greedy_gnorm.errors import GnormError

TIMEOUT = 5.0
"""Seconds that the hub has to answer; its own library asks five times, which takes half a minute."""

log = logging.getLogger("greedy_gnorm")


def is_hub_name(name: str | Path) -> bool:
    """Whether this is no file or folder, and may be a name on the hub; a path that does not exist is refused."""
    path = Path(name)
    if path.exists():
        return False
    folder = path.parent if path.parent != Path() else None  # `models/bert` is a path where there is a folder models
    if (
        isinstance(name, Path)
        or path.is_absolute()
        or name.startswith((".", "~"))
        or len(path.parts) != (1 if folder is None else 2)
        or (folder is not None and folder.is_dir())
    ):
        raise GnormError(f"There is no model folder {name}.")
    return True


def locate(name: str | Path) -> str:
    """A path as it is; a name on the hub as it is, or the folder of its cached copy where the hub can't be reached."""
    if not is_hub_name(name):
        return str(name)
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    missing = f"There is no folder {name} here"
    try:
        huggingface_hub.model_info(str(name), timeout=TIMEOUT)
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise GnormError(f"{missing}, and no model of this name on the hub that you may read.") from error
    except Exception as error:  # of the network, in as many kinds as there are ways to be offline
        folder = _cached(str(name))
        if folder is None:
            reason = " ".join((str(error) or type(error).__name__).split())[:200].rstrip(".")
            raise GnormError(f"{missing}, and the hub can't be reached ({reason}).") from error
        log.info("the hub can't be reached: using the copy of %s in the cache", name)
        return folder
    return str(name)


def _cached(name: str) -> str | None:
    """The folder of a model that was downloaded before, if it was."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(huggingface_hub.snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
