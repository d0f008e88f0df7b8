"""The tasks that come with Loopwright, one per file, each usable from a gin file.

The package is `framework.tasks`: by another name each class would exist twice.
"""

if __name__ != "framework.tasks":
  raise ImportError(f"Loopwright's tasks are framework.tasks; import that, not {__name__}.")
