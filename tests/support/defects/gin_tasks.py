"""A right and a wrong task that a gin file can name."""

import framework
from defects.replicas import NeverReduced
from defects.small import Small


@framework.register
class RightTask(Small):
  pass


@framework.register
class WrongTask(NeverReduced):
  pass
