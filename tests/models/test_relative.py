"""Buckets of distances against transformers, and tables that lack some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.models._relative import buckets_by_distance
from octavo.models.deberta_v2 import log_buckets
from tests.support.tiny_encoders import tiny_encoder

TABLE = "encoder.relative_attention_bias.weight"


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 20), (8, 128), (10, 300), (64, 1000)])
@pytest.mark.parametrize("both_ways", [False, True])
def test_buckets(num_buckets: int, max_distance: int, both_ways: bool) -> None:
    distance = torch.arange(-max_distance, max_distance + 1)
    expected = T5Attention._relative_position_bucket(distance, both_ways, num_buckets, max_distance)
    found = buckets_by_distance(num_buckets, max_distance, both_ways=both_ways)
    np.testing.assert_array_equal(found, expected.numpy())
    further = torch.tensor([-50 * max_distance, 50 * max_distance])  # the ends go on
    ends = T5Attention._relative_position_bucket(further, both_ways, num_buckets, max_distance)
    assert [found[0], found[-1]] == ends.tolist()
    if both_ways and max_distance == 128:
        own = MPNetEncoder.relative_position_bucket(distance, num_buckets, max_distance)
        np.testing.assert_array_equal(found, own.numpy())


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(256, 512), (16, 64), (8, 64), (32, 1000)])
def test_buckets_by_the_logarithm(num_buckets: int, max_distance: int) -> None:
    distance = torch.arange(-max_distance + 1, max_distance)
    expected = make_log_bucket_position(distance, num_buckets, max_distance).long()
    np.testing.assert_array_equal(log_buckets(distance.numpy(), num_buckets, max_distance), expected.numpy())


def test_a_table_of_fewer_buckets_is_refused(tmp_path: Path) -> None:
    tiny_encoder("mpnet").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {TABLE: tensors[TABLE][:8].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"relative_attention_bias.* is \[8, 4\]; the configuration asks for 32"):
        open_checkpoint(tmp_path)
