"""Find a checkpoint: in a directory, in a bucket, on Hugging Face's hub, or an embedded one."""

from pathlib import Path

from specjax import stored_folders, stores
from specjax.assets import embedded
from specjax.models import directories
from specjax.models.checkpoint_files import MEDUSA_WEIGHTS, TORCH_WEIGHTS, CheckpointFiles
from specjax.models.fields import CheckpointError, show


def open_checkpoint(path: str | Path | CheckpointFiles, weights: bool = True) -> CheckpointFiles:
    """Locate a checkpoint, and return its files; nothing is read yet.

    The errors are those of `locate`.

    Args:
        path: as in `locate`; or opened files, which are returned. If their weights are needed and
            have not been downloaded, they are downloaded first.
        weights: as in `locate`.

    Examples:
        >>> from specjax.models import hub
        >>> files = hub.open_checkpoint("embedded", weights=False)
        >>> hub.open_checkpoint(files) is files
        True
    """
    if isinstance(path, CheckpointFiles) and (path.has_weights or not weights):
        return path
    files = CheckpointFiles(locate(str(path), weights), str(path), weights)
    # The hub's snapshot is in the same directory unless the repository has changed. In that case
    # the files that were read before are outdated.
    return (
        path if isinstance(path, CheckpointFiles) and path.directory == files.directory else files
    )


def locate(path: str | Path, weights: bool = True) -> Path:
    """Return the local directory of a checkpoint: ``path``, or the hub's snapshot of that id.

    A folder in a bucket is copied into a cache; see `specjax.stored_folders.fetch`. "embedded" is
    the target that comes with specjax, "embedded:draft" its draft model.

    Args:
        path: a directory, a hub id of the form owner/name, a folder in a bucket
            (``s3://BUCKET/PATH`` or ``gs://BUCKET/PATH``), or the name of an embedded checkpoint.
        weights: whether to download the weights. False downloads only the small files: enough to
            check a checkpoint first.

    Raises:
        CheckpointError: ``path`` is neither a directory nor a repository that can be downloaded.
        InputError: There is no such embedded checkpoint, or no such folder in a bucket.

    Examples:
        >>> from specjax.models import hub
        >>> hub.locate("embedded").name
        'target'
    """
    kind, _, which = str(path).partition(":")
    if kind == "embedded":
        return embedded(which or "target")
    name = str(path)
    small = ["*.json", "*.model", "*.jinja", "*.txt"]
    if stores.is_url(name):
        patterns = [f"**/{pattern}" for pattern in small]
        return stored_folders.fetch(name, "checkpoint", ["**"] if weights else patterns).directory
    try:
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
        if directory.is_file():
            directories.check_file(directory)
    except (OSError, RuntimeError) as error:  # a name that is too long, or no home directory
        raise CheckpointError(
            f"{show(name)} is not a directory ({error}): check the spelling"
        ) from None
    if directory.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise CheckpointError(f"{name!r} is not a directory, nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    patterns = small + ["*.safetensors"] * weights

    def fetch(patterns: list[str]) -> Path:
        # "consolidated" and "original" are second copies of the weights in other layouts.
        return Path(
            snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=["consolidated*", "original/*"]
            )
        )

    try:
        directory = fetch(patterns)
        if weights and not any(directory.glob("*.safetensors")):
            directory = fetch([*patterns, TORCH_WEIGHTS, *MEDUSA_WEIGHTS])
        return directory
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise CheckpointError(
            f"{name!r} is not a directory here, and the hub did not give it"
            f" ({type(error).__name__}): check the spelling, the network, and for gated models the"
            " login"
        ) from error
