"""The checks as functions for a user's own suite."""

import keras
import pytest
from defects.replicas import MeanOfMeans, NeverReduced
from defects.small import Small

from loopwright import configurables, testing
from loopwright.errors import ConfigError


def test_a_right_task_passes():
  testing.assert_right(Small, groups=("order", "gradients"), optimizer=keras.optimizers.SGD)


def test_a_wrong_task_fails_with_the_table_of_what_failed():
  with pytest.raises(AssertionError) as raised:
    testing.assert_right(NeverReduced, groups=("order", "gradients"))
  text = str(raised.value)
  assert "likely cause: never reduced" in text
  assert "in Written.train_step" in text  # its base, which has the step written out
  assert "every variable has a gradient" not in text


@pytest.mark.whole
def test_a_single_check_can_be_asserted():
  results = testing.check(MeanOfMeans, groups=("replicas",))
  result = testing.found(results, "same update on 2 replicas")
  assert (result.status, result.cause) == ("failed", "mean of means")
  again = testing.found(results, "same update on 3 replicas")
  assert again.detail.startswith("follows from 'same update on 2 replicas' above; ")
  with pytest.raises(KeyError, match="no check 'same'"):
    testing.found(results, "same")


def test_options_reach_the_trainer():
  results = testing.check(Small, groups=("order",), clip_norm=0.5)
  assert "clip (0.5)" in testing.found(results, "pipeline of the step").detail


GIN = """
import defects.small

run.task = @small.Small()
run.global_batch_size = 48
run.train_steps = 5
run.optimizer = @keras.SGD
Trainer.clip_norm = 0.5
"""


def test_a_gin_file_says_all(tmp_path):
  file = tmp_path / "small.gin"
  file.write_text(GIN)
  configurables.register(Small)
  results = testing.check(file, groups=("order",), gin_params=["Trainer.clip_norm = 0.25"])
  assert "clip (0.25)" in testing.found(results, "pipeline of the step").detail
  with pytest.raises(ConfigError, match=r"received both '.*small.gin' and clip_norm; the gin file"):
    testing.check(file, clip_norm=0.5)
  with pytest.raises(ConfigError, match="gin_params belong to a gin file"):
    testing.check(Small, gin_params=["run.seed = 1"])
