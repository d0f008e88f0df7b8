"""Lines of JSON, as in metrics.jsonl: each a JSON object, which a kill may have cut off."""

from __future__ import annotations

import json
from typing import Any

from loopwright.errors import is_integer

Record = dict[str, Any]


def parsed(line: str | bytes) -> Record | None:
  """Returns the object of a line; None if it has none, such as a line that is damaged."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return record if isinstance(record, dict) else None


def of_a_step(line: str | bytes) -> Record | None:
  """Returns the object of a line of a run's log, which has a "step"; else None."""
  record = parsed(line)
  return record if record is not None and is_integer(record.get("step"), at_least=0) else None
