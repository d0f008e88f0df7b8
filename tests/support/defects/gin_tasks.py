"""A right and a wrong task that a gin file can name."""

import loopwright
from defects.replicas import NeverReduced
from defects.small import Small


@loopwright.register
class RightTask(Small):
  pass


@loopwright.register
class WrongTask(NeverReduced):
  pass
