"""N replicas make the update of one, and what else `loopwright verify` checks."""

from loopwright import testing
from waves import Waves


def test_waves_is_right():
  testing.assert_right(Waves, global_batch_size=50)
