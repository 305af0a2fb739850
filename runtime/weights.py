"""Weights of a layout, mapped read-only from the artifact's files."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from artifacts.errors import UnfinishedArtifactError
from artifacts.folder import Artifact
from artifacts.safetensors_file import map_tensors
from artifacts.signature import TensorSpec


def map_weights(artifact: Artifact, parameters: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Map each parameter; its pages are read when a step first touches them.

    Args:
        artifact: a checked artifact.
        parameters: names, shapes and dtypes of one rank.

    Raises:
        UnfinishedArtifactError: the artifact was built without weights.
        CorruptArtifactError: a file disagrees with the manifest.
    """
    stored = artifact.manifest.weights
    if stored is None:
        raise UnfinishedArtifactError(
            found=f"{artifact.root.name} was built with --no-weights",
            expected="weights to load",
            action="build it again without that option",
        )
    by_file: dict[str, list[TensorSpec]] = defaultdict(list)
    for spec in parameters:
        by_file[stored[spec.name].file].append(spec)
    mapped: dict[str, np.ndarray] = {}
    for file, specs in by_file.items():
        mapped.update(map_tensors(artifact.path(file), specs))
    return mapped
