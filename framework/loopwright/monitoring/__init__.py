"""What a process spends its time on, hangs, slow workers."""
