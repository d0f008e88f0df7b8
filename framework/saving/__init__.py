"""What a run keeps: checkpoints, assets, exports; and initial weights from elsewhere."""
