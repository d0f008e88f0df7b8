"""What a run saves: checkpoints, assets, exports; and initial weights from other files."""
