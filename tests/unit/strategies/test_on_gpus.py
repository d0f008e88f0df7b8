"""What a strategy chooses on GPUs."""

import pytest

from framework.strategies import factories


@pytest.mark.parametrize("count", [2, 8])
def test_auto_is_collective_on_gpus(count, caplog):
  """NcclAllReduce has no bfloat16; TensorFlow's collectives call NCCL between GPUs."""
  names = [f"GPU:{index}" for index in range(count)]
  with caplog.at_level("INFO"):
    assert factories.works("auto", names)
  assert "cross-device ops auto: collective, NCCL between GPUs" in caplog.text
