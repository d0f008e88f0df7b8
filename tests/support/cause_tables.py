"""The table of causes in docs/verify.md, from causes.txt: python -m tests.support.cause_tables."""

import re
from pathlib import Path

from loopwright.tools.verify import causes

PAGE = Path(__file__).parents[2] / "docs/verify.md"
_TABLE = re.compile(r"(\| group \| cause \| remedy \|\n)(?:\|.*\n)*")


def with_table(text):
  """The page with the table as it is now."""
  rows = "".join(
    f"| {row.group} | {row.name} | {row.remedy.replace('{}', '...')} |\n" for row in causes.table()
  )
  return _TABLE.sub(lambda found: f"{found[1]}|---|---|---|\n{rows}", text)


if __name__ == "__main__":
  PAGE.write_text(with_table(PAGE.read_text()))
