"""Models as they are served elsewhere: SavedModels."""
