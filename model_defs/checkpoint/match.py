"""The tensors that a model needs against those that a checkpoint has."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from artifacts.errors import CheckpointTensorError
from model_defs.checkpoint.interface import TensorInfo
from model_defs.checkpoint.listing import listing

_HARMLESS = ("*.rotary_emb.inv_freq",)  # old checkpoints store what the configuration implies


def match_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, TensorInfo],
    description: str,
    ignored: Iterable[str] = (),
) -> None:
    """Check that a checkpoint has every tensor of a model, in its shape, and no other.

    Args:
        expected: shape of each tensor of the model, by checkpoint name.
        found: the checkpoint's tensors.
        description: the checkpoint as the user wrote it.
        ignored: fnmatch patterns of extra tensors that do no harm, such as ``lm_head.weight`` where the head is tied.

    Raises:
        CheckpointTensorError: names what is missing, unexpected and of another shape, up to 8 of each.
    """
    harmless = (*_HARMLESS, *ignored)
    missing = [name for name in expected if name not in found]
    unexpected = [
        name for name in found if name not in expected and not any(fnmatchcase(name, one) for one in harmless)
    ]
    misshapen = [
        f"{name} is {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    faults = [
        f"{len(names)} {kind} ({listing(names)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if faults:
        raise CheckpointTensorError(
            found=f"tensors of {description}: {', '.join(faults)}",
            expected=f"the {len(expected)} tensors that the configuration describes",
            action="check that weights and configuration belong to the same model",
        )
