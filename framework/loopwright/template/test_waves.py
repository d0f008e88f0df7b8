"""N replicas make the update of one, and what else `loopwright verify` checks of the config."""

from pathlib import Path

from loopwright import testing


def test_waves_is_right():
  testing.assert_right(Path(__file__).with_name("waves.gin"))
