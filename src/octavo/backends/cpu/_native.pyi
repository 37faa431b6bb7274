from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Batch, DomainRows, StepOutput

def detected_isa() -> str:
    """The widest instruction set of processor, operating system and build."""

def known_isas() -> list[str]:
    """All levels, each containing those before it."""

def kernel_names() -> list[str]:
    """The operations that have a kernel."""

class PackedWeight:
    """A matrix in the layout of the linear kernels."""

    @property
    def nbytes(self) -> int: ...
    @property
    def type_name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def panels(self) -> NDArray[np.uint8]:
        """The packed bytes, read-only, not copied."""
    @property
    def is_view(self) -> bool:
        """Whether the packed bytes belong to something else, a mapped file."""
    @property
    def reads_image(self) -> bool:
        """Whether products read activations as an image in the order of their columns: no floats, no order."""
    @property
    def guard(self) -> MappingGuard | None:
        """That of the mapped file, if it has one."""

class MappingGuard:
    """Makes failed reads of a mapped file known, instead of fatal by SIGBUS: the reader sees zeros from there on.

    Reads fail beyond the end of a file that was truncated, and by errors of the disk.
    """

    def __init__(self, data: NDArray[np.uint8], path: str) -> None:
        """data: the whole mapping, kept alive. Raises RuntimeError if more than 256 files are guarded."""
    @property
    def path(self) -> str: ...
    @property
    def is_damaged(self) -> bool:
        """Whether a read has failed."""

PACK_LAYOUT_VERSION: int

def packable_types() -> list[str]:
    """The types of GGUF files with kernels of their own."""

def pack_weight(type_name: str, data: NDArray[np.uint8], n: int, k: int) -> PackedWeight:
    """Packs the bytes of a matrix [n, k]. Releases the interpreter lock. Raises ValueError if they do not fit."""

def pack_groups(
    type_name: str,
    shape: tuple[int, int],
    bits: int,
    zero: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    mins: NDArray[np.uint8] | None,
    orders: NDArray[np.uint8] | None,
) -> PackedWeight:
    """Packs the codes of a matrix [n, k], `bits` each, and the scales and minimums of its groups, all as bytes.

    type_name: `I4_128`, `I8_ROW_Z_F32`, ... (csrc/pack.h). zero: the code of zero. mins: zero points or minimums.
    orders: the column of each code, int32; several orders for experts. Releases the interpreter lock. Raises ValueError
    for arrays that do not fit type and size.
    """

def code_table(name: str) -> tuple[list[int], float]:
    """The table of `NF4` or `FP4` as whole numbers, and the factor by which they are too large; empty for others."""

def view_packed(
    type_name: str, panels: NDArray[np.uint8], n: int, k: int, guard: MappingGuard | None = None
) -> PackedWeight:
    """A matrix [n, k] over bytes that are packed already, kept alive and not copied. guard: of these bytes, kept too.

    Raises ValueError unless they are as many as type and size ask for, and aligned to 64.
    """

def packed_nbytes(type_name: str, n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k]. Raises ValueError for a type or size that cannot be packed."""

def checksums(arrays: list[NDArray[np.uint8]]) -> list[int]:
    """Of each array 64 bits that tell damaged bytes from whole ones, at the speed of memory.

    Releases the interpreter lock until all are done.
    """

class KernelRun:
    """One kernel alone, for tests and benchmarks."""

    def __init__(self, kernel: str, isa: str, num_threads: int) -> None: ...
    def __call__(
        self,
        inputs: list[NDArray[np.float32] | None],
        weights: list[PackedWeight | NDArray[np.float32] | None],
        ints: list[int],
        floats: list[float],
        output: NDArray[np.float32],
        token_ids: list[int] = ...,
    ) -> None: ...

class PendingStep:
    """A step in flight. It keeps the program, the batch and the output alive until it is done."""

    def wait(self) -> None:
        """Returns when the step is done. Releases the interpreter lock. Raises RuntimeError if the step failed."""
    @property
    def seconds(self) -> float:
        """Time on the first thread from the start of the step to its end. 0.0 until `wait` has returned."""

class CollectiveGroup:
    """This process's end of a group of ranks on one machine. See csrc/collective.h.

    name: the same on all ranks. buffer_bytes: of each of the two halves that values pass through, piece by piece.
    join_ms: for all ranks to come. silence_ms: without a sign of life, after which a rank counts as dead.
    deadline_ms: of one wait for a rank that lives. given_up: asked while ranks come, for a reason to wait no longer, or
    an empty text. Raises RuntimeError with that reason, or naming the rank that did not come.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        *,
        buffer_bytes: int = ...,
        join_ms: int = ...,
        silence_ms: int = ...,
        deadline_ms: int = ...,
        numa_node: int = ...,
        given_up: Callable[[], str] | None = None,
    ) -> None: ...
    @property
    def placement_error(self) -> int:
        """Why this rank's memory is not placed on `numa_node`, as an errno; 0: it is, or none was given."""

    def fail(self, reason: str) -> None:
        """This rank takes part no more: exchanges of all ranks fail. From any thread."""

    @property
    def error(self) -> str:
        """Why exchanges fail; empty: they do not."""

    @property
    def is_waiting(self) -> bool:
        """An exchange waits for another rank, apart from the first moments."""

class Program:
    """A list of records that all threads walk together. See csrc/program.h."""

    def __init__(
        self,
        isa: str,
        num_threads: int,
        spin_us: tuple[int, int],
        limits: tuple[int, int, int, int, int],
        values: list[tuple[int, int, int]],
        workspace_bytes: int,
        *,
        logits_rows: int = 0,
        checked: bool = False,
        domains: list[tuple[str, int, int, bool, list[int]]] = ...,
        indices: list[tuple[str, int, int, int, bool]] = ...,
        token_components: int = 1,
    ) -> None:
        """limits: tokens, requests, outputs, model length, vocabulary. values: offset, columns, number of the domain.

        logits_rows: the rows of logits that are held at once; more are computed and sampled in several passes. 0: all.
        domains: those behind tokens, outputs and logits: name, most rows, components of a position, whether sequences
        start, groups of its caches. indices: those behind `logits_indices`: name, numbers of the domains whose rows
        have entries and whose rows these are, entries a row, whether -1 is one. token_components: of the position of
        a token.
        """

    def share_threads(self, other: Program) -> None:
        """Computes on the threads of `other`, and ends its own; their steps never run at the same time.

        Raises ValueError if they have different numbers of threads. Not during a step.
        """

    def borrow_cache(self, other: Program) -> None:
        """Reads the cache that `other` has allocated, instead of one of its own; their steps never run together.

        Raises ValueError if the caches do not fit, or if there is one already.
        """

    def join(self, group: CollectiveGroup) -> None:
        """The group of the operations between ranks; before any record. Raises ValueError for too small a buffer."""

    def keep_as_image(self, value: int) -> None:
        """The value, of a gate, is kept as the only product that reads it needs it. Before any record."""

    def add_packed_weight(self, weight: PackedWeight) -> int: ...
    def stream_weights(self, weights: list[int], ahead_bytes: int) -> None:
        """These mapped weights pass through memory in every step. After `finish`."""

    def add_plain_weight(self, array: NDArray[np.float32]) -> int: ...
    def add_record(
        self,
        kernel: str,
        label: str,
        output: int,
        inputs: list[tuple[str, int]],
        weights: list[tuple[str, int]] = ...,
        ints: list[tuple[str, int]] = ...,
        floats: list[tuple[str, float]] = ...,
        tuples: list[tuple[str, list[int]]] = ...,
        cache: tuple[int, int] = (-1, 0),
        state_size: int = 0,
    ) -> None:
        """Operands with the names of their fields; -1: absent. cache: the slot of the layer in a block, and its group.

        Raises ValueError naming the first field that the kernel does not read in that place.
        """
    def finish(self) -> None: ...
    def set_adapter(
        self,
        slot: int,
        parts: list[tuple[int, int, NDArray[np.uint16], NDArray[np.uint16], NDArray[np.float32], int, float]],
    ) -> None:
        """Fills a slot with these parts, or empties it if there are none. Waits for running steps.

        parts: record, weight, A, B and gain (`octavo.backends.cpu.adapters`), which are kept alive and not copied, rank
        and scale. Raises ValueError for a slot that does not exist and for parts that do not fit.
        """
    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None: ...
    def submit(
        self,
        batch: Batch,
        result: int,
        output: StepOutput | None,
        errors: NDArray[np.int32] | None,
        copies: list[tuple[int, NDArray[np.float32]]] = ...,
        inputs: list[tuple[int, NDArray[np.float32]]] = ...,
        earlier_tokens: NDArray[np.int32] | None = None,
        rows: list[tuple[int, DomainRows]] = ...,
        records: tuple[int, int] = ...,
    ) -> PendingStep:
        """Starts the block copies, the records that lead to the value `result` (-1: all), and sampling from it if the
        batch asks. inputs: values that are written before; copies: values that are read afterwards.
        earlier_tokens: of the step before, which may still run, for `batch.token_sources`. rows: of domains by their
        numbers, beside what the batch has. records: the range to run, end -1: to the last; a part of them only in
        a program without caches and logits. Blocks while two steps are in flight. Raises ValueError for a batch that
        does not fit."""
    def value(self, index: int, rows: int) -> NDArray[np.float32]: ...
    def start_profile(self) -> None:
        """Counts from zero from now on."""
    def profile(self) -> list[tuple[str, str, int, int, int]]:
        """Of every record, then of sampling: label, kernel, calls, nanoseconds of wall time, nanoseconds of all threads
        inside the kernel. Empty unless started."""
    def close(self) -> None: ...
    @property
    def progress(self) -> int:
        """A number that changes with every record of a step."""

    @property
    def closed(self) -> bool: ...
    @property
    def num_records(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...

def quantizer_names() -> list[str]:
    """The ggml types that `quantize_rows` makes."""

def quantize_rows(
    type_name: str,
    x: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16],
    importance: NDArray[np.float32] | None,
    out: NDArray[np.uint8],
    isa: str | None = None,
) -> bool:
    """The blocks of a ggml type for x [rows, k], bfloat16 as uint16. importance [k]: weights of the columns in the
    error, with some above 0 in every block; None: all count the same. out: the bytes of the result. False, and nothing
    is written, if a number is not finite or beyond 65504. Raises ValueError for sizes and types that do not fit."""
