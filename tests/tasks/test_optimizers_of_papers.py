"""AdEMAMix and ADOPT: fifty steps on two replicas are those of Optax, and of a copy by config.

The numbers are what Optax 0.2.8 gives: `w = jnp.linspace(-1, 1.5, 6).reshape(3, 2)` in float32,
gradients `jnp.sin(3 w + t) + w / 2` for t from 0 to 49, and the transformation of each case.
"""

import numpy as np
import pytest
import tensorflow as tf

from loopwright.optimizers import adapters
from loopwright.optimizers.fusion import Gradients
from loopwright.tasks.optimizers import ADOPT, AdEMAMix

CASES = {
  # optax.contrib.ademamix(0.02, b3=0.99, alpha=5.0, weight_decay=0.1)
  "AdEMAMix": (
    lambda: AdEMAMix(0.02, beta_3=0.99, weight_decay=0.1),
    [-0.04266953468322754, -0.0006562490016222, -0.03975696489214897,
     -0.009256125427782536, 0.08658015727996826, 0.24241432547569275],
  ),
  # optax.contrib.adopt(0.02, b2=0.99)
  "ADOPT": (
    lambda: ADOPT(0.02, beta_2=0.99),
    [-0.5474861264228821, -0.35658127069473267, -0.02061234787106514,
     0.354375958442688, 0.558541476726532, 0.7555528879165649],
  ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("copied", [False, True])
def test_fifty_steps_are_those_of_optax(case, copied, mirrored):
  make, wanted = CASES[case]
  strategy, step = mirrored(2), tf.Variable(0, dtype=tf.int64)
  with strategy.scope():
    start = np.linspace(-1.0, 1.5, 6, dtype=np.float32).reshape(3, 2)
    variable = tf.Variable(start)
    factory = (lambda: type(make()).from_config(make().get_config())) if copied else make
    made = adapters.build(factory, lambda name: [variable], step)["default"]

  def in_replica(number):
    value = variable.read_value()
    packed = Gradients.of(made.fusion, [tf.sin(3.0 * value + number) + 0.5 * value])
    tf.distribute.get_replica_context().merge_call(
      lambda strategy, tensors: made.apply(strategy, packed.replaced(tensors)),
      args=(packed.tensors,),
    )

  update = tf.function(lambda number: strategy.run(in_replica, args=(number,)), autograph=False)
  for number in range(50):
    update(tf.constant(number, tf.float32))
  for copy in strategy.experimental_local_results(variable):
    np.testing.assert_allclose(np.ravel(copy), wanted, rtol=0, atol=1e-5)
