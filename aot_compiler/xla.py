"""The one module of the compiler that touches jax internals: from jax functions to HLO, from HLO to programs.

Private names of jax and jaxlib move between releases: jax is pinned in pyproject.toml, and
tests/aot_compiler/test_xla.py fails when one of them has moved.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxlib import _jax
from jaxlib import xla_client as xc

from artifacts.signature import TensorSpec


def lower_to_hlo(function: Callable[..., Sequence[jax.Array]], inputs: Sequence[TensorSpec]) -> bytes:
    """Lower a function of jax values to a serialised HloModuleProto, as XLA writes it.

    The module goes through its text: the in-memory form carries Python source locations, which would make the
    bytes depend on where the source stands.

    Args:
        function: takes one value per input, in order, and returns the outputs in order.
        inputs: shapes and dtypes; every one becomes a parameter, used or not.
    """
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.numpy_dtype) for spec in inputs]
    lowered = jax.jit(function, keep_unused=True).trace(*shapes).lower(lowering_platforms=("cpu",))
    computation = _jax.mlir.mlir_module_to_xla_computation(lowered.as_text(), use_tuple_args=False, return_tuple=True)
    return bytes(computation.as_serialized_hlo_module_proto())


def compile_for_cpu(hlo: bytes, ranks: int) -> bytes:
    """Compile a module with XLA:CPU and serialise the program.

    Args:
        hlo: a serialised HloModuleProto.
        ranks: replicas that run the program together, one device each.
    """
    client = xc.make_cpu_client(num_devices=ranks)
    module = _jax.mlir.xla_computation_to_mlir_module(xc.XlaComputation(hlo))
    devices = xc.DeviceList(tuple(client.devices()[:ranks]))
    return bytes(client.compile_and_load(module, devices, _compile_options(ranks)).serialize())


def _compile_options(ranks: int) -> xc.CompileOptions:
    options = xc.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = ranks
    options.num_partitions = build.num_partitions = 1
    build.device_assignment = xc.DeviceAssignment.create(np.arange(ranks).reshape(ranks, 1))
    return options
