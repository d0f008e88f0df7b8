"""Compares TensorFlow's Adam kernel on a CPU with Keras's operations, by size of the variable.

    python -m benchmarks.adam_kernel                # alone on the machine
    python -m benchmarks.adam_kernel --busy=3       # beside this many equal processes

Both run a loop of updates in one tf.function, in turns. A figure is the median over turns of the
microseconds per update. framework/loopwright/optimizers/kernels.py states the conclusion.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import numpy as np
import tensorflow as tf

from loopwright.optimizers import kernels, rule

SIZES = [64, 256, 2**9, 2**10, 2**12, 2**13, 2**14, 2**15, 2**16, 2**17, 2**19]
UPDATES = 200
TURNS = 15


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--busy", type=int, default=0, help="processes beside this one")
  beside = [sys.executable, "-m", "benchmarks.adam_kernel"]
  others = [
    subprocess.Popen(beside, stdout=subprocess.DEVNULL) for _ in range(parser.parse_args().busy)
  ]
  kernels.FORKED = range(0)  # so that every size has its kernel
  print("| elements | kernel, us | Keras's operations, us |\n|---|---|---|")
  try:
    for size in SIZES:
      print(f"| {size} | {' | '.join(f'{us:.0f}' for us in compared(size))} |", flush=True)
  finally:
    for other in others:
      other.kill()
      other.wait()


def compared(size):
  """Returns the microseconds per update with the kernel, and with Keras's operations."""
  loops = [made(size, kernel=True), made(size, kernel=False)]
  times = [[], []]
  for _ in range(TURNS + 1):
    for loop, taken in zip(loops, times, strict=True):
      started = time.perf_counter()
      loop()
      taken.append((time.perf_counter() - started) / UPDATES * 1e6)
  return [statistics.median(taken[1:]) for taken in times]  # the first traces


def made(size, *, kernel):
  """Returns a function that makes `UPDATES` updates, one after the other."""
  rng = np.random.default_rng(0)
  variable = keras.Variable(rng.random(size, np.float32))
  gradient = tf.constant(rng.random(size, np.float32))
  optimizer = keras.optimizers.Adam()
  one = rule.Keras3(optimizer, [variable])
  one.update = one.decayed(kernels.update_of(optimizer, one.usual)) if kernel else None

  @tf.function
  def loop():
    for _ in tf.range(UPDATES):
      one.apply([gradient + 0.0 * variable.value])

  return loop


if __name__ == "__main__":
  main()
