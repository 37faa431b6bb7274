"""Layers in groups by their windows, and the blocks that sequences take in them."""

from __future__ import annotations

import pytest

from octavo.graph.cache import CacheLayout, CacheSizes, KVCache, cache_layout


def layout(*windows: int | None) -> CacheLayout:
    return cache_layout([KVCache(layer, 2, 64, 64, window) for layer, window in enumerate(windows)])


def gemma3(num_layers: int, window: int = 512) -> CacheLayout:
    """Every sixth layer is global."""
    return layout(*(None if (layer + 1) % 6 == 0 else window for layer in range(num_layers)))


def test_layers_that_are_alike_are_one_group() -> None:
    for window in (None, 4096):
        (group,) = layout(*[window] * 30).groups
        assert (group.window, group.layers) == (window, tuple(range(30)))
    (empty,) = cache_layout([]).groups
    assert (empty.window, empty.layers) == (None, ())


@pytest.mark.parametrize(
    ("grouped", "sizes"),
    [
        (gemma3(26), [4, 4, 4, 4, 4, 2, 4]),
        (gemma3(34), [5, 5, 5, 5, 5, 4, 5]),
        (layout(*[128, None] * 12), [12, 12]),
        (layout(*[None] * 21, *[4096] * 7), [7, 7, 7, 7]),
    ],
)
def test_groups_are_few_and_of_about_one_size(grouped: CacheLayout, sizes: list[int]) -> None:
    assert [len(group.layers) for group in grouped.groups] == sizes
    assert grouped.slots == max(sizes)
    layers = sorted(layer for group in grouped.groups for layer in group.layers)
    assert layers == list(range(sum(sizes)))
    places = [grouped.place(layer) for layer in layers]
    assert len(set(places)) == len(places)
    for layer, (slot, group) in zip(layers, places, strict=True):
        assert grouped.groups[group].layers[slot] == layer


def test_only_groups_without_a_window_grow_with_the_context() -> None:
    grouped = gemma3(26)
    # Six groups see 512 tokens and compute up to 256: 48 blocks of 16 and one that is cut.
    assert grouped.max_blocks(256, 16, 256) == 7 * 16
    assert grouped.max_blocks(32768, 16, 256) == 2048 + 6 * 49
    assert grouped.max_blocks(65536, 16, 256) - grouped.max_blocks(32768, 16, 256) == 2048


def test_the_longest_sequence_is_the_one_that_just_fits() -> None:
    for grouped in (layout(None), gemma3(26), gemma3(34, window=48), layout(64, 64)):
        for num_blocks in (1, 6, 7, 20, 200, 3000):
            longest = grouped.max_tokens(num_blocks, 16, 100, limit=10_000)
            assert longest % 16 == 0
            assert grouped.max_blocks(longest, 16, 100) <= num_blocks
            assert longest >= 10_000 or grouped.max_blocks(longest + 16, 16, 100) > num_blocks
    assert layout(64, 64).max_tokens(12, 16, 100, limit=10_000) == 10_000


def test_bytes_of_a_sequence() -> None:
    grouped = gemma3(26)
    sizes = CacheSizes(grouped, token_bytes=26 * 100, block_token_bytes=4 * 100)
    assert sizes.block_bytes(16) == 4 * 100 * 16
    whole = 32768 * sizes.token_bytes
    assert sizes.sequence_bytes(32768, 16, 256) == (2048 + 6 * 49) * 4 * 100 * 16 < 0.18 * whole
