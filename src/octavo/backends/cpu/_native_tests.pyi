"""Entry points of the native library for tests and benchmarks. Not in wheels."""

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu._native import CollectiveGroup
from octavo.batch import SamplingBatch, StepOutput

def kernel_isa(kernel: str, level: str) -> str | None:
    """The instruction set of the kernel that runs at `level`; None: the operation has none."""

def sample(
    isa: str,
    logits: NDArray[np.float32],
    sampling: SamplingBatch,
    output: StepOutput,
    errors: NDArray[np.int32],
    num_workers: int = 1,
    scratch: NDArray[np.uint8] | None = None,
) -> None:
    """Samples all rows of `logits` into `output`, as a step does after its last operation.

    scratch: memory to work in, aligned to 64 bytes. Raises ValueError if it has less than `sampling_scratch_bytes`.
    """

def check_sampling_row(dtype: np.dtype[np.void]) -> None:
    """Raises ImportError naming the first field in which `dtype` is not the native struct.

    Importing `_native` checks `octavo.batch.SAMPLING_ROW`.
    """

def sampling_scratch_bytes(vocab: int) -> int:
    """Bytes that a worker needs beside its operands to sample from `vocab` logits."""

def all_reduce(group: CollectiveGroup, x: NDArray[np.float32]) -> None:
    """The sum over the ranks, in place: x [rows, cols]. Raises RuntimeError if a rank is gone."""

def all_gather(group: CollectiveGroup, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """The columns of x of all ranks side by side in out: [rows, cols] -> [rows, cols of all]. As `all_reduce`."""

def sample_part(
    group: CollectiveGroup,
    isa: str,
    logits: NDArray[np.float32],
    first: int,
    vocab: int,
    sampling: object,
    output: object,
    errors: NDArray[np.int32],
) -> None:
    """As `sample`, for logits [rows, part] of the tokens from `first` on; rank 0 gets the output."""

def given_bytes(group: CollectiveGroup) -> int:
    """Bytes that this rank has written for the others so far."""
