"""The tasks that come with Loopwright, one per file, each usable from a gin file.

The package is `loopwright.tasks`: by another name each class would exist twice.
"""

if __name__ != "loopwright.tasks":
  raise ImportError(f"Loopwright's tasks are loopwright.tasks; import that, not {__name__}.")
